"""Which engine a conversation goes to, and which engines are well: a pure value, without I/O.

Knows engines, conversations by digest, loads and times as they are passed in. Refuses to know HTTP,
clocks and tokens (router).

What is known of an engine's health is of that one object, and ends with it. Where conversations
went, and their homes, are by engines' names: another object of the same name, an engine whose key
was changed for instance, has the same prefixes.

Where a conversation goes
-------------------------
An engine computes a prompt from where its prefix cache ends. An agent's conversation begins with
10,000 to 25,000 tokens and grows by some hundred at a time, so that the engine which computed the
last turn has all but the end of the next prompt, and another one has at best the instructions.

1. A conversation stays with the engine that had it last, as long as that engine is up and not much
   fuller than the least loaded one.
2. A new one, and one that has to move, goes to its home: engines are ordered by a digest of engine
   and conversation (rendezvous hashing, Thaler and Ravishankar 1998,
   https://www.eecs.umich.edu/techreports/cse/96/CSE-TR-316-96.pdf), and the first one is taken that
   is not fuller than the least loaded by more than a few requests (consistent hashing with bounded
   loads, Mirrokni, Thorup and Zadimoghaddam 2016, https://arxiv.org/abs/1608.01350). Gateways that
   share nothing but the list of engines agree on it, and when an engine goes, only its
   conversations move. To send new ones to the least loaded engine would be as good with one
   gateway, and with four of them would compute ten times as much: each has its own opinion.

"Much fuller" is what SGLang's router calls imbalanced: more requests than the least loaded engine
by an absolute number *and* by a ratio (its ``--balance-abs-threshold`` 64 and
``--balance-rel-threshold`` 1.5, https://docs.sglang.io/advanced_features/router.html). The numbers
here are from ``ci/simulate_routing.py``; docs/scale.md has its results.

What a conversation is
----------------------
All that was said before the model first spoke: instructions, tools, the first question. It is the
same in every prompt of a conversation, since a generated turn is placed again as it was generated
(``core.replay``) and nothing before it changes. The tenant is part of the digest.

When an engine is down
----------------------
``_NEXT`` below is the only place that says so. Requests are the first to notice (passive checks):
``failures`` of them in a row, and nothing more is sent to that engine for ``pause`` seconds. Then
it is probed, and each probe that fails doubles the pause. An engine that is up is probed, too, now
and then. An engine that refuses for want of room (429, or anything with ``Retry-After``) is full,
not broken: nothing is counted.

A server may answer all probes of its health while nothing is generated behind it. Hence a failure
makes an engine ``doubted``: it is probed at once, and only an id that it generates, for the probe
or for a request, ends the doubt. A request that fails in the same way on two engines is the cause
itself. It counts against neither (``router``), and the probes find out whether it has broken them.

When an engine is silent
------------------------
An engine that computes a long prompt says nothing for as long as one that hangs. Two things tell
them apart:

1. Silence is that of the engine, not of a request: it begins anew with each id that the engine
   sends to anybody.
2. How long it may last is a multiple (``slack``) of what the request's prompt would take, and those
   that were sent before it and have no id either. Two measures tell that, medians of the last
   ``observed`` requests: the time to the first id of those with next to nothing to compute, and the
   time to the first id per token that was not cached of the others, which had ``long`` tokens and
   more. Each is the engine's own, or what is usual among the other engines where that is longer: an
   engine slower than all others is held to its own past, and one of an overloaded fleet to that of
   the others. One that has not computed ``known_after`` long prompts may be a slow laptop, which
   takes ``slowest`` seconds per token. Nothing below ``patience`` seconds counts as silence.

A silent engine is down at once, and what waits for its first id is tried on another engine. Without
another one nothing is gained by that: the request waits until its deadline, which then counts as
one failure. ``ci/simulate_routing.py --silent`` counts false alarms: none (docs/scale.md).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from statistics import median
from typing import Generic, Literal, TypeAlias, TypeVar

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.lru import ByteLRU

ASSISTANT = 173_781
"""The id of ``assistant``, which a header has behind ``<|start|>``."""


_LOOKED_AT = 4096
"""Ids of the opening, the last ones: all of 25,000 would take half a millisecond. Two that differ
before that only, and are as long, go to the same engine, and nothing else comes of it."""


def conversation(prompt: tuple[int, ...], tenant: str) -> bytes:
    """16 bytes for the conversation of ``tenant`` that ``prompt`` is a turn of."""
    end = -1
    while True:
        try:
            end = prompt.index(vocab.START, end + 1)
        except ValueError:
            end = len(prompt)
            break
        if prompt[end + 1 : end + 2] == (ASSISTANT,):
            break
    digest = blake2b(tenant.encode(), digest_size=16)
    digest.update(b"\0" + end.to_bytes(4, "little"))
    digest.update(array("I", prompt[max(0, end - _LOOKED_AT) : end]).tobytes())
    return digest.digest()


# --- Engines that are up, and those that are not


class Health(Enum):
    """What is known of an engine."""

    UP = auto()
    DOWN = auto()
    """Nothing is sent to it until a probe finds it well."""
    DRAINING = auto()
    """It is to be taken away: what runs on it goes on, nothing new comes."""
    DRAINING_DOWN = auto()
    """The same, and it was down when last seen."""


class Event(Enum):
    """What is found out about an engine."""

    ANSWERED = auto()
    """A request got its first ids, or a probe its answer."""
    FAILED = auto()
    """A request or a probe failed."""
    FAILED_OFTEN = auto()
    """The same, as the last of ``Rule.failures`` in a row."""
    SILENT = auto()
    """It has generated nothing for anybody for longer than it may."""
    PROBED_UP = auto()
    """A probe of an engine that was down found it well."""
    DRAIN = auto()
    """Somebody wants it taken away."""
    RESTORE = auto()
    """Somebody wants it back."""


_UP, _DOWN = Health.UP, Health.DOWN
_DRAINING, _DRAINING_DOWN = Health.DRAINING, Health.DRAINING_DOWN

_NEXT: dict[Health, dict[Event, Health]] = {
    _UP: {
        Event.ANSWERED: _UP,
        Event.FAILED: _UP,
        Event.FAILED_OFTEN: _DOWN,
        Event.SILENT: _DOWN,
        Event.PROBED_UP: _UP,
        Event.DRAIN: _DRAINING,
        Event.RESTORE: _UP,
    },
    # A request that began before says nothing of now: only a probe brings an engine back.
    _DOWN: {
        Event.ANSWERED: _DOWN,
        Event.FAILED: _DOWN,
        Event.FAILED_OFTEN: _DOWN,
        Event.SILENT: _DOWN,
        Event.PROBED_UP: _UP,
        Event.DRAIN: _DRAINING_DOWN,
        Event.RESTORE: _DOWN,
    },
    _DRAINING: {
        Event.ANSWERED: _DRAINING,
        Event.FAILED: _DRAINING,
        Event.FAILED_OFTEN: _DRAINING_DOWN,
        Event.SILENT: _DRAINING_DOWN,
        Event.PROBED_UP: _DRAINING,
        Event.DRAIN: _DRAINING,
        Event.RESTORE: _UP,
    },
    _DRAINING_DOWN: {
        Event.ANSWERED: _DRAINING_DOWN,
        Event.FAILED: _DRAINING_DOWN,
        Event.FAILED_OFTEN: _DRAINING_DOWN,
        Event.SILENT: _DRAINING_DOWN,
        Event.PROBED_UP: _DRAINING,
        Event.DRAIN: _DRAINING_DOWN,
        Event.RESTORE: _DOWN,
    },
}
"""All there is: what an engine is after an event, by what it was before."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The numbers of the rules above.

    ``spread`` requests more than the least loaded engine has, and ``ratio`` times as many, make one
    much fuller; with ``home_spread`` more it is no conversation's home.
    ``failures`` in a row take an engine down, for ``pause`` seconds at first and ``longest_pause``
    at most; one that is up is probed every ``probe_every`` seconds. ``remembered`` conversations
    are known by where they went, about 250 bytes each. The others are of silent engines: seconds,
    tokens, and ``slowest`` in seconds per token.
    """

    spread: int = 16
    home_spread: int = 8
    ratio: float = 1.5
    failures: int = 3
    pause: float = 1.0
    longest_pause: float = 30.0
    probe_every: float = 10.0
    remembered: int = 100_000
    patience: float = 20.0
    slack: float = 8.0
    long: int = 500
    observed: int = 32
    known_after: int = 4
    slowest: float = 0.005


E = TypeVar("E", bound=Hashable)
"""An engine, in whatever way it is known by."""

Why: TypeAlias = Literal["prefix", "moved", "new"]


@dataclass(frozen=True, slots=True)
class Choice(Generic[E]):
    """The engine for a request, and why: it has the prefix, had to be left for it, or is home."""

    engine: E
    why: Why


@dataclass(slots=True)
class _Engine:
    health: Health = Health.UP
    failures: int = 0
    pause: float = 0.0
    probe_at: float = 0.0
    doubted: bool = False
    waits: deque[float] = field(default_factory=deque)
    """Seconds to the first id of the last requests with little to compute."""
    paces: deque[float] = field(default_factory=deque)
    """The same of those with more, per token."""


class Routing(Generic[E]):
    """Engines, and where conversations went. For one thread; times in seconds."""

    def __init__(
        self, engines: Iterable[E], rule: Rule | None = None, *, name: Callable[[E], str] = str
    ) -> None:
        """Engines are up. No two that are up have the same ``name``."""
        self._rule = rule or Rule()
        self._name = name
        self._engines = {engine: _Engine() for engine in engines}
        self._went: ByteLRU[bytes, str] = ByteLRU(self._rule.remembered)
        self._left: ByteLRU[bytes, str] = ByteLRU(self._rule.remembered)

    @property
    def rule(self) -> Rule:
        """Its numbers."""
        return self._rule

    def choose(
        self, conversation: bytes, loads: Mapping[E, int], excluded: Collection[E] = ()
    ) -> Choice[E] | None:
        """Where a turn of ``conversation`` goes; ``None`` when no engine is there for it.

        ``loads`` are requests under way, 0 for an engine that is not in it; ``excluded`` are
        engines that this request has tried. Nothing is remembered before it ``went`` there.
        """
        usable = {
            self._name(engine): engine
            for engine, known in self._engines.items()
            if known.health is Health.UP and engine not in excluded
        }
        if not usable:
            return None
        least = min(loads.get(engine, 0) for engine in usable.values())
        left = self._left.get(conversation)
        if left in usable and len(usable) > 1:
            del usable[left]
            least = min(loads.get(engine, 0) for engine in usable.values())
        last = self._went.get(conversation)
        if last in usable and not self._much_fuller(loads.get(usable[last], 0), least):
            return Choice(usable[last], "prefix")
        why: Why = "new" if last is None else "moved"
        room = least + self._rule.home_spread
        roomy = (name for name, engine in usable.items() if loads.get(engine, 0) <= room)
        return Choice(usable[max(roomy, key=lambda name: _weight(name, conversation))], why)

    def went(self, conversation: bytes, engine: E) -> None:
        """Remembers that ``engine`` computes a turn of ``conversation``."""
        self._went.put(conversation, self._name(engine), 1)
        self._left.discard(conversation)

    def left(self, conversation: bytes, engine: E) -> None:
        """``engine`` let a turn of ``conversation`` down: its next one goes to another engine."""
        self._left.put(conversation, self._name(engine), 1)

    def _much_fuller(self, load: int, least: int) -> bool:
        return load - least > self._rule.spread and load > self._rule.ratio * least

    # --- Health

    def health(self, engine: E) -> Health:
        """What is known of it. Raises ``KeyError`` for one that is not there."""
        return self._engines[engine].health

    def answered(self, engine: E) -> None:
        """A request to it got its first ids."""
        self._happened(engine, Event.ANSWERED, 0.0)

    def observed(self, engine: E, seconds: float, tokens: int) -> None:
        """A request got its first id after ``seconds``; ``tokens`` of its prompt were not cached.

        Those that may have been cached, for all that is known, are not among ``tokens``.
        """
        known = self._engines.get(engine)
        if known is not None:
            long = tokens >= self._rule.long
            last = known.paces if long else known.waits
            last.append(seconds / tokens if long else seconds)
            if len(last) > self._rule.observed:
                last.popleft()

    def expected(self, engine: E, tokens: int) -> float:
        """Seconds in which an id is certain to come from an engine that is well and has ``tokens``
        to compute before: ``slack`` times what is usual. Raises ``KeyError``."""
        rule, own = self._rule, self._engines[engine]
        others = [other for each, other in self._engines.items() if each != engine]
        wait = max(_median(own.waits), _median([_median(each.waits) for each in others]))
        pace = max(_median(own.paces), _median([_median(each.paces) for each in others]))
        seconds = rule.slack * (wait + pace * tokens)
        known = len(own.paces) >= rule.known_after
        return seconds if known else max(seconds, rule.slowest * tokens)

    def doubt(self, engine: E, now: float) -> None:
        """Something went wrong with a request to it: it is probed as soon as may be."""
        doubted = self._engines.get(engine)
        if doubted is not None and not _is_down(doubted):
            doubted.doubted, doubted.probe_at = True, min(doubted.probe_at, now)

    def doubted(self, engine: E) -> bool:
        """Whether only an id that it generates can show that it is well."""
        known = self._engines.get(engine)
        return known is not None and (known.doubted or _is_down(known))

    def failed(self, engine: E, now: float) -> None:
        """A request to it failed by its fault."""
        self._happened(engine, Event.FAILED, now)
        self.doubt(engine, now)

    def silent(self, engine: E, now: float) -> None:
        """It generated nothing for longer than is ``expected``, and ``Rule.patience`` at least."""
        self._happened(engine, Event.SILENT, now)

    def due(self, now: float, probed: Collection[E] = ()) -> list[E]:
        """The engines that are to be probed now, but for those that are being ``probed``.

        None of them is due again before it is.
        """
        due = [
            engine
            for engine, known in self._engines.items()
            if known.probe_at <= now and engine not in probed
        ]
        for engine in due:
            known = self._engines[engine]
            known.probe_at = now + (known.pause or self._rule.probe_every)
        return due

    def probed(self, engine: E, well: bool, now: float) -> None:
        """A probe of it has ended. Each that fails doubles the time to the next."""
        probed = self._engines.get(engine)
        if probed is not None and probed.pause and not well:
            probed.pause = min(2 * probed.pause, self._rule.longest_pause)
            probed.probe_at = now + probed.pause
            return
        self._happened(engine, Event.PROBED_UP if well else Event.FAILED, now)

    def retry_after(self, now: float) -> float | None:
        """Seconds until the next probe of an engine that is down; ``None`` when none is."""
        down = [each.probe_at for each in self._engines.values() if each.health is Health.DOWN]
        return max(0.0, min(down) - now) if down else None

    def _happened(self, engine: E, event: Event, now: float) -> None:
        known = self._engines.get(engine)
        if known is None:  # taken away while it was probed
            return
        if event is Event.FAILED:
            known.failures += 1
            if known.failures >= self._rule.failures:
                event = Event.FAILED_OFTEN
        was_down, known.health = _is_down(known), _NEXT[known.health][event]
        if _is_down(known):
            if not was_down:
                known.pause = self._rule.pause
                known.probe_at = now + known.pause
        elif event in (Event.ANSWERED, Event.PROBED_UP):
            known.failures, known.pause, known.doubted = 0, 0.0, False
            if was_down:
                known.probe_at = now + self._rule.probe_every

    # --- Engines come and go

    @property
    def engines(self) -> tuple[E, ...]:
        """All of them."""
        return tuple(self._engines)

    def add(self, engine: E, *, up: bool = True) -> None:
        """There is another engine: up, or down until a probe finds it, which is due at once."""
        new = _Engine() if up else _Engine(Health.DOWN, pause=self._rule.pause)
        self._engines.setdefault(engine, new)

    def drain(self, engine: E) -> None:
        """It is to be taken away: nothing new is sent to it. Raises ``KeyError``."""
        self._engines[engine].health = _NEXT[self._engines[engine].health][Event.DRAIN]

    def restore(self, engine: E) -> None:
        """It is not to be taken away after all. Raises ``KeyError``."""
        self._engines[engine].health = _NEXT[self._engines[engine].health][Event.RESTORE]

    def remove(self, engine: E) -> None:
        """It is not there any more. Its conversations go elsewhere."""
        self._engines.pop(engine, None)


def _is_down(engine: _Engine) -> bool:
    return engine.health in (Health.DOWN, Health.DRAINING_DOWN)


def _weight(name: str, conversation: bytes) -> bytes:
    return blake2b(conversation + name.encode(), digest_size=8).digest()


def _median(values: Collection[float]) -> float:
    """That of the ``values`` above 0; 0 where there are none."""
    known = [value for value in values if value]
    return median(known) if known else 0.0
