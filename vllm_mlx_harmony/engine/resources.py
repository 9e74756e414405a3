"""What all engines of this process share: options, the prefix cache in memory and on disk.

Configured by flags and the environment before the first model is loaded.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.disk.cache import DiskCache, Failed
from vllm_mlx_harmony.engine.mlx_engine import Options
from vllm_mlx_harmony.engine.pieces import Piece
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.scheduler import BatchLimits
from vllm_mlx_harmony.engine_api.engine import Speculate

logger = logging.getLogger("vllm_mlx_harmony")

COSTS = "step-costs.json"
"""The name of `Options.costs_file`: in the directory of the disk cache, or the user's cache."""

CLOSE_TIMEOUT = 5.0
"""Seconds in which the disk cache writes what is pending when it is closed."""


class EngineSettings(Protocol):
    """What operators set for all engines: a part of `server.settings.ServerSettings`."""

    @property
    def queue(self) -> int: ...
    @property
    def pause_ms(self) -> int: ...
    @property
    def speculate(self) -> Speculate: ...
    @property
    def memory(self) -> int | None: ...
    @property
    def wired(self) -> int | None: ...


options = Options()
disk: DiskCache | None = None

_cache_bytes: int | None = None


def configure(
    new_options: Options, size: int | None, directory: str | None, gigabytes: float, per_day: int
) -> None:
    """Sets the options and both prefix caches: in memory, which is emptied, of ``size``
    bytes (``None``: the default), and, if ``directory`` is given, on disk, of ``gigabytes``,
    writing at most ``per_day`` bytes a day."""
    global options, disk, _cache_bytes
    options, _cache_bytes = new_options, size
    tree.cache_clear()
    disk = open_disk(directory, gigabytes, per_day) if directory and cache_bytes() > 0 else None
    costs_directory = vocab.cache_dir() if disk is None else disk.directory
    options = replace(options, costs_file=costs_directory / COSTS)


def reset() -> None:
    """Closes the prefix caches, and restores what there was before `configure`."""
    global options, disk, _cache_bytes
    close()
    options, disk, _cache_bytes = Options(), None, None
    tree.cache_clear()


def configured_options(settings: EngineSettings) -> Options:
    """Options of engines by the environment, before any flags."""
    return Options(
        limits=BatchLimits(pause=settings.pause_ms / 1000),
        speculate=settings.speculate,
        queue=settings.queue,
        memory=settings.memory,
        wired=settings.wired,
    )


def engine_options(args: object, default: Options) -> Options:
    """``default``, but for the flags, or settings of one of several models, in ``args``."""
    limits = default.limits

    def of(name: str, otherwise: int, least: int = 1) -> int:
        value = getattr(args, name, None)
        return otherwise if value is None else max(least, value)

    return replace(
        default,
        limits=replace(
            limits,
            sequences=of("max_num_seqs", limits.sequences),
            prompts=of("prefill_batch_size", limits.prompts),
            answers=of("completion_batch_size", limits.answers),
            chunk=of("prefill_step_size", limits.chunk),
            chunk_beside=of("chunked_prefill_tokens", limits.chunk_beside, 0),
        ),
        utilization=getattr(args, "gpu_memory_utilization", default.utilization),
        interval=of("stream_interval", default.interval),
    )


def cache_bytes() -> int:
    """Size of the prefix cache in bytes: as configured, or else a sixteenth of the machine's
    memory."""
    return device.machine() // 16 if _cache_bytes is None else _cache_bytes


@lru_cache(maxsize=1)
def tree() -> PrefixTree[Piece]:
    return PrefixTree(cache_bytes())


def open_disk(directory: str, gigabytes: float, per_day: int) -> DiskCache | None:
    """The cache in ``directory``; ``None``, with a warning, if it cannot be used. Raises
    ``HostError`` for an invalid size."""
    if not gigabytes > 0:
        raise HostError(f"--ssd-cache-max-gb must be greater than 0, not {gigabytes:g}")
    path = Path(directory).expanduser()
    try:
        return DiskCache(path, int(gigabytes * (1 << 30)), cache_bytes(), per_day)
    except Failed as error:
        logger.warning("prefix cache: disk cache disabled: %s cannot be used (%s)", path, error)
        return None


@atexit.register
def close() -> None:
    """Writes what is pending. Servers call it when they end, too: uvicorn ends the process by the
    signal that it got, so that nothing registered with `atexit` runs."""
    if disk is not None:
        disk.close(CLOSE_TIMEOUT)


async def clear() -> None:
    """Empties the prefix cache of all models: memory first, which would be written again."""
    tree().forget(lambda _: True)
    device.clear_pool()
    if disk is not None:
        await asyncio.to_thread(disk.clear)
