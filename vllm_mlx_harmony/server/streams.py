"""Streams over HTTP, and clients that disconnect.

A client may stop reading without closing its connection. So every write has a time limit
(``send_with_timeout``), after which the connection is aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_mlx_harmony import tasks
from vllm_mlx_harmony.protocols.events import Event, frame, line
from vllm_mlx_harmony.server.front_end import front_end_of
from vllm_mlx_harmony.server.host import Deadline

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Framing:
    """How events are written in the body of a response."""

    media_type: str
    frame: Callable[[Event], str]


SERVER_SENT_EVENTS = Framing("text/event-stream", frame)
LINES = Framing("application/x-ndjson", line)


class EventStream(StreamingResponse):
    """Streams ``events``, and closes the iterator when the client disconnects.

    ``readable`` returns those that can be read already, which are sent together.

    Starlette would leave the iterator to the garbage collector, which may run much later; the
    engine would be busy until then. Its task group for watching the client costs several times as
    much as ``unless_disconnected``.
    """

    def __init__(
        self,
        request: Request,
        events: AsyncIterator[Event],
        framing: Framing = SERVER_SENT_EVENTS,
        readable: Callable[[], Iterable[Event]] = tuple,
    ) -> None:
        super().__init__((), media_type=framing.media_type)
        self._frame = framing.frame
        self._request, self._events, self._readable = request, events, readable
        self._read_to_end = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = transport_of(self._request)
        if transport is not None and not transport.is_closing():  # uvloop's raises when closed
            # Each write waits until the previous one has left the process. Otherwise the end of an
            # answer would be in asyncio's own buffer, which nothing waits for.
            transport.set_write_buffer_limits(high=0)
        give_up = partial(abort_connection, transport)
        seconds = front_end_of(self._request).settings.stream_seconds
        try:
            with (
                send_with_timeout(seconds, send, give_up) as sending,
                suppress(ClientDisconnect),
            ):
                await unless_disconnected(self.stream_response(sending), self._request)
        except OSError as error:  # from servers of ASGI 2.4 or later, for a client that has gone
            raise ClientDisconnect from error
        finally:
            # A separate task, because this one may be cancelled together with what it awaits.
            if not self._read_to_end:
                tasks.start(_close(self._events))
            if transport is not None and not transport.is_closing():
                transport.set_write_buffer_limits()  # a later response may use this connection

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async for event in self._events:
            data = "".join(map(self._frame, (event, *self._readable()))).encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        self._read_to_end = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _close(events: AsyncIterator[Event]) -> None:
    # aclose() raises if the generator is still running in another task.
    with suppress(RuntimeError):
        await events.aclose()  # type: ignore[attr-defined]


async def unless_disconnected(
    coming: Awaitable[T], request: Request, deadline: Deadline | None = None
) -> T:
    """Awaits ``coming``, and cancels it if the client disconnects first.

    The request's body must have been read. Raises ``ClientDisconnect``, and ``HostError`` 504 at
    the ``deadline``. If it has already passed, waits one second more, so that ``coming`` can raise
    its own error.
    """
    task = asyncio.ensure_future(coming)
    gone = asyncio.ensure_future(_disconnected(request))
    ends: set[asyncio.Future[Any]] = {task, gone}
    try:
        seconds = None if deadline is None else deadline.left or 1.0
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if deadline is not None and not gone.done():
            raise deadline.timeout_error()
        raise ClientDisconnect
    finally:
        gone.cancel()
        if not task.done():
            await tasks.cancel_and_wait(task)


async def _disconnected(request: Request) -> None:
    """Returns once the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


TRANSPORT = "vllm_mlx_harmony.transport"
"""Where the scope of a request has the transport of its connection (`middleware`)."""


def transport_of(connection: HTTPConnection) -> asyncio.WriteTransport | None:
    """The transport of the connection, if known. It is aborted if the client stops reading."""
    found: asyncio.WriteTransport | None = connection.scope.get(TRANSPORT)
    return found


def abort_connection(transport: asyncio.WriteTransport | None) -> None:
    """Aborts a connection. Unread bytes are lost."""
    if transport is not None:
        transport.abort()


@contextmanager
def send_with_timeout(
    seconds: float, send: Callable[[T], Awaitable[None]], give_up: Callable[[], object]
) -> Iterator[Callable[[T], Coroutine[Any, Any, None]]]:
    """Yields a ``send`` that calls ``give_up`` if one call takes longer than ``seconds``."""

    def late() -> None:
        logger.info("disconnecting a client that has read nothing for %.0f seconds", seconds)
        give_up()

    timer = tasks.Timer(seconds, late)

    async def sending(message: T) -> None:
        timer.start()
        try:
            await send(message)
        finally:
            timer.stop()

    try:
        yield sending
    finally:
        timer.close()
