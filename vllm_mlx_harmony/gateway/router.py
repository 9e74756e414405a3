"""Which of several engines gets a request, and what becomes of it when that one fails.

A ``Fleet`` is all engines of one model as the front end's one ``Engine``. `routing` decides where a
request goes, and learns how it went. Another engine is tried as long as nothing was generated:
afterwards an answer has begun, and ends with an error.

**Whose fault it was.** A failure before the first id is held back until another engine has been
tried. When that one answers, the first one was at fault. When it fails in the same way, the request
is the cause: nothing is counted, no third engine gets it, and the error is the client's. An engine
that cannot be reached is always its own fault.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.engines.http import EngineSilent, EngineUnavailable, HttpEngine
from vllm_mlx_harmony.gateway.routing import Health, Routing, Rule, conversation
from vllm_mlx_harmony.server.engine import Step, Steps
from vllm_mlx_harmony.server.generation import stopped
from vllm_mlx_harmony.server.host import Deadline
from vllm_mlx_harmony.server.sampling import Settings

logger = logging.getLogger("vllm_mlx_harmony")

NOT_FOUND = "not found yet"

TOO_MANY = 429

BUSY_SECONDS = 1
"""For how long an engine that had no room gets no requests, unless it says another time."""

MOST_TRIES = 3
"""Engines that one request is tried on, at most."""

SHORT_SECONDS = 1.0
"""Of silence, which say nothing of an engine whose client has gone."""

LATE = 0.1
"""Seconds before a deadline in which a request ends by it."""

SHARE = 3
"""An engine may be silent for one part in so many of a request's time, unless its prompt takes
longer: then there is time left for another engine. A client's own time limit may be short: what is
tried elsewhere because of it only makes the engine doubted."""


@dataclass(eq=False)
class Backend:
    """One engine of the fleet, and what is known of it now. Of the event loop alone."""

    spec: Spec
    routing: Routing[Backend]
    engine: HttpEngine | None = None
    """``None`` until it was found."""
    in_flight: int = 0
    waiting: dict[object, int] = field(default_factory=dict)
    """The requests without an id so far, and how long their prompts are."""
    generated_at: float = 0.0
    """When an id came last, on the monotonic clock."""
    busy_until: float = 0.0
    """It had no room: until when it said so, on the monotonic clock."""
    problem: str = NOT_FOUND
    """What was wrong with it last; empty when nothing is."""

    @property
    def name(self) -> str:
        """What conversations that went there are remembered by, and logs call it."""
        return self.spec.url

    @property
    def up(self) -> bool:
        """Whether requests may go there."""
        healthy = self.engine is not None and self.routing.health(self) is Health.UP
        return healthy and time.monotonic() >= self.busy_until

    @property
    def health(self) -> str:
        """What `routing` knows of it, in a word."""
        return self.routing.health(self).name.lower()

    def expected(self, request: object = None) -> float:
        """Seconds in which it is certain to generate something: for ``request``, with what it has
        to compute before; else with all that it has to compute."""
        tokens = 0
        for each, length in self.waiting.items():
            tokens += length
            if each is request:
                break
        return self.routing.expected(self, tokens)

    def found(self, engine: HttpEngine) -> None:
        """It is there, and well."""
        self.engine = engine
        self.probed("")

    def probed(self, problem: str) -> None:
        """It was asked how it is: empty when it is well."""
        self.routing.probed(self, not problem, time.monotonic())
        self._say(problem)

    def succeeded(self) -> None:
        """It generates."""
        self.routing.answered(self)
        self.busy_until = 0.0
        self._say("")

    def failed(self, problem: str) -> None:
        """It took no request, or lost it."""
        self.routing.failed(self, time.monotonic())
        self._say(problem)

    def silent(self, problem: str) -> None:
        """It generates nothing for anybody."""
        self.routing.silent(self, time.monotonic())
        self._say(problem)

    def doubt(self) -> None:
        """A probe has to show whether it generates."""
        self.routing.doubt(self, time.monotonic())

    def busy(self, seconds: int) -> None:
        """It has no room for ``seconds``, which is no fault of it."""
        self.busy_until = time.monotonic() + seconds

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            logger.warning("engine %s: %s", self.spec.url, problem)
        self.problem = problem


@dataclass(eq=False)
class _Try:
    """A request on one of the engines. Times are of the monotonic clock."""

    backend: Backend
    tokens: int
    began: float
    first_at: float = 0.0
    cached: int = 0

    def silence(self, now: float) -> float:
        """Seconds for which the engine has generated nothing, for this request or any other."""
        return now - max(self.began, self.backend.generated_at)

    def took(self, step: Step) -> None:
        """It generated a step."""
        self.cached = max(self.cached, step.cached_tokens)
        if step.ids:
            self.backend.generated_at = time.monotonic()
            if not self.first_at:
                self.first_at = self.backend.generated_at
                self.backend.waiting.pop(self, None)
                self.backend.succeeded()

    def observed(self) -> None:
        """It has ended. What was cached is known from then on, from some engines never."""
        if self.first_at:
            computed = self.tokens - self.cached if self.cached else 0
            self.backend.routing.observed(self.backend, self.first_at - self.began, computed)


class Fleet:
    """The engines of one model as one ``Engine``."""

    one_at_a_time = False
    remote = True

    def __init__(
        self,
        model: str,
        specs: Sequence[Spec],
        rule: Rule | None = None,
        *,
        limit: float = math.inf,
    ) -> None:
        """``limit``: seconds that a request has which sets no time limit of its own."""
        self.model = model
        self.limit = limit
        self.routing: Routing[Backend] = Routing((), rule, name=lambda backend: backend.name)
        self.backends: tuple[Backend, ...] = ()
        self._draining: set[Backend] = set()
        self.routed: Counter[str] = Counter()
        """Requests by why they went where they went (`routing.Why`)."""
        self.retried = 0
        """How often a request was tried on another engine."""
        self.update(specs)

    def update(self, specs: Sequence[Spec]) -> None:
        """These are the engines from now on.

        One that is not among them gets nothing new, and goes when it has answered what it runs. One
        that has another kind or key is another one, and is found anew.
        """
        for backend in self.backends:
            if backend.spec in specs:
                self.routing.restore(backend)
                self._draining.discard(backend)
            else:
                self.routing.drain(backend)
                self._draining.add(backend)
        known = [each.spec for each in self.backends]
        new = [Backend(spec, self.routing) for spec in specs if spec not in known]
        for backend in new:
            self.routing.add(backend, up=False)
        self.backends = (*self.backends, *new)
        self.drained()

    def drained(self) -> None:
        """Takes those away that are to go and run nothing any more."""
        for backend in [each for each in self._draining if not each.in_flight]:
            self._draining.remove(backend)
            self.routing.remove(backend)
            self.backends = tuple(each for each in self.backends if each is not backend)
            logger.warning("engine %s: taken away", backend.name)

    @property
    def context_length(self) -> int | None:
        """The shortest: a request may go to any."""
        lengths = [each.engine.context_length for each in self.backends if each.engine is not None]
        return min((length for length in lengths if length is not None), default=None)

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """See ``server.engine.Engine``. No engine says it before it has computed."""
        return 0

    @property
    def patience(self) -> float:
        """Seconds of silence that an engine may be taken down for."""
        return min(self.routing.rule.patience, self.limit / SHARE)

    def within(self, deadline: Deadline) -> Bounded:
        """The fleet for a request that has until ``deadline``."""
        return Bounded(self, deadline)

    async def generate(
        self,
        prompt: tuple[int, ...],
        settings: Settings,
        tenant: str,
        constraint: Constraint | None,
        deadline: Deadline | None = None,
    ) -> Steps:
        """See ``server.engine.Engine``. Raises ``EngineUnavailable`` when no engine takes it."""
        # Of one engine there is nothing to choose, and a long prompt takes a while to digest.
        key = conversation(prompt, tenant) if len(self.backends) > 1 else b""
        tried: list[Backend] = []
        held_back: list[tuple[Backend, HarmonyFailure]] = []
        taken = False
        try:
            while True:
                backend, engine = self._chosen(key, tried)
                tried.append(backend)
                last = len(tried) >= min(MOST_TRIES, len(self.backends))
                running = _Try(backend, len(prompt), time.monotonic())
                backend.in_flight += 1
                backend.waiting[running] = len(prompt)
                try:
                    generated = engine.generate(prompt, settings, tenant, constraint)
                    async with aclosing(generated) as steps:
                        while (step := await self._next(steps, running, deadline)) is not None:
                            if step.ids and not running.first_at:
                                self.routing.went(key, backend)
                            running.took(step)
                            if step.ids or step.finish is not None or not taken:
                                taken = True
                                yield step
                    return
                except (EngineUnavailable, OutputError) as error:
                    own_fault = self._failed(key, running, error, held_back)
                    if own_fault or running.first_at or last:
                        raise
                except asyncio.CancelledError:  # while the engine was waited for, not the reader
                    self._given_up(key, running, deadline)
                    raise
                finally:
                    backend.in_flight -= 1
                    backend.waiting.pop(running, None)
                    running.observed()
                self.retried += 1
        finally:
            for failing, failure in held_back:
                failing.failed(failure.message)

    async def _next(self, steps: Steps, running: _Try, deadline: Deadline | None) -> Step | None:
        """The next of ``steps``; ``None`` behind the last. Raises ``EngineSilent`` where the engine
        is, before the first id, and another one is up."""
        if running.first_at or len(self.backends) == 1:
            return await anext(steps, None)
        coming = asyncio.ensure_future(anext(steps, None))
        try:
            while not coming.done():
                left = self._may_be_silent(running, deadline)
                if left <= 0:
                    seconds = running.silence(time.monotonic())
                    raise EngineSilent(f"it has generated nothing for {seconds:.0f} seconds")
                await asyncio.wait({coming}, timeout=left)
        finally:
            if not coming.done():
                await stopped(coming)
        return coming.result()

    def _may_be_silent(self, running: _Try, deadline: Deadline | None) -> float:
        """Seconds until something has to come from the engine; more than none while no other engine
        is up."""
        backend, rule = running.backend, self.routing.rule
        silence = running.silence(time.monotonic())
        shortest = rule.patience
        if deadline is not None:
            shortest = min(shortest, deadline.total / SHARE)
        if silence < shortest:  # nearly always: nothing is reckoned up
            return shortest - silence
        others = any(each.up for each in self.backends if each is not backend)
        if not others:
            return rule.patience
        return max(shortest, backend.expected(running)) - silence

    def _failed(
        self,
        key: bytes,
        running: _Try,
        error: EngineUnavailable | OutputError,
        held_back: list[tuple[Backend, HarmonyFailure]],
    ) -> bool:
        """Notes a failure. Whether the request is its cause: then no other engine gets it."""
        backend = running.backend
        if isinstance(error, EngineSilent):
            if running.silence(time.monotonic()) >= self.patience:
                backend.silent(error.message)
            else:
                backend.doubt()
            self.routing.left(key, backend)
        elif isinstance(error, EngineUnavailable) and error.is_full:
            backend.busy(error.retry_after or BUSY_SECONDS)
        elif running.first_at or (isinstance(error, EngineUnavailable) and not error.reached):
            backend.failed(error.message)
        else:
            backend.doubt()
            if any(_alike(each, error) for _, each in held_back):
                held_back.clear()
                return True
            held_back.append((backend, error))
        return False

    def _given_up(self, key: bytes, running: _Try, deadline: Deadline | None) -> None:
        """Its client has gone, or its time was over, while the engine generated nothing."""
        backend, now = running.backend, time.monotonic()
        silence = running.silence(now)
        waited = silence if running.first_at else now - running.began
        over = deadline is not None and (
            silence >= deadline.total - LATE if running.first_at else now >= deadline.at - LATE
        )
        full = deadline is not None and deadline.total >= self.limit
        counts = silence >= self.patience or (over and full)
        late = waited >= backend.expected(running)
        if late and (counts or over):
            self.routing.left(key, backend)
        if late and counts:
            backend.failed(f"it generated nothing for {waited:.0f} seconds")
        elif silence >= SHORT_SECONDS:
            backend.doubt()

    def _chosen(self, key: bytes, tried: Collection[Backend]) -> tuple[Backend, HttpEngine]:
        """Where a request goes now. Raises ``EngineUnavailable`` when nothing is left."""
        now = time.monotonic()
        excluded = [each for each in self.backends if each in tried or not each.up]
        loads = {each: each.in_flight for each in self.backends}
        choice = self.routing.choose(key, loads, excluded)
        if choice is None:
            up = [each for each in self.backends if self.routing.health(each) is Health.UP]
            waits = [max(0.0, each.busy_until - now) for each in up]
            problem = (
                "every engine is busy"
                if any(waits)
                else "no engine is available: the gateway's log and /ready say why"
            )
            if (probe := self.routing.retry_after(now)) is not None:
                waits.append(probe)
            seconds = max(BUSY_SECONDS, math.ceil(min(waits, default=0.0)))
            raise EngineUnavailable(problem, retry_after=seconds)
        self.routed[choice.why] += 1
        assert choice.engine.engine is not None
        return choice.engine, choice.engine.engine


class Bounded:
    """A fleet, for a request that has until ``deadline``."""

    one_at_a_time = False
    remote = True

    def __init__(self, fleet: Fleet, deadline: Deadline) -> None:
        self._fleet, self._deadline = fleet, deadline

    @property
    def model(self) -> str:
        """See ``server.engine.Engine``."""
        return self._fleet.model

    @property
    def context_length(self) -> int | None:
        """See ``server.engine.Engine``."""
        return self._fleet.context_length

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """See ``server.engine.Engine``."""
        return await self._fleet.reusable_tokens(prompt, tenant)

    def generate(
        self,
        prompt: tuple[int, ...],
        settings: Settings,
        tenant: str,
        constraint: Constraint | None,
    ) -> Steps:
        """See ``server.engine.Engine``."""
        return self._fleet.generate(prompt, settings, tenant, constraint, self._deadline)


def _alike(one: HarmonyFailure, other: HarmonyFailure) -> bool:
    """Whether two engines failed in the same way."""
    answered = [getattr(each, "answered", 0) for each in (one, other)]
    return type(one) is type(other) and answered[0] == answered[1]
