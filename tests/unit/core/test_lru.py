"""An LRU cache that is bounded in bytes."""

from __future__ import annotations

import threading

import pytest

from vllm_mlx_harmony.core.lru import ByteLRU


def stored_keys(cache: ByteLRU[str, int]) -> set[str]:
    return {key for key in "abcdef" if key in cache._entries}


# name: the steps ("a3" puts a with 3 bytes, "a" gets it; the limit is 10), the keys, the bytes
ROWS: dict[str, tuple[list[str], str, int]] = {
    "nothing": ([], "", 0),
    "all of it fits": (["a3", "b3", "c4"], "abc", 10),
    "the oldest goes": (["a3", "b3", "c4", "d1"], "bcd", 8),
    "several go for a large one": (["a3", "b3", "c4", "d9"], "d", 9),
    "what was used stays": (["a3", "b3", "c4", "a", "d1"], "acd", 8),
    "what was put again stays": (["a3", "b3", "c4", "a3", "d1"], "acd", 8),
    "put again with another size": (["a3", "a9"], "a", 9),
    "too large": (["a3", "b11"], "a", 3),
    "grown too large": (["a3", "a11"], "", 0),
    "exactly the limit": (["a10"], "a", 10),
    "asking for what is not there": (["a3", "b", "c4"], "ac", 7),
}


@pytest.mark.parametrize(("steps", "keys", "size"), ROWS.values(), ids=ROWS.keys())
def test_least_recently_used_entries_are_evicted(steps: list[str], keys: str, size: int) -> None:
    cache: ByteLRU[str, int] = ByteLRU(10)
    for step in steps:
        if step[1:]:
            cache.put(step[0], int(step[1:]), int(step[1:]))
        else:
            cache.get(step[0])
    assert (stored_keys(cache), cache.size, len(cache)) == (set(keys), size, len(keys))


def test_get_returns_last_value() -> None:
    cache: ByteLRU[str, int] = ByteLRU(10)
    assert cache.get("a") is None
    cache.put("a", 1, 1)
    cache.put("a", 2, 1)
    assert cache.get("a") == 2


def test_clear_empties_cache() -> None:
    cache: ByteLRU[str, int] = ByteLRU(10)
    cache.put("a", 1, 5)
    cache.cache_clear()
    assert (cache.get("a"), cache.size, len(cache)) == (None, 0, 0)


def test_concurrent_use_keeps_size_consistent() -> None:
    cache: ByteLRU[int, int] = ByteLRU(100)

    def work(seed: int) -> None:
        for step in range(3_000):
            key = (step * seed) % 37
            cache.put(key, key, 1 + key % 7)
            assert cache.get((key * seed) % 37) in (None, (key * seed) % 37)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.size == sum(size for _, size in cache._entries.values()) <= 100


def test_number_of_entries_is_bounded() -> None:
    cache = ByteLRU[str, int](100, most=2)
    for key in "abc":
        cache.put(key, 1, 1)
    assert [cache.get(key) for key in "abc"] == [None, 1, 1]
    assert cache.discard("b")
    assert not cache.discard("b")
    assert (len(cache), cache.size) == (1, 1)
