"""``EventBuffer``: the events of an answer that are written, but not read yet.

A reader may be slower than an engine, and must not delay other requests. So a local engine never
waits: after each group of events its writer checks ``exceeds_capacity``, and ends the answer if too
much is unread. A remote engine has one connection per request, so its writer can wait for ``room``.

Clients give up on a stream in which they find no event for a while (semantics E1). After a silence,
in which there were only comments, the reader gets a keep-alive event.

There is one writer and one reader, on the same event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from vllm_mlx_harmony.protocols.events import Event

HIGH_WATER = 128 * 1024
"""Unread bytes above which a writer that can wait does so, until half of them are read."""

PIECE = 32 * 1024
"""Approximate bytes of events that are sent together."""


class EventBuffer:
    """A buffer for ``capacity`` bytes.

    ``keep_alive`` makes the event that the reader gets after ``ping_seconds`` of silence; 0: never.
    """

    def __init__(self, capacity: int, ping_seconds: float, keep_alive: Callable[[], Event]) -> None:
        self.bytes = 0
        """The size of the unread events."""
        self.closed = False
        """Whether nothing more will be put into it."""
        self.read_to_end = False
        """Whether the reader knows that there is nothing more."""
        self._events: deque[Event] = deque()
        self._capacity = capacity
        self._limit: int | None = None  # of `bytes`
        self._ping_seconds, self._keep_alive = ping_seconds, keep_alive
        self._ping_timer: asyncio.TimerHandle | None = None
        self._silent_since: float | None = None  # on the loop's clock, as the reader sees it
        self._reader: asyncio.Future[None] | None = None  # done when there may be something to read
        self._writer: asyncio.Future[None] | None = None  # done when there is room

    # --- For the reader

    async def get(self) -> Event | None:
        """The next event, as soon as there is one; ``None`` at the end."""
        clock = asyncio.get_running_loop().time
        if self._silent_since is None:
            self._silent_since = clock()
        while True:
            left = self._silent_since + self._ping_seconds - clock()
            # An event that waits has a lower sequence number than one that is made now.
            silent = not self.closed and all(event.comment for event in self._events)
            if self._ping_seconds and silent and left <= 0:
                self._silent_since = clock()
                return self._keep_alive()
            if self._events:
                event = self._pop()
                if not event.comment:
                    self._silent_since = clock()
                return event
            if self.closed:
                self.end_reading()
                return None
            await self._wait(left if self._ping_seconds else None)

    def readable(self) -> list[Event]:
        """The events that can be read now, at most about ``PIECE`` bytes."""
        events: list[Event] = []
        size = 0
        while self._events and size < PIECE:
            events.append(self._pop())
            size += len(events[-1].data)
        return events

    async def changed(self) -> None:
        """Waits until something is put into the buffer, or it is closed."""
        await self._wait(None)

    def end_reading(self) -> None:
        """The reader knows that there is nothing more."""
        self._stop_pings()
        self.read_to_end = True

    def discard(self) -> None:
        """Closes the buffer for a reader that has gone."""
        self._stop_pings()
        self._events.clear()
        self.bytes = 0
        self.close()

    def _pop(self) -> Event:
        event = self._events.popleft()
        self.bytes -= len(event.data)
        if self._writer is not None and self.bytes <= HIGH_WATER // 2:
            _wake(self._writer)
        return event

    async def _wait(self, seconds: float | None) -> None:
        """Waits for a change, or until ``seconds`` pass."""
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        # An event does not cancel the timer, so it may wake a later wait too early; `get` checks
        # the clock.
        if seconds is not None and self._ping_timer is None:
            self._ping_timer = loop.call_later(seconds, self._ping_due)
        await self._reader

    def _ping_due(self) -> None:
        self._ping_timer = None
        _wake(self._reader)

    def _stop_pings(self) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None

    # --- For the writer

    def put(self, events: Iterable[Event]) -> None:
        for event in events:
            self._events.append(event)
            self.bytes += len(event.data)
        _wake(self._reader)

    def close(self) -> None:
        """Ends the events. Those in the buffer can still be read."""
        self.closed = True
        _wake(self._reader)

    def exceeds_capacity(self) -> bool:
        """Whether too much is unread. To be called after each group of events.

        The first group does not count: in Responses it repeats the client's instructions and tools.
        """
        if self._limit is None:
            self._limit = self.bytes + self._capacity
        return self.bytes > self._limit

    async def room(self) -> None:
        """Waits until at most half of ``HIGH_WATER`` is unread, if it is more than that now."""
        while self.bytes > HIGH_WATER:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
