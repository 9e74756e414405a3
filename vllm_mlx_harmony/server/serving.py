"""A request read, run on its engine and answered: one function for every API.

Knows HTTP and what the host does around a request. Refuses to know which routes there are (routes)
and what any API's bodies and events look like (protocols).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import HarmonyFailure, RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.replay import ReplayScope
from vllm_mlx_harmony.core.turn import Defaults, Message, ResponseInfo, Turn
from vllm_mlx_harmony.protocols.client_servers import ClientServer
from vllm_mlx_harmony.protocols.events import Event, frame
from vllm_mlx_harmony.server import cancellations, replay
from vllm_mlx_harmony.server.body import LARGE, Document, bounded, in_thread, parse_body
from vllm_mlx_harmony.server.enforcement import UnlessGone, constraint_for
from vllm_mlx_harmony.server.errors import error_response, failure_of, logged_failure
from vllm_mlx_harmony.server.generation import Deltas, Job, run
from vllm_mlx_harmony.server.host import Context, Deadline, Host, Lease, host_of, tenant_of
from vllm_mlx_harmony.server.model_names import own_name, response_name
from vllm_mlx_harmony.server.sampling import capped, resolve
from vllm_mlx_harmony.server.streams import Emitter, EventBuffer, EventStream, written
from vllm_mlx_harmony.server.tools.client_servers import ConnectedServer, stop
from vllm_mlx_harmony.server.tools.turn_tools import TurnTools, with_tools

logger = logging.getLogger(__name__)

LONGEST = 1e9
"""Seconds. A request may not take longer: no clock could be set to when its time is over."""


LONGEST_NAME = 4_096
"""Characters of a model's name, which may be a path."""


class ParsedRequest(Protocol):
    """A request that can be run."""

    @property
    def turn(self) -> Turn:
        """What to ask the model."""

    @property
    def model(self) -> str:
        """The model's name as the request gave it."""

    @property
    def stream(self) -> bool:
        """Whether the answer is sent as it comes."""

    def emitter(self, info: ResponseInfo) -> Emitter:
        """The writer of the answer."""

    def echoed(self, message: Message) -> Message:
        """A message of the answer, as it is read when a client gives it back."""


@dataclass(frozen=True, slots=True)
class Api:
    """What makes one API out of ``serve``.

    ``name``: what the host's metrics call it. ``prefix``: what its paths begin with; every error
    below it, also a middleware's, is written by ``error_body``. ``frame`` writes one event of a
    stream. ``ping`` is sent while a stream is silent, where the API has such an event. ``writer``
    replaces the request's own emitter. ``blocks``: ``read`` may wait for a disk or a network, and
    runs in a thread. ``reports_cached``: a stream begins with the usage of the prompt. ``servers``:
    the tool servers that a body names by their URLs, where the operator's have these labels.
    """

    name: str
    read: Callable[[object, Defaults, str], ParsedRequest]
    error_body: Callable[[HarmonyFailure], dict[str, Any]]
    prefix: str = ""
    frame: Callable[[Event], str] = frame
    ping: Event | None = None
    writer: Callable[[Any, ResponseInfo, Context, str], Emitter] | None = None
    blocks: bool = False
    reports_cached: bool = False
    servers: Callable[[object, Collection[str]], Sequence[ClientServer]] = lambda body, labels: ()

    async def parsed(self, document: Document, defaults: Defaults, tenant: str) -> Any:
        """The request in ``document``, from ``tenant``. Raises ``RequestError``."""
        if document.large:
            return await in_thread(self.read, document.value, defaults, tenant)
        if self.blocks:
            return await asyncio.to_thread(self.read, document.value, defaults, tenant)
        return self.read(document.value, defaults, tenant)

    def emitter(
        self, parsed: ParsedRequest, info: ResponseInfo, context: Context, tenant: str
    ) -> Emitter:
        """The emitter for the answer to ``parsed``; ``context`` holds its conversation."""
        if self.writer is None:
            return parsed.emitter(info)
        return self.writer(parsed, info, context, tenant)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that was read and rendered: what is left is to run it."""

    api: Api
    parsed: Any
    info: ResponseInfo
    job: Job
    emitter: Any


Answer: TypeAlias = "Callable[[Request, PreparedRequest], Awaitable[Response]]"


async def serve(
    api: Api, request: Request, id_seed: str = "", answer: Answer | None = None
) -> Response:
    """The answer to a request in ``api``'s shape, errors included.

    ``id_seed`` is what the answer's ids are made from; a new one when it is not given. ``answer``,
    if given, is called with the prepared request in place of ``respond``. A request for a model
    that is not Harmony is answered by the host, as if we were not there.
    """
    try:
        request = bounded(request)
        document = await parse_body(await request.body())
        async with leased(api, request, document) as lease:
            if lease.engine is None:
                return await _forwarded(request, lease)
            host = host_of(request)
            gone = watch(host, request, lease.deadline)
            seed = id_seed or uuid4().hex
            prepared = await prepare(api, host, document, lease, seed, unless_gone=gone)
            if answer is not None:
                return await answer(request, prepared)
            return await respond(request, prepared, run(prepared.job))
    except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
        return error_answer(api, error)


async def count(api: Api, request: Request, body: Callable[[int], dict[str, Any]]) -> Response:
    """How many tokens a request's prompt has, as ``body`` writes it; nothing is generated."""
    try:
        request = bounded(request)
        document = await parse_body(await request.body())
        async with leased(api, request, document) as lease:
            if lease.engine is None:
                return await _forwarded(request, lease)
            host = host_of(request)
            given = await _given(api, host, document, lease)
            defaults = with_tools(host.defaults(None), host.toolbox, given)
            parsed = await api.parsed(document, defaults, lease.tenant)
            turn = replace(parsed.turn, tenant=lease.tenant)
            remembered = replay.view(host, lease)
            await lease.release()
            context = await _context(
                host, turn, ResponseInfo("", 0, ""), remembered, document.large
            )
            return JSONResponse(body(len(context.render_for_completion())))
    except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
        return error_answer(api, error)


def error_answer(api: Api, error: Exception) -> Response:
    """What a client is answered when its request raises ``error``, in ``api``'s shape."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED)
    if isinstance(error, (HarmonyFailure, HTTPException)):
        return error_response(api.error_body, failure_of(error))
    return error_response(api.error_body, logged_failure(error, "a request failed"))


@asynccontextmanager
async def leased(api: Api, request: Request, document: Document) -> AsyncIterator[Lease]:
    """The engine that ``document`` is for, lent for as long as the request may take.

    It is given back at the end of the block, unless somebody in it has taken the lease over: `run`,
    as a rule. Raises ``HarmonyFailure``, the host's ``HTTPException``, and ``ClientDisconnect``
    when the client has gone meanwhile.
    """
    host = host_of(request)
    model, timeout = _routing(document.value)
    if model is None and host.model_name is None:  # there are several
        await api.parsed(document, host.defaults(None), tenant_of(request))
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


async def _forwarded(request: Request, lease: Lease) -> Response:
    """The host's own answer: the model is not Harmony. 404 where it has no such route."""
    await lease.release()
    try:
        return await host_of(request).forward(request)
    except LookupError as error:
        problem = f"{request.url.path} is not served for this model"
        raise RequestError(problem, status=404, param="model") from error


CLIENT_CLOSED = 499
"""nginx's number for a client that has gone, as the host uses it. Nobody reads it."""


def _routing(document: object) -> tuple[str | None, float | None]:
    """``model`` and ``timeout``, each ``None`` unless it is valid: the request is checked later.

    Raises ``RequestError`` for a name that nothing can have: logs and errors would repeat it.
    """
    if not isinstance(document, dict):
        return None, None
    model, timeout = document.get("model"), document.get("timeout")
    if isinstance(model, str) and len(model) > LONGEST_NAME:
        problem = f"the name of a model has no more than {LONGEST_NAME} characters"
        raise RequestError(problem, param="model", code="model_not_found", status=404)
    valid = isinstance(timeout, (int, float)) and 0 < timeout < LONGEST
    return model if isinstance(model, str) else None, timeout if valid else None


def watch(host: Host, request: Request, deadline: Deadline) -> UnlessGone:
    """Awaits something while ``request`` has a client, until its ``deadline``."""

    async def unless_gone(coming: Awaitable[Any]) -> Any:
        return await host.unless_gone(coming, request, deadline.remaining(), deadline.total)

    return unless_gone


async def prepare(
    api: Api,
    host: Host,
    document: Document,
    lease: Lease,
    id_seed: str,
    *,
    unless_gone: UnlessGone | None = None,
) -> PreparedRequest:
    """The request, read and rendered; ids are made from ``id_seed``.

    ``unless_gone`` watches its client where that takes long. Raises ``HarmonyFailure``, and
    ``ClientDisconnect``.
    """
    given = await _given(api, host, document, lease)
    defaults = with_tools(host.defaults(lease.engine), host.toolbox, given)
    parsed = await api.parsed(document, defaults, lease.tenant)
    info = ResponseInfo(id_seed, int(time.time()), response_name(parsed.model, host.model_name))
    settings = resolve(parsed.turn.sampling, parsed.turn.limits, host.max_tokens, defaults.sampling)
    remembered = replay.view(host, lease)
    turn = replace(parsed.turn, tenant=lease.tenant)
    context = await _context(host, turn, info, remembered, document.large)
    names = getattr(context, "names", None) or Names.of(turn)
    constraint = await constraint_for(turn, names, host.reasoning_tokens, unless_gone)
    prompt_tokens = len(context.render_for_completion())
    job = Job(
        lease=lease,
        context=context,
        settings=capped(settings, prompt_tokens, lease.harmony.context_length),
        tracker=host.tracker(api.name, stream=parsed.stream),
        replay=remembered,
        echoed=parsed.echoed,
        reports_cached=api.reports_cached and parsed.stream,
        id_seed=id_seed,
        constraint=constraint,
        tools=TurnTools.of(host, turn, names, lease.deadline, given),
    )
    emitter = api.emitter(parsed, info, context, lease.tenant)
    cancellations.watch()
    return PreparedRequest(api, parsed, info, job, emitter)


async def _given(
    api: Api, host: Host, document: Document, lease: Lease
) -> Sequence[ConnectedServer]:
    """The tool servers that the request names by their URLs, until ``lease`` is released.

    None where the server runs no tools. Raises ``RequestError``.
    """
    if host.toolbox is None:
        return ()
    labels = [each.label for each in host.toolbox.servers]
    requested = api.servers(document.value, labels)
    if not requested:
        return ()
    servers = await host.toolbox.clients.connected(requested, lease.tenant)
    lease.on_release(partial(stop, servers))
    return servers


async def respond(request: Request, prepared: PreparedRequest, deltas: Deltas) -> Response:
    """The answer to ``prepared``, made of ``deltas``: streamed or whole, as it was asked for."""
    host, api, deadline = host_of(request), prepared.api, prepared.job.lease.deadline
    try:
        seconds = deadline.remaining()
    except HarmonyFailure:
        prepared.job.tracker.finish(result="timeout")  # nothing has run that would say so
        raise
    if not prepared.parsed.stream:
        result = await host.unless_gone(
            _collected(deltas, prepared.emitter), request, seconds, deadline.total
        )
        return Response(status_code=CLIENT_CLOSED) if result is None else JSONResponse(result)
    # Headers go out when this request has the engine: until then errors have a status of their own.
    # A second more, so that the limit of the queue is first: its error says what was waited for.
    first = await host.unless_gone(anext(deltas), request, seconds + 1.0, deadline.total)
    if first is None:
        return Response(status_code=CLIENT_CLOSED)
    waits = prepared.job.lease.harmony.remote
    events = EventBuffer(written(first, deltas, prepared.emitter), api.ping, waits=waits)
    return EventStream(request, events, api.frame)


async def _collected(deltas: Deltas, emitter: Emitter) -> dict[str, Any]:
    async with aclosing(deltas):
        async for group in deltas:
            for delta in group:
                emitter.feed(delta)
    return emitter.result()


async def _context(
    host: Host, turn: Turn, info: ResponseInfo, remembered: ReplayScope | None, large: bool
) -> Context:
    """The turn, rendered; not on the event loop when that may take long.

    A small body may have large tools: a ``$ref`` can stand in it any number of times.
    """
    renderer = replay.replaying(host.renderer, remembered)
    waits = remembered is not None and remembered.blocks
    if not (large or turn.tools or turn.characters >= LARGE or waits):
        return host.context(turn, info, renderer)
    return await in_thread(host.context, turn, info, renderer)
