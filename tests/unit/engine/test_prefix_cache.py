"""One model's prefix cache, in memory and on disk: what is found, for whom, and what fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from engine_models import flushed
from mlx_lm.models.cache import ConcatenateKVCache, KVCache

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine import pieces
from vllm_mlx_harmony.engine.disk import cache as disks
from vllm_mlx_harmony.engine.disk.cache import DiskCache
from vllm_mlx_harmony.engine.prefix_cache import SHARED_TENANT, Match, PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree, pack

PLENTY = 1 << 30
IDS = list(range(1000, 1600))
WEIGHTS = b"weights"


def new(model: Any, disk: DiskCache | None = None, budget: int = PLENTY) -> PrefixCache:
    """As after a start: nothing in memory."""
    return PrefixCache(model, PrefixTree(budget), disk, WEIGHTS)


def restored(cache: PrefixCache, ids: Sequence[int], tenant: str = "") -> tuple[list[Any], int]:
    match = asyncio.run(cache.load(cache.lookup(ids, tenant)))
    layers, cached = cache.restore(match)
    assert cached == match.cached
    return layers, cached


def known(cache: PrefixCache, ids: Sequence[int], tenant: str = "") -> int:
    return cache.lookup(ids, tenant).cached


def compute(model: Any, cache: PrefixCache, ids: Sequence[int], tenant: str = "") -> list[Any]:
    """Computes ``ids`` in three pieces, and stores each."""
    layers, start = model.make_cache(), 0
    for place in (200, 500, len(ids)):
        model(mx.array([ids[start:place]]), cache=layers)
        cache.store(ids[:place], layers, tenant)
        start = place
    return layers


def go_on_alike(model: Any, one: list[Any], other: list[Any]) -> bool:
    following = mx.array([[1, 2, 3]])
    return bool(mx.array_equal(model(following, cache=one), model(following, cache=other)))


def test_evicted_pieces_are_read_from_disk(random_model: Any, disk: DiskCache) -> None:
    first = new(random_model, disk)
    assert restored(first, [*IDS, 1])[1] == 0
    computed = compute(random_model, first, IDS)
    assert flushed(disk)
    again = new(random_model, disk)
    assert again.lookup([*IDS, 1], "").in_memory == 0
    layers, cached = restored(again, [*IDS, 1])
    assert cached == 600 and go_on_alike(random_model, layers, computed)
    assert again.status().segments == 3
    assert restored(again, [*IDS, 2])[1] == 600
    assert disk.counters().hits == 1  # the second time it was in memory
    status = again.status()
    assert (status.hits, status.misses) == (2, 0)
    assert (status.tokens_reused, status.tokens_new) == (1200, 2)


def test_tenants_and_models_are_apart(model: Any, disk: DiskCache) -> None:
    """In memory and on disk. What the operator had computed is everybody's."""
    tree: PrefixTree[Any] = PrefixTree(PLENTY)
    one, other = PrefixCache(model, tree, disk, b"one"), PrefixCache(model, tree, disk, b"other")
    compute(model, one, IDS, "alice")
    assert flushed(disk)
    for cache in (one, PrefixCache(model, PrefixTree(PLENTY), disk, b"one")):
        assert [known(cache, [*IDS, 1], name) for name in ("alice", "bob", "")] == [600, 0, 0]
        assert restored(cache, [*IDS, 1], "bob")[1] == 0
    assert known(other, [*IDS, 1], "alice") == 0
    compute(model, other, IDS, SHARED_TENANT)
    assert flushed(disk)
    for cache in (other, PrefixCache(model, PrefixTree(PLENTY), disk, b"other")):
        assert [restored(cache, [*IDS, 1], name)[1] for name in ("alice", "bob")] == [600, 600]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_without_a_disk_or_an_identity_it_is_in_memory(
    model: Any, disk: DiskCache, weights: bytes | None
) -> None:
    cache = PrefixCache(model, PrefixTree(PLENTY), None if weights else disk, weights)
    compute(model, cache, IDS)
    assert restored(cache, [*IDS, 1])[1] == 600
    assert flushed(disk) and disk.counters().pieces == 0


def test_restored_layers_are_copies(model: Any) -> None:
    cache = new(model)
    compute(model, cache, IDS)
    one, cached = restored(cache, [*IDS, 1])
    model(mx.array([[5, 6, 7]]), cache=one)
    cache.evict(PLENTY)
    assert restored(cache, [*IDS, 1])[1] == 0
    assert cached == 600 and one[0].offset == 603


@pytest.mark.parametrize(("capacity", "expected"), [(0, 600), (600, 600), (601, 601), (1300, 1300)])
def test_room_is_left_for_what_comes(model: Any, capacity: int, expected: int) -> None:
    cache = new(model)
    compute(model, cache, IDS)
    layers, cached = cache.restore(cache.lookup([*IDS, 1], ""), capacity)
    assert {layer.keys.shape[2] for layer in layers} == {128, expected} and cached == 600


@pytest.mark.parametrize("on_disk", [False, True])
def test_pieces_of_waiting_prompts_are_evicted_last(
    model: Any, open_disk: Callable[..., DiskCache], on_disk: bool
) -> None:
    cache = new(model, open_disk() if on_disk else None)
    compute(model, cache, IDS)
    held = cache.status().nbytes
    compute(model, cache, [7, *IDS])
    match = asyncio.run(cache.load(cache.lookup([*IDS, 1], "")))
    assert cache.evict(1) > 0 and cache.evict(cache.status().nbytes - held) > 0
    assert cache.restore(match)[1] == 600


def test_piece_evicted_before_use_is_computed(
    model: Any, disk: DiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor can what was read from the disk be used that continues it."""
    compute(model, new(model, disk), IDS)
    assert flushed(disk)
    cache, layers = new(model, disk), model.make_cache()
    model(mx.array([IDS[:200]]), cache=layers)
    cache.store(IDS[:200], layers, "")
    match = asyncio.run(cache.load(cache.lookup([*IDS, 1], "")))
    assert (match.in_memory, match.cached) == (200, 600)
    cache.evict(PLENTY)
    with caplog.at_level(logging.WARNING):
        assert cache.restore(match)[1] == 0
    assert caplog.records == []


def test_the_id_that_ended_an_answer_is_left_out(model: Any) -> None:
    """A history has another in its place. One that a history has, too, is stored."""
    for last, expected in ((vocab.RETURN, 3), (vocab.CALL, 4)):
        cache, layers = new(model), model.make_cache()
        ids = [1, 2, 3, last]
        model(mx.array([ids]), cache=layers)
        cache.store(ids, layers, "")
        assert known(cache, [*ids, 5]) == expected


@pytest.mark.parametrize("disk_has", ["all", "nothing"])
def test_memory_of_waiting_pieces_is_bounded(
    open_disk: Callable[..., DiskCache], model: Any, disk_has: str
) -> None:
    """The next prompt is read when one has had its turn, or was given up; in their order."""
    first = new(model, open_disk())
    for person in range(4):
        compute(model, first, [person, *IDS])
    assert first._disk is not None and flushed(first._disk)
    disk = open_disk(buffer=first._disk.counters().nbytes // 4)
    cache = new(model, disk)
    turns: list[int] = []

    async def one(person: int, had_turn: asyncio.Event) -> None:
        ids = [person if disk_has == "all" else person + 10, *IDS, 1]
        match = await cache.load(cache.lookup(ids, ""))
        assert bool(match.loaded) == (disk_has == "all")
        turns.append(person)
        try:
            await had_turn.wait()
        finally:
            del match

    async def four() -> None:
        turn = [asyncio.Event() for _ in range(4)]
        waiting = [asyncio.create_task(one(person, turn[person])) for person in range(4)]
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

    asyncio.run(four())
    assert disk.read_ahead == 0


def test_prompts_that_come_together_are_read_once(model: Any, disk: DiskCache) -> None:
    compute(model, new(model, disk), IDS)
    assert flushed(disk)
    cache = new(model, disk)

    async def both() -> list[Match]:
        matches = [cache.lookup([*IDS, last], "") for last in (1, 2)]
        return await asyncio.gather(*map(cache.load, matches))

    one, other = asyncio.run(both())
    assert one.cached == other.cached == 600
    assert disk.counters().bytes_read == disk.counters().bytes_written > 0
    assert [cache.restore(match)[1] for match in (one, other)] == [600, 600]


def test_prompts_of_each_event_loop_are_read(model: Any, disk: DiskCache) -> None:
    compute(model, new(model, disk), IDS)
    assert flushed(disk)

    async def both(cache: PrefixCache) -> list[Match]:
        matches = [await cache.find([*IDS, last], "") for last in (1, 2)]
        return await asyncio.gather(*map(cache.load, matches))

    for _ in range(2):
        matches = asyncio.run(both(new(model, disk)))
        assert [match.cached for match in matches] == [600, 600]


def test_pieces_in_memory_are_not_read_from_disk(model: Any, disk: DiskCache) -> None:
    compute(model, new(model, disk), IDS)
    assert flushed(disk)
    cache = new(model, disk)
    match = cache.lookup([*IDS, 1], "")
    compute(model, cache, IDS)
    loaded = asyncio.run(cache.load(match))
    assert loaded.loaded == () and loaded.cached == 600
    assert disk.counters().bytes_read == 0


def test_a_piece_may_begin_before_what_memory_has(model: Any, disk: DiskCache) -> None:
    """The same ids were cut elsewhere: the rest of the piece is what is taken of it."""
    computed = compute(model, new(model, disk), IDS)
    assert flushed(disk)
    cache, half = new(model, disk), model.make_cache()
    model(mx.array([IDS[:350]]), cache=half)
    cache.store(IDS[:350], half, "")
    layers, cached = restored(cache, [*IDS, 1])
    assert cached == 600
    after = [model(mx.array([[1, 2, 3]]), cache=each) for each in (computed, layers)]
    assert mx.allclose(*after, atol=1e-4)


def test_small_memory_costs_only_the_rest(model: Any, disk: DiskCache) -> None:
    first = new(model, disk)
    compute(model, first, IDS)
    assert flushed(disk)
    _, held = first._tree.find(first._owners(""), pack([*IDS, 1]))
    cache = new(model, disk, sum(piece.nbytes for piece in held[:2]))
    layers, cached = cache.restore(asyncio.run(cache.load(cache.lookup([*IDS, 1], ""))))
    assert cached == 500 and layers[0].offset == 500


def test_evicted_from_memory_it_stays_on_disk(model: Any, disk: DiskCache) -> None:
    cache = new(model, disk)
    compute(model, cache, IDS)
    assert flushed(disk)
    held = cache.status().nbytes
    assert 0 < cache.evict(1) < held
    assert cache.lookup([*IDS, 1], "").in_memory == 500
    left = cache.status().nbytes
    assert cache.evict(PLENTY) == left > 0 and cache.status().nbytes == 0
    assert restored(cache, [*IDS, 1])[1] == 600


def test_closed_it_holds_and_takes_nothing(model: Any) -> None:
    tree: PrefixTree[Any] = PrefixTree(PLENTY)
    cache, other = PrefixCache(model, tree), PrefixCache(model, tree)
    compute(model, cache, IDS)
    compute(model, other, IDS)
    cache.close()
    compute(model, cache, IDS)
    assert restored(cache, [*IDS, 1])[1] == 0 and restored(other, [*IDS, 1])[1] == 600


def test_switched_off_it_does_nothing(model: Any, disk: DiskCache) -> None:
    cache = new(model, disk, budget=0)
    compute(model, cache, IDS)
    assert not cache.enabled and restored(cache, [*IDS, 1])[1] == 0
    assert flushed(disk) and disk.counters().pieces == 0
    assert (cache.status().hits, cache.status().misses, cache.status().refused) == (0, 0, 0)


class Other:
    """A model with layers that cannot be cut."""

    def make_cache(self) -> list[Any]:
        return [ConcatenateKVCache(), KVCache()]


def test_layers_of_another_kind_are_not_cached() -> None:
    cache = new(Other())
    layers, cached = restored(cache, [1, 2, 3])
    assert not cache.enabled and cached == 0 and isinstance(layers[0], ConcatenateKVCache)
    cache.store([1, 2], layers, "")


@pytest.mark.parametrize("broken", ["cut", "join", "imported", "exported"])
def test_a_failure_costs_only_the_reuse(
    model: Any,
    disk: DiskCache,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compute(model, new(model, disk), IDS)
    assert flushed(disk)

    def fail(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(pieces, broken, fail)
    cache = new(model, disk)
    match = asyncio.run(cache.load(cache.lookup([*IDS, 1], "")))
    layers, cached = cache.restore(match)
    assert cached == layers[0].offset == (0 if broken in {"join", "imported"} else 600)
    compute(model, cache, [7, *IDS])
    assert flushed(disk)
    assert "no room" in caplog.text
    monkeypatch.undo()
    assert restored(cache, [*IDS, 1])[1] == 600
