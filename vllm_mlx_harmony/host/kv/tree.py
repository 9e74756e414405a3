"""What is known of token sequences, as a tree: bounded in bytes, least recently used out first.

Knows sequences, their common beginnings, order of use and the budget. Refuses to know what is held
for a sequence: anything that has a size.

**Theory.** Keys and values of a token depend on it and on all tokens before it, on nothing else.
So what was computed for a prompt serves every prompt with the same beginning, and a tree of
beginnings finds the longest one: RadixAttention (https://arxiv.org/abs/2312.07104, section 3), or
blocks found by hashes of what stands before them in vLLM
(https://docs.vllm.ai/en/latest/design/prefix_caching.html).

Two things are different here.

- *Pieces, not blocks.* A piece ends where another prompt may leave this one (``prefix.marks``):
  behind the system message, before the last message of the user, before what a later turn drops.
  gpt-oss has sliding-window layers, of which a piece must hold the whole window at its end: cutting
  anywhere would cost that much again, and cutting every 16 tokens would cost it as often. So a node
  is never split. Prompts that differ within a piece share what is before it.
- *Owners.* A tree of its own for each tenant: how long a prompt takes says whether its beginning is
  known, and nobody may learn that of another's (SECURITY.md). What the operator had computed for
  all is ``shared``; a tenant that uses it has the same pieces under a root of its own, counted
  twice.

**Order.** Using a node uses all before it, and they are put behind it in the order of use. So the
least recently used node is always a leaf: dropping it orphans nothing.

**Invariants.** The bytes of all nodes are within the budget, always. A child begins where its
parent ends, and no two children of one node have the same ids. What was given out stays whole when
it is dropped: it is only not found any more. Sequences are packed (4 bytes an id), so that
comparing two is one comparison of memory; a look-up is linear in the ids of the prompt. The lock is
held for no longer than that, never while something is copied or computed."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
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
    """A sequence of ids as bytes: comparing one with another is then one memory comparison."""
    return array("I", ids).tobytes()


@dataclass(frozen=True, slots=True)
class Counters:
    """What a tree did so far. ``nbytes`` and ``segments`` are what it holds now."""

    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    tokens_new: int = 0
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

    @property
    def nbytes(self) -> int:
        return 0 if self.value is None else self.value.nbytes


class Tree(Generic[T]):
    """Pieces of sequences, each with what is held for it. Every method may be called by any thread.

    A sequence belongs to an ``owner``; nobody is ever given what another owner put in, but for one
    that is named as ``shared``.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._roots: dict[Hashable, _Node[T]] = {}
        # Least recently used first. A node is always used together with those before it, and put
        # before them: so the first one has no children, and can go.
        self._order: dict[_Node[T], None] = {}
        self._lock = threading.Lock()
        self._gone: deque[Callable[[Hashable], bool]] = deque()
        self._nbytes = 0
        self._hits = self._misses = self._reused = self._new = self._evicted = self._refused = 0

    def counters(self) -> Counters:
        """A look at the counters, without waiting for anybody."""
        return Counters(
            hits=self._hits,
            misses=self._misses,
            tokens_reused=self._reused,
            tokens_new=self._new,
            evictions=self._evicted,
            refused=self._refused,
            segments=len(self._order),
            nbytes=self._nbytes,
            budget=self._budget,
        )

    def find(
        self, owner: Hashable, sequence: bytes, shared: Hashable = None
    ) -> tuple[int, tuple[T, ...]]:
        """The longest known beginning of ``sequence`` that is shorter than it is.

        Returns its length in ids, and what is held for its pieces, first to last; 0 and nothing
        when none is known. Where ``shared`` knows more than ``owner``, it becomes the owner's, too:
        what is added later continues the pieces that are held already.
        """
        length = len(sequence) // WIDTH
        with self._locked():
            node = self._deepest_shared(owner, sequence, shared)
            known = 0 if node is None else node.end
            self._hits, self._misses = self._hits + (known > 0), self._misses + (known == 0)
            self._reused, self._new = self._reused + known, self._new + length - known
            if node is None:
                return 0, ()
            self._use(node)
            return known, tuple(step.value for step in node.path() if step.value is not None)[::-1]

    def adopt(self, owner: Hashable, sequence: bytes, shared: Hashable) -> None:
        """What `find` would make the owner's, too, is: for what is added behind it. No look-up."""
        with self._locked():
            self._deepest_shared(owner, sequence, shared)

    def pieces(self, owner: Hashable, sequence: bytes) -> tuple[tuple[int, T], ...]:
        """What is held for ``sequence``, first to last, each with where it ends, in ids.

        Nothing unless all of it is known. Counts as no use.
        """
        with self._locked():
            node = self._deepest(owner, sequence, len(sequence) // WIDTH)
            if node is None or node.end * WIDTH != len(sequence):
                return ()
            found = ((step.end, step.value) for step in node.path())
            return tuple((end, value) for end, value in found if value is not None)[::-1]

    def reach(self, owner: Hashable, sequence: bytes, shared: Hashable = None) -> int:
        """How many ids `find` would find; a look that counts for nothing."""
        limit = len(sequence) // WIDTH - 1
        with self._locked():
            nodes = (self._deepest(whose, sequence, limit) for whose in (owner, shared))
            return max(0 if node is None else node.end for node in nodes)

    def add(self, owner: Hashable, sequence: bytes, cut: Callable[[int, int], T]) -> bool:
        """Makes ``sequence`` known; ``cut(start, end)`` gives what to hold for its last piece.

        ``cut`` is called without a lock, once as a rule, and not at all when the sequence is known.
        False when it does not fit, together with what it continues: then nothing is thrown out.
        """
        end = len(sequence) // WIDTH
        while True:
            start = self._known(owner, sequence, end)
            if start == end:
                return True
            value = cut(start, end)
            added = self._attach(owner, sequence, start, value)
            if added is not None:
                return added

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Throws out everything of the owners that are ``gone``. Does not count as evictions.

        May be called at any moment, by a finalizer in the middle of another call as well.
        """
        self._gone.append(gone)
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._sweep()
            yield
            self._sweep()

    def _sweep(self) -> None:
        while self._gone:
            gone = self._gone.popleft()
            for owner in [owner for owner in self._roots if gone(owner)]:
                below = [self._roots.pop(owner)]
                while below:
                    node = below.pop()
                    below.extend(node.children.values())
                    self._drop(node)
                    node.children, node.parent = {}, None  # no cycle keeps what is held alive

    def _drop(self, node: _Node[T]) -> None:
        if node in self._order:
            del self._order[node]
            self._nbytes -= node.nbytes

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

    def _deepest_shared(
        self, owner: Hashable, sequence: bytes, shared: Hashable
    ) -> _Node[T] | None:
        limit = len(sequence) // WIDTH - 1
        node = self._deepest(owner, sequence, limit)
        common = self._deepest(shared, sequence, limit)
        if common is not None and (node is None or common.end > node.end):
            node = common
            self._adopt(owner, common)
        return node

    def _use(self, node: _Node[T]) -> None:
        for step in node.path():
            self._order.pop(step, None)
            self._order[step] = None

    def _known(self, owner: Hashable, sequence: bytes, end: int) -> int:
        with self._locked():
            node = self._deepest(owner, sequence, end)
            if node is None:
                return 0
            if node.end == end:
                self._use(node)
            return node.end

    def _attach(self, owner: Hashable, sequence: bytes, start: int, value: T) -> bool | None:
        """Whether the piece fits; ``None`` when what it continues is not what it was before."""
        end = len(sequence) // WIDTH
        with self._locked():
            found = self._deepest(owner, sequence, end)
            parent = found or self._roots.get(owner) or _Node(owner)
            if parent.end != start:
                return None
            if sum(step.nbytes for step in parent.path()) + value.nbytes > self._budget:
                self._refused += 1
                return False
            self._grow(parent, sequence[start * WIDTH :], value)
            return True

    def _grow(self, parent: _Node[T], ids: bytes, value: T) -> _Node[T]:
        """A new piece behind ``parent``. There has to be room for it and for those before it."""
        self._use(parent)
        self._make_room(value.nbytes)
        if parent.parent is None:
            self._roots[parent.owner] = parent
        node = _Node(parent.owner, ids, parent.end + len(ids) // WIDTH, value, parent)
        parent.children[ids] = node
        self._nbytes += value.nbytes
        self._use(node)
        return node

    def _adopt(self, owner: Hashable, found: _Node[T]) -> None:
        """What leads to ``found`` belongs to ``owner``, too: the same pieces, counted twice.

        Nothing happens when the budget does not hold both.
        """
        steps = tuple(found.path())[::-1]
        if 2 * sum(step.nbytes for step in steps) > self._budget:
            return
        self._use(found)
        node = self._roots.get(owner) or _Node(owner)
        for step in steps:
            known = node.children.get(step.ids)
            if known is None and step.value is not None:
                known = self._grow(node, step.ids, step.value)
            assert known is not None  # only beginnings hold nothing
            node = known

    def _make_room(self, nbytes: int) -> None:
        while self._nbytes + nbytes > self._budget:
            oldest = next(iter(self._order))
            self._drop(oldest)
            self._evicted += 1
            parent = oldest.parent
            assert parent is not None  # roots are in no order
            del parent.children[oldest.ids]
            if parent.parent is None and not parent.children:
                self._roots.pop(oldest.owner, None)
