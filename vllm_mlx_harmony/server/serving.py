"""A request from its body to its response. All APIs share these steps:

1. ``serve`` parses the body, and leases an engine for it: ``Received``.
2. ``parse`` has the API read the request: ``Parsed``.
3. ``prepare`` resolves the sampling settings, renders the prompt and makes the constraint: ``Job``.
4. ``respond`` starts the ``Answer`` to the job, and reads it.

Until there is an ``Answer``, every step may reject the request, and only the lease has to be
released, which ``serve`` does. The ``Answer`` owns the lease and the metrics of the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Citation
from vllm_mlx_harmony.core.errors import HostError, PromptTooLong, RequestError
from vllm_mlx_harmony.core.prompt_pages import prompt_pages
from vllm_mlx_harmony.core.render import Rendered
from vllm_mlx_harmony.core.replay import ReplayScope
from vllm_mlx_harmony.core.text_limits import CONTEXT_TOKENS
from vllm_mlx_harmony.core.turn import Defaults, Message, ResponseInfo, Turn
from vllm_mlx_harmony.engine_api.engine import GenerationSettings
from vllm_mlx_harmony.protocols.citations import link
from vllm_mlx_harmony.protocols.client_servers import ClientServer
from vllm_mlx_harmony.protocols.events import encode_in_chunks
from vllm_mlx_harmony.protocols.validation import unsupported
from vllm_mlx_harmony.server import sampling
from vllm_mlx_harmony.server.answer import Answer
from vllm_mlx_harmony.server.body import LARGE, Document, read_document
from vllm_mlx_harmony.server.enforcement import constraint_for
from vllm_mlx_harmony.server.front_end import Caller, FrontEnd, front_end_of
from vllm_mlx_harmony.server.generation import Emitter, Job
from vllm_mlx_harmony.server.host import Context, Lease, NotHarmony, tenant_of
from vllm_mlx_harmony.server.model_names import check_length
from vllm_mlx_harmony.server.observer import (
    TRACE_HEADERS,
    ObservedRequest,
    Observer,
    make_observers,
)
from vllm_mlx_harmony.server.streams import (
    SERVER_SENT_EVENTS,
    EventStream,
    Framing,
    unless_disconnected,
)
from vllm_mlx_harmony.server.tools.tool_server import ToolServer
from vllm_mlx_harmony.server.tools.turn_tools import TurnTools, with_tools
from vllm_mlx_harmony.tasks import in_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TIMEOUT = 1e9
"""Maximum timeout of a request in seconds: timers cannot be set much further ahead."""


class ParsedRequest(Protocol):
    @property
    def turn(self) -> Turn: ...

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    def emitter(self, info: ResponseInfo) -> Emitter: ...

    def echoed(self, message: Message) -> Message:
        """How ``message`` will be parsed when the client sends the answer back."""


@dataclass(frozen=True, slots=True)
class Api:
    """What is specific to an API."""

    name: str
    """Its name in the host's metrics."""
    read: Callable[[object, Defaults, Caller], Any]
    """Makes a ``ParsedRequest`` of a document."""
    blocks: bool = False
    """Whether ``read`` waits for a disk or a network, and so runs in a thread."""
    servers: Callable[[object, Collection[str]], Sequence[ClientServer]] = lambda body, labels: ()
    """Returns the tool servers that a document names by URL, given the labels of the operator's."""
    emitter: Callable[[Any, ResponseInfo, Context, Caller], Emitter] = (
        lambda parsed, info, context, caller: parsed.emitter(info)
    )
    reports_cached: bool = False
    """Whether streams begin with the usage of the prompt."""
    comments_progress: bool = False
    """Whether comments in a stream report the progress of the prompt, until the first token."""
    more_values: int = 0
    """JSON values that a body may have beyond the limit (`body`)."""
    logprobs: str = "logprobs"
    """The field that requests log probabilities."""
    framing: Framing = SERVER_SENT_EVENTS
    cited: Callable[[Citation], str] = link
    """The text of a citation in an answer."""


@dataclass(frozen=True, slots=True)
class Received:
    """A document with a lease of an engine."""

    api: Api
    front_end: FrontEnd
    request: Request
    document: Document
    lease: Lease
    id_seed: str
    """Contained in all ids of the answer."""

    @property
    def caller(self) -> Caller:
        return Caller(self.front_end, self.lease.tenant)

    async def unless_disconnected(self, coming: Awaitable[T]) -> T:
        """Calls ``streams.unless_disconnected`` with the request and its deadline."""
        return await unless_disconnected(coming, self.request, self.lease.deadline)

    def answer(self, job: Job, **options: Any) -> Answer:
        """Starts the answer to ``job``, its metrics and observers; ``options`` as in ``Answer``.

        The answer gets the lease.
        """
        front_end = self.front_end
        observers: tuple[Observer, ...] = ()
        front_end.sharing.answer_begins(front_end.answers)
        if front_end.observer_factories:
            request = self.request
            observed = ObservedRequest(
                self.api.name,
                request.url.path,
                self.document,
                job.model,
                job.stream,
                self.id_seed,
                self.lease.tenant,
                tenant_of(request),
                {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers},
            )
            observers = make_observers(observed, front_end.observer_factories)
        tracker = front_end.host.tracker(self.api.name, stream=job.stream)
        answer = Answer(job, tracker, front_end.answers, observers, **options)
        self.lease.hand_over()
        return answer


@dataclass(frozen=True, slots=True)
class Parsed:
    """The request as read by its API, and its turn.

    ``defaults`` are the server's, ``servers`` the tool servers that the request names by URL.
    """

    received: Received
    request: ParsedRequest
    turn: Turn
    defaults: Defaults
    servers: Sequence[ToolServer]


async def generate(received: Received) -> Response:
    return await respond(received, await prepare(received))


async def serve(
    api: Api,
    request: Request,
    handler: Callable[[Received], Awaitable[Response]] = generate,
    id_seed: str = "",
) -> Response:
    """The response to a request of ``api``, made by ``handler``.

    The host answers requests for models that are not Harmony models. Raises ``HarmonyFailure``,
    ``ClientDisconnect``, and ``HTTPException`` of the host (`endpoint.Endpoint.error`).
    """
    front_end = front_end_of(request)
    request, document = await read_document(request, front_end.settings, api.more_values)
    try:
        async with leased(api, request, document, front_end) as lease:
            seed = id_seed or uuid4().hex
            return await handler(Received(api, front_end, request, document, lease, seed))
    except NotHarmony:
        try:
            return await front_end.host.forward(request)
        except LookupError as error:
            problem = f"{request.url.path} is not available for this model"
            raise RequestError(problem, status=404, param="model") from error


async def count(api: Api, request: Request, body: Callable[[int], dict[str, Any]]) -> Response:
    """The response to a request that counts the tokens of a prompt; ``body`` makes its JSON."""

    async def counted(received: Received) -> Response:
        return JSONResponse(body(len(await rendered_prompt(received))))

    return await serve(api, request, counted)


async def rendered_prompt(received: Received) -> tuple[int, ...]:
    """The prompt of a request that is not generated from. Releases the lease."""
    parsed = await parse(received)
    turns = _reusable_turns(received)
    await received.lease.release()  # rendering may take long, and needs no engine
    context, *_ = await _contexts(parsed, ResponseInfo("", 0, ""), turns)
    return context.render_for_completion()


@asynccontextmanager
async def leased(
    api: Api, request: Request, document: Document, front_end: FrontEnd
) -> AsyncIterator[Lease]:
    """A lease of the engine that ``document`` asks for.

    It is released at the end of the block, unless it is handed over to an ``Answer``. Raises
    ``HarmonyFailure``, and what ``Host.acquire`` raises.
    """
    host, caller = front_end.host, Caller(front_end, tenant_of(request))
    model, timeout = _routing(document.value)
    name = None if model is None else front_end.names.canonical_name(model)
    if name is None and host.model_name is None:  # there are several models
        await reject_invalid(api, document, caller)
        raise RequestError("model must be a string", param="model")
    if await host.must_load(name):
        await reject_invalid(api, document, caller)
    async with await host.acquire(request, name, host.deadline(timeout)) as lease:
        yield lease


def _routing(document: object) -> tuple[str | None, float | None]:
    """``model`` and ``timeout`` of an unvalidated body; each ``None`` if missing or malformed."""
    if not isinstance(document, dict):
        return None, None
    model, timeout = document.get("model"), document.get("timeout")
    if isinstance(model, str):
        check_length(model)
    valid = isinstance(timeout, (int, float)) and 0 < timeout < MAX_TIMEOUT
    return model if isinstance(model, str) else None, timeout if valid else None


async def reject_invalid(api: Api, document: Document, caller: Caller) -> None:
    """Raises the error of an invalid request, so that no model is loaded for it.

    Requests that name tool servers by URL are not checked, because that connects to the servers.
    """
    host = caller.front_end.host
    defaults = host.defaults(None)
    if (toolbox := host.toolbox) is not None:
        if api.servers(document.value, toolbox.labels):
            return
        defaults = with_tools(defaults, toolbox, ())
    await read(api, document, defaults, caller)


async def parse(received: Received) -> Parsed:
    """Reads the request in a document. Raises ``RequestError``."""
    api, host, lease = received.api, received.front_end.host, received.lease
    servers: Sequence[ToolServer] = ()
    defaults = host.defaults(lease.engine)
    if (toolbox := host.toolbox) is not None:
        if requested := api.servers(received.document.value, toolbox.labels):
            servers = await toolbox.clients.connected(requested, lease.tenant)
            lease.endings.push_async_callback(toolbox.clients.stop, servers)
        defaults = with_tools(defaults, toolbox, servers)
    request = await read(api, received.document, defaults, received.caller)
    return Parsed(received, request, replace(request.turn, tenant=lease.tenant), defaults, servers)


async def read(api: Api, document: Document, defaults: Defaults, caller: Caller) -> Any:
    """Calls ``api.read``, in a thread if that may take long."""
    if document.large or api.blocks:
        return await in_thread(api.read, document.value, defaults, caller)
    return api.read(document.value, defaults, caller)


async def prepare(received: Received) -> Job:
    """Everything before the answer.

    Raises ``HarmonyFailure`` for a request that is invalid, cannot be rendered, does not fit into
    the context, or cannot be enforced, and ``ClientDisconnect``.
    """
    api, front_end, lease = received.api, received.front_end, received.lease
    host = front_end.host
    parsed = await parse(received)
    request, turn = parsed.request, parsed.turn
    settings = sampling.resolve(
        turn.sampling, turn.limits, host.max_tokens, parsed.defaults.sampling
    )
    check_logprobs(lease, settings, api.logprobs)
    if front_end.observer_factories:
        settings = replace(settings, origins=True)
    if turn.prediction and lease.engine.has_prediction:  # a hint, as long as a body may be
        predicted = await in_thread(vocab.encode, turn.prediction[:CONTEXT_TOKENS])
        settings = replace(settings, prediction=tuple(predicted[:CONTEXT_TOKENS]))
    name = received.front_end.names.echoed_name(request.model)
    info = ResponseInfo(received.id_seed, int(time.time()), name)
    turns = _reusable_turns(received)
    context, *other_contexts = await _contexts(parsed, info, turns)
    prompt_tokens = len(context.render_for_completion())
    settings = sampling.limited_to_context(settings, prompt_tokens, lease.engine.context_length)
    wanted = front_end.enforcement
    if host.reasoning_tokens is not None:
        wanted = replace(wanted, reasoning_tokens=host.reasoning_tokens)
    constraint = None
    if not turn.answer:
        constraint = await constraint_for(turn, context.names, wanted)
    tools = None
    if host.toolbox is not None and turn.namespaces:
        seconds = lease.deadline.total
        prompt = context.render_for_completion()
        pages = await in_thread(prompt_pages, prompt) if turn.has_browser else {}
        tools = TurnTools(host.toolbox, turn, context.names, wanted, seconds, parsed.servers, pages)
    job = Job(
        lease,
        context,
        settings,
        api.emitter(request, info, context, received.caller),
        stream=request.stream,
        id_seed=received.id_seed,
        model=name,
        server_settings=front_end.settings,
        constraint=constraint,
        replay=turns,
        echoed=request.echoed,
        tools=tools,
        comments_progress=api.comments_progress and request.stream,
        reports_cached=api.reports_cached,
        answer=turn.answer,
        cited=api.cited,
    )
    if not other_contexts:
        return job
    choices = (
        replace(
            job,
            context=other,
            settings=sampling.reseeded(job.settings, choice),
            constraint=None if constraint is None else Constraint(constraint.spec),
            tools=None if tools is None else tools.fresh(),
        )
        for choice, other in enumerate(other_contexts, start=1)
    )
    return replace(job, other_jobs=tuple(choices))


def check_logprobs(lease: Lease, settings: GenerationSettings, field: str) -> None:
    """Raises ``RequestError`` naming ``field`` if the engine does not return log probabilities."""
    if settings.top_logprobs is not None and not lease.engine.has_logprobs:
        raise unsupported(field, f"{field}: this server's engine does not return log probabilities")


async def _contexts(parsed: Parsed, info: ResponseInfo, turns: ReplayScope | None) -> list[Context]:
    """The context of each choice. Renders the turn, in a thread if that may take long.

    Tools may be large even if the body is small, since a schema can use a ``$ref`` many times.
    """
    host, turn = parsed.received.front_end.host, parsed.turn
    renderer = partial(host.renderer, replay=turns)
    blocks = turns is not None and turns.blocks

    def render() -> list[Context]:
        if turn.choices == 1:
            return [host.context(turn, info, renderer)]
        rendered = renderer(turn)

        # The choices share one rendering; a tool result renders a changed turn.
        def render_once(requested: Turn) -> Rendered:
            return rendered if requested is turn else renderer(requested)

        infos = (replace(info, choice=choice) for choice in range(turn.choices))
        return [host.context(turn, of_choice, render_once) for of_choice in infos]

    try:
        if not (parsed.received.document.large or turn.tools or turn.characters >= LARGE or blocks):
            return render()
        return await in_thread(render)
    except PromptTooLong as error:  # the renderer does not know the window of the engine
        window = parsed.received.lease.engine.context_length
        if window is None:
            raise
        raise error.within(window) from error


def _reusable_turns(received: Received) -> ReplayScope | None:
    """The turns that the prompt may reuse: those of the same model and tenant."""
    turns, lease = received.front_end.turns, received.lease
    return None if turns is None else turns.view(f"{lease.engine.model}\0{lease.tenant}")


async def respond(received: Received, job: Job) -> Response:
    """The response, streamed or whole as requested.

    The headers of a stream are sent with the first event. Errors before that have an HTTP status.
    """
    answer = received.answer(job)
    try:
        # If no time is left, the answer itself raises the error and counts it as a timeout.
        if not job.stream:
            document = await received.unless_disconnected(answer.document())
            if not received.document.large:
                return JSONResponse(document)
            # Responses repeats the request's tools and instructions.
            text = await in_thread(encode_in_chunks, document)
            return Response(text, media_type=JSONResponse.media_type)
        await received.unless_disconnected(answer.first_event())
        return EventStream(received.request, answer, received.api.framing)
    except BaseException as error:
        # An answer that failed by itself has already recorded its result.
        await answer.aclose("timeout" if isinstance(error, HostError) else "client_closed")
        raise
