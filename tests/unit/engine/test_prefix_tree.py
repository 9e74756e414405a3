"""The tree of cached prefixes: matches, owners, eviction, and the budget."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.engine.prefix_tree import WIDTH, PrefixTree, pack

PLENTY = 1_000_000


@dataclass(eq=False)
class Piece:
    """Stands for the ids from ``start`` to ``end``, with ten bytes each."""

    sequence: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return 10 * (self.end - self.start)


def add(tree: PrefixTree[Piece], ids: Any, owner: object = "me") -> bool:
    sequence = tuple(ids)
    return bool(tree.add([owner], pack(sequence), lambda start, end: Piece(sequence, start, end)))


def find(tree: PrefixTree[Piece], ids: Any, owner: object = "me") -> int:
    """Length of the cached prefix; checks that its pieces are those that were added."""
    sequence = tuple(ids)
    length, pieces = tree.find([owner], pack(sequence))
    at = 0
    for piece in pieces:
        assert piece.start == at and piece.sequence[: piece.end] == sequence[: piece.end]
        at = piece.end
    assert at == length
    assert tree.match_length([owner], pack(sequence)) == length
    return length


@pytest.mark.parametrize(
    ("known", "asked", "expected"),
    [
        ([], [1, 2, 3], 0),
        ([[1, 2, 3]], [1, 2, 3, 4], 3),
        ([[1, 2, 3]], [1, 2, 3], 0),  # at least one id must be computed
        ([[1, 2], [1, 2, 3]], [1, 2, 3], 2),
        ([[1, 2, 3]], [1, 2, 9, 9], 0),  # no match ends inside a piece
        ([[1, 2], [1, 2, 3, 4]], [1, 2, 9, 9], 2),
        ([[1, 2], [1, 2, 3, 4]], [1, 2, 3, 4, 5], 4),
        ([[1, 2, 3, 4], [1, 2]], [1, 2, 3, 4, 5], 4),  # added in the other order
        ([[1, 2, 3, 4], [1, 2]], [1, 2, 9], 2),
        ([[1], [1, 2], [1, 2, 3], [1, 9]], [1, 9, 9], 2),
        ([[1, 2, 3]], [2, 3, 4], 0),
        ([[256, 1]], [1, 256, 1], 0),  # no match across the bytes of an id
        ([[201_088, 0, 7]], [201_088, 0, 7, 7], 3),
    ],
)
def test_longest_known_prefix_is_found(
    known: list[list[int]], asked: list[int], expected: int
) -> None:
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)
    assert all(add(tree, ids) for ids in known)
    assert find(tree, asked) == expected


def test_shared_piece_is_held_once() -> None:
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)
    system = range(100)
    add(tree, system)
    for person in range(8):
        add(tree, [*system, 500 + person, 1])
        add(tree, [*system, 500 + person, 1])
    assert tree.counters().nbytes == 10 * (100 + 8 * 2)
    assert tree.counters().segments == 9


def test_owners_are_isolated() -> None:
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)
    add(tree, [1, 2, 3], owner=("model", "alice"))
    assert find(tree, [1, 2, 3, 4], owner=("model", "bob")) == 0
    assert find(tree, [1, 2, 3, 4], owner=("other model", "alice")) == 0
    assert find(tree, [1, 2, 3, 4], owner=("model", "alice")) == 3


def test_shared_segments_are_found_by_all_owners() -> None:
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)
    add(tree, [1, 2], owner="all")
    add(tree, [1, 2, 3, 4], owner="all")
    add(tree, [1, 2, 3], owner="alice")
    sequence = pack([1, 2, 3, 4, 5])
    assert tree.match_length(["alice", "all"], sequence) == 4
    assert (
        tree.match_length(["alice"], sequence),
        tree.match_length(["bob", "alice"], sequence),
    ) == (
        3,
        3,
    )
    assert tree.find(["bob", "all"], sequence) == tree.find(["all"], sequence)
    assert tree.find(["alice", "all"], pack([1, 2, 3, 9]))[0] == 3  # alice's own is longer
    held = tree.counters().nbytes
    longer = [1, 2, 3, 4, 5, 6]
    cut = tree.add(["bob", "all"], pack(longer), lambda *part: Piece(tuple(longer), *part))
    assert [(end, piece.start) for end, piece in cut] == [(2, 0), (4, 2), (6, 4)]
    assert tree.counters().nbytes == held + 20  # the shared prefix is not held again
    sequence = pack([*longer, 7])
    assert tree.match_length(["bob", "all"], sequence) == 6
    assert [tree.match_length([name, "all"], sequence) for name in ("alice", "carol")] == [4, 4]
    assert tree.match_length(["bob"], sequence) == 0
    assert tree.add(["carol", "all"], pack([1, 2, 3, 4]), lambda *_: pytest.fail("is known"))


def test_orphaned_continuation_is_evicted_in_turn() -> None:
    tree: PrefixTree[Piece] = PrefixTree(40)
    add(tree, [1, 2], owner="all")
    tree.add(["bob", "all"], pack([1, 2, 3]), lambda *part: Piece((1, 2, 3), *part))
    tree.forget(lambda owner: owner == "all")
    assert tree.match_length(["bob", "all"], pack([1, 2, 3, 4])) == 0
    assert (tree.counters().nbytes, tree.counters().segments) == (10, 1)
    add(tree, [5, 6, 7, 8])
    assert (tree.counters().nbytes, tree.counters().segments) == (40, 1)
    tree.forget(lambda _: True)
    assert (tree.counters().nbytes, tree.counters().segments) == (0, 0)


@pytest.mark.parametrize(
    ("nbytes", "remaining"), [(0, 3), (1, 2), (10, 2), (11, 1), (30, 0), (10_000, 0)]
)
def test_evict_frees_no_more_than_needed(nbytes: int, remaining: int) -> None:
    """Evicts the least recently used first, and no more than needed."""
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)
    for first in (1, 2, 3):
        add(tree, [first])
    assert find(tree, [1, 9]) == 1  # now [2] is the oldest
    assert tree.evict(nbytes) == 10 * (3 - remaining)
    assert tree.counters().nbytes == 10 * remaining and tree.counters().evictions == 3 - remaining
    assert [find(tree, [first, 9]) for first in (2, 3, 1)] == [0] * (3 - remaining) + [
        1
    ] * remaining


def test_least_recently_used_leaf_is_evicted_first() -> None:
    tree: PrefixTree[Piece] = PrefixTree(40)
    add(tree, [1])
    add(tree, [1, 2])
    add(tree, [1, 3])
    assert find(tree, [1, 2, 0]) == 2  # now [1, 3] is the oldest
    add(tree, [1, 4])
    add(tree, [1, 5])
    assert [find(tree, [1, last, 0]) for last in (2, 3, 4, 5)] == [2, 1, 2, 2]
    assert tree.counters().evictions == 1


def test_match_length_does_not_count_as_use() -> None:
    tree: PrefixTree[Piece] = PrefixTree(20)
    add(tree, [1])
    add(tree, [2])
    before = tree.counters()
    assert tree.match_length(["me"], pack([1, 9])) == 1
    assert tree.match_length(["other"], pack([1, 9])) == tree.match_length(["me"], pack([])) == 0
    assert tree.counters() == before
    add(tree, [3])
    assert [tree.match_length(["me"], pack([first, 9])) for first in (1, 2, 3)] == [0, 1, 1]


def test_budget_of_one_entry_keeps_last() -> None:
    tree: PrefixTree[Piece] = PrefixTree(30)
    for first in range(5):
        assert add(tree, [first, 0, 0])
        assert tree.counters().nbytes == 30
        assert find(tree, [first, 0, 0, 0]) == 3
    assert tree.counters().evictions == 4


def test_oversized_piece_evicts_nothing() -> None:
    tree: PrefixTree[Piece] = PrefixTree(50)
    add(tree, [1, 1])
    add(tree, [2, 2])
    assert not add(tree, range(9))
    assert not add(tree, [1, 1, *range(9)])  # nor one that continues [1, 1]
    assert [find(tree, [1, 1, 0]), find(tree, [2, 2, 0])] == [2, 2]
    assert tree.counters().refused == 2 and tree.counters().evictions == 0


def test_zero_budget_holds_nothing() -> None:
    tree: PrefixTree[Piece] = PrefixTree(0)
    assert not add(tree, [1])
    assert find(tree, [1, 2]) == 0


def test_piece_evicted_while_in_use_stays_whole() -> None:
    tree: PrefixTree[Piece] = PrefixTree(30)
    add(tree, [1, 2])
    length, pieces = tree.find(["me"], pack([1, 2, 3]))
    add(tree, [7, 8, 9])
    assert find(tree, [1, 2, 3]) == 0
    assert length == 2 and pieces[0].sequence == (1, 2)
    assert add(tree, [1, 2, 3])  # with its prefix, which was evicted
    assert find(tree, [1, 2, 3, 4]) == 3


def test_prefix_evicted_during_cut_is_cut_again() -> None:
    tree: PrefixTree[Piece] = PrefixTree(40)
    add(tree, [1, 2])
    cuts: list[tuple[int, int]] = []

    def cut(start: int, end: int) -> Piece:
        cuts.append((start, end))
        if len(cuts) == 1:
            add(tree, [5, 6, 7, 8])  # of another request; evicts [1, 2]
        return Piece((1, 2, 3, 4), start, end)

    assert tree.add(["me"], pack([1, 2, 3, 4]), cut)
    assert cuts == [(2, 4), (0, 4)]
    assert find(tree, [1, 2, 3, 4, 5]) == 4


def test_failed_cut_leaves_nothing() -> None:
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)

    def cut(start: int, end: int) -> Piece:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - the one above
        tree.add(["me"], pack([1, 2]), cut)
    assert find(tree, [1, 2, 3]) == 0 and tree.counters().segments == 0
    assert add(tree, [1, 2])


def test_forgotten_owners_leave_nothing() -> None:
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)
    add(tree, [1, 2], owner=("a", 1))
    add(tree, [1, 2, 3], owner=("a", 2))
    add(tree, [1, 2], owner=("b", 1))
    pieces = [weakref.ref(piece) for piece in tree.find([("a", 1)], pack([1, 2, 3]))[1]]
    gc.disable()  # gigabytes must not wait for the garbage collector
    tree.forget(lambda owner: isinstance(owner, tuple) and owner[0] == "a")
    gc.enable()
    assert [piece() for piece in pieces] == [None]
    assert [find(tree, [1, 2, 3, 4], owner=("a", number)) for number in (1, 2)] == [0, 0]
    assert find(tree, [1, 2, 3], owner=("b", 1)) == 2
    assert tree.counters().nbytes == 20


@pytest.mark.nightly
@pytest.mark.once
def test_deep_conversations_do_not_recurse() -> None:
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)
    deep = sys.getrecursionlimit() + 100
    for length in range(1, deep):
        add(tree, range(length))
    assert find(tree, range(deep)) == deep - 1


def test_memory_of_200_conversations_stays_within_budget() -> None:
    tree: PrefixTree[Piece] = PrefixTree(2_000)
    for person in range(200):
        for turn in range(1, 5):
            add(tree, [7, 7, *[person + 100] * (turn * 5)], owner=("model", str(person % 7)))
            assert tree.counters().nbytes <= 2_000
    assert len(tree._order) == tree.counters().segments
    assert unique(tree) == tree.counters().nbytes
    assert len(tree._root.children) <= 7


def test_concurrent_access_stays_consistent() -> None:
    tree: PrefixTree[Piece] = PrefixTree(600)
    failures: list[BaseException] = []

    def converse(person: int) -> None:
        try:
            for turn in range(1, 300):
                ids = [person % 3, *range(turn % 9)]
                add(tree, ids)
                assert find(tree, [*ids, 99]) <= len(ids)
        except BaseException as error:  # noqa: BLE001 - of any kind
            failures.append(error)

    threads = [threading.Thread(target=converse, args=(person,)) for person in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tree.counters().nbytes <= 600


def unique(tree: PrefixTree[Piece]) -> int:
    """Bytes held, counted from the nodes themselves."""
    values = {id(node.value): node.value for node in tree._order}
    return sum(value.nbytes for value in values.values() if value is not None)


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=7)


@given(st.lists(SEQUENCES, max_size=25), SEQUENCES)
def test_match_equals_brute_force(stored: list[list[int]], query: list[int]) -> None:
    tree: PrefixTree[Piece] = PrefixTree(PLENTY)
    for ids in stored:
        add(tree, ids)
    shared = [len(ids) for ids in stored if query[: len(ids)] == ids and len(ids) < len(query)]
    assert find(tree, query) == max(shared, default=0)


@given(
    st.integers(0, 150),
    st.lists(st.tuples(st.integers(0, 1), SEQUENCES, st.booleans()), max_size=40),
)
def test_memory_never_exceeds_budget(budget: int, steps: list[tuple[int, list[int], bool]]) -> None:
    tree: PrefixTree[Piece] = PrefixTree(budget)
    for owner, ids, sharing in steps:
        if sharing:
            sequence = pack([*ids, 9])
            owners = [owner, 1 - owner]
            assert tree.find(owners, sequence)[0] == tree.match_length(owners, sequence)
            tree.add(owners, sequence, lambda *part, ids=ids: Piece((*ids, 9), *part))
        fits = add(tree, ids, owner)
        counters = tree.counters()
        assert counters.nbytes <= budget
        assert counters.nbytes == unique(tree)
        assert not fits or find(tree, [*ids, 9], owner) == len(ids)
    for node in tree._order:
        assert len(node.ids) // WIDTH == node.end - (node.parent.end if node.parent else 0)
