"""An engine that replays ids and a host around it, without vllm-mlx: what the front end sees."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from harmony_text import ids_of, script_for, text_of
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.deltas import TokenLogprob, Usage
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.engine_api.engine import Engine, Finish, GenerationRequest, Step, Steps
from vllm_mlx_harmony.server.answers import Answers
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.front_end import installed_in
from vllm_mlx_harmony.server.host import Deadline, Lease, tenant_of
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

T = TypeVar("T")

KEY = "sesame"
MODEL = "gpt-oss-20b"


def logprobs(step: Sequence[int], most: int | None) -> tuple[TokenLogprob, ...]:
    """Log probabilities that depend on the ids only, if they are requested."""
    if most is None:
        return ()
    likeliest = (vocab.RETURN, vocab.END, *range(18))
    top = tuple((token, -0.25 * rank) for rank, token in enumerate(likeliest, start=1))
    return tuple(TokenLogprob(token, -token / 1000, top[:most]) for token in step)


@dataclass(eq=False)
class ScriptedEngine:
    """Generates the script whose key is last in the prompt, ``at_once`` ids at a time."""

    scripts: dict[str, str]
    at_once: int = 1
    remote: bool = False
    model: str = MODEL
    has_logprobs: bool = True
    has_prediction: bool = True
    context_length: int | None = 4096
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def generate(self, request: GenerationRequest) -> Steps:
        """The ids of the script, and a pause after each step."""
        prompt, settings = request.prompt, request.settings
        self.prompts.append(prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            output = script_for(prompt, self.scripts)[: settings.max_tokens]
            at_limit = len(output) == settings.max_tokens and output[-1] not in vocab.TURN_ENDS
            for at in range(0, len(output), self.at_once):
                step = output[at : at + self.at_once]
                is_last = at + self.at_once >= len(output)
                finish: Finish | None = None
                if is_last:
                    finish = "length" if at_limit else "stop"
                yield Step(step, finish, logprobs=logprobs(step, settings.top_logprobs))
                await asyncio.sleep(0)
        finally:
            self.running -= 1

    async def reusable_tokens(self, prompt: Sequence[int], tenant: str) -> int:
        """Nothing is cached."""
        return 0


@dataclass(eq=False)
class DecidingEngine(ScriptedEngine):
    """Decides with the probabilities of labels in ``likely``, by a part of the question; another
    token has the rest."""

    likely: dict[str, dict[str, float]] = field(default_factory=dict)

    async def generate(self, request: GenerationRequest) -> Steps:
        """One token with log probabilities, if one token is requested."""
        if request.settings.max_tokens > 1:
            async for step in super().generate(request):
                yield step
            return
        self.prompts.append(request.prompt)
        text = text_of(request.prompt)
        question = text[text.rfind("<|start|>user") :]
        label_probabilities = next(
            (probabilities for part, probabilities in self.likely.items() if part in question), {}
        )
        rest = 1 - sum(label_probabilities.values()) or 1e-9
        labels = ((vocab.encode(label)[0], math.log(p)) for label, p in label_probabilities.items())
        top = ((vocab.RETURN, math.log(rest)), *labels)
        yield Step((vocab.RETURN,), "stop", logprobs=(TokenLogprob(*top[0], top),))


class ObedientEngine(ScriptedEngine):
    """Ends its reasoning where it has to, and generates ``ANSWER`` then. Ignores grammars."""

    ANSWER = "<|channel|>final<|message|>Well.<|return|>"

    async def generate(self, request: GenerationRequest) -> Steps:
        """The ids of the script, one by one, as far as permitted."""
        constraint = request.constraint
        matcher = None if constraint is None else constraint.start(grammar=False)
        watch = None if matcher is None else matcher.reasoning
        async for step in super().generate(request):
            for token in step.ids:
                if watch is not None and watch.forced:
                    yield Step((*watch.forced, *ids_of(self.ANSWER)), "stop")
                    return
                if matcher is not None:
                    matcher.consume(token)
            yield step


@dataclass
class Tracker:
    """The accounting of one request."""

    api: str
    results: list[str] = field(default_factory=list)

    def observe_ttft(self) -> None:
        """Does nothing."""

    def reasoning_ended(self, reason: str) -> None:
        """Does nothing."""

    def finish(self, result: str, usage: Usage) -> None:
        """The first one counts."""
        self.results.append(result)


class SingleEngineHost:
    """A host with one engine and one API key."""

    model_name: str | None = MODEL
    requires_key = True
    reasoning_tokens: int | None = None
    archive = None
    toolbox: Toolbox | None = None
    renderer: Callable[..., Any] = staticmethod(render)
    context: Callable[..., Any] = StreamingHarmonyContext

    def __init__(self, engine: Engine, seconds: float = 300.0) -> None:
        self.engine = engine
        self.seconds = seconds
        self.leases = 0
        self.trackers: list[Tracker] = []

    @cached_property
    def server_settings(self) -> ServerSettings:
        """Those in the environment when the application is made."""
        return ServerSettings.read()

    @cached_property
    def app(self) -> Starlette:
        """The application that it serves."""
        return application(self)

    @property
    def answers(self) -> Answers:
        """All answers of the application."""
        return installed_in(self.app).answers

    async def models(self) -> dict[str, Any]:
        """One model, with the context length of its engine if that is known."""
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm-mlx"}
        if (length := self.engine.context_length) is not None:
            entry["max_model_len"] = length
        return {"object": "list", "data": [entry]}

    async def must_load(self, model: str | None) -> bool:
        """It is loaded."""
        return False

    async def acquire(self, request: Request, model: str | None, deadline: Deadline) -> Lease:
        """Counts the lease."""
        if model not in (None, MODEL):
            raise HTTPException(404, f"there is no {model}")
        self.leases += 1

        async def give_back() -> None:
            self.leases -= 1

        return Lease(self.engine, tenant_of(request), deadline, give_back)

    async def forward(self, request: Request) -> Response:
        """There is no host behind this one."""
        raise LookupError(request.url.path)

    def deadline(self, timeout: float | None) -> Deadline:
        """The requested timeout, or the default."""
        seconds = timeout or self.seconds
        return Deadline(seconds, time.monotonic() + seconds)

    def defaults(self, engine: Engine | None) -> Defaults:
        """No date: prompts are the same every day."""
        return Defaults(date=None)

    def max_tokens(self, requested: int | None) -> int:
        """Up to a thousand."""
        return 1000 if requested is None else min(requested, 1000)

    def is_key(self, text: str) -> bool:
        """Whether it is the only key."""
        return text == KEY

    async def authenticate(self, connection: HTTPConnection) -> None:
        """One key, if any is required."""
        if self.requires_key and connection.headers.get("authorization") != f"Bearer {KEY}":
            raise HTTPException(401, "Invalid API key")

    async def check_rate_limit(self, connection: HTTPConnection) -> None:
        """No limit."""

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        """A tracker that tests can inspect."""
        self.trackers.append(Tracker(api))
        return self.trackers[-1]
