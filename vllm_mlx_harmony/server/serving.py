"""A request from its body to its response. All APIs share these steps:

1. ``serve`` parses the body, and leases an engine for it: ``LeasedRequest``.
2. ``read_turn_request`` has the API read the request: ``TurnRequest``.
3. ``prepare`` resolves the sampling settings, renders the prompt and makes the constraint: ``Job``.
4. ``respond`` starts the ``Answer`` to the job, and reads it.

Until there is an ``Answer``, every step may reject the request, and only the lease has to be
released, which ``serve`` does. The ``Answer`` owns the lease and the metrics of the request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Citation
from vllm_mlx_harmony.core.errors import HostError, PromptTooLong, RequestError
from vllm_mlx_harmony.core.names import Names
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
from vllm_mlx_harmony.server.settings import Enforcement
from vllm_mlx_harmony.server.streams import (
    SERVER_SENT_EVENTS,
    EventStream,
    Framing,
    unless_disconnected,
)
from vllm_mlx_harmony.server.tools.tool_server import ToolServer
from vllm_mlx_harmony.server.turn_tools import TurnTools, with_tools
from vllm_mlx_harmony.tasks import in_thread

T = TypeVar("T")

MAX_TIMEOUT = 1e9
"""Maximum timeout of a request in seconds: timers cannot be set much further ahead."""


class ApiRequest(Protocol):
    """A request for a turn, as its API reads it."""

    @property
    def turn(self) -> Turn: ...

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    def as_sent_back(self, message: Message) -> Message:
        """How ``message`` will be parsed when the client sends the answer back."""


R_co = TypeVar("R_co", covariant=True)
ApiRequestT = TypeVar("ApiRequestT", bound=ApiRequest)


@dataclass(frozen=True, slots=True)
class Api(Generic[R_co]):
    """What is specific to an API: what ``serve`` and ``respond`` need."""

    name: str
    """Its name in the host's metrics."""
    read: Callable[[object, Defaults, Caller], R_co]
    """Makes a request of a document. Raises ``RequestError``."""
    blocks: bool = False
    """Whether ``read`` waits for a disk or a network, and so runs in a thread."""
    servers: Callable[[object, Collection[str]], Sequence[ClientServer]] = lambda body, labels: ()
    """Returns the tool servers that a document names by URL, given the labels of the operator's."""
    more_values: int = 0
    """JSON values that a body may have beyond the limit (`body`)."""
    framing: Framing = SERVER_SENT_EVENTS


@dataclass(frozen=True, slots=True)
class TurnApi(Api[ApiRequestT]):
    """An API whose requests are turns: what ``prepare`` needs as well."""

    emitter: Callable[[ApiRequestT, ResponseInfo, Context, Caller], Emitter] = field(kw_only=True)
    """Makes the emitter of the answer to a request."""
    reports_cached: bool = False
    """Whether streams begin with the usage of the prompt."""
    comments_progress: bool = False
    """Whether comments in a stream report the progress of the prompt, until the first token."""
    logprobs_field: str = "logprobs"
    """The field that requests log probabilities."""
    citation_text: Callable[[Citation], str] = link
    """The text of a citation in an answer."""


ApiT = TypeVar("ApiT", bound=Api[Any])
ApiT_co = TypeVar("ApiT_co", bound=Api[Any], covariant=True)


@dataclass(frozen=True, slots=True)
class LeasedRequest(Generic[ApiT_co]):
    """A request's document, and the lease of its engine."""

    api: ApiT_co
    front_end: FrontEnd
    http_request: Request
    document: Document
    lease: Lease
    id_seed: str
    """Contained in all ids of the answer."""

    @property
    def caller(self) -> Caller:
        return Caller(self.front_end, self.lease.tenant)

    async def unless_disconnected(self, coming: Awaitable[T]) -> T:
        """Calls ``streams.unless_disconnected`` with the request and its deadline."""
        return await unless_disconnected(coming, self.http_request, self.lease.deadline)

    def start_answer(self, job: Job, **options: Any) -> Answer:
        """Starts the answer to ``job``, its metrics and observers; ``options`` as in ``Answer``.

        The answer gets the lease.
        """
        front_end = self.front_end
        observers: tuple[Observer, ...] = ()
        front_end.sharing.answer_begins()
        if front_end.observer_factories:
            request = self.http_request
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
class TurnRequest:
    """A request as its API has read it."""

    leased_request: LeasedRequest[Api[Any]]
    api_request: ApiRequest
    turn: Turn
    """With the tenant of the lease, which ``api_request.turn`` lacks."""
    defaults: Defaults
    """Those of the server."""
    servers: Sequence[ToolServer]
    """The tool servers that the request names by URL."""


LeasedTurnRequest: TypeAlias = LeasedRequest[TurnApi[Any]]


async def generate(leased_request: LeasedTurnRequest) -> Response:
    return await respond(leased_request, await prepare(leased_request))


async def serve(
    api: ApiT,
    request: Request,
    handler: Callable[[LeasedRequest[ApiT]], Awaitable[Response]],
    id_seed: str = "",
) -> Response:
    """The response to a request of ``api``, made by ``handler``.

    The host answers requests for models that are not Harmony models. Raises ``HarmonyFailure``,
    ``ClientDisconnect``, and ``HTTPException`` of the host (`endpoint.Endpoint.error`).
    """
    front_end = front_end_of(request)
    request, document = await read_document(request, front_end.settings, api.more_values)
    try:
        async with lease_for(api, request, document, front_end) as lease:
            seed = id_seed or uuid4().hex
            return await handler(LeasedRequest(api, front_end, request, document, lease, seed))
    except NotHarmony:
        try:
            return await front_end.host.forward(request)
        except LookupError as error:
            problem = f"{request.url.path} is not available for this model"
            raise RequestError(problem, status=404, param="model") from error


async def count(
    api: TurnApi[Any], request: Request, body: Callable[[int], dict[str, Any]]
) -> Response:
    """The response to a request that counts the tokens of a prompt; ``body`` makes its JSON."""

    async def counted(leased_request: LeasedTurnRequest) -> Response:
        return JSONResponse(body(len(await rendered_prompt(leased_request))))

    return await serve(api, request, counted)


async def rendered_prompt(leased_request: LeasedRequest[Api[Any]]) -> tuple[int, ...]:
    """The prompt of a request that is not generated from. Releases the lease."""
    turn_request = await read_turn_request(leased_request)
    replay = _reusable_turns(leased_request)
    await leased_request.lease.release()  # rendering may take long, and needs no engine
    context, *_ = await _contexts(turn_request, ResponseInfo("", 0, ""), replay)
    return context.render_for_completion()


@asynccontextmanager
async def lease_for(
    api: Api[Any], request: Request, document: Document, front_end: FrontEnd
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


async def reject_invalid(api: Api[Any], document: Document, caller: Caller) -> None:
    """Raises the error of an invalid request, so that no model is loaded for it.

    Requests that name tool servers by URL are not checked, because that connects to the servers.
    """
    host = caller.front_end.host
    defaults = host.defaults(None)
    if (toolbox := host.toolbox) is not None:
        if api.servers(document.value, toolbox.labels):
            return
        defaults = with_tools(defaults, toolbox, ())
    await read_request(api, document, defaults, caller)


async def read_turn_request(leased_request: LeasedRequest[Api[Any]]) -> TurnRequest:
    """Reads the request in a document. Raises ``RequestError``."""
    api, host, lease = leased_request.api, leased_request.front_end.host, leased_request.lease
    servers: Sequence[ToolServer] = ()
    defaults = host.defaults(lease.engine)
    if (toolbox := host.toolbox) is not None:
        if requested := api.servers(leased_request.document.value, toolbox.labels):
            servers = await toolbox.clients.connected(requested, lease.tenant)
            lease.endings.push_async_callback(toolbox.clients.stop, servers)
        defaults = with_tools(defaults, toolbox, servers)
    api_request = await read_request(api, leased_request.document, defaults, leased_request.caller)
    turn = replace(api_request.turn, tenant=lease.tenant)
    return TurnRequest(leased_request, api_request, turn, defaults, servers)


async def read_request(
    api: Api[R_co], document: Document, defaults: Defaults, caller: Caller
) -> R_co:
    """Calls ``api.read``, in a thread if that may take long."""
    if document.large or api.blocks:
        return await in_thread(api.read, document.value, defaults, caller)
    return api.read(document.value, defaults, caller)


async def prepare(leased_request: LeasedTurnRequest) -> Job:
    """Everything before the answer.

    Raises ``HarmonyFailure`` for a request that is invalid, cannot be rendered, does not fit into
    the context, or cannot be enforced, and ``ClientDisconnect``.
    """
    api, front_end, lease = leased_request.api, leased_request.front_end, leased_request.lease
    turn_request = await read_turn_request(leased_request)
    api_request, turn = turn_request.api_request, turn_request.turn
    settings = await _settings(turn_request)
    check_logprobs(lease, settings, api.logprobs_field)
    name = front_end.names.echoed_name(api_request.model)
    info = ResponseInfo(leased_request.id_seed, int(time.time()), name)
    replay = _reusable_turns(leased_request)
    context, *other_contexts = await _contexts(turn_request, info, replay)
    prompt = context.render_for_completion()
    settings = sampling.limited_to_context(settings, len(prompt), lease.engine.context_length)
    enforcement = front_end.enforcement
    if (reasoning_tokens := front_end.host.reasoning_tokens) is not None:
        enforcement = replace(enforcement, reasoning_tokens=reasoning_tokens)
    constraint = None
    if not turn.fixed_answer:
        constraint = await constraint_for(turn, context.names, enforcement)
    tools = await _turn_tools(turn_request, context.names, prompt, enforcement)
    job = Job(
        lease,
        context,
        settings,
        api.emitter(api_request, info, context, leased_request.caller),
        stream=api_request.stream,
        id_seed=leased_request.id_seed,
        model=name,
        server_settings=front_end.settings,
        constraint=constraint,
        replay=replay,
        as_sent_back=api_request.as_sent_back,
        tools=tools,
        comments_progress=api.comments_progress and api_request.stream,
        reports_cached=api.reports_cached,
        fixed_answer=turn.fixed_answer,
        citation_text=api.citation_text,
    )
    return replace(job, other_jobs=_other_choices(job, other_contexts))


async def _settings(turn_request: TurnRequest) -> GenerationSettings:
    """The settings of the request, not yet limited to the context."""
    leased_request, turn = turn_request.leased_request, turn_request.turn
    front_end, lease = leased_request.front_end, leased_request.lease
    settings = sampling.resolve(
        turn.sampling, turn.limits, front_end.host.max_tokens, turn_request.defaults.sampling
    )
    if front_end.observer_factories:
        settings = replace(settings, origins=True)
    if turn.prediction and lease.engine.has_prediction:  # a hint, as long as a body may be
        predicted = await in_thread(vocab.encode, turn.prediction[:CONTEXT_TOKENS])
        settings = replace(settings, prediction=tuple(predicted[:CONTEXT_TOKENS]))
    return settings


async def _turn_tools(
    turn_request: TurnRequest, names: Names, prompt: tuple[int, ...], enforcement: Enforcement
) -> TurnTools | None:
    """The tools that the server runs in a turn with this ``prompt``; ``None`` if there are none."""
    leased_request, turn = turn_request.leased_request, turn_request.turn
    toolbox = leased_request.front_end.host.toolbox
    if toolbox is None or not turn.namespaces:
        return None
    seconds = leased_request.lease.deadline.total
    pages = await in_thread(prompt_pages, prompt) if turn.has_browser else {}
    return TurnTools(toolbox, turn, names, enforcement, seconds, turn_request.servers, pages)


def _other_choices(job: Job, contexts: Iterable[Context]) -> tuple[Job, ...]:
    """The jobs of all choices but the first, which is ``job``."""
    constraint, tools = job.constraint, job.tools
    return tuple(
        replace(
            job,
            context=context,
            settings=sampling.reseeded(job.settings, choice),
            constraint=None if constraint is None else Constraint(constraint.spec),
            tools=None if tools is None else tools.fresh(),
        )
        for choice, context in enumerate(contexts, start=1)
    )


def check_logprobs(lease: Lease, settings: GenerationSettings, field: str) -> None:
    """Raises ``RequestError`` naming ``field`` if the engine does not return log probabilities."""
    if settings.top_logprobs is not None and not lease.engine.has_logprobs:
        raise unsupported(field, f"{field}: this server's engine does not return log probabilities")


async def _contexts(
    turn_request: TurnRequest, info: ResponseInfo, replay: ReplayScope | None
) -> list[Context]:
    """The context of each choice. Renders the turn, in a thread if that may take long.

    Tools may be large even if the body is small, since a schema can use a ``$ref`` many times.
    """
    leased_request, turn = turn_request.leased_request, turn_request.turn
    host = leased_request.front_end.host
    renderer = partial(host.renderer, replay=replay)
    is_long = leased_request.document.large or turn.tools or turn.characters >= LARGE

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
        if is_long or (replay is not None and replay.blocks):
            return await in_thread(render)
        return render()
    except PromptTooLong as error:  # the renderer does not know the window of the engine
        window = leased_request.lease.engine.context_length
        if window is None:
            raise
        raise error.within(window) from error


def _reusable_turns(leased_request: LeasedRequest[Api[Any]]) -> ReplayScope | None:
    """The turns that the prompt may reuse: those of the same model and tenant."""
    turns, lease = leased_request.front_end.turns, leased_request.lease
    return None if turns is None else turns.view(f"{lease.engine.model}\0{lease.tenant}")


async def respond(leased_request: LeasedRequest[Api[Any]], job: Job) -> Response:
    """The response, streamed or whole as requested.

    The headers of a stream are sent with the first event. Errors before that have an HTTP status.
    """
    answer = leased_request.start_answer(job)
    try:
        # If no time is left, the answer itself raises the error and counts it as a timeout.
        if not job.stream:
            document = await leased_request.unless_disconnected(answer.document())
            if not leased_request.document.large:
                return JSONResponse(document)
            # Responses repeats the request's tools and instructions.
            text = await in_thread(encode_in_chunks, document)
            return Response(text, media_type=JSONResponse.media_type)
        await leased_request.unless_disconnected(answer.first_event())
        http_request, framing = leased_request.http_request, leased_request.api.framing
        return EventStream(http_request, answer, framing, answer.readable)
    except BaseException as error:
        # An answer that failed by itself has already recorded its result.
        await answer.aclose("timeout" if isinstance(error, HostError) else "client_closed")
        raise
