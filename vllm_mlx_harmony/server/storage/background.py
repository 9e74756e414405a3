"""Background responses, which clients can poll, stream, cancel and delete.

All events of running responses are in memory, and those of the responses that ended last. They are
stored as any response is (`persistence`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from json import loads
from typing import Any, Protocol

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.protocols.events import DONE, Event, encode_in_chunks
from vllm_mlx_harmony.protocols.responses import resource
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.storage.persistence import StoringEmitter
from vllm_mlx_harmony.server.storage.store import ResourceKey, parse_written
from vllm_mlx_harmony.tasks import in_thread

MAX_EVENTS = 200_000
"""Maximum events of ended responses in memory. The oldest responses are dropped first."""

MAX_BYTES = 64 * 1024 * 1024
"""The same in bytes, as four events of each response repeat its instructions and tools."""

AT_ONCE = 16
"""Events that are sent before other tasks get their turn: nothing else in a replay waits, and 20
readers of a long response would keep the event loop for seconds."""

TURN_BYTES = 64 * 1024
"""Minimum size of a running response, including its prompt."""


class Closable(Protocol):
    """The answer that writes a response (`answer.Answer`)."""

    async def aclose(self) -> None: ...


class BackgroundResponse:
    """A background response, and the sink of its answer.

    ``events`` has all events so far; the index of an event is its ``sequence_number``. ``bytes`` is
    the size that remains when the response has ended. A running response also has the request,
    which is about as large, and its last two events will repeat the request. ``deleted``: a client
    has deleted it.
    """

    def __init__(
        self,
        emitter: StoringEmitter,
        start: Callable[[BackgroundResponse], Closable],
        written_input: str,
        ping_seconds: float,
    ) -> None:
        self.key = emitter.key
        self.events: list[Event] = []
        self.deleted = False
        self._input = written_input
        self.bytes = len(self._input)
        self._more = asyncio.Event()
        # ``None`` when the response has ended, so that only its events stay in memory.
        self._generating: tuple[Closable, StoringEmitter] | None = None
        self.append(emitter.create())
        self._ping_seconds = ping_seconds
        self._generating = start(self), emitter

    @property
    def done(self) -> bool:
        return DONE in self.events[-1:]

    @property
    def bytes_taken(self) -> int:
        """The largest size in bytes that it can currently have."""
        return self.bytes if self.done else TURN_BYTES + 3 * self.bytes

    @property
    def document(self) -> dict[str, Any]:
        if self._generating is not None:
            return self._generating[1].document()
        document: dict[str, Any] = loads(self.events[-2].data)["response"]
        return document

    @property
    def input_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = parse_written(self._input)
        return items

    def numbered_events(self, start: int) -> dict[int, Event]:
        """The events from number ``start`` on, by their numbers."""
        return dict(enumerate(self.events[start:], start))

    async def follow(self, start: int = 0) -> AsyncGenerator[Event, None]:
        """Yields the events from number ``start`` on, as they arrive. During a silence, an event
        says that the response is running."""
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
                if not start % AT_ONCE:
                    await asyncio.sleep(0)
            if self.done:
                return
            try:
                async with asyncio.timeout(self._ping_seconds or None):
                    await self._more.wait()
            except TimeoutError:
                yield resource.running_event(self.document, start - 1)

    async def cancel(self) -> None:
        """Ends the response and frees the engine. Has no effect on an ended response."""
        if self._generating is None:
            return
        answer, emitter = self._generating
        try:
            await answer.aclose()
            last = await emitter.write_last(None)
            if not self.done:  # it may have been cancelled twice
                self.append(last)
        finally:
            self.end()

    async def delete(self) -> None:
        """Ends the response, which is neither stored nor found any more."""
        self.deleted = True
        if self._generating is not None:
            await self._generating[1].forget()
        await self.cancel()

    def end(self) -> None:
        """Nothing more is generated. A response without last events has failed."""
        if not self.done:
            created = loads(self.events[0].data)["response"]
            failed = resource.lost(created, "the end of this response could not be written")
            self.append([resource.failed_event(failed, len(self.events)), DONE])

    def append(self, events: list[Event]) -> None:
        self.events.extend(events)
        self.bytes += sum(len(event.data) for event in events)
        if self.done:
            self._generating = None
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class BackgroundResponses:
    """The background responses of this server: those that run, and the last that ended.

    Ended responses are dropped only when another is started, so that even a large one can be read
    for a while.
    """

    def __init__(
        self, settings: ServerSettings, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._settings, self._max_events, self._max_bytes = settings, max_events, max_bytes
        self._all: OrderedDict[ResourceKey, BackgroundResponse] = OrderedDict()

    async def start(
        self, emitter: StoringEmitter, start: Callable[[BackgroundResponse], Closable]
    ) -> BackgroundResponse:
        """Starts the response of ``emitter``; ``start`` starts the answer, whose sink it is.

        Raises ``HostError`` 503 if the running responses take all the memory that they may.
        """
        # The input as JSON, which may have megabytes.
        written_input = await in_thread(lambda: encode_in_chunks(emitter.input_items()))
        events = size = 0
        for ended in [answer for answer in reversed(self._all.values()) if answer.done]:
            if not ended.deleted:
                events, size = events + len(ended.events), size + ended.bytes
            if ended.deleted or events > self._max_events or size > self._max_bytes:
                del self._all[ended.key]
        bytes_taken = sum(answer.bytes_taken for answer in self._all.values() if not answer.done)
        if bytes_taken > self._settings.background_bytes:
            raise HostError(
                "background responses already use all the memory reserved for them; "
                "try again later",
                code="background_full",
            )
        running = BackgroundResponse(emitter, start, written_input, self._settings.ping_seconds)
        self._all[running.key] = running
        return running

    def get(self, key: ResourceKey) -> BackgroundResponse | None:
        """The response, if it is in memory."""
        running = self._all.get(key)
        return None if running is None or running.deleted else running

    async def forget(self, key: ResourceKey) -> bool:
        """Cancels and drops the response; returns whether it was in memory."""
        running = self.get(key)
        if running is None:
            return False
        del self._all[key]
        await running.delete()
        return True
