"""Prefix reuse: what was computed for one prompt and its answer is not computed again for the next.

Knows what is remembered, for whom, where a prompt is cut, and the budget. One memory per process,
and a disk below it where one was asked for: what is added in memory is written behind; what a
prompt has more on the disk than in memory is read before its turn (`fetch`) and added then.
Refuses to know engines (`simple`, `batched`), buffers (`layers`), files (`disk`).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.host.kv.disk import Disk, Fetched, Offered, Root
from vllm_mlx_harmony.host.kv.tree import WIDTH, Counters, Tree, pack
from vllm_mlx_harmony.server.settings import number

if TYPE_CHECKING:
    from vllm_mlx_harmony.host.kv.layers import Segment

logger = logging.getLogger(__name__)

VARIABLE = "VLLM_MLX_HARMONY_CACHE"
"""Environment variable: bytes all remembered prompts may take (``512M``, ``2G``), 0 for none."""

MEMORY_DIVISOR = 16
"""Without the variable: this part of the machine's memory. 1 GiB of 16."""

SHORTEST = 32
"""Tokens that a piece of a prompt has as a rule: each costs a pass of its own."""

Owner: TypeAlias = tuple[int, str]

EVERYBODY = "*"
"""The tenant whose prompts all may continue: what the operator had computed at the start."""


class TenantPrompt(list[int]):
    """The ids of a prompt that may continue what the same ``tenant`` asked the model before.

    ``tenant`` separates those who must not see each other's prompts, not even by the clock: say, a
    digest of the API key; what is `EVERYBODY`'s, all may continue. ``cached`` is set, on the
    engine's thread, by the time the first id is generated: how many of the ids were not computed
    again. ``fetched`` is what was read of it from the disk, until its turn comes.
    """

    def __init__(
        self, ids: Iterable[int], tenant: str = "", fetched: tuple[Fetched, ...] = ()
    ) -> None:
        super().__init__(ids)
        self.tenant = tenant
        self.cached = 0
        self.fetched = fetched


def marks(ids: Sequence[int], after: int) -> list[int]:
    """Where a prompt is cut, ascending: places at which another prompt may leave this one.

    Behind the system and developer messages (shared by conversations); before the last message of
    the user (edited and asked again); before the last id (asked again, and where the reasoning that
    follows is dropped by a later turn, semantics A6). Only places behind ``after``, and none that
    cuts a piece that is not worth it: what follows the system and developer messages may be short,
    a greeting, or the placeholder of a prompt that is computed ahead.
    """
    last = len(ids) - 1
    found, before = [], after
    opening, user = _roles()
    preamble = next((place for place, role in _messages(ids) if role not in opening), 0)
    asked = max((place for place, role in _messages(ids, after) if role == user), default=0)
    for place in sorted({preamble, asked}):
        rest = 1 if place == preamble else SHORTEST
        if before + SHORTEST <= place <= last - rest:
            found.append(place)
            before = place
    return [*found, last] if last > after else found


def _messages(ids: Sequence[int], after: int = 0) -> Iterator[tuple[int, int]]:
    """Where each message begins, and the first id of its role."""
    place = after - 1
    with suppress(ValueError):  # there is no more
        while True:
            place = ids.index(vocab.START, place + 1, len(ids) - 1)
            yield place, ids[place + 1]


@lru_cache(maxsize=1)
def _roles() -> tuple[frozenset[int], int]:
    system, developer, user = (vocab.encode(role)[0] for role in ("system", "developer", "user"))
    return frozenset({system, developer}), user


_limit: int | None = None


def limit(nbytes: int | None) -> None:
    """Sets what the server's flags allow, ``None`` when they say nothing; what is held goes."""
    global _limit
    _limit = nbytes
    memory.cache_clear()


def budget() -> int:
    """Bytes that may be remembered: as flags say, else the environment, else a share of the memory.

    A value that is no size is warned about, and counts as none given.
    """
    if _limit is not None:
        return _limit
    return number(
        VARIABLE, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MEMORY_DIVISOR
    )


@lru_cache(maxsize=1)
def memory() -> Tree[Segment]:
    """What this process remembers, of all its models together."""
    return Tree(budget())


def enabled() -> bool:
    """Whether anything may be remembered."""
    return memory().counters().budget > 0


def counters() -> Counters:
    """What was reused and what is held, for whoever shows it. Waits for nobody."""
    return memory().counters()


_disk: Disk | None = None


def keep_on(disk: Disk | None) -> None:
    """From now on, what is remembered is on ``disk`` as well; ``None``: in memory only."""
    global _disk
    _disk = disk


def disk() -> Disk | None:
    """The disk below the memory, where there is one."""
    return _disk


def computing() -> AbstractContextManager[None]:
    """While an engine computes: what is written behind it holds back."""
    return nullcontext() if _disk is None else _disk.pace.computing()


_models: dict[int, weakref.finalize[Any, Any]] = {}

_weights: dict[int, bytes] = {}
"""Of each model that the disk knows: its weights, as they were when it was loaded."""

_identities: dict[int, tuple[bytes, bytes]] = {}
"""Of each of them that was asked for something: its weights and its layout, as `identity` does."""


def owner(model: Any, tenant: str) -> Owner:
    """Whose a sequence is: one model's (as long as it lives) and one tenant's."""
    key = id(model)
    if key not in _models:
        # Modules are not hashable; an id can be taken again only after the finalizer ran.
        _models[key] = weakref.finalize(model, _forget, key)
        _models[key].atexit = False
    return key, tenant


def forget(model: Any) -> None:
    """Throws out everything that is remembered of a model."""
    _forget_all_of(id(model))


def _forget(key: int) -> None:
    _models.pop(key, None)
    _weights.pop(key, None)
    _identities.pop(key, None)
    _forget_all_of(key)


def _forget_all_of(key: int) -> None:
    memory().forget(lambda whose: isinstance(whose, tuple) and whose[0] == key)


async def reach(model: Any, ids: Sequence[int], tenant: str) -> int:
    """How many ids of a prompt `resume` would find now. On any thread: no buffer is touched.

    About 1.4 ms for 130,000 ids in 400 pieces, in memory.
    """
    if not enabled():
        return 0
    sequence = pack(ids)
    known = memory().reach(owner(model, tenant), sequence, owner(model, EVERYBODY))
    if _disk is None:
        return known
    return max(known, await _disk.in_reader(_reach, _disk, model, sequence, tenant))


def _reach(disk: Disk, model: Any, sequence: bytes, tenant: str) -> int:
    try:
        return disk.reach(_roots(model, tenant), sequence)
    except Exception:
        logger.exception("a prefix could not be looked for on the disk")
        return 0


async def fetch(model: Any, ids: Sequence[int], tenant: str) -> tuple[Fetched, ...]:
    """What the disk has of a prompt behind what is in memory, for ``TenantPrompt.fetched``.

    Waits while what was read for others, whose turn has not come, is as much as the disk allows.
    """
    if _disk is None or not enabled():
        return ()
    async with _disk.room():
        return await _disk.in_reader(_fetch, _disk, model, ids, tenant)


def _fetch(disk: Disk, model: Any, ids: Sequence[int], tenant: str) -> tuple[Fetched, ...]:
    try:
        from vllm_mlx_harmony.host.kv.layers import fits

        sequence = pack(ids)
        known = memory().reach(owner(model, tenant), sequence, owner(model, EVERYBODY))
        return disk.fetch(_roots(model, tenant), sequence, known, partial(fits, model))
    except Exception:
        logger.exception("a prefix could not be read from the disk")
        return ()


def identify(model: Any, weights: bytes) -> None:
    """From now on the disk knows ``model``, by its weights, as `identity.of_weights` has them.

    A model that it does not know is in memory only.
    """
    key, _ = owner(model, EVERYBODY)
    _weights[key] = weights


def _roots(model: Any, tenant: str) -> tuple[Root, ...]:
    """What a tenant's sequences, and everybody's, begin with on the disk; none: not with these."""
    from vllm_mlx_harmony.host.kv import identity

    key = id(model)
    if key not in _identities:
        if key not in _weights:
            return ()
        _identities[key] = _weights[key], identity.of_layout(model)
    return tuple(identity.root(*_identities[key], whose) for whose in (tenant, EVERYBODY))


def resume(model: Any, prompt: TenantPrompt, answer: int = 0) -> tuple[int, list[Any] | None]:
    """How many ids of ``prompt`` are known, and a cache that holds exactly those.

    0 and ``None`` when none are, when nothing may be remembered, and whenever anything goes wrong.
    The cache has room for the rest and ``answer`` ids more; for nothing more without. On the thread
    that owns the model. Sets ``prompt.cached``.
    """
    prompt.cached = 0
    fetched, prompt.fetched = prompt.fetched, ()
    if not enabled():
        return 0, None
    try:
        from vllm_mlx_harmony.host.kv.layers import join

        whose, shared = owner(model, prompt.tenant), owner(model, EVERYBODY)
        sequence = pack(prompt)
        if fetched:  # it goes on behind what either of the two has in memory
            memory().adopt(whose, sequence, shared)
            _take_in(whose, sequence, fetched)
        known, segments = memory().find(whose, sequence, shared)
        headroom = len(prompt) - known + answer if answer else 0
        cache = join(model, segments, headroom) if known else None
    except Exception:
        logger.exception("a prefix could not be reused")
        return 0, None
    prompt.cached = known
    return known, cache


def _take_in(whose: Owner, sequence: bytes, fetched: Sequence[Fetched]) -> None:
    """Adds what was read to what is in memory, as far as it continues that."""
    from vllm_mlx_harmony.host.kv.layers import Misaligned, imported, same_kind

    for piece in fetched:
        before = memory().pieces(whose, sequence[: piece.start * WIDTH])

        def cut(start: int, end: int, piece: Fetched = piece, before: Any = before) -> Segment:
            if not piece.start <= start < end == piece.end:
                raise Misaligned(f"{start} to {end} of {piece.start} to {piece.end}")
            segment = imported(piece.end - piece.start, piece.tensors)
            if before and not same_kind(segment, before[-1][1]):
                raise Misaligned("keys and values of another type")
            return segment.last(end - start)

        try:
            if not memory().add(whose, sequence[: piece.end * WIDTH], cut):
                return
        except Misaligned as error:
            logger.warning("what was read from the disk cannot be used: %s", error)
            return


def remember(model: Any, tenant: str, ids: Sequence[int], cache: Any, row: int = 0) -> None:
    """Remembers ``ids``, which are exactly those that ``cache`` holds in ``row``.

    What ended an answer and no later prompt has is left out. Nothing happens when the cache does
    not hold them, or anything else goes wrong. On the thread that owns the model.
    """
    if not enabled():
        return
    from vllm_mlx_harmony.host.kv.layers import cut

    try:
        known = pack(ids[:-1] if ids[-1] in vocab.LAST else ids)
        whose = owner(model, tenant)
        added = memory().add(whose, known, lambda start, end: cut(cache, start, end, row))
        if added and _disk is not None:
            _write(_disk, whose, known)
    except Exception:
        logger.exception("a prefix could not be remembered")


def _write(disk: Disk, whose: Owner, sequence: bytes) -> None:
    """Has the pieces of ``sequence`` written that are not on the disk yet."""
    from vllm_mlx_harmony.host.kv import identity
    from vllm_mlx_harmony.host.kv.layers import exported

    key, tenant = whose
    if key in _identities:
        pieces = memory().pieces(whose, sequence)
        offered = [
            Offered(end, segment.nbytes, partial(exported, segment)) for end, segment in pieces
        ]
        disk.offer(identity.root(*_identities[key], tenant), sequence, offered)


def reusable(model: Any) -> bool:
    """Whether anything may be remembered, and the model's caches are of kinds that can be cut."""
    if not enabled():
        return False
    from vllm_mlx_harmony.host.kv.layers import windows

    return windows(model) is not None
