"""Responses in the background: started, followed and cancelled by requests that come later.

While one is generated, all its events are in memory, and so are those of the last that ended. What
is stored of them: ``responses.persistence``.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from json import loads
from typing import Any

from pydantic_core import from_json

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import DONE, Event, encode_slowly
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, resource
from vllm_mlx_harmony.server.answer import Answer
from vllm_mlx_harmony.server.errors import RETRY_SECONDS
from vllm_mlx_harmony.server.generation import Job, run
from vllm_mlx_harmony.server.responses.persistence import (
    References,
    StoringEmitter,
)
from vllm_mlx_harmony.server.responses.persistence import read as read_request
from vllm_mlx_harmony.server.responses.store import StoredResponse
from vllm_mlx_harmony.server.settings import number

MOST_EVENTS = 200_000
"""Events kept of responses that have ended; the oldest responses are dropped first."""

MOST_BYTES = 64 * 1024 * 1024
"""The same in bytes: four events of each response repeat its instructions and its tools."""

RUNNING_VARIABLE = "VLLM_MLX_HARMONY_BACKGROUND_BYTES"
"""Environment variable: bytes that all running responses may take; more are rejected with 503."""

DEFAULT_RUNNING = 256 * 1024 * 1024

TURN_BYTES = 64 * 1024
"""The least that a running response takes, its prompt included."""


class Running:
    """A response in the background, from its first event to its last.

    ``events`` are all events so far: the one with ``sequence_number`` n is the n-th. ``bytes`` is
    the size of what is remembered when the response has ended. While it runs it has the request,
    too, about as large again, and there are two more events to come that repeat it.
    """

    def __init__(self, job: Job, emitter: StoringEmitter, written: str | None = None) -> None:
        self.id, self.tenant = emitter.id, emitter.tenant
        self.events: list[Event] = []
        self._input = written_input(emitter) if written is None else written
        self.bytes = len(self._input)
        self._more = asyncio.Event()
        # Until it has ended; then nothing but the events is kept.
        self._generating: tuple[Answer, StoringEmitter] | None = None
        self._append(emitter.create())
        answer = Answer(job, run(job), emitter, end=emitter.end, announced=True, keep=self._append)
        self._generating = answer, emitter

    @property
    def done(self) -> bool:
        """Whether the last event is there."""
        return DONE in self.events[-1:]

    @property
    def bytes_taken(self) -> int:
        """Bytes that it takes now, at most."""
        return self.bytes if self.done else TURN_BYTES + 3 * self.bytes

    def document(self) -> dict[str, Any]:
        """The response as it is now."""
        if self._generating is not None:
            return self._generating[1].document()
        document: dict[str, Any] = loads(self.events[-2].data)["response"]
        return document

    def input_items(self) -> list[dict[str, Any]]:
        """The input as items."""
        items: list[dict[str, Any]] = from_json(self._input, cache_strings="none")
        return items

    async def follow(self, start: int = 0) -> AsyncGenerator[Event, None]:
        """The events from number ``start`` on, as they come, to the last one."""
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self.done:
                return
            await self._more.wait()

    async def cancel(self) -> None:
        """Ends it now, and frees the engine. A response that has ended stays as it is."""
        if self._generating is None:
            return
        answer, emitter = self._generating
        await answer.aclose()
        last = await emitter.end(None)
        if not self.done:  # it may have been cancelled twice
            self._append(last)

    def _append(self, events: list[Event]) -> None:
        self.events.extend(events)
        self.bytes += sum(len(event.data) for event in events)
        if self.done:
            self._generating = None
        self._more.set()
        self._more = asyncio.Event()


def written_input(emitter: StoringEmitter) -> str:
    """The input items as JSON. For a thread, as they may be megabytes."""
    return encode_slowly(emitter.input_items())


class Background:
    """The background responses of this server: all that run, and the last that ended.

    Old ones are dropped when another is started, so that a response which has just ended can be
    read for a while, however large it is.
    """

    def __init__(
        self,
        most_events: int = MOST_EVENTS,
        most_bytes: int = MOST_BYTES,
        most_running: int | None = None,
    ) -> None:
        self._most_events, self._most_bytes = most_events, most_bytes
        self._most_running = most_running
        self._all: OrderedDict[str, Running] = OrderedDict()

    def start(
        self, begin: Callable[[], Job], emitter: StoringEmitter, written: str | None = None
    ) -> Running:
        """Generates the response to a job from now on, which ``begin`` makes when there is room.

        ``written`` is its ``written_input``, where that is known already.
        Raises ``HostError`` 503 when the responses that run take all the room there is.
        """
        self._make_room()
        bytes_taken = sum(each.bytes_taken for each in self._all.values() if not each.done)
        limit = self._most_running
        if bytes_taken > (number(RUNNING_VARIABLE, DEFAULT_RUNNING) if limit is None else limit):
            raise HostError(
                "the answers in the background take all the room there is; try again later",
                code="background_full",
                retry_after=RETRY_SECONDS,
            )
        running = self._all[emitter.id] = Running(begin(), emitter, written)
        return running

    def get(self, key: str, tenant: str) -> Running | None:
        """The response with this id, if it is ``tenant``'s and its events are kept."""
        running = self._all.get(key)
        return running if running is not None and running.tenant == tenant else None

    async def forget(self, key: str, tenant: str) -> bool:
        """Cancels it if it runs; whether ``tenant`` had one."""
        running = self.get(key, tenant)
        if running is None:
            return False
        del self._all[key]
        await running.cancel()
        return True

    def _make_room(self) -> None:
        events = size = 0
        for running in [each for each in reversed(self._all.values()) if each.done]:
            events, size = events + len(running.events), size + running.bytes
            if events > self._most_events or size > self._most_bytes:
                del self._all[running.id]


BACKGROUND = Background()
"""The background responses of this server."""


def read(
    body: object, defaults: Defaults, tenant: str, local: Mapping[str, StoredResponse] | None = None
) -> ResponsesRequest:
    """``tenant``'s request in ``body``, with what it refers to; may block on a disk.

    ``local`` comes before the server's store. Raises ``StoreError``, and ``RequestError``: 404 for
    a previous response that is not kept, 400 for one that is still being generated.
    """
    key = responses.previous_response_id(body) or ""
    running = BACKGROUND.get(key, tenant)
    if running is not None and not running.done:
        raise resource.not_ready(key)
    return read_request(body, defaults, References(tenant, local or {}))
