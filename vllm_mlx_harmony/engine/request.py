"""A request: its prompt and settings, its progress, and the steps that its client still gets."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TypeAlias

import mlx.core as mx

from vllm_mlx_harmony.core.deltas import Progress, TokenLogprob
from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.engine.drafts import Drafts
from vllm_mlx_harmony.engine.mlx_lm_compat import Layers
from vllm_mlx_harmony.engine.prefix_cache import Match
from vllm_mlx_harmony.engine.sampler import Sampler
from vllm_mlx_harmony.engine_api.engine import Finish, GenerationSettings, Step

Item: TypeAlias = "Step | HarmonyFailure"

HEADROOM = 64
"""Ids of an answer for which its caches are allocated in advance."""


class Phase(StrEnum):
    """Where a request is (`loop`)."""

    WAITING = "waiting"
    """What is cached of its prompt is read, or the scheduler has not begun it."""
    COMPUTING = "computing"
    """Its prompt is computed, in caches of its own."""
    GENERATING = "generating"
    """It is a row of a batch."""
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Request:
    """The second group of fields belongs to the engine's thread, the third to the event loop."""

    number: int
    prompt: tuple[int, ...]
    settings: GenerationSettings
    tenant: str
    sampler: Sampler
    arrival_time: float = field(default_factory=time.perf_counter)
    event_loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    match: Match | None = None
    """What is cached of the prompt: set on the event loop before the request is enqueued, taken on
    the engine's thread when it begins. Nothing else refers to it, because it holds memory."""

    # On the engine's thread.
    phase: Phase = Phase.WAITING
    prefill_start: float = 0.0
    """When its caches were created."""
    lacking_since: float = inf
    """When it first found no memory."""
    hopeless_since: float = 0.0
    """Since when nothing else has run, and ``other_bytes`` have not changed."""
    other_bytes: int | None = None
    """Bytes of everything else, when it last asked for memory."""
    layers: Layers | None = None
    """Its caches, while its prompt is computed. The first of those that are computed together has
    the caches of all."""
    boundaries: deque[int] = field(default_factory=deque)
    """Remaining boundaries at which the prompt's prefix is stored."""
    computed_ids: int = 0
    """Number of prompt ids computed so far."""
    stored: int = 0
    """Number of these that are in the prefix cache."""
    cached: int = 0
    """Number of prompt ids found in the prefix cache."""
    ids: list[int] = field(default_factory=list)
    """Prompt and answer, once it is a row of a batch. After a step, `Batch.held` are those that the
    batch's caches hold."""
    stepped: bool = False
    """Whether its row has made a step, which computes the last id of its prompt."""
    drafts: Drafts | None = None
    """``None`` if none are to be tried."""
    accepted: int = 0
    rejected: int = 0
    first_token_time: float = 0.0
    """Time of the first generated id."""
    unsent_ids: list[int] = field(default_factory=list)
    """Generated ids that have not been sent."""
    origins: str = ""
    """``Step.origins`` of ``unsent_ids``, and of what else the model's last step has yielded."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of ``unsent_ids``, if they are requested."""
    scores: list[mx.array] = field(default_factory=list)
    """`sampler.log_probabilities` of the next id, if they are requested."""

    # On the event loop.
    ended: bool = False
    items: deque[Item] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def max_length(self) -> int:
        """Maximum number of ids of prompt and answer together."""
        return len(self.prompt) + self.settings.max_tokens

    @property
    def allocated_length(self) -> int:
        """Number of ids for which its caches are allocated before its prompt is computed."""
        return len(self.prompt) + min(self.settings.max_tokens, HEADROOM)

    @property
    def remaining_ids(self) -> int:
        """Maximum number of ids that may follow the next one, which is sampled already."""
        pending = 1 if self.stepped else 0
        return self.max_length - len(self.ids) - pending

    def next_chunk(self, most: int) -> tuple[int, ...]:
        """The next ids of the prompt to compute: its last one is computed with the first step."""
        end = min(self.computed_ids + most, len(self.prompt) - 1)
        return self.prompt[self.computed_ids : end]

    @property
    def generated(self) -> int:
        return max(0, len(self.ids) - len(self.prompt))

    @property
    def top_logprobs(self) -> int | None:
        return self.settings.top_logprobs

    def take_logprob(self, token: int) -> None:
        """Reads the log probabilities of ``token``, which was computed last, if there are any."""
        if self.scores:
            own, ids, found = (score.tolist() for score in self.scores)
            top = tuple(zip(ids, found, strict=True))[: self.top_logprobs]
            self.logprobs.append(TokenLogprob(token, own, top))

    def progress(self, place: int = 0) -> Progress:
        """How much of the prompt is computed. Before it begins: what is cached, and its place."""
        total = len(self.prompt)
        if self.phase is Phase.WAITING:
            cached = 0 if self.match is None else min(self.match.cached, total - 1)
            return Progress(total, cached, cached, place=place)
        seconds = time.perf_counter() - self.prefill_start
        return Progress(total, self.cached, self.computed_ids, seconds)

    def report(self, place: int = 0) -> Step:
        return Step((), progress=self.progress(place))

    def step(self, finish: Finish | None = None) -> Step:
        """The ids that have not been sent, which are no longer held."""
        ids, self.unsent_ids = tuple(self.unsent_ids), []
        origins, self.origins = self.origins[: len(ids)], self.origins[len(ids) :]
        logprobs, self.logprobs = tuple(self.logprobs), []
        return Step(
            ids,
            finish,
            cached_tokens=self.cached,
            origins=origins if self.settings.origins else "",
            accepted=self.accepted,
            rejected=self.rejected,
            logprobs=logprobs,
        )

    async def next(self) -> Step:
        """All ids since the last call as one step, or a report of progress.

        Raises the error that ends the request.
        """
        while not self.items:
            self.arrived.clear()
            await self.arrived.wait()
        step = self.items.popleft()
        if isinstance(step, HarmonyFailure):
            self.ended = True
            raise step
        while step.progress is None and self.items and isinstance(more := self.items[0], Step):
            step = more._replace(
                ids=step.ids + more.ids,
                origins=step.origins + more.origins,
                logprobs=step.logprobs + more.logprobs,
            )
            self.items.popleft()
        self.ended = step.finish is not None
        return step


def hand_over(items: Iterable[tuple[Request, Item]]) -> None:
    """Gives requests their steps, or the errors that end them; on their event loop."""
    for request, item in items:
        request.items.append(item)
        request.arrived.set()
