"""The device: how much memory a model may use on it, how much is used, what can be given back."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from vllm_mlx_harmony.server.settings import number

VARIABLE = "VLLM_MLX_HARMONY_MEMORY"
"""Environment variable: bytes of memory for models where there is no Metal (``8G``)."""

_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def has_metal() -> bool:
    """Whether models run on the machine's GPU."""
    return bool(mx.metal.is_available())


def memory() -> int:
    """Bytes that the device recommends to use; without Metal, those of the machine or container."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CONTAINERS:
        with suppress(OSError, ValueError):  # ``max``: no limit
            machine = min(machine, int(Path(path).read_text()))
    return number(VARIABLE, machine)


def wire() -> int | None:
    """Lets Metal keep in memory what it recommends; what was before, or ``None`` without Metal."""
    return mx.set_wired_limit(memory()) if mx.metal.is_available() else None


def unwire(limit: int | None) -> None:
    if limit is not None:
        mx.synchronize()
        mx.set_wired_limit(limit)


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
