"""Answers that are generated while nobody waits: started, watched, cancelled.

Knows what each has said so far, and for how long that is remembered. Refuses to know paths and
sockets (routes, websocket), and where an answer is kept when it has ended (persistence).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from json import loads
from typing import Any

from pydantic_core import from_json

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import responses
from vllm_mlx_harmony.protocols.events import DONE, Event, encode_slowly
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, resource
from vllm_mlx_harmony.server.generation import Job, run, stopped
from vllm_mlx_harmony.server.queue import RETRY_SECONDS
from vllm_mlx_harmony.server.responses.persistence import (
    References,
    StoringEmitter,
    stored_events,
    storing,
)
from vllm_mlx_harmony.server.responses.persistence import read as read_request
from vllm_mlx_harmony.server.responses.store import StoredResponse
from vllm_mlx_harmony.server.settings import number

MOST_EVENTS = 200_000
"""Events remembered of answers that have ended; the oldest answers go first."""

MOST_BYTES = 64 * 1024 * 1024
"""The same in bytes: four events of each answer repeat its instructions and its tools."""

RUNNING_VARIABLE = "VLLM_MLX_HARMONY_BACKGROUND_BYTES"
"""Environment variable: bytes that all answers which run may take; more are refused with 503."""

DEFAULT_RUNNING = 256 * 1024 * 1024

TURN_BYTES = 64 * 1024
"""What an answer takes at least, with its prompt and what it is generated with."""


@dataclass(frozen=True, slots=True)
class _Generating:
    """What an answer needs until it has ended: an engine, the conversation, and its ids."""

    job: Job
    answer: StoringEmitter
    task: asyncio.Future[None]


class Running:
    """An answer in the background, from its first event to its last.

    ``events`` are those there are so far: the one with ``sequence_number`` n is the n-th.
    ``bytes`` are those of what is remembered when it has ended. While it runs it has the request,
    too, about as large again, and there are two more events to come that repeat it.
    """

    def __init__(self, job: Job, answer: StoringEmitter, written: str | None = None) -> None:
        self.id, self.tenant = answer.id, answer.tenant
        self.events: list[Event] = []
        self._input = written_input(answer) if written is None else written
        self.bytes = len(self._input)
        self._more = asyncio.Event()
        self._append(*answer.create())
        job.lease.taken_over = True  # here, not when `run` begins: whoever asked does not wait
        task = asyncio.ensure_future(self._generate(job, answer))
        self._generating: _Generating | None = _Generating(job, answer, task)

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
            return self._generating.answer.document()
        document: dict[str, Any] = loads(self.events[-2].data)["response"]
        return document

    def input_items(self) -> list[dict[str, Any]]:
        """What was asked, as items."""
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
        """Ends it now, and frees the engine. What has ended stays as it is."""
        now = self._generating
        if now is None or self.done:
            return
        await stopped(now.task)
        # A task that never began had nothing to clean up after itself.
        now.job.tracker.finish(result="client_closed")
        await now.job.lease.release()
        last = await now.answer.end(None)
        if not self.done:  # somebody else may have cancelled it in the meantime
            self._append(*last)
        self._generating = None

    async def _generate(self, job: Job, answer: StoringEmitter) -> None:
        stored = storing(run(job), answer, known=True)
        async with aclosing(stored_events(stored, answer)) as events:
            async for group in events:
                self._append(*group)
        self._generating = None

    def _append(self, *events: Event) -> None:
        self.events.extend(events)
        self.bytes += sum(len(event.data) for event in events)
        self._more.set()
        self._more = asyncio.Event()


def written_input(answer: StoringEmitter) -> str:
    """What was asked, as items, as JSON. Of a large request for a thread."""
    return encode_slowly(answer.input_items())


class Background:
    """The answers in the background of this server: all that run, and the last that ended.

    Room is made when another is started, so that the answer which just ended is there for a while
    however long it is.
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

    def start(self, job: Job, answer: StoringEmitter, written: str | None = None) -> Running:
        """Generates the answer of ``job`` from now on, whoever listens.

        ``written`` is its ``written_input``, where that is there already.
        Raises ``HostError`` 503 when those that run take all the room there is.
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
        running = self._all[answer.id] = Running(job, answer, written)
        return running

    def get(self, key: str, tenant: str) -> Running | None:
        """The answer with this id, if it is ``tenant``'s and its events are remembered."""
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
"""The answers in the background of this server."""


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
