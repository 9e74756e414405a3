"""Generated turns on the disk: what `core.replay` remembers, from one start to the next.

Refuses to know how a turn is written (`core.serialization`), which turn it is (`core.replay`) and
where (`disk`).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mlx_harmony.core.replay import GeneratedTurn
from vllm_mlx_harmony.core.serialization import read, written
from vllm_mlx_harmony.host.kv.disk import Disk


class Turns:
    """The archive of turns on ``disk``; see `core.replay.Archive`."""

    blocks = False

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Has ``turn`` written."""
        self._disk.put_turn(key, written(turn))

    def get(self, key: bytes) -> GeneratedTurn | None:
        """The turn; ``None`` when there is none, or it is not what was written."""
        content = self._disk.turn(key)
        if content is None:
            return None
        turn = read(content)
        if turn is None:
            self._disk.drop_turn(key)
        return turn

    def find(self, keys: Sequence[bytes]) -> list[GeneratedTurn | None]:
        """The turns with these keys."""
        return [self.get(key) for key in keys]

    def use(self, key: bytes) -> None:
        """Notes that the turn was used."""
        self._disk.use_turn(key)
