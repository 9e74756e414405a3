"""The device: how much memory models may use on it, and how much they use.

Metal has one limit for the whole process, however many models are loaded.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from vllm_mlx_harmony.server.settings import number

VARIABLE = "VLLM_MLX_HARMONY_MEMORY"
"""Environment variable: bytes of memory for models where there is no Metal (``8G``)."""

_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

_weights = 0
_wired_before = 0
_lock = threading.Lock()


def has_metal() -> bool:
    """Whether models run on the machine's GPU."""
    return bool(mx.metal.is_available())


def machine() -> int:
    """Bytes of memory of the machine, or of the container if that has less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CONTAINERS:
        with suppress(OSError, ValueError):  # ``max``: no limit
            found = min(found, int(Path(path).read_text()))
    return found


def memory() -> int:
    """Bytes that the device recommends to use at most."""
    if has_metal():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return number(VARIABLE, machine())


def add_weights(nbytes: int) -> None:
    """Counts the weights of a model that was loaded, or, if negative, of one that is unloaded.

    While there are any, Metal keeps arrays in memory up to the recommended size.
    """
    global _weights, _wired_before
    with _lock:
        before, _weights = _weights, _weights + nbytes
        if not has_metal() or bool(before) == bool(_weights):
            return
        if _weights:
            _wired_before = mx.set_wired_limit(memory())
        else:
            mx.synchronize()
            mx.set_wired_limit(_wired_before)


def end_streams() -> None:
    """Ends the streams of this thread, as every thread that has used mlx should before it ends:
    otherwise the process may abort when it exits (https://github.com/ml-explore/mlx/pull/3395)."""
    if hasattr(mx, "clear_streams"):
        mx.clear_streams()


def weights() -> int:
    """Bytes of the weights of all models of this process."""
    return _weights


def used() -> int:
    """Bytes of all arrays of this process."""
    return int(mx.get_active_memory())


def exhausted(error: BaseException) -> bool:
    """Whether ``error`` says that an allocation has failed: mlx has no class for that."""
    words = ("malloc", "insufficient memory", "out of memory", "attempting to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, ValueError))
        and any(word in str(error).lower() for word in words)
    )
