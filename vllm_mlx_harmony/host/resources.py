"""What all engines of this process share, as flags and the environment say: options, memory of
prompts, a disk below it. Set when the plugin is activated, and used by each engine that is loaded.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine.disk import identity
from vllm_mlx_harmony.engine.disk.cache import Counters, DiskCache, Failed
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.scheduler import Limits
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.host.units import size
from vllm_mlx_harmony.server.settings import number

if TYPE_CHECKING:
    from vllm_mlx_harmony.engine.engine import Options
    from vllm_mlx_harmony.engine.pieces import Piece

logger = logging.getLogger("vllm_mlx_harmony")

VARIABLE = "VLLM_MLX_HARMONY_CACHE"
"""Environment variable: bytes that the cache may take in memory (``512M``, ``2G``), 0 for none."""

PAUSE_VARIABLE = "VLLM_MLX_HARMONY_PAUSE_MS"
"""Environment variable: milliseconds that an answer may pause while a prompt is computed."""

MEMORY_DIVISOR = 16
"""Without the variable: this part of the machine's memory. 1 GiB of 16."""

BYTES_PER_GB = 1 << 30
"""As vllm-mlx counts the gigabytes of its flag."""

LAST = 5.0
"""Seconds in which what still waits is written when the process ends by itself."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What of vllm-mlx's flags is an engine's: its own defaults, by their names."""

    max_num_seqs: int = 256
    prefill_batch_size: int = 8
    completion_batch_size: int = 32
    prefill_step_size: int = 2048
    chunked_prefill_tokens: int = 0
    stream_interval: int = 1
    gpu_memory_utilization: float = 0.9


_flags = Flags()
_budget: int | None = None
_disk: DiskCache | None = None
_problem = ""


def use(flags: Flags, budget: int | None) -> None:
    """Sets the flags, and the bytes that they allow the prefix cache; what is held goes."""
    global _flags, _budget
    _flags, _budget = flags, budget
    tree.cache_clear()


def options(**changed: Any) -> Options:
    """How an engine runs: as the flags say, with what is ``changed`` of them for one model."""
    from vllm_mlx_harmony.engine.engine import Options

    flags = replace(_flags, **changed)
    pause = number(PAUSE_VARIABLE, int(Limits().pause * 1000)) / 1000
    return Options(
        limits=Limits(
            sequences=max(1, flags.max_num_seqs),
            prompts=max(1, flags.prefill_batch_size),
            answers=max(1, flags.completion_batch_size),
            chunk=max(1, flags.prefill_step_size),
            chunk_beside=max(0, flags.chunked_prefill_tokens),
            pause=max(0.001, pause),
        ),
        utilization=flags.gpu_memory_utilization,
        interval=max(1, flags.stream_interval),
    )


def budget() -> int:
    """Bytes of memory: as flags say, else the environment, else a share of the machine's."""
    if _budget is not None:
        return _budget
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return number(VARIABLE, machine // MEMORY_DIVISOR)


@lru_cache(maxsize=1)
def tree() -> PrefixTree[Piece]:
    """What this process holds of prompts of all its models together."""
    return PrefixTree(budget())


def disk() -> DiskCache | None:
    """The disk below the memory, where there is one."""
    return _disk


def keep_on(opened: DiskCache | None) -> None:
    """Sets the disk below the memory; ``None``: in memory only."""
    global _disk
    _disk = opened


def opened(directory: str, gigabytes: float) -> DiskCache | None:
    """The disk in ``directory``; ``None``, and a line at the start, when it cannot be used.

    Raises ``HostError`` for a size that is none.
    """
    global _problem
    if not gigabytes > 0:
        raise HostError(f"--ssd-cache-max-gb {gigabytes:g}: it must be more than 0")
    path = Path(directory).expanduser()
    try:
        found = DiskCache(path, int(gigabytes * BYTES_PER_GB), budget())
    except Failed as error:
        _problem = f"not on disk: {path} cannot be used ({error})"
        logger.warning("prefix cache: %s", _problem)
        return None
    _problem = ""
    atexit.register(found.close, LAST)
    return found


def found(model: str | None) -> Iterator[str]:
    """What to say at the start: what was found for ``model``, a path, or for all models."""
    below = disk()
    if below is None:
        yield from filter(None, [_problem])
        return
    there = below.found(None if model is None else identity.of_weights(model) or b"")
    conversations = f"{there.conversations:,} conversation{'s' * (there.conversations != 1)}"
    limit = f"up to {size(below.budget)} on disk"
    yield f"{limit}: {size(there.nbytes)}, {conversations}, from {below.directory}"


METRICS: dict[str, tuple[str, Callable[[Counters], float]]] = {
    f"vllm_mlx_harmony_prefix_disk_{name}": (about, value)
    for name, about, value in (
        ("bytes", "Bytes of the prefix cache on disk.", lambda now: now.nbytes),
        ("pieces", "Pieces of prompts on disk.", lambda now: now.pieces),
        ("turns", "Generated turns on disk.", lambda now: now.turns),
        ("waiting_bytes", "Bytes that wait to be written.", lambda now: now.waiting),
        ("hits", "Prompts that went on from the disk.", lambda now: now.hits),
        ("misses", "Prompts of which the disk had no more than memory.", lambda now: now.misses),
        ("read_bytes", "Bytes read.", lambda now: now.bytes_read),
        ("read_seconds", "Seconds spent reading.", lambda now: now.read_seconds),
        ("written_bytes", "Bytes written.", lambda now: now.bytes_written),
        ("write_seconds", "Seconds spent writing.", lambda now: now.write_seconds),
        ("dropped", "Pieces that were not written in time.", lambda now: now.dropped),
        ("damaged", "Pieces and turns that could not be read.", lambda now: now.damaged),
        ("paused", "1 while the disk is left alone after a failure.", lambda now: now.paused),
    )
}


def show_metrics() -> None:
    """Our gauges among vllm-mlx's metrics, if those are on and there is a disk; once."""
    below = disk()
    kept: dict[str, Any] | None = server()._metrics._prom
    if below is None or kept is None or next(iter(METRICS)) in kept:
        return
    gauge = type(kept["http_requests_in_flight"])  # of the library that vllm-mlx took
    for name, (about, value) in METRICS.items():
        kept[name] = gauge(name, about, registry=kept["registry"])
        kept[name].set_function(lambda value=value: float(value(below.counters())))
