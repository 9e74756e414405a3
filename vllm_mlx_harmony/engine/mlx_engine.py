"""The engine: requests from any event loop, computed on one thread, answered id by id.

`server` has parsed, validated and rendered a request before it gets here, as a `GenerationRequest`.
What it passes through:

    event loop    generate ─▶ read cached pieces from disk ─▶ wait for steps ─▶ yield
    thread        `loop.EngineLoop`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.loop import EngineLoop, Load, Options
from vllm_mlx_harmony.engine.masks import LogitsMask
from vllm_mlx_harmony.engine.memory import Budget
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.request import Request
from vllm_mlx_harmony.engine.sampler import Sampler
from vllm_mlx_harmony.engine.status import RequestStatus, Totals
from vllm_mlx_harmony.engine.step_costs import ASSUMED
from vllm_mlx_harmony.engine.thread import Stopped
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Steps
from vllm_mlx_harmony.model_files import length_of
from vllm_mlx_harmony.tasks import wait_until_done

__all__ = ["MlxEngine", "Options", "RequestStatus"]


class MlxEngine:
    """A model on a thread of its own, as `engine_api.engine.Engine`; used on any other thread.

    Closed for good by ``close``. ``model`` is its directory or the name of its repository. What is
    read here is what the thread has published last.
    """

    remote = False
    has_logprobs = True

    def __init__(self, model: str, options: Options | None = None) -> None:
        self.model = model
        self.options = options or Options()
        self.loop = EngineLoop(model, self.options)
        self._thread = self.loop.thread
        self._numbers = count(1)

    @property
    def healthy(self) -> bool:
        return self._thread.alive

    @property
    def loaded(self) -> bool:
        return self.loop.published.loaded

    @property
    def cache(self) -> PrefixCache:
        return self.loop.published.cache

    @property
    def budget(self) -> Budget:
        return self.loop.published.budget

    @property
    def weight_bytes(self) -> int:
        return self.loop.published.weight_bytes

    @property
    def totals(self) -> Totals:
        return self.loop.published.totals

    @property
    def relative_costs(self) -> dict[int, float]:
        """Measured duration of a step of *n* ids, relative to a step of one; empty if not
        measured."""
        costs = self.loop.published.costs
        if costs in (None, ASSUMED):
            return {}
        first, *_ = costs.seconds
        pairs = zip(costs.ids, costs.seconds, strict=True)
        return {ids: round(seconds / first, 2) for ids, seconds in pairs}

    @property
    def has_prediction(self) -> bool:
        return self.options.speculate == "auto"

    @property
    def context_length(self) -> int | None:
        """Maximum ids of prompt and answer together: what the model can attend to, or what fits in
        memory while a request is alone, if that is less."""
        known = length_of(self.model)
        if not self.loaded:
            return known
        longest = self.budget.longest(device.weight_bytes())
        return longest if known is None else min(known, longest)

    def load(self, load: Load) -> None:
        """Calls ``load`` on the engine's thread, and waits for it.

        Raises what it raises, and ``HostError`` if the model does not fit.
        """
        self._thread.call(partial(self.loop.load, load)).result()

    def close(self) -> None:
        """Ends all requests, frees everything, ends the thread."""
        with suppress(Stopped):
            self._thread.call(self.loop.unload)
            self._thread.call(device.end_streams)
        self._thread.close()
        if self.loaded:  # the thread died, or failed to free it
            self.loop.unload()

    def status(self) -> list[RequestStatus]:
        """All requests: those that generate first, then the others in the order in which they will
        be served."""
        published = self.loop.published
        age = time.perf_counter() - published.at
        return [
            replace(status, seconds=round(status.seconds + age, 3)) for status in published.requests
        ]

    def generate(self, request: GenerationRequest) -> Steps:
        """See ``engine_api.engine.Engine``. Raises ``HostError`` when too many requests wait, and
        when the engine has stopped."""
        if not self._thread.alive:
            raise HostError(self.loop.published.stop_reason)
        waiting = self.loop.waiting.count
        if waiting >= self.options.queue:
            problem = f"the queue is full ({waiting} requests are waiting); try again later"
            raise HostError(problem, code="queue_full")
        prompt, settings, constraint = request.prompt, request.settings, request.constraint
        mask = None if constraint is None else LogitsMask(constraint, origins=settings.origins)
        sampler = Sampler(settings, prompt, mask)
        number = next(self._numbers)
        return self._generated(Request(number, prompt, settings, request.tenant, sampler))

    async def _generated(self, request: Request) -> Steps:
        loop = self.loop
        try:
            # Known to the loop before the first wait, so that it ends when the engine does.
            self._thread.call(partial(loop.arrive, request))
        except Stopped:
            raise HostError(loop.published.stop_reason) from None
        loop.waiting.add(1)
        try:
            match = await self.cache.find(request.prompt, request.tenant)
            request.match = await self.cache.load(match)
            try:
                await asyncio.wrap_future(self._thread.call(partial(loop.enqueue, request)))
            except Stopped:
                raise HostError(loop.published.stop_reason) from None
            while not request.ended:
                yield await request.next()
        finally:
            if not request.ended:
                with suppress(Stopped):
                    cancelling = self._thread.call(partial(loop.cancel, request))
                    await wait_until_done(asyncio.ensure_future(asyncio.wrap_future(cancelling)))

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        return (await self.cache.find(prompt, tenant)).cached
