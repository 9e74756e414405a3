"""Token sequences as a tree of pieces, within a budget of bytes, least recently used out first.

Keys and values of a token depend on it and on the tokens before it, on nothing else. What was
computed for a prompt therefore serves every prompt with the same beginning, and a tree finds the
longest one: RadixAttention (https://arxiv.org/abs/2312.07104, section 3), or blocks found by hashes
of what stands before them in vLLM (https://docs.vllm.ai/en/latest/design/prefix_caching.html).

Two things are different here.

- *Pieces, not blocks.* A piece ends where another prompt may leave this one (`boundaries`): behind
  the system message, before the last message of the user, before what a later turn drops. A piece
  holds the whole sliding window at its end, so that cutting every 16 tokens would cost a window
  every 16 tokens. A node is never split; prompts that differ in a piece share what is before it.
- *Owners.* Each tenant has a tree of its own: the time that a prompt takes shows whether its
  beginning is known, which no other tenant may learn (SECURITY.md). What the operator had computed
  for everybody is ``shared``: a tenant that uses it gets nodes of its own with the same values.

**Order.** Using a node uses all nodes before it, and they are put behind it in the order of use. So
the least recently used node is always a leaf, and dropping it orphans nothing.

**Invariants.** The bytes of all values, each counted once, are within the budget. A child begins
where its parent ends, and no two children of one node have the same ids. A value that was handed
out stays whole when it is dropped. Sequences are packed, 4 bytes an id, so that comparing two is
one comparison of memory and a look-up is linear in the prompt. The lock is held for no longer than
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
    """What is held for a piece of a sequence."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


T = TypeVar("T", bound=Sized)

WIDTH = array("I").itemsize
"""Bytes of one id in a packed sequence."""


def pack(ids: Iterable[int]) -> bytes:
    """A sequence of ids as bytes."""
    return array("I", ids).tobytes()


@dataclass(frozen=True, slots=True)
class Counters:
    """What a tree holds, and how often room was made (``evictions``) or missing (``refused``)."""

    evictions: int = 0
    refused: int = 0
    segments: int = 0
    nbytes: int = 0
    budget: int = 0


@dataclass(eq=False, slots=True)
class _Node(Generic[T]):
    """A place in a sequence, ``end`` ids from its beginning; holds what follows its parent."""

    owner: Hashable
    ids: bytes = b""
    end: int = 0
    value: T | None = None
    parent: _Node[T] | None = None
    children: dict[bytes, _Node[T]] = field(default_factory=dict)

    def path(self) -> Iterator[_Node[T]]:
        """This place and those before it, last first, without the beginning itself."""
        node: _Node[T] | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def values(self) -> tuple[tuple[int, T], ...]:
        """What is held up to here, first to last, each with the place where it ends."""
        found = [(step.end, step.value) for step in self.path() if step.value is not None]
        return tuple(found[::-1])


class PrefixTree(Generic[T]):
    """Pieces of sequences, each with what is held for it. Every method may be called by any thread.

    A sequence belongs to an ``owner``, and is found by that owner alone, or as ``shared`` by name.
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
        held = len(self._order)
        return Counters(self._evictions, self._refused, held, self._nbytes, self._budget)

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
            if common is not None and (node is None or common.end > node.end):
                self._use(common)
                node = self._adopted(owner, common)
            if node is None:
                return 0, ()
            self._use(node)
            return node.end, tuple(value for _, value in node.values())

    def reach(self, owner: Hashable, sequence: bytes, shared: Hashable = None) -> int:
        """How many ids `find` would find. Does not count as a use."""
        limit = len(sequence) // WIDTH - 1
        with self._lock:
            nodes = (self._deepest(whose, sequence, limit) for whose in (owner, shared))
            return max(0 if node is None else node.end for node in nodes)

    def pieces(self, owner: Hashable, sequence: bytes) -> tuple[tuple[int, T], ...]:
        """The values for all of ``sequence``, first to last, each with the id behind its last.

        Empty unless all of it is known. Does not count as a use.
        """
        with self._lock:
            node = self._deepest(owner, sequence, len(sequence) // WIDTH)
            whole = node is not None and node.end * WIDTH == len(sequence)
            return node.values() if node is not None and whole else ()

    def add(self, owner: Hashable, sequence: bytes, cut: Callable[[int, int], T]) -> bool:
        """Makes ``sequence`` known; ``cut(start, end)`` gives the value for its last piece.

        ``cut`` is called without a lock, as a rule once, and not at all when the sequence is known.
        False when the piece does not fit together with those it continues: nothing is evicted then.
        """
        end = len(sequence) // WIDTH
        while True:
            with self._lock:
                node = self._deepest(owner, sequence, end)
                start = 0 if node is None else node.end
                if node is not None and start == end:
                    self._use(node)
                    return True
            value = cut(start, end)
            with self._lock:
                known = self._deepest(owner, sequence, end)
                parent = known or self._roots.get(owner) or _Node(owner)
                if parent.end != start:  # another thread changed it meanwhile
                    continue
                if sum(each.nbytes for _, each in parent.values()) + value.nbytes > self._budget:
                    self._refused += 1
                    return False
                self._use(parent)
                self._evict_to(self._budget - value.nbytes)
                if parent.parent is None:
                    self._roots[owner] = parent
                self._attach(parent, sequence[start * WIDTH :], value)
                return True

    def evict(self, nbytes: int) -> int:
        """Drops the least recently used pieces, ``nbytes`` bytes of them if there are so many.

        Returns the bytes that were dropped.
        """
        with self._lock:
            before = self._nbytes
            self._evict_to(max(0, before - nbytes))
            return before - self._nbytes

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Drops everything of the owners for which ``gone`` is true. Counts no evictions."""
        with self._lock:
            for owner in [owner for owner in self._roots if gone(owner)]:
                below = [self._roots.pop(owner)]
                while below:
                    node = below.pop()
                    below.extend(node.children.values())
                    self._drop(node)
                    node.children, node.parent = {}, None  # no cycle keeps buffers alive

    def _deepest(self, owner: Hashable, sequence: bytes, limit: int) -> _Node[T] | None:
        root = self._roots.get(owner)
        if root is None:
            return None
        best, left = root, [root]
        while left:
            node = left.pop()
            best = max(best, node, key=lambda one: one.end)
            at = node.end * WIDTH
            left.extend(
                child
                for child in node.children.values()
                if child.end <= limit and sequence.startswith(child.ids, at)
            )
        return None if best is root else best

    def _use(self, node: _Node[T]) -> None:
        for step in node.path():
            self._order.pop(step, None)
            self._order[step] = None

    def _attach(self, parent: _Node[T], ids: bytes, value: T) -> _Node[T]:
        """A new node behind ``parent``, for whose value there has to be room."""
        node = _Node(parent.owner, ids, parent.end + len(ids) // WIDTH, value, parent)
        parent.children[ids] = node
        self._nbytes += 0 if self._holders[id(value)] else value.nbytes
        self._holders[id(value)] += 1
        self._use(node)
        return node

    def _adopted(self, owner: Hashable, found: _Node[T]) -> _Node[T]:
        """The owner's own nodes with the values that lead to ``found``."""
        node = self._roots.setdefault(owner, _Node(owner))
        for step in [*found.path()][::-1]:
            assert step.value is not None  # only roots have none
            node = node.children.get(step.ids) or self._attach(node, step.ids, step.value)
        return node

    def _drop(self, node: _Node[T]) -> None:
        if node.value is None:
            return
        del self._order[node]
        self._holders[id(node.value)] -= 1
        if not self._holders[id(node.value)]:
            del self._holders[id(node.value)]
            self._nbytes -= node.value.nbytes

    def _evict_to(self, nbytes: int) -> None:
        while self._nbytes > nbytes:
            oldest = next(iter(self._order))
            self._drop(oldest)
            self._evictions += 1
            parent = oldest.parent
            assert parent is not None  # roots are not in the order
            del parent.children[oldest.ids]
            if parent.parent is None and not parent.children:
                self._roots.pop(oldest.owner, None)
