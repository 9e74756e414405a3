"""Which of several engines gets a request, and what becomes of it when that one fails.

A ``Fleet`` is all engines of one model as the front end's one ``Engine``. `routing` says where each
request goes, and is told how it went; another engine is tried as long as nothing was generated:
afterwards an answer has begun, and ends with an error.

Knows requests under way and the engines that they are on. Refuses to know the rule (`routing`), how
an engine is spoken to (`engines`), and who probes it (`app`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.engines.http import EngineUnavailable, HttpEngine
from vllm_mlx_harmony.gateway.routing import Health, Routing, Rule, conversation
from vllm_mlx_harmony.server.engine import Steps
from vllm_mlx_harmony.server.sampling import Settings

logger = logging.getLogger("vllm_mlx_harmony")

NOT_FOUND = "not found yet"

TOO_MANY = 429

BUSY_SECONDS = 1
"""For how long an engine that had no room gets no requests, unless it says another time."""

MOST_TRIES = 3
"""Engines that one request is tried on, at most."""


@dataclass(eq=False)
class Backend:
    """One engine of the fleet, and what is known of it now. Of the event loop alone."""

    spec: Spec
    routing: Routing[Backend]
    engine: HttpEngine | None = None
    """``None`` until it was found."""
    in_flight: int = 0
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

    def busy(self, seconds: int) -> None:
        """It has no room for ``seconds``, which is no fault of it."""
        self.busy_until = time.monotonic() + seconds

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            logger.warning("engine %s: %s", self.spec.url, problem)
        self.problem = problem


class Fleet:
    """The engines of one model as one ``Engine``."""

    one_at_a_time = False
    remote = True

    def __init__(self, model: str, specs: Sequence[Spec], rule: Rule | None = None) -> None:
        self.model = model
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

    async def generate(
        self,
        prompt: tuple[int, ...],
        settings: Settings,
        tenant: str,
        constraint: Constraint | None,
    ) -> Steps:
        """See ``server.engine.Engine``. Raises ``EngineUnavailable`` when no engine takes it."""
        # Of one engine there is nothing to choose, and a long prompt takes a while to digest.
        key = conversation(prompt, tenant) if len(self.backends) > 1 else b""
        tried: list[Backend] = []
        taken = False
        while True:
            backend, engine = self._chosen(key, tried)
            tried.append(backend)
            last = len(tried) >= min(MOST_TRIES, len(self.backends))
            begun = False
            backend.in_flight += 1
            try:
                async with aclosing(engine.generate(prompt, settings, tenant, constraint)) as steps:
                    async for step in steps:
                        if step.ids and not begun:
                            begun = True
                            backend.succeeded()
                            self.routing.went(key, backend)
                        if step.ids or step.finish is not None or not taken:
                            taken = True
                            yield step
                return
            except EngineUnavailable as error:
                if error.retry_after is not None or error.status == TOO_MANY:
                    backend.busy(error.retry_after or BUSY_SECONDS)
                else:
                    backend.failed(error.message)
                if last:
                    raise
            except OutputError as error:
                backend.failed(error.message)
                if begun or last:
                    raise
            finally:
                backend.in_flight -= 1
            self.retried += 1

    def _chosen(self, key: bytes, tried: Collection[Backend]) -> tuple[Backend, HttpEngine]:
        """Where a request goes now. Raises ``EngineUnavailable`` when nothing is left."""
        now = time.monotonic()
        excluded = [each for each in self.backends if each in tried or not each.up]
        loads = {each: each.in_flight for each in self.backends}
        choice = self.routing.choose(key, loads, excluded)
        if choice is None:
            up = [each for each in self.backends if self.routing.health(each) is Health.UP]
            waits = [max(0.0, each.busy_until - now) for each in up]
            problem = "every engine is busy" if any(waits) else "no engine is there to answer"
            if (probe := self.routing.retry_after(now)) is not None:
                waits.append(probe)
            seconds = max(BUSY_SECONDS, math.ceil(min(waits, default=0.0)))
            raise EngineUnavailable(problem, retry_after=seconds)
        self.routed[choice.why] += 1
        assert choice.engine.engine is not None
        return choice.engine, choice.engine.engine
