"""Generated turns in the disk cache: the archive of `core.replay`, for the next process."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mlx_harmony.core.replay import GeneratedTurn
from vllm_mlx_harmony.core.serialization import read, written
from vllm_mlx_harmony.engine.disk.cache import DiskCache


class Turns:
    """A `core.replay.Archive` on ``disk``."""

    blocks = False

    def __init__(self, disk: DiskCache) -> None:
        self._disk = disk
        self.use = disk.use_turn

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Queues ``turn`` to be written."""
        self._disk.put_turn(key, written(turn))

    def find(self, keys: Sequence[bytes]) -> list[GeneratedTurn | None]:
        """The turns with these keys; ``None`` for one that is missing or damaged."""
        found: list[GeneratedTurn | None] = []
        for key in keys:
            content = self._disk.turn(key)
            found.append(None if content is None else read(content))
            if content is not None and found[-1] is None:
                self._disk.drop_turn(key)
        return found
