"""The disk below the prefix cache, as vllm-mlx's flags ask for it, and what it says of itself.

Knows ``--ssd-cache-dir`` and ``--ssd-cache-max-gb``, when an engine loads its model, the line at
the start, and the metrics. A directory that cannot be used costs the disk, not the server.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine.disk import identity
from vllm_mlx_harmony.engine.disk.cache import Counters, DiskCache, Failed
from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.host.units import size

logger = logging.getLogger("vllm_mlx_harmony")

BYTES_PER_GB = 1 << 30
"""As vllm-mlx counts the gigabytes of its flag."""

LAST = 5.0
"""Seconds in which what still waits is written when the process ends by itself."""

_problem = ""


def opened(directory: str, gigabytes: float) -> DiskCache | None:
    """The disk in ``directory``; ``None``, and a line at the start, when it cannot be used.

    Raises ``HostError`` for a size that is none.
    """
    global _problem
    if not gigabytes > 0:
        raise HostError(f"--ssd-cache-max-gb {gigabytes:g}: it must be more than 0")
    path = Path(directory).expanduser()
    try:
        disk = DiskCache(path, int(gigabytes * BYTES_PER_GB), prefix.budget())
    except Failed as error:
        _problem = f"not on disk: {path} cannot be used ({error})"
        logger.warning("prefix cache: %s", _problem)
        return None
    _problem = ""
    atexit.register(disk.close, LAST)
    return disk


def identified(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``prepare_for_start`` of an engine: the disk knows its model by the files it came from."""

    @wraps(original)
    def prepare(engine: Any) -> None:
        from mlx.nn import Module

        if engine._model is not None or engine.is_mllm or prefix.disk() is None:
            original(engine)
            return
        path = str(engine._model_path)
        _, weights = identity.while_loading(path, lambda: original(engine))
        if weights is not None:
            # The batched engine has the module itself, the simple one vllm-mlx's wrapper of it.
            model: Any = engine._model
            prefix.identify(model if isinstance(model, Module) else model.model, weights)

    return prepare


def found(model: str | None) -> Iterator[str]:
    """What to say at the start: what was found for ``model``, a path, or for all models."""
    disk = prefix.disk()
    if disk is None:
        yield from filter(None, [_problem])
        return
    there = disk.found(None if model is None else identity.of_weights(model) or b"")
    conversations = f"{there.conversations:,} conversation{'s' * (there.conversations != 1)}"
    limit = f"up to {size(disk.budget)} on disk"
    yield f"{limit}: {size(there.nbytes)}, {conversations}, from {disk.directory}"


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
    disk = prefix.disk()
    kept: dict[str, Any] | None = server()._metrics._prom
    if disk is None or kept is None or next(iter(METRICS)) in kept:
        return
    gauge = type(kept["http_requests_in_flight"])  # of the library that vllm-mlx took
    for name, (about, value) in METRICS.items():
        kept[name] = gauge(name, about, registry=kept["registry"])
        kept[name].set_function(lambda value=value: float(value(disk.counters())))
