"""The prefix cache of one loaded model, which computes the beginning of a prompt only once.

In memory it is a tree of pieces (`prefix_tree`, `pieces`). With a cache directory, they are also
written to disk in the background (`disk.cache`). See docs/reuse.md.

A prompt takes four steps::

    match = await cache.find(ids, tenant)        # event loop: how much is cached
    match = await cache.load(match)              # event loop: read what only the disk has
    layers, cached = cache.restore(match)        # engine: layers that hold ids[:cached]
    cache.store(ids[:end], layers, tenant)       # engine: at boundaries(), every STORE_EVERY ids,
                                                 # where a prompt is cancelled, after the answer

No failure of the cache fails a request: errors are logged, and cost only the reuse. The tree and
the disk may be shared by several models; nothing is found for another model or another tenant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine import pieces
from vllm_mlx_harmony.engine.disk import identity
from vllm_mlx_harmony.engine.disk.cache import DiskCache, DiskCounters, Loaded
from vllm_mlx_harmony.engine.disk.index import Row
from vllm_mlx_harmony.engine.mlx_lm_compat import Layers
from vllm_mlx_harmony.engine.pieces import Misaligned, Piece
from vllm_mlx_harmony.engine.prefix_tree import WIDTH, PrefixTree, TreeCounters, pack

logger = logging.getLogger(__name__)

SHARED_TENANT = "*"
"""The tenant whose prompts all others may continue: prompts that the operator warmed up at start
(`--warm-prompts`)."""

MIN_PIECE = 32
"""Fewest ids of a piece, as a rule: each is an array for each window, and a file."""

STORE_EVERY = 2048
"""Ids after which a prompt is stored at the end of a chunk, wherever that is: what a server that is
killed has computed, it finds again on disk. As long as the longest chunk, so that no pass becomes
shorter. The windows of a piece of gpt-oss-20b take a sixteenth of the rest (docs/reuse.md), which
is why pieces are not joined later: that would write everything twice."""


def boundaries(ids: Sequence[int], after: int = 0) -> list[int]:
    """Positions after ``after``, ascending, at which the prompt is split.

    After the system and developer messages, which conversations share; before the last message of
    the user, which may be edited; before the last id, so that the prompt can be repeated, and since
    a later turn may drop the reasoning that follows (semantics A6). A position that would make a
    piece shorter than ``MIN_PIECE`` is left out; only the piece after the preamble may be shorter.
    """
    last, place = len(ids) - 1, -1
    messages: list[tuple[int, int]] = []  # where each begins, and the first id of its role
    with suppress(ValueError):  # no message is left
        while True:
            place = ids.index(vocab.START, place + 1, last)
            messages.append((place, ids[place + 1]))
    system, developer, user = (vocab.encode(role)[0] for role in ("system", "developer", "user"))
    preamble = next((place for place, role in messages if role not in (system, developer)), 0)
    last_user_message = max((place for place, role in messages if role == user), default=0)
    found, before = [], after
    for place in sorted({preamble, last_user_message}):
        min_after = 1 if place == preamble else MIN_PIECE
        if before + MIN_PIECE <= place <= last - min_after:
            found.append(place)
            before = place
    return [*found, last] if last > after else found


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is cached. ``sequence`` has its ids, packed; ``owners`` those whose
    pieces it may continue.

    ``loaded`` are pieces that were read from the disk, in memory as long as the match is.
    """

    sequence: bytes
    owners: Sequence[Hashable]
    in_memory: int = 0
    on_disk: tuple[Row, ...] = ()
    loaded: tuple[Loaded, ...] = ()

    @property
    def cached(self) -> int:
        """How many ids `PrefixCache.restore` will find after `load`, if nothing is evicted."""
        ends = *(row.end for row in self.on_disk), *(piece.end for piece in self.loaded)
        return max(self.in_memory, *ends, 0)


@dataclass(frozen=True, slots=True)
class CacheCounters(TreeCounters):
    """What this model reused, in prompts and ids; what memory and ``disk`` hold, of all."""

    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    tokens_new: int = 0
    disk: DiskCounters | None = None


class PrefixCache:
    """What ``model`` computed, in ``tree`` and, if its ``weights_digest`` is known, on ``disk``.

    ``weights_digest`` is `identity.of_weights` of the files that the model was loaded from.
    ``tree`` and ``disk`` belong to the caller, who may share them between models; without a tree,
    nothing is stored. ``restore`` and ``store`` run on the thread that owns the model, everything
    else on any.
    """

    def __init__(
        self,
        model: Module,
        tree: PrefixTree[Piece] | None = None,
        disk: DiskCache | None = None,
        weights_digest: bytes | None = None,
    ) -> None:
        self._model = model
        self._tree = PrefixTree(0) if tree is None else tree
        self._id = object()
        """Identifies the model in the tree; a reference to the model itself would keep it alive."""
        windows = pieces.windows(model) if self._tree.counters().budget else None
        self.enabled = windows is not None
        """Whether there is any room, and all of the model's layers can be cut."""
        self._disk: DiskCache | None = None
        if disk is not None and weights_digest is not None and windows is not None:
            self._disk = disk
            layout = identity.of_layout(model.__class__.__name__, windows)
            self._root = partial(identity.root, weights_digest, layout)
        self._reused = CacheCounters()

    def lookup(self, ids: Iterable[int], tenant: str) -> Match:
        """How much of a prompt is cached. Never its last id: something must be left to compute.

        About 1.4 ms for 130,000 ids in 400 pieces in memory; a disk's index takes some ms more, and
        may have to wait for another process.
        """
        match = Match(pack(ids), self._owners(tenant))
        if self.enabled:
            with _logged("a prompt could not be looked up"):
                match = replace(
                    match, in_memory=self._tree.match_length(match.owners, match.sequence)
                )
                if self._disk is not None:
                    roots = [self._root(whose) for whose in (tenant, SHARED_TENANT)]
                    match = replace(match, on_disk=self._disk.chain(roots, match.sequence))
        return match

    async def find(self, ids: Sequence[int], tenant: str) -> Match:
        """`lookup`, which must not block the event loop."""
        if self._disk is None:
            return self.lookup(ids, tenant)
        return await asyncio.to_thread(self.lookup, ids, tenant)

    async def load(self, match: Match) -> Match:
        """Reads the part of the prompt that is on disk and not in memory; the result holds it.

        Waits while too much data read ahead for other prompts is still unused. What memory has of
        the prompt counts as used.
        """
        if not self.enabled:
            return match
        loaded, in_memory = match.loaded, match.in_memory
        with _logged("a prompt could not be read from the disk"):
            if self._disk is not None:
                cached_length = partial(self._tree.match_length, match.owners, match.sequence)
                loaded = await self._disk.load(match.on_disk, cached_length)
            in_memory, _ = self._tree.find(match.owners, match.sequence)
        return replace(match, in_memory=in_memory, on_disk=(), loaded=loaded)

    def restore(self, match: Match, capacity: int = 0) -> tuple[Layers, int]:
        """Layers that hold the longest cached prefix of the prompt, and its length in ids.

        The layers are a copy, with space for ``capacity`` ids in all; new ones if nothing is
        cached.
        """
        layers, cached = None, 0
        if self.enabled:
            with _logged("a prefix could not be reused"):
                length, found = self._tree.find(match.owners, match.sequence)
                if match.loaded and match.loaded[-1].end > length:
                    with suppress(Misaligned):  # raised if the piece before them was evicted
                        for piece in match.loaded:
                            sequence = match.sequence[: piece.end * WIDTH]
                            cut = partial(pieces.imported, piece)
                            if not self._tree.add(match.owners, sequence, cut):
                                break
                    length, found = self._tree.find(match.owners, match.sequence)
                if length:
                    layers = pieces.join(self._model, found, max(0, capacity - length))
                    cached = length
            new = len(match.sequence) // WIDTH - cached
            before = self._reused
            self._reused = replace(
                before,
                hits=before.hits + bool(cached),
                misses=before.misses + (not cached),
                tokens_reused=before.tokens_reused + cached,
                tokens_new=before.tokens_new + new,
            )
        return layers or make_prompt_cache(self._model), cached

    def store(self, ids: Sequence[int], layers: Layers, tenant: str, row: int = 0) -> None:
        """Adds ``ids``, which are exactly those that ``layers`` hold in ``row``.

        The last id is left out if it is `<|return|>` or `<|endoftext|>`, which later prompts do not
        contain. Nothing happens if the layers hold something else.
        """
        if not self.enabled:
            return
        with _logged("a prefix could not be stored"):
            sequence = pack(ids[:-1] if ids[-1] in vocab.RETURN_ENDS else ids)
            cut = partial(pieces.cut, layers, row=row)
            found = self._tree.add(self._owners(tenant), sequence, cut)
            if found and self._disk is not None:
                self._disk.offer(self._root(tenant), sequence, found, pieces.exported)

    def stored(self, ids: Sequence[int], tenant: str) -> int:
        """How many ids of a sequence are in memory."""
        if not self.enabled:
            return 0
        # A match never has the last id: with another one behind it, all of them may match.
        return self._tree.match_length(self._owners(tenant), pack(ids) + pack((0,)))

    def writing_slowly(self) -> AbstractContextManager[None]:
        """To be held while the engine computes, which writing to the disk would slow down."""
        return nullcontext() if self._disk is None else self._disk.writing_slowly()

    def make_room(self, nbytes: int, *, may_wait: bool = True) -> bool:
        """Frees ``nbytes`` bytes of pieces, or none if all together are too few; returns whether
        any were freed or evicted. Counts evicted pieces that wait to be written, which are given up
        unless the caller ``may_wait`` for that."""
        being_written = 0 if self._disk is None else self._disk.evicted
        if not 0 < nbytes <= being_written + self._tree.counters().nbytes:
            return False
        given_up = 0 if may_wait or self._disk is None else self._disk.drop_evicted()
        left = nbytes - (being_written if may_wait else given_up)
        return (left > 0 and self.evict(left) > 0) or given_up > 0

    def evict(self, nbytes: int) -> int:
        """Evicts the least recently used pieces, of any model, from memory; returns their bytes.
        Those that are being written are freed when that is done."""
        return self._tree.evict(nbytes)

    def close(self) -> None:
        """Drops this model's pieces from memory and disables the cache."""
        self.enabled = False
        self._tree.forget(lambda owner: isinstance(owner, tuple) and owner[0] is self._id)

    def counters(self) -> CacheCounters:
        """The counters now, without waiting for another thread."""
        disk = None if self._disk is None else self._disk.counters()
        return replace(self._reused, **asdict(self._tree.counters()), disk=disk)

    def _owners(self, tenant: str) -> Sequence[Hashable]:
        return (self._id, tenant), (self._id, SHARED_TENANT)


@contextmanager
def _logged(problem: str) -> Iterator[None]:
    """An error ends the block early, and is logged."""
    try:
        yield
    except Exception:
        logger.exception(problem)
