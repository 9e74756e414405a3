"""Token sequences as a tree of pieces, within a budget of bytes; evicts the least recently used.

Keys and values of a token depend only on it and on the tokens before it. So what was computed for a
prompt serves every prompt with the same beginning, and a tree finds the longest one, as in
RadixAttention (https://arxiv.org/abs/2312.07104, section 3). Two differences:

- *Pieces, not blocks.* A piece ends where another prompt may diverge (`boundaries`). Of the sliding
  layers, a piece stores its last window only; small blocks of a fixed size would store every token.
  A node is never split; prompts that diverge within a piece share what is before it.
- *Owners.* Each piece belongs to a tenant, and no other tenant finds it: the time that a prompt
  takes shows whether its beginning is cached, which others may not learn (SECURITY.md). A look-up
  names the owners whose pieces it may find: the tenant, and the operator, who had some computed for
  all. A tenant's pieces may continue those.

**Order.** Using a node uses all nodes before it, and counts them as used after it. So
the least recently used node is always a leaf, and no eviction orphans another node.

**Invariants.** The bytes of all values are within the budget. No two children of one node and one
owner have the same ids. Evicting a value that was returned leaves it whole. Sequences are packed, 4
bytes an id, so that a look-up is linear in the prompt. The lock is held for no longer than that,
never while something is copied or computed.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """The size of a piece's value in bytes."""


T = TypeVar("T", bound=Sized)

WIDTH = array("I").itemsize
"""Bytes of one id in a packed sequence."""


def pack(ids: Iterable[int]) -> bytes:
    return array("I", ids).tobytes()


@dataclass(frozen=True, slots=True)
class TreeCounters:
    """What a tree holds. ``refused`` values did not fit together with those that they continue."""

    evictions: int = 0
    refused: int = 0
    segments: int = 0
    nbytes: int = 0
    budget: int = 0


@dataclass(eq=False, slots=True)
class _Node(Generic[T]):
    """The packed ``ids`` that follow those of ``parent``, up to place ``end`` of the sequence. The
    root has no parent and no value."""

    owner: Hashable = None
    ids: bytes = b""
    end: int = 0
    value: T | None = None
    parent: _Node[T] | None = None
    children: dict[Hashable, dict[bytes, _Node[T]]] = field(default_factory=dict)

    def path(self) -> Iterator[_Node[T]]:
        """This node and those before it, last first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def pieces(self) -> tuple[tuple[int, T], ...]:
        """The values up to here, first to last, each with its end."""
        found = [(step.end, step.value) for step in self.path() if step.value is not None]
        return tuple(found[::-1])


class PrefixTree(Generic[T]):
    """Pieces of sequences with their values. Every method may be called by any thread.

    ``owners`` are those whose pieces may be found; the first of them owns what is added.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._root: _Node[T] = _Node()
        self._order: dict[_Node[T], None] = {}
        """All nodes but the root, least recently used first."""
        self._lock = threading.Lock()
        self._nbytes = self._evictions = self._refused = 0

    def counters(self) -> TreeCounters:
        """The counters now, without waiting for another thread."""
        segments = len(self._order)
        return TreeCounters(self._evictions, self._refused, segments, self._nbytes, self._budget)

    def find(self, owners: Sequence[Hashable], sequence: bytes) -> tuple[int, tuple[T, ...]]:
        """The length in ids of the longest cached prefix that is shorter than ``sequence``, and
        the values of its pieces, first to last."""
        with self._lock:
            node = self._deepest(owners, sequence, len(sequence) // WIDTH - 1)
            self._use(node)
            return node.end, tuple(value for _, value in node.pieces())

    def match_length(self, owners: Sequence[Hashable], sequence: bytes) -> int:
        """How many ids `find` would find. Does not count as a use."""
        with self._lock:
            return self._deepest(owners, sequence, len(sequence) // WIDTH - 1).end

    def add(
        self, owners: Sequence[Hashable], sequence: bytes, cut: Callable[[int, int], T]
    ) -> tuple[tuple[int, T], ...]:
        """Adds ``sequence``; ``cut(start, end)`` gives the value for its last piece.

        Returns the values of all of its pieces, first to last, each with its end. ``cut`` is called
        without the lock, usually once, and not at all when the sequence is known. Returns ``()``
        when the piece does not fit together with those it continues: then nothing is evicted.
        """
        end = len(sequence) // WIDTH
        while True:
            with self._lock:
                node = self._deepest(owners, sequence, end)
                start = node.end
                if start == end:
                    self._use(node)
                    return node.pieces()
            value = cut(start, end)
            with self._lock:
                parent = self._deepest(owners, sequence, end)
                if parent.end != start:  # another thread changed it meanwhile
                    continue
                if (
                    sum(cached.nbytes for _, cached in parent.pieces()) + value.nbytes
                    > self._budget
                ):
                    self._refused += 1
                    return ()
                self._use(parent)
                self._evict_to(self._budget - value.nbytes)
                ids = sequence[start * WIDTH :]
                node = _Node(owners[0], ids, end, value, parent)
                parent.children.setdefault(node.owner, {})[ids] = node
                self._nbytes += value.nbytes
                self._use(node)
                return node.pieces()

    def evict(self, nbytes: int) -> int:
        """Evicts the least recently used pieces, ``nbytes`` bytes or more if there are so many;
        returns their bytes."""
        with self._lock:
            before = self._nbytes
            self._evict_to(max(0, before - nbytes))
            return before - self._nbytes

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Removes the pieces of owners for which ``gone`` is true. Pieces of other owners that
        continue them become unreachable and are evicted in LRU order."""
        with self._lock:
            for node in [node for node in self._order if gone(node.owner)]:
                self._remove(node)

    def _deepest(self, owners: Sequence[Hashable], sequence: bytes, limit: int) -> _Node[T]:
        """The node of the longest cached prefix of at most ``limit`` ids."""
        best, left = self._root, [self._root]
        while left:
            node = left.pop()
            best = max(best, node, key=lambda one: one.end)
            at = node.end * WIDTH
            left.extend(
                child
                for owner in owners
                for child in node.children.get(owner, {}).values()
                if child.end <= limit and sequence.startswith(child.ids, at)
            )
        return best

    def _use(self, node: _Node[T]) -> None:
        for step in node.path():
            self._order.pop(step, None)
            self._order[step] = None

    def _evict_to(self, nbytes: int) -> None:
        while self._nbytes > nbytes:
            self._remove(next(iter(self._order)))
            self._evictions += 1

    def _remove(self, node: _Node[T]) -> None:
        assert node.parent is not None  # as the root, which is not in the order, has none
        assert node.value is not None
        del self._order[node]
        self._nbytes -= node.value.nbytes
        children = node.parent.children
        del children[node.owner][node.ids]
        if not children[node.owner]:
            del children[node.owner]
        node.parent = None  # no cycle keeps buffers alive
