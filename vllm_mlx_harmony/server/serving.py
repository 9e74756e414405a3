"""A request, from its body to its answer: one line of values for every API.

    Document ─▶ Received ─▶ Parsed ─▶ Resolved ─▶ Rendered ─▶ Prepared ─▶ Answer ─▶ Response
            leased     parse     resolve     render    constrain     begin    respond

Each step is a function of the value before it and knows nothing of the next. Until ``begin`` all of
them may refuse the request, and nothing has to be undone but the lease, which ``serve`` releases.
From ``begin`` on the ``Answer`` owns everything, the accounting of the request included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.errors import HarmonyFailure, RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.replay import ReplayScope
from vllm_mlx_harmony.core.turn import Defaults, Message, ResponseInfo, Turn
from vllm_mlx_harmony.protocols.client_servers import ClientServer
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server import cancellations, replay, sampling
from vllm_mlx_harmony.server.answer import Answer, Emitter, End, dropped
from vllm_mlx_harmony.server.body import LARGE, Document, bounded, in_thread, parse_body
from vllm_mlx_harmony.server.enforcement import constraint_for
from vllm_mlx_harmony.server.errors import error_response, failure_of, logged_failure
from vllm_mlx_harmony.server.generation import Job, run
from vllm_mlx_harmony.server.host import Context, Host, Lease, host_of, tenant_of
from vllm_mlx_harmony.server.model_names import own_name, response_name
from vllm_mlx_harmony.server.sampling import Settings
from vllm_mlx_harmony.server.streams import EventStream
from vllm_mlx_harmony.server.tools.client_servers import ConnectedServer, stop
from vllm_mlx_harmony.server.tools.turn_tools import TurnTools, with_tools

T = TypeVar("T")

LONGEST = 1e9
"""Seconds that a request may ask for: no timer can be set to a later time."""

LONGEST_NAME = 4_096
"""Characters of a model's name, which may be a path."""

CLIENT_CLOSED = 499
"""nginx's status for a client that has gone, as the host uses it. It is never read."""


class ParsedRequest(Protocol):
    """A request in an API's shape that can be run."""

    @property
    def turn(self) -> Turn:
        """What to ask the model."""

    @property
    def model(self) -> str:
        """The model's name as the request has it."""

    @property
    def stream(self) -> bool:
        """Whether the answer is streamed."""

    def emitter(self, info: ResponseInfo) -> Emitter:
        """The writer of the answer."""

    def echoed(self, message: Message) -> Message:
        """A message of the answer, as it is read when a client sends it back."""


@dataclass(frozen=True, slots=True)
class Api:
    """What an API adds to the line.

    ``name``: what the host's metrics call it. ``prefix``: what its paths begin with; every error
    below it, also a middleware's, is written by ``error_body``. ``read`` makes a ``ParsedRequest``
    of a document; ``blocks``: it may wait for a disk or a network, and runs in a thread.
    ``servers`` reads the tool servers that a document names by their URLs, where the operator's
    have these labels. ``emitter`` makes the writer of the answer. ``ping`` is sent while a stream
    is silent. ``reports_cached``: a stream begins with the usage of the prompt.
    ``comments_progress``: until the first token, comments in a stream say how far the prompt is.
    """

    name: str
    read: Callable[[object, Defaults, str], Any]
    error_body: Callable[[HarmonyFailure], dict[str, Any]]
    prefix: str = ""
    blocks: bool = False
    servers: Callable[[object, Collection[str]], Sequence[ClientServer]] = lambda body, labels: ()
    emitter: Callable[[Any, ResponseInfo, Context, str], Any] = (
        lambda parsed, info, context, tenant: parsed.emitter(info)
    )
    ping: Event | None = None
    reports_cached: bool = False
    comments_progress: bool = False


# --- The values


@dataclass(frozen=True, slots=True)
class Received:
    """A document, and the engine that is lent to it.

    Ids of the answer are made from ``id_seed``. ``watched``: the request is an exchange of its own,
    which ends when the client goes.
    """

    api: Api
    request: Request
    document: Document
    lease: Lease
    id_seed: str
    watched: bool = True

    @property
    def host(self) -> Host:
        """The host that it came to."""
        return host_of(self.request)

    async def unless_gone(self, coming: Awaitable[T]) -> T | None:
        """What is ``coming``; ``None`` when the client has gone, and then it is cancelled.

        Raises ``HostError`` and ``HTTPException`` 504 at the deadline.
        """
        if not self.watched:
            return await coming
        deadline = self.lease.deadline
        seconds = deadline.remaining()
        return await self.host.unless_gone(coming, self.request, seconds, deadline.total)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The request in its API's shape, and the turn that it asks for.

    ``defaults`` are the server's for it, ``servers`` the tool servers that it names.
    """

    received: Received
    request: Any
    turn: Turn
    defaults: Defaults
    servers: Sequence[ConnectedServer]


@dataclass(frozen=True, slots=True)
class Resolved:
    """How ids are drawn for the request, with the server's defaults, and who answers it."""

    parsed: Parsed
    settings: Settings
    info: ResponseInfo


@dataclass(frozen=True, slots=True)
class Rendered:
    """The request as a prompt; ``replay``: the generated turns that it may be rendered from."""

    resolved: Resolved
    context: Context
    replay: ReplayScope | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to run. Nothing has been computed or accounted for."""

    received: Received
    stream: bool
    context: Context
    settings: Settings
    constraint: Constraint | None
    emitter: Any
    request: Any = None
    replay: ReplayScope | None = None
    echoed: Callable[[Message], Message] = lambda message: message
    tools: TurnTools | None = None


Respond: TypeAlias = "Callable[[Received], Awaitable[Response]]"


# --- A request over HTTP


async def serve(
    api: Api, request: Request, respond: Respond | None = None, id_seed: str = ""
) -> Response:
    """The answer to a request in ``api``'s shape, errors included.

    ``respond`` answers in place of ``generate``. A request for a model that is not Harmony is
    answered by the host, as if this front end were not there.
    """
    try:
        request = bounded(request)
        document = await parse_body(await request.body())
        async with leased(api, request, document) as lease:
            if lease.engine is None:
                return await _forwarded(request, lease)
            received = Received(api, request, document, lease, id_seed or uuid4().hex)
            return await (respond or generate)(received)
    except Exception as error:  # noqa: BLE001 - every error is answered in the API's shape
        return error_answer(api, error)


async def generate(received: Received) -> Response:
    """The model's answer."""
    return await respond(await prepare(received))


async def count(api: Api, request: Request, body: Callable[[int], dict[str, Any]]) -> Response:
    """The number of tokens of a request's prompt, as ``body`` writes it; nothing is generated."""

    async def counted(received: Received) -> Response:
        parsed = await parse(received)
        remembered = replay.view(received.host, received.lease)
        await received.lease.release()
        context = await _context(parsed, ResponseInfo("", 0, ""), remembered)
        return JSONResponse(body(len(context.render_for_completion())))

    return await serve(api, request, counted)


def error_answer(api: Api, error: Exception) -> Response:
    """``error`` as an answer in ``api``'s shape."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED)
    if isinstance(error, (HarmonyFailure, HTTPException)):
        return error_response(api.error_body, failure_of(error))
    return error_response(api.error_body, logged_failure(error, "a request failed"))


@asynccontextmanager
async def leased(api: Api, request: Request, document: Document) -> AsyncIterator[Lease]:
    """The engine for ``document``, lent for as long as the request may take.

    It is released at the end of the block, unless an ``Answer`` has taken it over. Raises
    ``HarmonyFailure``, the host's ``HTTPException``, and ``ClientDisconnect`` when the client has
    gone meanwhile.
    """
    host = host_of(request)
    model, timeout = _routing(document.value)
    if model is None and host.model_name is None:  # there are several
        await _read(api, document, host.defaults(None), tenant_of(request))
        raise RequestError("model must be a string", param="model")
    own = None if model is None else own_name(model, host.model_name)
    lease = await host.acquire(request, own, host.deadline(timeout))
    if lease is None:
        raise ClientDisconnect
    try:
        yield lease
    finally:
        if not lease.taken_over:
            await lease.release()


def _routing(document: object) -> tuple[str | None, float | None]:
    """``model`` and ``timeout``, each ``None`` unless it is valid: the request is checked later.

    Raises ``RequestError`` for a name that no model can have: logs and errors would repeat it.
    """
    if not isinstance(document, dict):
        return None, None
    model, timeout = document.get("model"), document.get("timeout")
    if isinstance(model, str) and len(model) > LONGEST_NAME:
        problem = f"the name of a model has no more than {LONGEST_NAME} characters"
        raise RequestError(problem, param="model", code="model_not_found", status=404)
    valid = isinstance(timeout, (int, float)) and 0 < timeout < LONGEST
    return model if isinstance(model, str) else None, timeout if valid else None


async def _forwarded(request: Request, lease: Lease) -> Response:
    """The host's own answer: the model is not Harmony. 404 where it has no such route."""
    await lease.release()
    try:
        return await host_of(request).forward(request)
    except LookupError as error:
        problem = f"{request.url.path} is not served for this model"
        raise RequestError(problem, status=404, param="model") from error


# --- The line


async def prepare(received: Received) -> Prepared:
    """All steps before the first that computes. Raises ``HarmonyFailure``, ``ClientDisconnect``."""
    parsed = await parse(received)
    return await constrain(await render(resolve(parsed)))


async def parse(received: Received) -> Parsed:
    """The request, read from its document. Raises ``RequestError``."""
    api, host, lease = received.api, received.host, received.lease
    servers: Sequence[ConnectedServer] = ()
    if host.toolbox is not None:
        labels = [each.label for each in host.toolbox.servers]
        if requested := api.servers(received.document.value, labels):
            servers = await host.toolbox.clients.connected(requested, lease.tenant)
            lease.on_release(partial(stop, servers))
    defaults = with_tools(host.defaults(lease.engine), host.toolbox, servers)
    request = await _read(api, received.document, defaults, lease.tenant)
    return Parsed(received, request, replace(request.turn, tenant=lease.tenant), defaults, servers)


async def _read(api: Api, document: Document, defaults: Defaults, tenant: str) -> Any:
    """The request of ``tenant`` in ``document``; not on the event loop when that may take long."""
    if document.large:
        return await in_thread(api.read, document.value, defaults, tenant)
    if api.blocks:
        return await asyncio.to_thread(api.read, document.value, defaults, tenant)
    return api.read(document.value, defaults, tenant)


def resolve(parsed: Parsed) -> Resolved:
    """What the request leaves open is the server's. Raises ``RequestError``."""
    host, turn = parsed.received.host, parsed.turn
    settings = sampling.resolve(
        turn.sampling, turn.limits, host.max_tokens, parsed.defaults.sampling
    )
    name = response_name(parsed.request.model, host.model_name)
    return Resolved(parsed, settings, ResponseInfo(parsed.received.id_seed, int(time.time()), name))


async def render(resolved: Resolved) -> Rendered:
    """The prompt. Raises ``RequestError`` for a turn that cannot be rendered."""
    received = resolved.parsed.received
    remembered = replay.view(received.host, received.lease)
    context = await _context(resolved.parsed, resolved.info, remembered)
    return Rendered(resolved, context, remembered)


async def _context(parsed: Parsed, info: ResponseInfo, remembered: ReplayScope | None) -> Context:
    """The turn, rendered; not on the event loop when that may take long.

    A small body may have large tools: a ``$ref`` can stand in it any number of times.
    """
    host, turn = parsed.received.host, parsed.turn
    renderer = replay.replaying(host.renderer, remembered)
    waits = remembered is not None and remembered.blocks
    if not (parsed.received.document.large or turn.tools or turn.characters >= LARGE or waits):
        return host.context(turn, info, renderer)
    return await in_thread(host.context, turn, info, renderer)


async def constrain(rendered: Rendered) -> Prepared:
    """What the output must match, how long it may be, and the tools that the server runs in it.

    Raises ``RequestError`` for what cannot be enforced and ``PromptTooLong``.
    """
    resolved, context = rendered.resolved, rendered.context
    parsed = resolved.parsed
    received, turn, request = parsed.received, parsed.turn, parsed.request
    host, lease = received.host, received.lease
    names = getattr(context, "names", None) or Names.of(turn)
    constraint = await constraint_for(turn, names, host.reasoning_tokens, received.unless_gone)
    prompt_tokens = len(context.render_for_completion())
    return Prepared(
        received,
        request.stream,
        context,
        sampling.capped(resolved.settings, prompt_tokens, lease.harmony.context_length),
        constraint,
        received.api.emitter(request, resolved.info, context, lease.tenant),
        request=request,
        replay=rendered.replay,
        echoed=request.echoed,
        tools=TurnTools.of(host, turn, names, lease.deadline, parsed.servers),
    )


def begin(prepared: Prepared) -> Job:
    """The request, accounted for from now on: an ``Answer`` must follow."""
    received = prepared.received
    api = received.api
    cancellations.watch()
    return Job(
        lease=received.lease,
        context=prepared.context,
        settings=prepared.settings,
        tracker=received.host.tracker(api.name, stream=prepared.stream),
        replay=prepared.replay,
        echoed=prepared.echoed,
        reports_cached=api.reports_cached and prepared.stream,
        id_seed=received.id_seed,
        constraint=prepared.constraint,
        tools=prepared.tools,
    )


async def respond(prepared: Prepared, end: End | None = None) -> Response:
    """The answer, streamed or whole as it was asked for; ``end`` as in ``Answer``.

    The headers of a stream are sent when the request has the engine: until then errors have a
    status of their own.
    """
    received, job = prepared.received, begin(prepared)
    host, request, deadline = received.host, received.request, job.lease.deadline
    keep = None if prepared.stream else dropped
    api = received.api
    answer = Answer(
        job,
        run(job),
        prepared.emitter,
        end=end,
        keep=keep,
        ping=api.ping,
        comments_progress=api.comments_progress and prepared.stream,
    )
    response: Response | None = None
    try:
        # Without any time left the answer says so itself, and is accounted for as late.
        seconds = deadline.left or 1.0
        if not prepared.stream:
            whole = await host.unless_gone(answer.whole(), request, seconds, deadline.total)
            return Response(status_code=CLIENT_CLOSED) if whole is None else JSONResponse(whole)
        if await host.unless_gone(answer.begun(), request, seconds, deadline.total):
            response = EventStream(request, answer)
        return response or Response(status_code=CLIENT_CLOSED)
    finally:
        if response is None:
            await answer.aclose()
