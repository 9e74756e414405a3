"""What all engines of this process share: options, the prefix cache in memory and on disk.

Configured by flags and the environment before the first model is loaded.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import cast, get_args

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.disk.cache import DiskCache, Failed
from vllm_mlx_harmony.engine.engine import Options, Speculate
from vllm_mlx_harmony.engine.pieces import Piece
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.scheduler import Limits
from vllm_mlx_harmony.server.settings import number

logger = logging.getLogger("vllm_mlx_harmony")

VARIABLE = "VLLM_MLX_HARMONY_CACHE"
"""Environment variable: size of the prefix cache in memory (``512M``, ``2G``), 0 for none."""

PER_DAY = "VLLM_MLX_HARMONY_SSD_WRITES"
"""Environment variable: bytes that may be written to the disk in a day, 0 for no limit. The default
is 100 GiB: some 4 million new tokens of gpt-oss-20b, every day for about four years until an SSD of
256 GB is worn out."""

PAUSE_VARIABLE = "VLLM_MLX_HARMONY_PAUSE_MS"
"""Environment variable: longest pause of an answer while a prompt is computed, in ms."""

SPECULATE_VARIABLE = "VLLM_MLX_HARMONY_SPECULATE"
"""Environment variable: whether several ids may be computed at once; see ``engine.Options``."""

COSTS = "step-costs.json"
"""The file that `Options.costs` names: in the directory of the disk cache, or the user's cache."""

WRITTEN_WITHIN = 5.0
"""Seconds in which the disk cache writes what is pending when the process ends."""

options = Options()
disk: DiskCache | None = None

_budget: int | None = None


def configure(given: Options, bound: int | None, directory: str | None, gigabytes: float) -> None:
    """Sets the options, the ``bound`` of the prefix cache in memory (``None``: by default), which
    is emptied, and the ``directory``, if any, of the one on disk."""
    global options, disk, _budget
    options, _budget = given, bound
    tree.cache_clear()
    disk = opened(directory, gigabytes) if directory and budget() > 0 else None
    remembering = vocab.cache_dir() if disk is None else disk.directory
    options = replace(options, costs=remembering / COSTS)


def engine_options(args: object, default: Options) -> Options:
    """Options of engines, from the flags or the settings of one of several models in ``args``, if
    any, and the environment."""
    limits = default.limits

    def of(name: str, otherwise: int, least: int = 1) -> int:
        value = getattr(args, name, None)
        return otherwise if value is None else max(least, value)

    speculate = os.environ.get(SPECULATE_VARIABLE, "").strip().lower() or default.speculate
    if speculate not in (known := get_args(Speculate)):
        problem = f"{speculate!r} is not one of {', '.join(known)}"
        raise HostError(f"{SPECULATE_VARIABLE}: {problem}")
    return replace(
        default,
        limits=Limits(
            sequences=of("max_num_seqs", limits.sequences),
            prompts=of("prefill_batch_size", limits.prompts),
            answers=of("completion_batch_size", limits.answers),
            chunk=of("prefill_step_size", limits.chunk),
            chunk_beside=of("chunked_prefill_tokens", limits.chunk_beside, 0),
            pause=max(1, number(PAUSE_VARIABLE, int(limits.pause * 1000))) / 1000,
        ),
        utilization=getattr(args, "gpu_memory_utilization", default.utilization),
        interval=of("stream_interval", default.interval),
        speculate=cast("Speculate", speculate),
    )


def budget() -> int:
    """Size of the prefix cache in bytes: by flags, the environment, or else a sixteenth of the
    machine's memory."""
    return number(VARIABLE, device.machine() // 16) if _budget is None else _budget


@lru_cache(maxsize=1)
def tree() -> PrefixTree[Piece]:
    return PrefixTree(budget())


def opened(directory: str, gigabytes: float) -> DiskCache | None:
    """The cache in ``directory``; ``None``, with a warning, if it cannot be used. Raises
    ``HostError`` for an invalid size."""
    if not gigabytes > 0:
        raise HostError(f"--ssd-cache-max-gb must be greater than 0, not {gigabytes:g}")
    path = Path(directory).expanduser()
    try:
        found = DiskCache(path, int(gigabytes * (1 << 30)), budget(), number(PER_DAY, 100 << 30))
    except Failed as error:
        logger.warning("prefix cache: disk cache disabled: %s cannot be used (%s)", path, error)
        return None
    atexit.register(found.close, WRITTEN_WITHIN)
    return found


async def clear() -> None:
    """Empties the prefix cache of all models: memory first, which would be written again."""
    tree().forget(lambda _: True)
    device.clear_pool()
    if disk is not None:
        await asyncio.to_thread(disk.clear)
