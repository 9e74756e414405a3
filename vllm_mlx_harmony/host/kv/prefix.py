"""The prefix caches of this process's models, which share one budget of memory and one disk.

vllm-mlx's engines are steered from outside, by functions in their places, and so what they share is
here. Drop with those.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm_mlx_harmony.engine.boundaries import boundaries as marks
from vllm_mlx_harmony.engine.disk.cache import DiskCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.server.settings import number

if TYPE_CHECKING:
    from vllm_mlx_harmony.engine.pieces import Piece
    from vllm_mlx_harmony.engine.prefix_cache import Match, PrefixCache

__all__ = ["marks"]

VARIABLE = "VLLM_MLX_HARMONY_CACHE"
"""Environment variable: bytes that the cache may take in memory (``512M``, ``2G``), 0 for none."""

MEMORY_DIVISOR = 16
"""Without the variable: this part of the machine's memory. 1 GiB of 16."""

EVERYBODY = "*"
"""As `engine.prefix_cache` has it, which is imported when a model is there."""


class TenantPrompt(list[int]):
    """The ids of a prompt that may continue what the same ``tenant`` asked the model before.

    ``tenant`` separates those who must not see each other's prompts, not even by the clock: say, a
    digest of the API key; what is `EVERYBODY`'s, all may continue. ``cached`` is set, on the
    engine's thread, by the time the first id is generated: how many of the ids were not computed
    again. ``match`` holds what was read of it from the disk, until its turn comes.
    """

    def __init__(self, ids: Iterable[int], tenant: str = "", match: Match | None = None) -> None:
        super().__init__(ids)
        self.tenant = tenant
        self.cached = 0
        self.match = match


_limit: int | None = None


def limit(nbytes: int | None) -> None:
    """Sets what the server's flags allow, ``None`` when they say nothing; what is held goes."""
    global _limit
    _limit = nbytes
    memory.cache_clear()


def budget() -> int:
    """Bytes of memory: as flags say, else the environment, else a share of the machine's.

    A value that is no size is warned about, and counts as none given.
    """
    if _limit is not None:
        return _limit
    return number(
        VARIABLE, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MEMORY_DIVISOR
    )


@lru_cache(maxsize=1)
def memory() -> PrefixTree[Piece]:
    """What this process holds of all its models together."""
    return PrefixTree(budget())


def enabled() -> bool:
    """Whether anything may be held."""
    return memory().counters().budget > 0


_disk: DiskCache | None = None


def keep_on(disk: DiskCache | None) -> None:
    """Sets the disk below the memory; ``None``: in memory only."""
    global _disk
    _disk = disk


def disk() -> DiskCache | None:
    """The disk below the memory, where there is one."""
    return _disk


def computing() -> AbstractContextManager[None]:
    """While an engine computes: what is written behind it holds back."""
    return nullcontext() if _disk is None else _disk.computing()


_caches: dict[int, tuple[PrefixTree[Piece], DiskCache | None, PrefixCache]] = {}
_weights: dict[int, bytes] = {}
"""By the ``id`` of a model: modules are not hashable."""


def cache_of(model: Any) -> PrefixCache:
    """The prefix cache of ``model``, which ends with it."""
    key = id(model)
    tree, below, cache = _caches.get(key, (None, None, None))
    if cache is None:
        # An id can be taken again only after the finalizer ran.
        weakref.finalize(model, _close, key).atexit = False
    if cache is None or tree is not memory() or below is not _disk:
        cache = _renew(model)
    return cache


def _renew(model: Any) -> PrefixCache:
    from vllm_mlx_harmony.engine.prefix_cache import PrefixCache

    cache = PrefixCache(weakref.proxy(model), memory(), _disk, _weights.get(id(model)))
    _caches[id(model)] = memory(), _disk, cache
    return cache


def _close(key: int) -> None:
    _weights.pop(key, None)
    *_, cache = _caches.pop(key)
    # A finalizer may run anywhere, also in this thread while it holds the tree's lock.
    threading.Thread(target=cache.close).start()


def identify(model: Any, weights: bytes) -> None:
    """From now on the disk knows ``model``, by `identity.of_weights`."""
    cache_of(model).close()
    _weights[id(model)] = weights
    _renew(model)


def forget(model: Any) -> None:
    """Drops everything of a model from memory."""
    if id(model) in _caches:
        cache_of(model).clear()


def status(model: Any | None) -> dict[str, int]:
    """The counters of a model, ``None`` when it is not loaded, and of the memory."""
    reused = dict.fromkeys(("hits", "misses", "tokens_reused", "tokens_new"), 0)
    if model is None:
        return {**reused, **asdict(memory().counters())}
    return {
        name: count for name, count in asdict(cache_of(model).status()).items() if name != "disk"
    }


async def reach(model: Any, ids: Sequence[int], tenant: str) -> int:
    """How many ids of a prompt `resume` would find now."""
    return (await _lookup(model, ids, tenant)).cached


async def _lookup(model: Any, ids: Sequence[int], tenant: str) -> Match:
    look_up = cache_of(model).lookup
    return look_up(ids, tenant) if _disk is None else await asyncio.to_thread(look_up, ids, tenant)


async def fetch(model: Any, ids: Sequence[int], tenant: str) -> Match:
    """What is known of a prompt, read from the disk where memory has it not."""
    return await cache_of(model).load(await _lookup(model, ids, tenant))


def resume(model: Any, prompt: TenantPrompt, answer: int = 0) -> tuple[int, list[Any] | None]:
    """How many ids of ``prompt`` are known, and a cache that holds exactly those; 0 and ``None``.

    The cache has room for the rest and ``answer`` ids more; for nothing more without. On the thread
    that owns the model. Sets ``prompt.cached``.
    """
    cache = cache_of(model)
    match, prompt.match = prompt.match, None
    match = match or cache.lookup(prompt, prompt.tenant)
    layers, prompt.cached = cache.restore(match, len(prompt) + answer if answer else 0)
    return prompt.cached, layers if prompt.cached else None


def remember(model: Any, tenant: str, ids: Sequence[int], cache: Any, row: int = 0) -> None:
    """Adds ``ids``, which are exactly those that ``cache`` holds in ``row``."""
    cache_of(model).store(ids, cache, tenant, row)


def reusable(model: Any) -> bool:
    """Whether anything may be held, and the model's caches are of kinds that can be cut."""
    return enabled() and cache_of(model).enabled
