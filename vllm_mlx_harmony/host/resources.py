"""What all engines of this process share: options, the prefix cache in memory and on disk.

Configured by flags and the environment when the plugin is activated.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.disk.cache import DiskCache, Failed
from vllm_mlx_harmony.engine.engine import Options
from vllm_mlx_harmony.engine.pieces import Piece
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree

logger = logging.getLogger("vllm_mlx_harmony")

COSTS = "step-costs.json"
"""The file in the directory of the disk cache that `Options.costs` names."""

options = Options()
disk: DiskCache | None = None

_budget: int | None = None


def configure(
    given: Options, bound: int | None, directory: str | None, gigabytes: float, per_day: int
) -> None:
    """Sets the options, the ``bound`` of the prefix cache in memory (``None``: by default), which
    is emptied, and the ``directory``, if any, of the one on disk, with its limit of bytes that are
    written ``per_day``."""
    global options, disk, _budget
    options, _budget = given, bound
    tree.cache_clear()
    if directory and budget() > 0:
        disk = opened(directory, gigabytes, per_day)
    if disk is not None:
        options = replace(options, costs=disk.directory / COSTS)


def budget() -> int:
    """Size of the prefix cache in bytes: as configured, or else a sixteenth of the machine's
    memory."""
    return device.machine() // 16 if _budget is None else _budget


@lru_cache(maxsize=1)
def tree() -> PrefixTree[Piece]:
    return PrefixTree(budget())


def opened(directory: str, gigabytes: float, per_day: int) -> DiskCache | None:
    """The cache in ``directory``; ``None``, with a warning, if it cannot be used. Raises
    ``HostError`` for an invalid size."""
    if not gigabytes > 0:
        raise HostError(f"--ssd-cache-max-gb must be greater than 0, not {gigabytes:g}")
    path = Path(directory).expanduser()
    try:
        found = DiskCache(path, int(gigabytes * (1 << 30)), budget(), per_day)
    except Failed as error:
        logger.warning("prefix cache: disk cache disabled: %s cannot be used (%s)", path, error)
        return None
    atexit.register(found.close, 5.0)  # seconds to write what is pending
    return found


async def clear() -> None:
    """Empties the prefix cache of all models: memory first, which would be written again."""
    tree().forget(lambda _: True)
    device.clear_pool()
    if disk is not None:
        await asyncio.to_thread(disk.clear)
