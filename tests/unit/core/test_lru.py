"""What was used last, within a number of bytes."""

from __future__ import annotations

import threading

import pytest

from vllm_mlx_harmony.core.lru import ByteLRU


def held(recent: ByteLRU[str, int]) -> set[str]:
    return {key for key in "abcdef" if key in recent._entries}


# (what is done, limit 10: "a3" puts a with 3 bytes, "a" gets it) -> keys held, bytes
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


@pytest.mark.parametrize(("done", "keys", "size"), ROWS.values(), ids=ROWS.keys())
def test_row(done: list[str], keys: str, size: int) -> None:
    recent: ByteLRU[str, int] = ByteLRU(10)
    for step in done:
        if step[1:]:
            recent.put(step[0], int(step[1:]), int(step[1:]))
        else:
            recent.get(step[0])
    assert (held(recent), recent.size, len(recent)) == (set(keys), size, len(keys))


def test_get_gives_what_was_put_last() -> None:
    recent: ByteLRU[str, int] = ByteLRU(10)
    assert recent.get("a") is None
    recent.put("a", 1, 1)
    recent.put("a", 2, 1)
    assert recent.get("a") == 2


def test_cleared() -> None:
    recent: ByteLRU[str, int] = ByteLRU(10)
    recent.put("a", 1, 5)
    recent.cache_clear()
    assert (recent.get("a"), recent.size, len(recent)) == (None, 0, 0)


def test_many_threads() -> None:
    recent: ByteLRU[int, int] = ByteLRU(100)

    def work(seed: int) -> None:
        for step in range(3_000):
            key = (step * seed) % 37
            recent.put(key, key, 1 + key % 7)
            assert recent.get((key * seed) % 37) in (None, (key * seed) % 37)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recent.size == sum(size for _, size in recent._entries.values()) <= 100


def test_no_more_values_than_most() -> None:
    held = ByteLRU[str, int](100, most=2)
    for key in "abc":
        held.put(key, 1, 1)
    assert [held.get(key) for key in "abc"] == [None, 1, 1]
    assert held.discard("b")
    assert not held.discard("b")
    assert (len(held), held.size) == (1, 1)
