"""The device: how much memory models may use on it, how much they use, and who uses it alone.

mlx has one set of limits for the whole process, however many models are loaded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

MARGIN = 2 << 30
"""Bytes that are wired besides weights and prefix cache: the work of a chunk, and keys and values
of running requests (80,000 ids of gpt-oss-20b)."""

POOL = 256 << 20
"""Bytes of freed arrays that mlx may always keep for reuse."""

UNWIRE_SECONDS = 600.0
"""Seconds without a computation of any model, after which no memory is wired."""

_CONTAINERS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What models may use of ``recommended`` bytes, the most that Metal keeps in memory.

    ``usable``: weights, prefix cache and requests (`memory.Budget`), and so also cached pieces that
    are evicted but not yet written to the disk. ``cache``: what the prefix cache can have of that.
    ``wired``: what Metal keeps in memory even if other programs need it. ``pool``: what mlx may
    keep of freed arrays.

    The rest of the memory is not wired, because only wired memory was seen to cause kernel panics:
    with all of the recommended size wired, two streams of requests with changing caches panicked a
    Mac within two minutes, in three of three runs; with none wired, ten runs of 15 minutes passed
    (https://github.com/ml-explore/mlx/issues/3186). Macs of 16 GB freeze
    (https://github.com/exo-explore/exo/pull/1672). Weights that are not wired are compressed or
    swapped where they are most of the memory, and each token waits for them
    (https://github.com/osaurus-ai/vmlx-swift/issues/418).
    """

    recommended: int
    usable: int
    cache: int
    wired: int
    pool: int

    @classmethod
    def of(
        cls, recommended: int, weight_bytes: int, cache: int, utilization: float
    ) -> MemoryLimits:
        """``cache`` is the size of the prefix cache by the settings, ``utilization`` the part of
        ``recommended`` that may be used."""
        usable = int(recommended * utilization)
        cache = max(0, min(cache, usable - weight_bytes))
        wired = min(weight_bytes + cache + MARGIN, recommended)
        return cls(recommended, usable, cache, wired, max(POOL, (recommended - usable) // 2))


class Metal:
    """Applies `MemoryLimits` to mlx while any weights are loaded, and restores mlx's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weight_bytes = 0
        self._cache = 0
        self._utilization = 1.0
        self._configured: int | None = None
        self._limits: MemoryLimits | None = None
        self._before = (0, 0, 0)
        self._wired = False
        self._last_used = 0.0

    def weight_bytes(self) -> int:
        """Bytes of the weights of all models of this process."""
        return self._weight_bytes

    def add_weights(
        self, nbytes: int, cache: int = 0, utilization: float = 1.0, wired: int | None = None
    ) -> None:
        """Counts the weights of a model that was loaded, or, if negative, of one that is unloaded.

        ``cache`` is the size of the prefix cache, ``utilization`` the part of the device's memory
        that may be used, ``wired`` what Metal keeps in memory, if not by default (`MemoryLimits`);
        all are the last model's.
        """
        with self._lock:
            self._weight_bytes += nbytes
            if nbytes > 0:
                self._cache, self._utilization, self._configured = cache, utilization, wired
            if not has_metal():
                return
            if self._weight_bytes:
                self._limit()
            elif self._limits is not None:
                mx.synchronize()
                _set_limits(*self._before)
                self._limits, self._wired = None, False

    def _limit(self) -> None:
        limits = MemoryLimits.of(memory(), self._weight_bytes, self._cache, self._utilization)
        wired = limits.wired if self._configured is None else self._configured
        wired = min(wired, limits.recommended)
        before = _set_limits(wired, limits.recommended, limits.pool)
        if self._limits is None:
            self._before = before
        self._limits = replace(limits, wired=wired)
        self._wired, self._last_used = True, time.monotonic()

    def keep_wired(self) -> None:
        """To be called when a model computes: what `unwire_when_idle` has released is wired
        again."""
        if self._limits is None:
            return
        self._last_used = time.monotonic()
        if not self._wired:
            with self._lock:
                mx.set_wired_limit(self._limits.wired)
                self._wired = True

    def unwire_when_idle(self) -> float | None:
        """Releases wired memory if no model has computed for `UNWIRE_SECONDS` seconds: other
        programs can have it then. Returns the seconds after which to ask again; ``None``: nothing
        is wired."""
        with self._lock:
            if not self._wired:
                return None
            left = self._last_used + UNWIRE_SECONDS - time.monotonic()
            if left <= 0:
                mx.set_wired_limit(self._before[0])
                self._wired = False
            return left if left > 0 else None


class DeviceLock:
    """Who uses the device: engines that share it, or one that measures what it does alone.

    mlx counts memory and Metal runs work of all threads together, so what an engine measures while
    another computes is the other's, too.
    """

    def __init__(self, settle: Callable[[], None] = mx.synchronize) -> None:
        """``settle`` waits for what its thread has started: steps run ahead of Python."""
        self._settle = settle
        self._changed = threading.Condition()
        self._shared: set[Hashable] = set()
        self._exclusive = False  # or about to be, as soon as no engine shares it

    def share(self, engine: Hashable) -> None:
        """To be called on an engine's thread before each piece of its work: it may compute until it
        calls `release`. Waits while another one has the device alone."""
        if self._exclusive:
            self.release(engine)
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive or engine in self._shared)
            self._shared.add(engine)

    def release(self, engine: Hashable) -> None:
        """Waits for what the engine has started, and ends its share, if it has one."""
        if engine in self._shared:
            try:
                self._settle()
            finally:
                with self._changed:
                    self._shared.discard(engine)
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Meanwhile, no engine computes. Only one thread may ask for it at a time (`load_lock`)."""
        with self._changed:
            self._exclusive = True
            self._changed.wait_for(lambda: not self._shared)
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()


def _set_limits(wired: int, most: int, pool: int) -> tuple[int, int, int]:
    """Sets mlx's limits and returns those before: of wired memory, of memory in use, beyond which
    mlx waits for computations before it starts more, and of its pool of freed arrays."""
    return mx.set_wired_limit(wired), mx.set_memory_limit(most), mx.set_cache_limit(pool)


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


def memory(configured: int | None = None) -> int:
    """Bytes that the device recommends to use at most; without Metal, as ``configured``."""
    if has_metal():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return machine() if configured is None else configured


def end_streams() -> None:
    """Ends the streams of this thread, as every thread that has used mlx should before it ends:
    otherwise the process may abort when it exits (https://github.com/ml-explore/mlx/pull/3395)."""
    if hasattr(mx, "clear_streams"):
        mx.clear_streams()


def used() -> int:
    """Bytes of all arrays of this process."""
    return int(mx.get_active_memory())


def clear_pool() -> None:
    """Frees the arrays that mlx keeps for reuse; called from any thread."""
    mx.clear_cache()


def gpu_failed(error: BaseException) -> bool:
    """Whether ``error`` says that Metal has ended a command buffer: it took too long, or memory ran
    out. Where mlx can still throw it, that is; elsewhere the process ends (`cli.supervise`)."""
    return isinstance(error, RuntimeError) and "command buffer" in str(error).lower()


def exhausted(error: BaseException) -> bool:
    """Whether ``error`` says that an allocation has failed: mlx has no class for that."""
    words = ("malloc", "insufficient memory", "out of memory", "attempting to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, ValueError))
        and any(word in str(error).lower() for word in words)
    )


_metal = Metal()
weight_bytes, add_weights = _metal.weight_bytes, _metal.add_weights
keep_wired, unwire_when_idle = _metal.keep_wired, _metal.unwire_when_idle

lock = DeviceLock()
load_lock = threading.Lock()
"""Held while a model is loaded and measured: what one allocates is not another one's."""
