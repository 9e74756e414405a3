"""What all engines of this process share: options, the prefix cache in memory and on disk.

Configured by flags and the environment when the plugin is activated.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from functools import lru_cache
from pathlib import Path

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.disk.cache import DiskCache, Failed
from vllm_mlx_harmony.engine.engine import Options
from vllm_mlx_harmony.engine.pieces import Piece
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.server.settings import number

logger = logging.getLogger("vllm_mlx_harmony")

VARIABLE = "VLLM_MLX_HARMONY_CACHE"
"""Environment variable: size of the prefix cache in memory (``512M``, ``2G``), 0 for none."""

MEMORY_DIVISOR = 16
"""The default size is this fraction of the machine's memory: 1 GiB of 16."""

BYTES_PER_GB = 1 << 30
"""The unit of ``--ssd-cache-max-gb``."""

PER_DAY = "VLLM_MLX_HARMONY_SSD_WRITES"
"""Environment variable: bytes that may be written to the disk in a day, 0 for no limit."""

DEFAULT_PER_DAY = 100 << 30
"""Some 4 million new tokens of gpt-oss-20b. An SSD of 256 GB endures it for about four years."""

COSTS = "step-costs.json"
"""The file in the directory of the disk cache that `Options.costs` names."""

LAST = 5.0
"""Seconds to write what is pending when the process exits."""

options = Options()
"""Options of all engines."""

disk: DiskCache | None = None
"""The prefix cache on disk, if any."""

_budget: int | None = None


def use(given: Options, budget: int | None) -> None:
    """Sets the options and the size of the prefix cache in bytes, ``None`` for the default size,
    and empties it."""
    global options, _budget
    options, _budget = given, budget
    tree.cache_clear()


def budget() -> int:
    """Size of the prefix cache in bytes: by flags, the environment, or the machine's memory."""
    if _budget is not None:
        return _budget
    return number(VARIABLE, device.machine() // MEMORY_DIVISOR)


@lru_cache(maxsize=1)
def tree() -> PrefixTree[Piece]:
    return PrefixTree(budget())


def opened(directory: str, gigabytes: float) -> DiskCache | None:
    """Opens the cache in ``directory``; returns ``None``, with a warning, if it cannot be used.

    Raises ``HostError`` for an invalid size.
    """
    if not gigabytes > 0:
        raise HostError(f"--ssd-cache-max-gb must be greater than 0, not {gigabytes:g}")
    path = Path(directory).expanduser()
    try:
        per_day = number(PER_DAY, DEFAULT_PER_DAY)
        found = DiskCache(path, int(gigabytes * BYTES_PER_GB), budget(), per_day)
    except Failed as error:
        logger.warning("prefix cache: not on disk: %s cannot be used (%s)", path, error)
        return None
    atexit.register(found.close, LAST)
    return found


async def clear() -> None:
    """Empties the prefix cache of all models: memory first, which would be written again."""
    tree().forget(lambda _: True)
    if disk is not None:
        await asyncio.to_thread(disk.clear)
