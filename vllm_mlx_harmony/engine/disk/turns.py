"""Generated turns in the disk cache: the archive of `core.replay`, for the next process."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mlx_harmony.core.replay import GeneratedTurn
from vllm_mlx_harmony.core.serialization import read, written
from vllm_mlx_harmony.engine.disk.cache import DiskCache


class Turns:
    """The archive of turns on ``disk``; see `core.replay.Archive`."""

    blocks = False

    def __init__(self, disk: DiskCache) -> None:
        self._disk = disk

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Queues ``turn`` to be written."""
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
