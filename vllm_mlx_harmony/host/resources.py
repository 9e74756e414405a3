"""What all engines of this process share: options, the prefix cache in memory and on disk.

Configured by flags and the environment when the plugin is activated.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine.disk.cache import DiskCache, Failed
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.server.settings import number

if TYPE_CHECKING:
    from vllm_mlx_harmony.engine.engine import Options
    from vllm_mlx_harmony.engine.pieces import Piece

logger = logging.getLogger("vllm_mlx_harmony")

VARIABLE = "VLLM_MLX_HARMONY_CACHE"
"""Environment variable: size of the prefix cache in memory (``512M``, ``2G``), 0 for none."""

MEMORY_DIVISOR = 16
"""The default size is this fraction of the machine's memory: 1 GiB of 16."""

BYTES_PER_GB = 1 << 30
"""The unit of ``--ssd-cache-max-gb``."""

LAST = 5.0
"""Seconds to write what is pending when the process exits."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(nbytes: int) -> str:
    """Bytes in the largest unit that fits."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}".replace(".0 ", " ")
    return f"{nbytes} bytes"


_options: Options | None = None
_budget: int | None = None
_disk: DiskCache | None = None


def use(options: Options | None, budget: int | None) -> None:
    """Sets the options and the size of the prefix cache in bytes, and empties it; ``None`` is the
    default of each."""
    global _options, _budget
    _options, _budget = options, budget
    tree.cache_clear()


def options() -> Options:
    """The options of all engines."""
    from vllm_mlx_harmony.engine.engine import Options

    return _options or Options()


def budget() -> int:
    """Size of the prefix cache in bytes: by flags, the environment, or the machine's memory."""
    if _budget is not None:
        return _budget
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return number(VARIABLE, machine // MEMORY_DIVISOR)


@lru_cache(maxsize=1)
def tree() -> PrefixTree[Piece]:
    """The prefix cache in memory, of all models."""
    return PrefixTree(budget())


def disk() -> DiskCache | None:
    """The prefix cache on disk, if any."""
    return _disk


def keep_on(opened: DiskCache | None) -> None:
    """Sets the prefix cache on disk; ``None`` for none."""
    global _disk
    _disk = opened


def opened(directory: str, gigabytes: float) -> DiskCache | None:
    """Opens the cache in ``directory``; returns ``None``, with a warning, if it cannot be used.

    Raises ``HostError`` for an invalid size.
    """
    if not gigabytes > 0:
        raise HostError(f"--ssd-cache-max-gb {gigabytes:g}: it must be more than 0")
    path = Path(directory).expanduser()
    try:
        found = DiskCache(path, int(gigabytes * BYTES_PER_GB), budget())
    except Failed as error:
        logger.warning("prefix cache: not on disk: %s cannot be used (%s)", path, error)
        return None
    atexit.register(found.close, LAST)
    return found


async def clear() -> None:
    """Empties the prefix cache of all models: memory first, as it would be written to the disk."""
    tree().forget(lambda _: True)
    if _disk is not None:
        await asyncio.to_thread(_disk.clear)
