"""Chooses the engine of a conversation and tracks the engines' health: a value without I/O.

Engines are opaque objects, conversations are digests, and loads and times are passed in.

Health belongs to the engine object. Conversations and their homes belong to the engine's name:
another object of the same name, for instance an engine whose key was changed, has the same cached
prefixes.

Where a conversation goes
-------------------------
An engine computes a prompt from the end of its cached prefix. An agent's conversation begins with
10,000 to 25,000 tokens and grows by a few hundred at a time. The engine that computed the last turn
therefore has all but the end of the next prompt, and any other has at best the instructions.

1. A conversation stays with its last engine, as long as that engine is up and not overloaded
   compared with the least loaded one.
2. A new conversation, or one that has to move, goes to its home: engines are ordered by a digest of
   engine and conversation (rendezvous hashing, Thaler and Ravishankar 1998,
   https://www.eecs.umich.edu/techreports/cse/96/CSE-TR-316-96.pdf), and the first one is
   taken whose load exceeds the least loaded by no more than a few requests (consistent hashing with
   bounded loads, Mirrokni, Thorup and Zadimoghaddam 2016, https://arxiv.org/abs/1608.01350).
   Gateways that share nothing but the list of engines agree on it, and if an engine is removed,
   only its conversations move. Sending new ones to the least loaded engine would be as good with
   one gateway; with four, which count only their own requests, it would compute ten times as much.

"Overloaded" is what SGLang's router calls imbalanced: more requests than the least loaded engine
by an absolute number *and* by a ratio (its ``--balance-abs-threshold`` 64 and
``--balance-rel-threshold`` 1.5, https://docs.sglang.io/advanced_features/router.html). The numbers
here are from ``benchmarks/simulate_routing.py``; docs/simulation.md has its results.

What a conversation is
----------------------
The ids before the model's first output: instructions, tools, the first question. They are the same
in every prompt of a conversation, because generated turns are replayed exactly (``core.replay``)
and nothing before them changes. The tenant is part of the digest.

When an engine is down
----------------------
Requests notice first (passive checks): once ``failure_threshold`` of them in a row have failed, the
engine gets no requests for ``open_seconds`` seconds. Then it is probed, and each failed probe
doubles the pause. Only a probe brings it back, because a request that began earlier proves nothing.
Engines that are up are probed periodically. An engine that rejects a request for lack of capacity
(429, or anything with ``Retry-After``) is full, not broken: it does not count as a failure.

A server may pass every health check while it generates nothing. A failure therefore makes an engine
``doubted``: it is probed at once, and only a generated id, for the probe or for a request, ends the
doubt. A request that fails in the same way on two engines is itself the cause. It counts against
neither (`fleet`), and the probes show whether it has broken them.

When an engine is silent
------------------------
An engine that computes a long prompt is as silent as one that hangs, unless it reports its progress
(llama.cpp and this project's engine do). Two rules tell them apart:

1. Silence belongs to the engine, not to a request: any id for any request ends it, and so does
   progress with a prompt, as long as it advances.
2. The silence allowed is a multiple (``silence_factor``) of the expected time of the request's
   prompt and of the prompts before it that have no id yet. The expectation uses two medians of the
   last ``window_requests`` requests: the time to the first id of requests with few tokens to
   compute, and the time to the first id per uncached token of those with ``long_prompt_tokens``
   tokens or more. Each is the engine's own or the median of the other engines, whichever is longer:
   an engine slower than all others is held to its own past, and one of an overloaded fleet to that
   of the others. Before an engine has computed ``min_long_prompts`` long prompts, it may be a slow
   laptop that takes ``max_seconds_per_token`` seconds per token. Less than ``min_silence`` seconds
   never count as silence.

A silent engine is taken down at once, and its requests without an id are retried on another engine.
If there is no other, a request waits until its deadline, which then counts as one failure. Prompts
of other gateways are unknown here. An engine that computes one prompt after the other and reports
no progress can be taken down for another gateway's prompt, if that takes longer than
``min_silence`` and than what is expected of the own ones. It costs the move of conversations:
requests are retried on another engine, and a probe brings the engine back once it generates again.
``benchmarks/simulate_routing.py --silent`` counts false alarms: none (docs/simulation.md).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from statistics import median
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.lru import ByteLRU

ASSISTANT = 173_781
"""The id of ``assistant``, which follows ``<|start|>`` in a header."""


_LOOKED_AT = 4096
"""Only the last ids of the opening are hashed: all of 25,000 would take half a millisecond. If two
openings of the same length differ only before these, they share an engine, which is harmless."""


def conversation(prompt: tuple[int, ...], tenant: str) -> bytes:
    """A digest of 16 bytes of the ``tenant``'s conversation to which ``prompt`` belongs."""
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


class Health(Enum):
    """Whether an engine is draining, and whether it is down.

    A draining engine finishes its requests, and gets no new ones. One that is down gets none until
    a probe succeeds.
    """

    UP = (False, False)
    DOWN = (False, True)
    DRAINING = (True, False)
    DRAINING_DOWN = (True, True)


def rendezvous_weight(name: str, conversation: bytes) -> bytes:
    """How much a conversation prefers the engine of this ``name`` to others."""
    return blake2b(conversation + name.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Rule:
    """The parameters of the rules above.

    An engine is overloaded with over ``balance_abs_threshold`` requests more than the least loaded
    one and more than ``balance_rel_threshold`` times as many; with over ``home_abs_threshold`` more
    it is no conversation's home. Of the others, the home is the one with the highest ``weight`` of
    its name and the conversation. ``failure_threshold`` failures in a row take an engine down, for
    ``open_seconds`` seconds at first and ``max_open_seconds`` at most; engines that are up are
    probed every ``probe_interval`` seconds. The engines of the last ``max_conversations``
    conversations are known, at about 250 bytes each. The other parameters are those of silent
    engines: ``min_silence`` is in seconds, ``long_prompt_tokens`` in tokens,
    ``max_seconds_per_token`` in seconds per token.
    """

    balance_abs_threshold: int = 16
    home_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5
    weight: Callable[[str, bytes], Any] = rendezvous_weight
    failure_threshold: int = 3
    open_seconds: float = 1.0
    max_open_seconds: float = 30.0
    probe_interval: float = 10.0
    max_conversations: int = 100_000
    min_silence: float = 20.0
    silence_factor: float = 8.0
    long_prompt_tokens: int = 500
    window_requests: int = 32
    min_long_prompts: int = 4
    max_seconds_per_token: float = 0.005


E = TypeVar("E", bound=Hashable)
"""An engine: any hashable object."""

Why: TypeAlias = Literal["prefix", "moved", "new"]


@dataclass(frozen=True, slots=True)
class Choice(Generic[E]):
    """The engine for a request, and the reason: it has the prefix, the conversation had to move, or
    it is new."""

    engine: E
    why: Why


@dataclass(slots=True)
class _Engine:
    down: bool = False
    draining: bool = False
    failures: int = 0
    pause: float = 0.0
    probe_at: float = 0.0
    doubted: bool = False
    waits: deque[float] = field(default_factory=deque)
    """Seconds to the first id of the last requests with few tokens to compute."""
    paces: deque[float] = field(default_factory=deque)
    """The same per token, of requests with more."""

    @property
    def health(self) -> Health:
        return Health((self.draining, self.down))


class Routing(Generic[E]):
    """The engines, and the last engine of each conversation. Not thread-safe; times in seconds."""

    def __init__(
        self, engines: Iterable[E], rule: Rule | None = None, *, name: Callable[[E], str] = str
    ) -> None:
        """All ``engines`` are up. The names of engines that are up must be unique."""
        self.rule = rule or Rule()
        self._name = name
        self._engines = {engine: _Engine() for engine in engines}
        self._last_engine: ByteLRU[bytes, str] = ByteLRU(self.rule.max_conversations)
        self._avoided: ByteLRU[bytes, str] = ByteLRU(self.rule.max_conversations)

    def choose(
        self, conversation: bytes, loads: Mapping[E, int], excluded: Collection[E] = ()
    ) -> Choice[E] | None:
        """Chooses an engine for a turn of ``conversation``; ``None`` if none is available.

        ``loads`` are the running requests of each engine (default 0); ``excluded`` are engines that
        must not be chosen. The choice is not recorded until ``record_turn``.
        """
        usable = {
            self._name(engine): engine
            for engine, known in self._engines.items()
            if known.health is Health.UP and engine not in excluded
        }
        if not usable:
            return None
        avoided = self._avoided.get(conversation)
        if avoided in usable and len(usable) > 1:
            del usable[avoided]
        rule, least = self.rule, min(loads.get(engine, 0) for engine in usable.values())
        last = self._last_engine.get(conversation)
        if last in usable:
            load = loads.get(usable[last], 0)
            if (
                load - least <= rule.balance_abs_threshold
                or load <= rule.balance_rel_threshold * least
            ):
                return Choice(usable[last], "prefix")
        why: Why = "new" if last is None else "moved"
        room = least + rule.home_abs_threshold
        roomy = (name for name, engine in usable.items() if loads.get(engine, 0) <= room)
        return Choice(usable[max(roomy, key=lambda name: rule.weight(name, conversation))], why)

    def record_turn(self, conversation: bytes, engine: E) -> None:
        """Records that ``engine`` computes a turn of ``conversation``."""
        self._last_engine.put(conversation, self._name(engine), 1)
        self._avoided.discard(conversation)

    def avoid(self, conversation: bytes, engine: E) -> None:
        """Sends the next turn to another engine, because ``engine`` failed this one."""
        self._avoided.put(conversation, self._name(engine), 1)

    # --- Health

    def _known(self, engine: E) -> _Engine:
        """The records of an engine. What is recorded of one that was removed has no effect."""
        return self._engines.get(engine) or _Engine()

    def health(self, engine: E) -> Health:
        """The health of an engine. Raises ``KeyError`` for an unknown one."""
        return self._engines[engine].health

    def record_success(self, engine: E) -> None:
        """A request got its first ids from ``engine``."""
        known = self._known(engine)
        if not known.down:
            known.failures, known.doubted = 0, False

    def record_latency(self, engine: E, seconds: float, tokens: int) -> None:
        """A request got its first id after ``seconds``; ``tokens`` of its prompt were not cached.

        ``tokens`` excludes any that may have been cached.
        """
        known, long = self._known(engine), tokens >= self.rule.long_prompt_tokens
        last = known.paces if long else known.waits
        last.append(seconds / tokens if long else seconds)
        if len(last) > self.rule.window_requests:
            last.popleft()

    def expected(self, engine: E, tokens: int) -> float:
        """Seconds within which a healthy engine with ``tokens`` to compute generates an id:
        ``slack`` times the usual time. Raises ``KeyError``."""
        rule, own = self.rule, self._engines[engine]
        others = [other for key, other in self._engines.items() if key != engine]
        wait = max(_median(own.waits), _median([_median(other.waits) for other in others]))
        pace = max(_median(own.paces), _median([_median(other.paces) for other in others]))
        seconds = rule.silence_factor * (wait + pace * tokens)
        known = len(own.paces) >= rule.min_long_prompts
        return seconds if known else max(seconds, rule.max_seconds_per_token * tokens)

    def doubt(self, engine: E, now: float) -> None:
        """A request to ``engine`` went wrong: it is probed as soon as possible."""
        known = self._known(engine)
        if not known.down:
            known.doubted, known.probe_at = True, min(known.probe_at, now)

    def doubted(self, engine: E) -> bool:
        """Whether only a generated id can prove that ``engine`` is healthy."""
        known = self._known(engine)
        return known.doubted or known.down

    def record_failure(self, engine: E, now: float) -> None:
        """A request failed, and ``engine`` was at fault."""
        self._count_failures(engine, now)
        self.doubt(engine, now)

    def record_silence(self, engine: E, now: float) -> None:
        """``engine`` generated nothing for longer than ``expected`` and ``Rule.min_silence``."""
        self._count_failures(engine, now, count=self.rule.failure_threshold)

    def _count_failures(self, engine: E, now: float, count: int = 1) -> None:
        """Counts a failure, or as many at once."""
        known = self._known(engine)
        if known.down:
            return
        known.failures += count
        if known.failures >= self.rule.failure_threshold:
            known.down, known.pause = True, self.rule.open_seconds
            known.probe_at = now + known.pause

    def due(self, now: float, probed: Collection[E] = ()) -> list[E]:
        """The engines whose probe is due, except those that are being ``probed``.

        Schedules the next probe of each.
        """
        due: list[E] = []
        for engine, known in self._engines.items():
            if known.probe_at <= now and engine not in probed:
                known.probe_at = now + (known.pause or self.rule.probe_interval)
                due.append(engine)
        return due

    def record_probe(self, engine: E, well: bool, now: float) -> None:
        """A probe of ``engine`` has ended. Each failure doubles the time to the next probe."""
        known = self._known(engine)
        if not well and known.down:
            known.pause = min(2 * known.pause, self.rule.max_open_seconds)
            known.probe_at = now + known.pause
        elif not well:
            self._count_failures(engine, now)
        else:
            if known.down:
                known.probe_at = now + self.rule.probe_interval
            known.down, known.failures, known.pause, known.doubted = False, 0, 0.0, False

    def retry_after(self, now: float) -> float | None:
        """Seconds until the next probe of an engine that is down; ``None`` if none is down."""
        down = [
            engine.probe_at for engine in self._engines.values() if engine.health is Health.DOWN
        ]
        return max(0.0, min(down) - now) if down else None

    # --- Engines come and go

    @property
    def engines(self) -> tuple[E, ...]:
        return tuple(self._engines)

    def add(self, engine: E, *, up: bool = True) -> None:
        """Adds an engine: up, or down until its first probe, which is due at once."""
        new = _Engine() if up else _Engine(down=True, pause=self.rule.open_seconds)
        self._engines.setdefault(engine, new)

    def drain(self, engine: E) -> None:
        """Sends no new requests to ``engine``, before it is removed. Raises ``KeyError``."""
        self._engines[engine].draining = True

    def restore(self, engine: E) -> None:
        """Reverses ``drain``. Raises ``KeyError``."""
        self._engines[engine].draining = False

    def remove(self, engine: E) -> None:
        """Removes ``engine``. Its conversations move to other engines."""
        self._engines.pop(engine, None)


def _median(values: Collection[float]) -> float:
    """The median of the ``values`` above 0; 0 if there are none."""
    known = [value for value in values if value]
    return median(known) if known else 0.0
