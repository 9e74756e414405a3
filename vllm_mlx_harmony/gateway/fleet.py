"""Sends a request to one of several engines, and to another one if that fails.

A ``FleetEngine`` presents all engines of a model as one ``Engine``. `routing_policy` chooses the
engine and learns of the result. A request is retried only until its first id: after that the client
has part of the answer, and a failure ends it with an error.

**Who is at fault.** A failure before the first id is held back until another engine has tried. If
that one answers, the first was at fault. If it fails in the same way, the request is the cause: no
engine is blamed, no third one tries, and the client gets the error. An engine that cannot be
reached is always at fault.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from prometheus_client import Counter, Gauge

from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.engines.http import (
    EngineSilent,
    EngineUnavailable,
    HttpEngine,
    reason_of,
)
from vllm_mlx_harmony.gateway.routing_policy import Health, Routing, Rule, Why, conversation
from vllm_mlx_harmony.server.host import Deadline
from vllm_mlx_harmony.tasks import cancel_and_wait

logger = logging.getLogger("vllm_mlx_harmony")

NAMESPACE = "vllm_mlx_harmony"
"""The prefix of all metrics."""

NOT_FOUND = "not found yet"

BUSY_SECONDS = 1
"""Seconds without requests for a full engine that sent no ``Retry-After``."""

MAX_TRIES = 3
"""The most engines that try one request."""

SHORT_SECONDS = 1.0
"""A silence up to this long is no evidence against an engine whose client disconnected."""

LATE = 0.1
"""A request that ends this many seconds before its deadline was ended by it."""

MAX_SILENT_FRACTION = 1 / 3
"""Of a request's time limit, for which an engine may be silent unless its prompt takes longer:
that leaves time for another engine. A client's own time limit may be short: a retry because of it
only makes the engine doubted."""


@dataclass(eq=False)
class Backend:
    """One engine of the fleet and its state. Used only on the event loop."""

    spec: Spec
    routing: Routing[Backend]
    engine: HttpEngine | None = None
    """``None`` until it is detected."""
    in_flight: int = 0
    waiting: dict[object, int] = field(default_factory=dict)
    """The requests without an id so far, with the lengths of their prompts."""
    alive_at: float = 0.0
    """The time of its last id or progress, on the monotonic clock."""
    busy_until: float = 0.0
    """The time until which it is full, on the monotonic clock."""
    problem: str = NOT_FOUND
    """Its current problem; empty if there is none."""

    @property
    def name(self) -> str:
        """Its name in logs and in the records of conversations."""
        return self.spec.url

    @property
    def up(self) -> bool:
        """Whether it can get requests."""
        healthy = self.engine is not None and self.routing.health(self) is Health.UP
        return healthy and time.monotonic() >= self.busy_until

    @property
    def health(self) -> str:
        """Its health, as a word."""
        return self.routing.health(self).name.lower()

    def expected(self, request: object = None) -> float:
        """Seconds within which a healthy engine generates an id: for ``request``, after the prompts
        before it; without one, after all waiting prompts."""
        tokens = 0
        for other, length in self.waiting.items():
            tokens += length
            if other is request:
                break
        return self.routing.expected(self, tokens)

    def found(self, engine: HttpEngine) -> None:
        """It was detected, and is healthy."""
        self.engine = engine
        self.probed("")

    def probed(self, problem: str) -> None:
        """It was probed; ``problem`` is empty if it is healthy."""
        self.routing.record_probe(self, not problem, time.monotonic())
        self._note(problem)

    def succeeded(self) -> None:
        """It generated an id."""
        self.routing.record_success(self)
        self.busy_until = 0.0
        self._note("")

    def failed(self, problem: str) -> None:
        """It refused or lost a request."""
        self.routing.record_failure(self, time.monotonic())
        self._note(problem)

    def silent(self, problem: str) -> None:
        """It generates nothing for any request."""
        self.routing.record_silence(self, time.monotonic())
        self._note(problem)

    def doubt(self) -> None:
        """A probe must show whether it generates."""
        self.routing.doubt(self, time.monotonic())

    def busy(self, seconds: int) -> None:
        """It is full for ``seconds``, which is no failure."""
        self.busy_until = time.monotonic() + seconds

    def _note(self, problem: str) -> None:
        if problem and problem != self.problem:
            logger.warning("engine %s: %s", self.spec.url, problem)
        self.problem = problem


@dataclass(eq=False)
class _Attempt:
    """A request on one of the engines. Times are of the monotonic clock."""

    backend: Backend
    key: bytes
    """Of the conversation."""
    tokens: int
    began: float
    first_at: float = 0.0
    cached: int = 0
    progress: tuple[int, int] = (-1, -1)
    """What it reported last: the tokens of the prompt that are computed, its place in the queue."""
    progress_at: float = 0.0

    def silence(self, now: float) -> float:
        """Seconds without an id or progress of the engine, for this request or any other."""
        return now - max(self.began, self.backend.alive_at)

    def record(self, step: Step) -> None:
        """Records a generated step."""
        self.cached = max(self.cached, step.cached_tokens)
        if step.progress is not None:
            progress = step.progress.processed, step.progress.place
            if progress != self.progress:
                self.progress = progress
                self.progress_at = self.backend.alive_at = time.monotonic()
        if step.ids:
            self.backend.alive_at = time.monotonic()
            if not self.first_at:
                self.first_at = self.backend.alive_at
                self.backend.waiting.pop(self, None)
                self.backend.routing.record_turn(self.key, self.backend)
                self.backend.succeeded()

    def ended(self) -> None:
        """Records its latency. Some engines never report the number of cached tokens."""
        if self.first_at:
            computed = self.tokens - self.cached if self.cached else 0
            self.backend.routing.record_latency(self.backend, self.first_at - self.began, computed)


class Fleet:
    """The engines of one model."""

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
        metric: dict[str, Any] = {"namespace": NAMESPACE, "registry": None}
        self.routed = Counter(
            "routed",
            "Requests by the reason for their engine: it has the prefix, the conversation moved "
            "from an engine that is down or overloaded, or it is new.",
            ["why"],
            **metric,
        )
        for why in get_args(Why):
            self.routed.labels(why)
        self.retried = Counter("retried", "Retries on another engine.", **metric)
        self.requests = Gauge(
            "engine_requests",
            "Requests in progress on the engine.",
            ["engine"],
            multiprocess_mode="livesum",
            **metric,
        )
        self.update(specs)

    def update(self, specs: Sequence[Spec]) -> None:
        """Sets the engines.

        An engine that is no longer listed gets no new requests, and is removed once its running
        ones have ended. One whose kind or key has changed is a new engine, and is detected again.
        """
        for backend in self.backends:
            if backend.spec in specs:
                self.routing.restore(backend)
            else:
                self.routing.drain(backend)
        known = [backend.spec for backend in self.backends]
        new = [Backend(spec, self.routing) for spec in specs if spec not in known]
        for backend in new:
            self.routing.add(backend, up=False)
            self.requests.labels(backend.name)
        self.backends = (*self.backends, *new)
        self.drained()

    def drained(self) -> None:
        """Removes the draining engines that have no running requests."""
        for backend in self.backends:
            draining = self.routing.health(backend) in (Health.DRAINING, Health.DRAINING_DOWN)
            if draining and not backend.in_flight:
                self.routing.remove(backend)
                self.backends = tuple(other for other in self.backends if other is not backend)
                logger.warning("engine %s: removed", backend.name)

    @property
    def context_length(self) -> int | None:
        """The shortest of all engines, because a request may go to any."""
        lengths = [
            backend.engine.context_length for backend in self.backends if backend.engine is not None
        ]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def silence_timeout(self) -> float:
        """Seconds of silence that an engine may be taken down for."""
        return min(self.routing.rule.min_silence, self.limit * MAX_SILENT_FRACTION)

    def choose(self, key: bytes, tried: Collection[Backend]) -> tuple[Backend, HttpEngine]:
        """Chooses an engine. Raises ``EngineUnavailable`` if none is left."""
        now = time.monotonic()
        excluded = [backend for backend in self.backends if backend in tried or not backend.up]
        loads = {backend: backend.in_flight for backend in self.backends}
        choice = self.routing.choose(key, loads, excluded)
        if choice is None:
            up = [backend for backend in self.backends if self.routing.health(backend) is Health.UP]
            waits = [max(0.0, backend.busy_until - now) for backend in up]
            problem = (
                "every engine is busy"
                if any(waits)
                else "no engine is available: the gateway's log and /ready say why"
            )
            if (probe := self.routing.retry_after(now)) is not None:
                waits.append(probe)
            seconds = max(BUSY_SECONDS, math.ceil(min(waits, default=0.0)))
            raise EngineUnavailable(problem, retry_after=seconds)
        self.routed.labels(choice.why).inc()
        assert choice.engine.engine is not None
        return choice.engine, choice.engine.engine


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """A fleet as the ``Engine`` of one request with a ``deadline``."""

    fleet: Fleet
    deadline: Deadline
    remote: ClassVar[bool] = True

    @property
    def model(self) -> str:
        return self.fleet.model

    @property
    def context_length(self) -> int | None:
        return self.fleet.context_length

    @property
    def has_logprobs(self) -> bool:
        """Whether all engines return log probabilities, because a request may go to any."""
        engines = (backend.engine for backend in self.fleet.backends)
        return all(engine.capabilities.logprobs for engine in engines if engine is not None)

    @property
    def has_prediction(self) -> bool:
        """Whether any engine takes one; the others are sent none."""
        engines = (backend.engine for backend in self.fleet.backends)
        return any(engine.capabilities.prediction for engine in engines if engine is not None)

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """Always 0: engines report cached tokens only after the prompt."""
        return 0

    async def generate(self, request: GenerationRequest) -> Steps:
        """Raises ``EngineUnavailable`` if no engine accepts the request."""
        fleet, tokens = self.fleet, len(request.prompt)
        # With one engine there is no choice, and hashing a long prompt takes a while.
        key = conversation(request.prompt, request.tenant) if len(fleet.backends) > 1 else b""
        tried: list[Backend] = []
        held_back: list[tuple[Backend, HarmonyFailure]] = []
        accepted = False
        try:
            while True:
                backend, engine = fleet.choose(key, tried)
                tried.append(backend)
                last = len(tried) >= min(MAX_TRIES, len(fleet.backends))
                attempt = _Attempt(backend, key, tokens, time.monotonic())
                backend.in_flight += 1
                fleet.requests.labels(backend.name).inc()
                backend.waiting[attempt] = tokens
                try:
                    generated = engine.generate(request)
                    async with aclosing(generated) as steps:
                        while (step := await self._next(steps, attempt)) is not None:
                            attempt.record(step)
                            if step.ids or step.finish or step.progress or not accepted:
                                accepted = True
                                yield step
                    return
                except (EngineUnavailable, OutputError) as error:
                    at_fault = self._failed(attempt, error, held_back)
                    if at_fault or attempt.first_at or last:
                        raise
                except asyncio.CancelledError:  # while waiting for the engine, not for the reader
                    self._cancelled(attempt)
                    raise
                finally:
                    backend.in_flight -= 1
                    fleet.requests.labels(backend.name).dec()
                    backend.waiting.pop(attempt, None)
                    attempt.ended()
                fleet.retried.inc()
        finally:
            for failing, failure in held_back:
                failing.failed(_described(failure))

    async def _next(self, steps: Steps, attempt: _Attempt) -> Step | None:
        """The next of ``steps``; ``None`` after the last. Raises ``EngineSilent`` if the engine is
        silent before the first id while another one is up."""
        if attempt.first_at or len(self.fleet.backends) == 1:
            return await anext(steps, None)
        coming = asyncio.ensure_future(anext(steps, None))
        try:
            while not coming.done():
                left = self._silence_allowed(attempt)
                if left <= 0:
                    seconds = attempt.silence(time.monotonic())
                    raise EngineSilent(f"it has generated nothing for {seconds:.0f} seconds")
                await asyncio.wait({coming}, timeout=left)
        finally:
            if not coming.done():
                await cancel_and_wait(coming)
        return coming.result()

    def _silence_allowed(self, attempt: _Attempt) -> float:
        """Seconds until the engine must generate an id; positive while no other one is up."""
        min_silence = self.fleet.routing.rule.min_silence
        silence = attempt.silence(time.monotonic())
        shortest = min(min_silence, self.deadline.total * MAX_SILENT_FRACTION)
        if silence < shortest:  # nearly always, and cheap
            return shortest - silence
        if not any(backend.up for backend in self.fleet.backends if backend is not attempt.backend):
            return min_silence
        return max(shortest, attempt.backend.expected(attempt)) - silence

    def _failed(
        self,
        attempt: _Attempt,
        error: EngineUnavailable | OutputError,
        held_back: list[tuple[Backend, HarmonyFailure]],
    ) -> bool:
        """Records a failure. Returns whether the request is its cause: then it is not retried."""
        backend = attempt.backend
        if isinstance(error, EngineSilent):
            if attempt.silence(time.monotonic()) >= self.fleet.silence_timeout:
                backend.silent(error.message)
            else:
                backend.doubt()
            backend.routing.avoid(attempt.key, backend)
        elif isinstance(error, EngineUnavailable) and error.is_full:
            backend.busy(error.retry_after or BUSY_SECONDS)
        elif attempt.first_at or (isinstance(error, EngineUnavailable) and not error.connected):
            backend.failed(_described(error))
        else:
            backend.doubt()
            status = getattr(error, "engine_status", 0)
            if any(
                type(earlier) is type(error) and getattr(earlier, "engine_status", 0) == status
                for _, earlier in held_back
            ):
                held_back.clear()
                return True
            held_back.append((backend, error))
        return False

    def _cancelled(self, attempt: _Attempt) -> None:
        """The client disconnected, or the deadline passed, while the engine generated nothing."""
        backend, now, deadline = attempt.backend, time.monotonic(), self.deadline
        silence = attempt.silence(now)
        waited = silence if attempt.first_at else now - max(attempt.began, attempt.progress_at)
        early = deadline.total - silence if attempt.first_at else deadline.at - now
        expired = early <= LATE
        counts = silence >= self.fleet.silence_timeout or (
            expired and deadline.total >= self.fleet.limit
        )
        late = waited >= backend.expected(attempt)
        if late and (counts or expired):
            backend.routing.avoid(attempt.key, backend)
        if late and counts:
            backend.failed(f"it generated nothing for {waited:.0f} seconds")
        elif silence >= SHORT_SECONDS:
            backend.doubt()


def _described(failure: HarmonyFailure) -> str:
    """A failure as the log has it. Its cause names the engine's address, which clients do not
    get."""
    cause = failure.__cause__
    return failure.message if cause is None else f"{failure.message} ({reason_of(cause)})"
