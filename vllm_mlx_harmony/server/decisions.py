"""The endpoints of decisions: typed questions about an input, answered with probabilities.

Each question has a prompt of its own. All of them begin with the input, which is computed once, and
end with the header of an answer: the model does not reason, and its first token is the label of an
option. Only the probabilities of that token are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, product
from string import ascii_uppercase
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Delta
from vllm_mlx_harmony.core.turn import (
    Defaults,
    Effort,
    Instructions,
    Message,
    OutputLimits,
    ResponseInfo,
    Sampling,
    Turn,
    User,
)
from vllm_mlx_harmony.engine_api.engine import Step
from vllm_mlx_harmony.protocols import decisions, responses
from vllm_mlx_harmony.protocols.decisions.question import INSTRUCTIONS, MAX_OPTIONS, Question
from vllm_mlx_harmony.server import sampling
from vllm_mlx_harmony.server.endpoint import Endpoint, OpenAIEndpoint
from vllm_mlx_harmony.server.front_end import Caller
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.host import Context
from vllm_mlx_harmony.server.serving import (
    Api,
    LeasedRequest,
    check_logprobs,
    read_request,
    respond,
    serve,
)
from vllm_mlx_harmony.tasks import in_thread

REMOTE_LOGPROBS = 20
"""The likeliest tokens that other servers are asked for: their limit."""

LOGPROBS = 1_000
"""Those that an engine in this process returns, so that the labels are among them."""


@lru_cache(maxsize=1)
def _labels() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The labels of options, and their ids: ``A`` to ``Z``, then pairs that are single tokens."""
    texts = (*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2)))
    ids = ((text, vocab.encode(text)) for text in texts)
    single = ((text, found[0]) for text, found in ids if len(found) == 1)
    names, tokens = zip(*islice(single, MAX_OPTIONS), strict=True)
    return names, tokens


def _read_openai(body: object, defaults: Defaults, caller: Caller) -> decisions.DecisionRequest:
    def conversation(request: Mapping[str, Any]) -> Iterable[Message]:
        return responses.read(request, defaults, caller.cipher).turn.messages

    return decisions.read_openai(body, conversation)


OPENAI = Api("decisions", _read_openai)
SYSTEM_ONE = Api("systemone", lambda body, defaults, caller: decisions.read_systemone(body))


async def create_decision(request: Request) -> Response:
    """``POST /v1/decisions``."""
    return await serve(OPENAI, request, _decide)


async def create_systemone(request: Request) -> Response:
    """``POST /v1/systemone``."""
    return await serve(SYSTEM_ONE, request, _decide)


async def _decide(leased_request: LeasedRequest[Api[decisions.DecisionRequest]]) -> Response:
    lease, front_end = leased_request.lease, leased_request.front_end
    host, engine = front_end.host, lease.engine
    defaults = host.defaults(engine)
    parsed = await read_request(
        leased_request.api, leased_request.document, defaults, leased_request.caller
    )
    name = front_end.names.echoed_name(parsed.model)
    labels, label_ids = await in_thread(_labels)
    turns = [
        _turn(parsed, question, labels, defaults, lease.tenant) for question in parsed.questions
    ]
    info = ResponseInfo(leased_request.id_seed, 0, name)

    def render() -> list[Context]:
        return [host.context(turn, info, host.renderer) for turn in turns]

    contexts = await in_thread(render)
    most = REMOTE_LOGPROBS if engine.remote else LOGPROBS
    settings = sampling.resolve(
        Sampling(temperature=0, top_p=1, top_logprobs=most), OutputLimits(), host.max_tokens
    )
    settings = replace(settings, max_tokens=1)
    check_logprobs(lease, settings, "questions")
    for context in contexts:
        prompt_tokens = len(context.render_for_completion())
        # ``max_tokens`` is 1, so this only raises ``PromptTooLong``.
        sampling.limited_to_context(settings, prompt_tokens, engine.context_length)
    emitter = decisions.Emitter(parsed, name, label_ids)
    first, *other_jobs = (
        Job(
            lease,
            context,
            settings,
            emitter,
            stream=False,
            id_seed=leased_request.id_seed,
            model=name,
            server_settings=front_end.settings,
            append=partial(_append, emitter, question),
        )
        for question, context in enumerate(contexts)
    )
    return await respond(leased_request, replace(first, other_jobs=tuple(other_jobs)))


def _append(emitter: decisions.Emitter, question: int, step: Step) -> list[Delta]:
    """``Job.append`` of a question, whose output has no deltas."""
    emitter.add(question, step.logprobs)
    return []


def _turn(
    request: decisions.DecisionRequest,
    question: Question,
    labels: tuple[str, ...],
    defaults: Defaults,
    tenant: str,
) -> Turn:
    message = User(question.text(labels))
    return Turn(
        (Instructions(INSTRUCTIONS), *request.messages, message),
        effort=Effort.LOW,
        identity=defaults.identity,
        date=defaults.date,
        prefill="",
        thinking=False,
        tenant=tenant,
    )


_endpoint = partial(OpenAIEndpoint, dependencies_of=("/v1/chat/completions", "POST"))

ENDPOINTS: tuple[Endpoint, ...] = (
    _endpoint("/v1/decisions", ("POST",), create_decision, "OpenAI's decisions"),
    _endpoint("/v1/systemone", ("POST",), create_systemone, "decisions, as Ollama's"),
)
