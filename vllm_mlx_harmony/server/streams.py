"""An answer on its way to a reader: generated at the engine's pace, read at the client's.

An engine that waited for its readers would be held by the slowest of them. So it waits for nobody,
unless each request has a connection of its own to it (``Engine.remote``: then nothing is read from
that while the reader has enough to read):
what it generates goes into a buffer (``EventBuffer``), which is bounded. An answer that outgrows it
ends with an error, and the engine is free. Whatever is left in the buffer can still be read, unless
the client takes nothing for so long that its connection is given up (``within``).

Knows Starlette's streams. Refuses to know what an event says (protocols).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.protocols.events import Event, frame
from vllm_mlx_harmony.server.errors import logged_failure
from vllm_mlx_harmony.server.generation import Deltas
from vllm_mlx_harmony.server.host import host_of
from vllm_mlx_harmony.server.settings import number

logger = logging.getLogger(__name__)

CAPACITY_VARIABLE = "VLLM_MLX_HARMONY_STREAM_BYTES"
"""Environment variable: bytes of an answer that may wait for its reader."""

DEFAULT_CAPACITY = 8 * 1024 * 1024

HIGH_WATER = 128 * 1024
"""Unread bytes of an answer above which an engine that can wait does, until half are read."""

PIECE = 32 * 1024
"""Bytes of events that are sent at once, about."""

SECONDS_VARIABLE = "VLLM_MLX_HARMONY_STREAM_SECONDS"
"""Environment variable: seconds after which a client that takes nothing is given up."""

DEFAULT_SECONDS = 60

PING_VARIABLE = "VLLM_MLX_HARMONY_PING_SECONDS"
"""Environment variable: seconds of silence after which a stream says that it is alive, in APIs that
have a word for it; 0: never."""

DEFAULT_PING_SECONDS = 5

T = TypeVar("T")

Events: TypeAlias = AsyncGenerator[list[Event], None]
"""The events of an answer, in the groups they come in; a failure is among them, never raised."""


class Emitter(Protocol):
    """Writes one answer in the shape of an API."""

    def feed(self, delta: Delta) -> list[Event]:
        """What goes on the wire for ``delta``."""

    def result(self) -> dict[str, Any]:
        """The whole answer, when it is not streamed."""


async def written(first: list[Delta], deltas: Deltas, emitter: Emitter) -> Events:
    """The events of ``first`` and then of ``deltas``; a failure before the end makes events too."""
    ended = False
    try:
        async with aclosing(deltas):
            yield list(_fed(emitter, first))
            async for group in deltas:
                events = list(_fed(emitter, group))
                ended = ends(group)
                try:
                    yield events
                except HostError as failure:  # which is the answer's, too: it may be kept
                    await deltas.athrow(failure)
    except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
        if not ended:
            yield emitter.feed(Failed(logged_failure(error, "a stream failed")))


def ends(group: list[Delta]) -> bool:
    """Whether nothing comes after ``group``."""
    return any(isinstance(delta, (Finished, Failed)) for delta in group)


def _fed(emitter: Emitter, group: list[Delta]) -> Iterator[Event]:
    for delta in group:
        yield from emitter.feed(delta)


class EventBuffer:
    """The events of an answer, generated whether or not somebody reads, and read one by one.

    While more than ``capacity`` bytes wait to be read the answer is ended: ``HostError`` is thrown
    into ``events``, and what they make of it is the last that is read. The first group does not
    count: it repeats what the client has sent. ``ping`` is read after each silence of
    ``pings_after`` seconds, 0: never. ``waits``: the answer is not ended, but waits while
    ``HIGH_WATER`` bytes are unread. For one reader; closed, it frees the engine.
    """

    def __init__(
        self,
        events: Events,
        ping: Event | None = None,
        capacity: int | None = None,
        *,
        waits: bool = False,
        pings_after: float | None = None,
    ) -> None:
        self._events = events
        self._waits = waits
        self._read: asyncio.Future[None] | None = None
        if pings_after is None:
            pings_after = number(PING_VARIABLE, DEFAULT_PING_SECONDS)
        self._ping = ping if pings_after else None
        self._pings_after = pings_after
        self._capacity = (
            number(CAPACITY_VARIABLE, DEFAULT_CAPACITY) if capacity is None else capacity
        )
        self._waiting: deque[Event] = deque()
        self._bytes = 0
        self._more: asyncio.Future[None] | None = None
        self._entered = self._closed = False
        self._filling = asyncio.ensure_future(self._fill())
        self._filling.add_done_callback(self._wake)
        _unread.add(self)

    def __aiter__(self) -> EventBuffer:
        return self

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self._closed or self._filling.done():
                _unread.discard(self)
                if not (self._closed or self._filling.cancelled()):
                    self._filling.result()
                raise StopAsyncIteration
            loop = asyncio.get_running_loop()
            self._more = loop.create_future()
            silence = loop.call_later(self._pings_after, self._wake) if self._ping else None
            try:
                await self._more
            finally:
                if silence is not None:
                    silence.cancel()
            if self._ping and not (self._waiting or self._closed or self._filling.done()):
                return self._ping
        return self._taken()

    def _taken(self) -> Event:
        event = self._waiting.popleft()
        self._bytes -= len(event.data)
        if self._read is not None and self._bytes <= HIGH_WATER // 2 and not self._read.done():
            self._read.set_result(None)
        return event

    def ready(self) -> list[Event]:
        """What waits to be read now, ``PIECE`` bytes of it at most; nothing, where an engine is so
        near that there never is much."""
        events: list[Event] = []
        size = 0
        while self._waits and self._waiting and size < PIECE:
            events.append(self._taken())
            size += len(events[-1].data)
        return events

    async def aclose(self) -> None:
        """Ends the answer, if it has not ended, and sees the engine freed."""
        _unread.discard(self)
        self._closed = True
        self._waiting.clear()
        self._wake()
        if self._entered:
            self._filling.cancel()
        await asyncio.wait({self._filling})

    async def _fill(self) -> None:
        self._entered = True
        if self._closed:
            # Not before: a task that is cancelled before it began enters nothing, and leaves
            # nothing, neither its place in the queue nor the engine.
            self._filling.cancel()
        capacity: int | None = None
        async with aclosing(self._events) as groups:
            async for group in groups:
                self._put(group)
                if self._waits:
                    while self._bytes > HIGH_WATER:
                        self._read = asyncio.get_running_loop().create_future()
                        await self._read
                elif capacity is None:
                    capacity = self._bytes + self._capacity
                elif self._bytes > capacity:
                    logger.info("an answer was ended: %d bytes of it were not read", self._bytes)
                    failure = HostError(
                        "the answer was not read as fast as it was generated, and has been ended",
                        code="reader_too_slow",
                    )
                    with suppress(StopAsyncIteration):  # it had ended
                        self._put(await groups.athrow(failure))
                    return

    def _put(self, group: list[Event]) -> None:
        if not self._closed:
            self._waiting.extend(group)
            self._bytes += sum(len(event.data) for event in group)
            self._wake()

    def _wake(self, _: object = None) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


_unread: set[object] = set()


def unread() -> bool:
    """Whether there are answers that have not been read to their ends."""
    return bool(_unread)


@contextmanager
def unread_until_left() -> Iterator[None]:
    """An answer is on its way from here on, whether or not any of it has been generated."""
    answer = object()
    _unread.add(answer)
    try:
        yield
    finally:
        _unread.discard(answer)


class EventStream(StreamingResponse):
    """``events`` as server-sent ones, each as ``frame`` writes it; closed when nobody reads more.

    Starlette leaves the iterator of a client that has gone to the garbage collector, which may
    come much later, and the engine stays busy until then.
    """

    def __init__(
        self,
        request: Request,
        events: AsyncIterator[Event],
        frame: Callable[[Event], str] = frame,
    ) -> None:
        self._frames = _Frames(events, frame)
        guarded = host_of(request).until_gone(self._frames, request)
        super().__init__(guarded, media_type="text/event-stream")
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = host_of(self._request).transport(self._request)
        if transport is not None:
            # Each write waits until the one before has left the process, so that the end of an
            # answer waits for a client, too. What asyncio buffers by itself nobody would wait for.
            transport.set_write_buffer_limits(high=0)
        sending = within(client_seconds(), send, partial(hang_up, transport))
        try:
            await super().__call__(scope, receive, sending)
        finally:
            # A task of its own: this one may be cancelled, and whatever it awaits with it.
            closing = asyncio.ensure_future(self._close())
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)

    async def _close(self) -> None:
        with suppress(RuntimeError):  # it is running: then it has been cancelled just now
            await self.body_iterator.aclose()  # type: ignore[attr-defined]
        await self._frames.aclose()


_closing: set[asyncio.Future[None]] = set()


class _Frames:
    """``events`` as they stand on the wire. No generator: those cannot be closed while they run."""

    def __init__(self, events: AsyncIterator[Event], frame: Callable[[Event], str]) -> None:
        self._events, self._frame = events, frame

    def __aiter__(self) -> _Frames:
        return self

    async def __anext__(self) -> str:
        first = self._frame(await anext(self._events))
        if not isinstance(self._events, EventBuffer):
            return first
        return first + "".join(map(self._frame, self._events.ready()))

    async def aclose(self) -> None:
        with suppress(RuntimeError):  # a generator, which has nothing to free
            await self._events.aclose()  # type: ignore[attr-defined]


def hang_up(transport: asyncio.WriteTransport | None) -> None:
    """Drops a connection at once, whatever of the answer was not read."""
    if transport is not None:
        transport.abort()


def client_seconds() -> float:
    """For how long a client may take nothing of what it is sent."""
    return number(SECONDS_VARIABLE, DEFAULT_SECONDS)


def within(
    seconds: float, send: Callable[[T], Awaitable[None]], give_up: Callable[[], object]
) -> Callable[[T], Coroutine[Any, Any, None]]:
    """``send``, with ``give_up`` called when it has waited ``seconds`` for the client."""
    loop = asyncio.get_running_loop()

    def late() -> None:
        logger.info("a client took nothing for %.0f seconds: its connection is given up", seconds)
        give_up()

    async def sending(message: T) -> None:
        timer = loop.call_later(seconds, late)
        try:
            await send(message)
        finally:
            timer.cancel()

    return sending
