"""A model's prefix cache in memory and on disk: hits, owners, and failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from engine_models import IDS, PLENTY
from mlx_lm.models.cache import ConcatenateKVCache, KVCache

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine import pieces
from vllm_mlx_harmony.engine.disk import cache as disks
from vllm_mlx_harmony.engine.disk.cache import DiskCache
from vllm_mlx_harmony.engine.prefix_cache import SHARED_TENANT, Match, PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree, pack

WEIGHTS = b"weights"


def new_cache(model: Any, disk: DiskCache | None = None, budget: int = PLENTY) -> PrefixCache:
    """A cache as after a start: nothing in memory."""
    return PrefixCache(model, PrefixTree(budget), disk, WEIGHTS)


def restore(cache: PrefixCache, ids: Sequence[int], tenant: str = "") -> tuple[list[Any], int]:
    match = asyncio.run(cache.load(cache.lookup(ids, tenant)))
    layers, cached = cache.restore(match)
    assert cached == match.cached
    return layers, cached


def cached_length(cache: PrefixCache, ids: Sequence[int], tenant: str = "") -> int:
    return cache.lookup(ids, tenant).cached


def compute(model: Any, cache: PrefixCache, ids: Sequence[int], tenant: str = "") -> list[Any]:
    """Computes ``ids`` in three pieces and stores each."""
    layers, start = model.make_cache(), 0
    for place in (200, 500, len(ids)):
        model(mx.array([ids[start:place]]), cache=layers)
        cache.store(ids[:place], layers, tenant)
        start = place
    return layers


def continue_alike(model: Any, first: list[Any], second: list[Any]) -> bool:
    following = mx.array([[1, 2, 3]])
    return bool(mx.array_equal(model(following, cache=first), model(following, cache=second)))


def test_pieces_are_read_from_disk_after_restart(random_model: Any, disk: DiskCache) -> None:
    first = new_cache(random_model, disk)
    assert restore(first, [*IDS, 1])[1] == 0
    computed = compute(random_model, first, IDS)
    assert disk.flush(10)
    again = new_cache(random_model, disk)
    assert again.lookup([*IDS, 1], "").in_memory == 0
    layers, cached = restore(again, [*IDS, 1])
    assert cached == 600 and continue_alike(random_model, layers, computed)
    assert again.counters().segments == 3
    assert restore(again, [*IDS, 2])[1] == 600
    assert disk.counters().hits == 1  # the second time it was in memory
    counters = again.counters()
    assert (counters.hits, counters.misses) == (2, 0)
    assert (counters.tokens_reused, counters.tokens_new) == (1200, 2)


def test_tenants_and_models_do_not_share_pieces(model: Any, disk: DiskCache) -> None:
    """In memory and on disk. Pieces of the shared tenant are everybody's."""
    tree: PrefixTree[Any] = PrefixTree(PLENTY)
    first, second = PrefixCache(model, tree, disk, b"one"), PrefixCache(model, tree, disk, b"other")
    compute(model, first, IDS, "alice")
    assert disk.flush(10)
    for cache in (first, PrefixCache(model, PrefixTree(PLENTY), disk, b"one")):
        assert [cached_length(cache, [*IDS, 1], name) for name in ("alice", "bob", "")] == [
            600,
            0,
            0,
        ]
        assert restore(cache, [*IDS, 1], "bob")[1] == 0
    assert cached_length(second, [*IDS, 1], "alice") == 0
    compute(model, second, IDS, SHARED_TENANT)
    assert disk.flush(10)
    for cache in (second, PrefixCache(model, PrefixTree(PLENTY), disk, b"other")):
        assert [restore(cache, [*IDS, 1], name)[1] for name in ("alice", "bob")] == [600, 600]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_cache_without_disk_or_identity_is_in_memory(
    model: Any, disk: DiskCache, weights: bytes | None
) -> None:
    cache = PrefixCache(model, PrefixTree(PLENTY), None if weights else disk, weights)
    compute(model, cache, IDS)
    assert restore(cache, [*IDS, 1])[1] == 600
    assert disk.flush(10) and disk.counters().pieces == 0


def test_restored_layers_are_copies(model: Any) -> None:
    cache = new_cache(model)
    compute(model, cache, IDS)
    layers, cached = restore(cache, [*IDS, 1])
    model(mx.array([[5, 6, 7]]), cache=layers)
    cache.evict(PLENTY)
    assert restore(cache, [*IDS, 1])[1] == 0
    assert cached == 600 and layers[0].offset == 603


@pytest.mark.parametrize(("capacity", "expected"), [(0, 600), (600, 600), (601, 601), (1300, 1300)])
def test_restored_layers_have_requested_capacity(model: Any, capacity: int, expected: int) -> None:
    cache = new_cache(model)
    compute(model, cache, IDS)
    layers, cached = cache.restore(cache.lookup([*IDS, 1], ""), capacity)
    assert {layer.keys.shape[2] for layer in layers} == {128, expected} and cached == 600


@pytest.mark.parametrize("on_disk", [False, True])
def test_pieces_of_waiting_prompts_are_evicted_last(
    model: Any, open_disk: Callable[..., DiskCache], on_disk: bool
) -> None:
    cache = new_cache(model, open_disk() if on_disk else None)
    compute(model, cache, IDS)
    held = cache.counters().nbytes
    compute(model, cache, [7, *IDS])
    match = asyncio.run(cache.load(cache.lookup([*IDS, 1], "")))
    assert cache.evict(1) > 0 and cache.evict(cache.counters().nbytes - held) > 0
    assert cache.restore(match)[1] == 600


def test_piece_evicted_before_use_is_computed(
    model: Any, disk: DiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    """The pieces from disk that continue it cannot be used either."""
    compute(model, new_cache(model, disk), IDS)
    assert disk.flush(10)
    cache, layers = new_cache(model, disk), model.make_cache()
    model(mx.array([IDS[:200]]), cache=layers)
    cache.store(IDS[:200], layers, "")
    match = asyncio.run(cache.load(cache.lookup([*IDS, 1], "")))
    assert (match.in_memory, match.cached) == (200, 600)
    cache.evict(PLENTY)
    with caplog.at_level(logging.WARNING):
        assert cache.restore(match)[1] == 0
    assert caplog.records == []


def test_final_return_is_not_stored(model: Any) -> None:
    """A history has another id in its place. A final ``<|call|>``, which it keeps, is stored."""
    for last, expected in ((vocab.RETURN, 3), (vocab.CALL, 4)):
        cache, layers = new_cache(model), model.make_cache()
        ids = [1, 2, 3, last]
        model(mx.array([ids]), cache=layers)
        cache.store(ids, layers, "")
        assert cached_length(cache, [*ids, 5]) == expected


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("disk_has", ["all", "nothing"])
def test_memory_of_waiting_pieces_is_bounded(
    open_disk: Callable[..., DiskCache], model: Any, disk_has: str
) -> None:
    """Prompts are read in order, each when the one before has had its turn or was cancelled."""
    first = new_cache(model, open_disk())
    for person in range(4):
        compute(model, first, [person, *IDS])
    assert first._disk is not None and first._disk.flush(10)
    disk = open_disk(buffer=first._disk.counters().nbytes // 4)
    cache = new_cache(model, disk)
    turns: list[int] = []

    async def read_in_turn(person: int, had_turn: asyncio.Event) -> None:
        ids = [person if disk_has == "all" else person + 10, *IDS, 1]
        match = await cache.load(cache.lookup(ids, ""))
        assert bool(match.loaded) == (disk_has == "all")
        turns.append(person)
        try:
            await had_turn.wait()
        finally:
            del match

    async def read_four() -> None:
        turn = [asyncio.Event() for _ in range(4)]
        waiting = [asyncio.create_task(read_in_turn(person, turn[person])) for person in range(4)]
        for person in range(4):
            for _ in range(1000):
                if len(turns) > person:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(2 * disks.RETRY)
            assert turns == [*range(person + 1 if disk_has == "all" else 4)]
            if person == 1:
                waiting[person].cancel()
            turn[person].set()
        await asyncio.wait(waiting)

    asyncio.run(read_four())
    assert disk.read_ahead == 0


def test_simultaneous_prompts_are_read_once(model: Any, disk: DiskCache) -> None:
    compute(model, new_cache(model, disk), IDS)
    assert disk.flush(10)
    cache = new_cache(model, disk)

    async def both() -> list[Match]:
        matches = [cache.lookup([*IDS, last], "") for last in (1, 2)]
        return await asyncio.gather(*map(cache.load, matches))

    first, second = asyncio.run(both())
    assert first.cached == second.cached == 600
    assert disk.counters().bytes_read == disk.counters().bytes_written > 0
    assert [cache.restore(match)[1] for match in (first, second)] == [600, 600]


def test_prompts_of_any_event_loop_are_read(model: Any, disk: DiskCache) -> None:
    compute(model, new_cache(model, disk), IDS)
    assert disk.flush(10)

    async def both(cache: PrefixCache) -> list[Match]:
        matches = [await cache.find([*IDS, last], "") for last in (1, 2)]
        return await asyncio.gather(*map(cache.load, matches))

    for _ in range(2):
        matches = asyncio.run(both(new_cache(model, disk)))
        assert [match.cached for match in matches] == [600, 600]


def test_pieces_in_memory_are_not_read_from_disk(model: Any, disk: DiskCache) -> None:
    compute(model, new_cache(model, disk), IDS)
    assert disk.flush(10)
    cache = new_cache(model, disk)
    match = cache.lookup([*IDS, 1], "")
    compute(model, cache, IDS)
    loaded = asyncio.run(cache.load(match))
    assert loaded.loaded == () and loaded.cached == 600
    assert disk.counters().bytes_read == 0


def test_piece_that_overlaps_memory_is_used_in_part(model: Any, disk: DiskCache) -> None:
    """The same ids were cut elsewhere: only the rest of the piece is used."""
    computed = compute(model, new_cache(model, disk), IDS)
    assert disk.flush(10)
    cache, half = new_cache(model, disk), model.make_cache()
    model(mx.array([IDS[:350]]), cache=half)
    cache.store(IDS[:350], half, "")
    layers, cached = restore(cache, [*IDS, 1])
    assert cached == 600
    after = [model(mx.array([[1, 2, 3]]), cache=caches) for caches in (computed, layers)]
    assert mx.allclose(*after, atol=1e-4)


def test_pieces_that_fit_memory_are_restored(model: Any, disk: DiskCache) -> None:
    first = new_cache(model, disk)
    compute(model, first, IDS)
    assert disk.flush(10)
    _, held = first._tree.find(first._owners(""), pack([*IDS, 1]))
    cache = new_cache(model, disk, sum(piece.nbytes for piece in held[:2]))
    layers, cached = cache.restore(asyncio.run(cache.load(cache.lookup([*IDS, 1], ""))))
    assert cached == 500 and layers[0].offset == 500


def test_piece_evicted_from_memory_stays_on_disk(model: Any, disk: DiskCache) -> None:
    cache = new_cache(model, disk)
    compute(model, cache, IDS)
    assert disk.flush(10)
    held = cache.counters().nbytes
    assert 0 < cache.evict(1) < held
    assert cache.lookup([*IDS, 1], "").in_memory == 500
    remaining = cache.counters().nbytes
    assert cache.evict(PLENTY) == remaining > 0 and cache.counters().nbytes == 0
    assert restore(cache, [*IDS, 1])[1] == 600


def test_closed_cache_stores_nothing(model: Any) -> None:
    tree: PrefixTree[Any] = PrefixTree(PLENTY)
    cache, other = PrefixCache(model, tree), PrefixCache(model, tree)
    compute(model, cache, IDS)
    compute(model, other, IDS)
    cache.close()
    compute(model, cache, IDS)
    assert restore(cache, [*IDS, 1])[1] == 0 and restore(other, [*IDS, 1])[1] == 600


def test_disabled_cache_stores_nothing(model: Any, disk: DiskCache) -> None:
    cache = new_cache(model, disk, budget=0)
    compute(model, cache, IDS)
    assert not cache.enabled and restore(cache, [*IDS, 1])[1] == 0
    assert disk.flush(10) and disk.counters().pieces == 0
    assert (cache.counters().hits, cache.counters().misses, cache.counters().refused) == (0, 0, 0)


class Other:
    """A model with layers that cannot be cut."""

    def make_cache(self) -> list[Any]:
        return [ConcatenateKVCache(), KVCache()]


def test_unsupported_layers_are_not_cached() -> None:
    cache = new_cache(Other())
    layers, cached = restore(cache, [1, 2, 3])
    assert not cache.enabled and cached == 0 and isinstance(layers[0], ConcatenateKVCache)
    cache.store([1, 2], layers, "")


@pytest.mark.parametrize("broken", ["cut", "join", "imported", "exported"])
def test_failure_costs_only_reuse(
    model: Any,
    disk: DiskCache,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compute(model, new_cache(model, disk), IDS)
    assert disk.flush(10)

    def fail(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(pieces, broken, fail)
    cache = new_cache(model, disk)
    match = asyncio.run(cache.load(cache.lookup([*IDS, 1], "")))
    layers, cached = cache.restore(match)
    assert cached == layers[0].offset == (0 if broken in {"join", "imported"} else 600)
    compute(model, cache, [7, *IDS])
    assert disk.flush(10)
    assert "no room" in caplog.text
    monkeypatch.undo()
    assert restore(cache, [*IDS, 1])[1] == 600
