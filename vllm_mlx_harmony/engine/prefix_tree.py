"""Token sequences as a tree of pieces, within a budget of bytes; evicts the least recently used.

Keys and values of a token depend only on it and on the tokens before it. What was computed for a
prompt therefore serves every prompt with the same beginning, and a tree finds the longest one, as
in RadixAttention (https://arxiv.org/abs/2312.07104, section 3) or by hashes of blocks in vLLM
(https://docs.vllm.ai/en/latest/design/prefix_caching.html). Two differences:

- *Pieces, not blocks.* A piece ends where another prompt may diverge (`boundaries`): after the
  system message, before the last message of the user, before what a later turn drops. It holds up
  to a whole sliding window at its end: short pieces would keep every token of the layers with
  windows, too. A node is never split; prompts that diverge within a piece share what is before it.
- *Owners.* Each tenant has a tree of its own: the time that a prompt takes shows whether its
  beginning is cached, which no other tenant may learn (SECURITY.md). What the operator had computed
  for all tenants is ``shared``: a tenant that uses it gets nodes of its own with the same values.

**Order.** Using a node uses all nodes before it, and counts them as used after it. So
the least recently used node is always a leaf, and no eviction orphans another node.

**Invariants.** The bytes of all values, each counted once, are within the budget. A child begins
where its parent ends, and no two children of one node have the same ids. Evicting a value that was
returned leaves it whole. Sequences are packed, 4 bytes an id, so that comparing two is one
comparison of memory and a look-up is linear in the prompt. The lock is held for no longer than
that, never while something is copied or computed.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """The value of a piece."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


T = TypeVar("T", bound=Sized)

WIDTH = array("I").itemsize
"""Bytes of one id in a packed sequence."""


def pack(ids: Iterable[int]) -> bytes:
    return array("I", ids).tobytes()


@dataclass(frozen=True, slots=True)
class Counters:
    """What a tree holds. ``refused`` values did not fit together with those that they continue."""

    evictions: int = 0
    refused: int = 0
    segments: int = 0
    nbytes: int = 0
    budget: int = 0


@dataclass(eq=False, slots=True)
class _Node(Generic[T]):
    """The ``ids`` of a sequence that end after ``end`` ids. Roots have no parent and no value."""

    owner: Hashable
    ids: bytes = b""
    end: int = 0
    value: T | None = None
    parent: _Node[T] | None = None
    children: dict[bytes, _Node[T]] = field(default_factory=dict)

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

    A sequence belongs to an ``owner``, and is found by that owner alone, or by naming it as
    ``shared``.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._roots: dict[Hashable, _Node[T]] = {}
        self._order: dict[_Node[T], None] = {}
        """All nodes but the roots, least recently used first."""
        self._holders: Counter[int] = Counter()
        """How many nodes hold a value, by its ``id``."""
        self._lock = threading.Lock()
        self._nbytes = self._evictions = self._refused = 0

    def counters(self) -> Counters:
        """The counters now, without waiting for another thread."""
        segments = len(self._order)
        return Counters(self._evictions, self._refused, segments, self._nbytes, self._budget)

    def find(
        self, owner: Hashable, sequence: bytes, shared: Hashable = None
    ) -> tuple[int, tuple[T, ...]]:
        """The longest known beginning of ``sequence`` that is shorter than it is.

        Returns its length in ids and the values of its pieces, first to last. Where ``shared``
        knows more than ``owner``, the owner gets these pieces, too, so that what is added later
        continues them.
        """
        limit = len(sequence) // WIDTH - 1
        with self._lock:
            node = self._deepest(owner, sequence, limit)
            common = self._deepest(shared, sequence, limit)
            if common.end > node.end:
                self._use(common)
                node = self._roots.setdefault(owner, _Node(owner))
                for step in [*common.path()][::-1]:
                    node = node.children.get(step.ids) or self._attach(node, step.ids, step.value)
            self._use(node)
            return node.end, tuple(value for _, value in node.pieces())

    def reach(self, owner: Hashable, sequence: bytes, shared: Hashable = None) -> int:
        """How many ids `find` would find. Does not count as a use."""
        limit = len(sequence) // WIDTH - 1
        with self._lock:
            return max(self._deepest(each, sequence, limit).end for each in (owner, shared))

    def add(
        self, owner: Hashable, sequence: bytes, cut: Callable[[int, int], T]
    ) -> tuple[tuple[int, T], ...]:
        """Adds ``sequence``; ``cut(start, end)`` gives the value for its last piece.

        Returns the values of all of its pieces, first to last, each with its end. ``cut`` is called
        without the lock, usually once, and not at all when the sequence is known. Returns ``()``
        when the piece does not fit together with those it continues: then nothing is evicted.
        """
        end = len(sequence) // WIDTH
        while True:
            with self._lock:
                node = self._deepest(owner, sequence, end)
                start = node.end
                if start == end:
                    self._use(node)
                    return node.pieces()
            value = cut(start, end)
            with self._lock:
                parent = self._deepest(owner, sequence, end)
                if parent.end != start:  # another thread changed it meanwhile
                    continue
                if sum(each.nbytes for _, each in parent.pieces()) + value.nbytes > self._budget:
                    self._refused += 1
                    return ()
                self._use(parent)
                self._evict_to(self._budget - value.nbytes)
                if parent.parent is None:
                    self._roots[owner] = parent
                return self._attach(parent, sequence[start * WIDTH :], value).pieces()

    def evict(self, nbytes: int) -> int:
        """Evicts the least recently used pieces, ``nbytes`` bytes of them if there are so many.

        Returns the bytes that were evicted.
        """
        with self._lock:
            before = self._nbytes
            self._evict_to(max(0, before - nbytes))
            return before - self._nbytes

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Removes everything of the owners for which ``gone`` is true. Counts no evictions."""
        with self._lock:
            for owner in [owner for owner in self._roots if gone(owner)]:
                below = [self._roots.pop(owner)]
                while below:
                    node = below.pop()
                    below.extend(node.children.values())
                    self._release(node)
                    node.children, node.parent = {}, None  # no cycle keeps buffers alive

    def _deepest(self, owner: Hashable, sequence: bytes, limit: int) -> _Node[T]:
        """The node of the longest known beginning of at most ``limit`` ids; else a root."""
        best = self._roots.get(owner) or _Node(owner)
        left = [best]
        while left:
            node = left.pop()
            best = max(best, node, key=lambda one: one.end)
            at = node.end * WIDTH
            left.extend(
                child
                for child in node.children.values()
                if child.end <= limit and sequence.startswith(child.ids, at)
            )
        return best

    def _use(self, node: _Node[T]) -> None:
        for step in node.path():
            self._order.pop(step, None)
            self._order[step] = None

    def _attach(self, parent: _Node[T], ids: bytes, value: T | None) -> _Node[T]:
        """A new node below ``parent``, for whose value there is room."""
        assert value is not None  # only roots have none
        node = _Node(parent.owner, ids, parent.end + len(ids) // WIDTH, value, parent)
        parent.children[ids] = node
        self._nbytes += 0 if self._holders[id(value)] else value.nbytes
        self._holders[id(value)] += 1
        self._use(node)
        return node

    def _release(self, node: _Node[T]) -> None:
        if node.value is not None:
            del self._order[node]
            self._holders[id(node.value)] -= 1
            if not self._holders[id(node.value)]:
                del self._holders[id(node.value)]
                self._nbytes -= node.value.nbytes

    def _evict_to(self, nbytes: int) -> None:
        while self._nbytes > nbytes:
            oldest = next(iter(self._order))
            self._release(oldest)
            self._evictions += 1
            parent = oldest.parent
            assert parent is not None  # roots are not in the order
            del parent.children[oldest.ids]
            if parent.parent is None and not parent.children:
                self._roots.pop(oldest.owner, None)
