"""Which of several engines gets a request, and what becomes of it when that one fails.

A ``Fleet`` is all engines of one model as the front end's one ``Engine``. It asks a ``Router`` for
each request, tells it how the request went, and tries another engine as long as nothing was
generated: afterwards an answer has begun, and ends with an error.

An engine that could not be reached, or answered 5xx or 429, gets no requests for a while
(``retry_at``); whoever watches it (`app`) sets it up again when it answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.gateway.engines.finding import Spec
from vllm_mlx_harmony.gateway.engines.http import EngineUnavailable, HttpEngine
from vllm_mlx_harmony.server.engine import Steps
from vllm_mlx_harmony.server.sampling import Settings

logger = logging.getLogger("vllm_mlx_harmony")

DOWN_SECONDS = 2.0
"""For how long an engine that failed gets no requests, unless it says another time."""

MOST_TRIES = 3
"""Engines that one request is tried on, at most."""


@dataclass(eq=False)
class Backend:
    """One engine of the fleet, and what is known of it now. Of the event loop alone."""

    spec: Spec
    engine: HttpEngine | None = None
    """``None`` until it was found."""
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    retry_at: float = 0.0
    """When it may be tried again, on the monotonic clock."""
    problem: str = field(default="not found yet")
    """Why it is not up; empty when it is."""

    @property
    def up(self) -> bool:
        """Whether requests may go there."""
        return self.engine is not None and time.monotonic() >= self.retry_at

    def succeeded(self) -> None:
        """It generates."""
        self.failures, self.retry_at, self.problem = 0, 0.0, ""

    def failed(self, problem: str, seconds: float = DOWN_SECONDS) -> None:
        """It gets no requests for ``seconds``."""
        self.failures += 1
        self.retry_at = time.monotonic() + seconds
        self.problem = problem
        logger.warning("engine %s: %s", self.spec.url, problem)


@dataclass(frozen=True, slots=True)
class Routed:
    """What a router sees of a request."""

    prompt: tuple[int, ...]
    tenant: str


class Router(Protocol):
    """Chooses engines. Of the event loop alone; no call may wait."""

    def choose(self, request: Routed, backends: Sequence[Backend]) -> Backend:
        """One of ``backends``, which are up and were not tried yet: at least one."""

    def generated(self, request: Routed, backend: Backend, ids: Sequence[int]) -> None:
        """``backend`` has computed the prompt of ``request`` and ``ids`` behind it."""


class LeastLoaded:
    """The engine with the fewest requests; the first of several."""

    def choose(self, request: Routed, backends: Sequence[Backend]) -> Backend:
        """See ``Router``."""
        return min(backends, key=lambda each: each.in_flight)

    def generated(self, request: Routed, backend: Backend, ids: Sequence[int]) -> None:
        """It remembers nothing."""


class Fleet:
    """The engines of one model as one ``Engine``."""

    one_at_a_time = False
    remote = True

    def __init__(
        self, model: str, backends: Sequence[Backend], router: Router | None = None
    ) -> None:
        self.model = model
        self.backends = tuple(backends)
        self.router: Router = router or LeastLoaded()

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
        request = Routed(prompt, tenant)
        tried: list[Backend] = []
        taken = False
        while True:
            backend, engine = self._chosen(request, tried)
            tried.append(backend)
            last = len(tried) >= min(MOST_TRIES, len(self.backends))
            said: list[int] = []
            begun = False
            backend.in_flight += 1
            try:
                async with aclosing(engine.generate(prompt, settings, tenant, constraint)) as steps:
                    async for step in steps:
                        if step.ids and not begun:
                            begun = True
                            backend.succeeded()
                        said += step.ids
                        if step.ids or step.finish is not None or not taken:
                            taken = True
                            yield step
                return
            except EngineUnavailable as error:
                backend.failed(error.message, error.retry_after or DOWN_SECONDS)
                if last:
                    raise
            except OutputError as error:
                backend.failed(error.message, 0.0)
                if begun or last:
                    raise
            finally:
                backend.in_flight -= 1
                if begun:
                    self.router.generated(request, backend, said)

    def _chosen(self, request: Routed, tried: Sequence[Backend]) -> tuple[Backend, HttpEngine]:
        """Where ``request`` goes now. Raises ``EngineUnavailable`` when nothing is left."""
        left = [each for each in self.backends if each.up and each not in tried]
        if not left:
            seconds = max(1, round(DOWN_SECONDS))
            raise EngineUnavailable("no engine is there to answer", retry_after=seconds)
        backend = self.router.choose(request, left)
        assert backend.engine is not None
        return backend, backend.engine
