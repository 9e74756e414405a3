"""``/harmony/v1/generate``: token ids in, token ids out, for a gateway in front of this server.

Disabled unless ``VLLM_MLX_HARMONY_ID_ENDPOINT=1`` (``vllm-mlx-harmony serve --id-endpoint``): its
clients can send the model any ids, control tokens included, and are trusted to name tenants. The
server's API key and rate limit apply as everywhere.

POST takes a JSON object: ``prompt`` (ids), ``settings`` (`engine_api.engine.GenerationSettings`),
``model``, ``tenant`` (cached prompts are reused within a tenant only), ``grammar`` (text for
llguidance, which the output must match from its first id) and ``min_tokens``. It answers with
server-sent events ``{"ids": […], "finish": null | "stop" | "length", "cached_tokens": n}``. Events
before the first id have no ids but ``prompt_progress`` (as llama.cpp's), at most twice a second. An
event with ``error`` ends a stream that failed. With ``settings.origins``, events have ``origins``:
the ``Origin`` of each id, as a letter; with ``settings.top_logprobs``, they have ``logprobs``:
``{"logprob": x, "top": [[id, x], …]}`` for each id. With drafts (docs/speed.md),
events have ``accepted`` and ``rejected``: how many draft ids so far. GET returns the version of
this interface, and the names of the ``settings`` that this server takes.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.deltas import (
    Delta,
    Failed,
    Finished,
    Progress,
    Started,
    Usage,
)
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import Policy
from vllm_mlx_harmony.core.text_limits import CONTEXT_TOKENS
from vllm_mlx_harmony.core.turn import VOCAB_SIZE, Defaults
from vllm_mlx_harmony.engine_api.engine import Finish, GenerationSettings, Step
from vllm_mlx_harmony.protocols.events import HEARTBEAT, Event, encode
from vllm_mlx_harmony.protocols.progress import FIELD, prompt_progress
from vllm_mlx_harmony.protocols.validation import RequestModel, Seed, TopLogprobs, validate
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.endpoint import OpenAIEndpoint
from vllm_mlx_harmony.server.front_end import Caller, front_end_of
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.sampling import limited_to_context
from vllm_mlx_harmony.server.serving import (
    Api,
    LeasedRequest,
    check_logprobs,
    read_request,
    respond,
    serve,
)
from vllm_mlx_harmony.server.settings import variable

ID_ENDPOINT_VARIABLE = variable("id_endpoint")

PATH = "/harmony/v1/generate"
VERSION = 1
"""Incremented by incompatible changes."""


class IdSettings(RequestModel):
    """``GenerationSettings`` on the wire; ``logit_bias`` has pairs of id and bias."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int = Field(ge=0)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = 0.0
    repetition_penalty: float = Field(default=1.0, gt=0)
    logit_bias: list[Annotated[tuple[int, float], Strict(False)]] = Field(default_factory=list)
    frequency_penalty: float = 0.0
    seed: Seed | None = None
    origins: bool = False
    top_logprobs: TopLogprobs | None = None
    prediction: list[int] = Field(default_factory=list, max_length=CONTEXT_TOKENS)

    def resolved(self) -> GenerationSettings:
        bias, prediction = tuple(self.logit_bias), tuple(self.prediction)
        return GenerationSettings(
            **{**self.model_dump(), "logit_bias": bias, "prediction": prediction}
        )


class IdRequest(RequestModel):
    model_config = ConfigDict(extra="forbid")

    prompt: list[int] = Field(min_length=1)
    settings: IdSettings
    model: str | None = None
    tenant: str = ""
    grammar: str | None = None
    min_tokens: int = Field(default=0, ge=0)
    stream: Literal[True] = True


class IdContext:
    """An output that is not parsed here: its deltas are the engine's steps, for ``IdEmitter``.

    It has what a job without tools and ``replay`` uses of a ``Context``.
    """

    done = False

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._prompt = prompt
        self._generated = 0

    def render_for_completion(self) -> tuple[int, ...]:
        return self._prompt

    def start(self, cached_tokens: int | None) -> list[Delta]:
        return [Started(len(self._prompt), cached_tokens)]

    def append(self, step: Step) -> list[Any]:
        """The step without what ``finish`` reports, if it has ids."""
        self._generated += len(step.ids)
        return [step._replace(finish=None, cached_tokens=0)] if step.ids else []

    def finish(self, reason: Finish, cached_tokens: int) -> list[Delta]:
        usage = Usage(len(self._prompt), self._generated, cached_tokens=cached_tokens)
        return [Finished(reason, usage=usage)]


class IdEmitter:
    def keep_alive(self) -> Event:
        return HEARTBEAT

    def feed(self, delta: Delta | Step) -> list[Event]:
        if isinstance(delta, Step):
            return [_event(delta)]
        if isinstance(delta, Progress):
            return [_event(Step((), progress=delta))]
        if isinstance(delta, Finished):
            finish: Finish = "length" if delta.reason == "length" else "stop"
            return [_event(Step((), finish, delta.usage.cached_tokens))]
        if isinstance(delta, Failed):
            error = {"message": delta.error.message, "code": delta.error.status}
            return [Event(encode({"error": error}))]
        return []

    def result(self) -> dict[str, Any]:
        """Never called: every answer is streamed."""
        return {}


def _event(step: Step) -> Event:
    document: dict[str, Any] = {
        "ids": step.ids,
        "finish": step.finish,
        "cached_tokens": step.cached_tokens,
    }
    if step.logprobs:
        document["logprobs"] = [
            {"logprob": logprob.logprob, "top": logprob.top} for logprob in step.logprobs
        ]
    if step.accepted or step.rejected:
        document |= {"accepted": step.accepted, "rejected": step.rejected}
    if step.progress is not None:
        document[FIELD] = prompt_progress(step.progress)
    if step.origins:
        document["origins"] = step.origins
    return Event(encode(document))


def _read(body: object, defaults: Defaults, caller: Caller) -> IdRequest:
    parsed = validate(IdRequest, body)
    biased = [token for token, _ in parsed.settings.logit_bias]
    for field, tokens in (
        ("prompt", parsed.prompt),
        ("settings.logit_bias", biased),
        ("settings.prediction", parsed.settings.prediction),
    ):
        wrong = next((token for token in tokens if not 0 <= token < VOCAB_SIZE), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is out of range", param=field)
    return parsed


API = Api("ids", _read, more_values=2 * CONTEXT_TOKENS)
"""As many JSON values as a prompt and a prediction can have ids, besides the usual limit."""


async def generate_from_ids(request: Request) -> Response:
    """``POST /harmony/v1/generate``, and ``GET`` (or ``HEAD``)."""
    if not front_end_of(request).settings.id_endpoint:
        problem = f"{PATH} is disabled ({ID_ENDPOINT_VARIABLE}=1 enables it)"
        raise RequestError(problem, status=404, code="not_found")
    if request.method != "POST":
        return JSONResponse({"harmony": VERSION, "settings": [*IdSettings.model_fields]})
    return await serve(API, request, _generate)


async def _generate(leased_request: LeasedRequest[Api[IdRequest]]) -> Response:
    """Generates from the prompt, which needs no rendering."""
    lease = leased_request.lease
    parsed = await read_request(API, leased_request.document, Defaults(), leased_request.caller)
    lease.tenant = sha256(f"{lease.tenant}\0{parsed.tenant}".encode()).hexdigest()
    prompt = tuple(parsed.prompt)
    grammar = None
    if parsed.grammar is not None:
        if leased_request.front_end.enforcement.policy is Policy.OFF:
            raise RequestError("grammars are disabled on this server", param="grammar")
        grammar = await enforcement.compile_untrusted(parsed.grammar, lease.tenant)
    spec = ConstraintSpec(grammar=grammar, min_tokens=parsed.min_tokens, binding=True)
    constraint = Constraint(spec) if spec else None
    settings = limited_to_context(
        parsed.settings.resolved(), len(prompt), lease.engine.context_length
    )
    if leased_request.front_end.observer_factories:
        settings = replace(settings, origins=True)
    check_logprobs(lease, settings, "settings.top_logprobs")
    context: Any = IdContext(prompt)  # the part of a Context that this job uses
    job = Job(
        lease,
        context,
        settings,
        IdEmitter(),
        stream=True,
        id_seed=leased_request.id_seed,
        model=parsed.model or "",
        server_settings=leased_request.front_end.settings,
        constraint=constraint,
        append=context.append,
    )
    return await respond(leased_request, job)


ENDPOINTS = (
    OpenAIEndpoint(
        PATH,
        ("GET", "POST"),
        generate_from_ids,
        "token ids for a gateway in front of this server",
        dependencies_of=("/v1/chat/completions", "POST"),
    ),
)
