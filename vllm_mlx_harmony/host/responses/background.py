"""Answers that are generated while nobody waits: started, watched, cancelled.

Knows what each has said so far, and for how long that is remembered. Refuses to know paths and
requests (routes), and where an answer is kept when it has ended (keeping).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from vllm_mlx_harmony.host.answers import Deltas, Job, run, stopped
from vllm_mlx_harmony.host.responses.keeping import KeptAnswer, keeping, told
from vllm_mlx_harmony.protocols.events import DONE, Event

MOST_EVENTS = 200_000
"""Events remembered of answers that have ended, some 50 MB; the oldest answers go first."""


class Running:
    """An answer in the background, from its first event to its last.

    ``events`` are those there are so far: the one with ``sequence_number`` n is the n-th.
    """

    def __init__(self, job: Job, answer: KeptAnswer) -> None:
        self.events: list[Event] = []
        self.done = False
        self._job: Job | None = job  # until it ends: it holds an engine
        self._answer = answer
        self._more = asyncio.Event()
        self._task = asyncio.ensure_future(self._generate(run(job)))

    @property
    def id(self) -> str:
        """The id of the response."""
        return self._answer.id

    def document(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._answer.document()

    def input_items(self) -> Sequence[Mapping[str, Any]]:
        """What was asked, as items."""
        return self._answer.kept().input_items

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
        await stopped(self._task)
        if self._job is not None:
            # A task that never began had nothing to clean up after itself.
            self._job.tracker.finish(result="client_closed")
            await self._job.lease.release()
        last = await self._answer.end(None)
        if not self.done:  # somebody else may have cancelled it in the meantime
            self._tell(*last)
            self._end()

    async def _generate(self, deltas: Deltas) -> None:
        kept = keeping(deltas, self._answer, known=True)
        async with aclosing(told(kept, self._answer)) as events:
            async for event in events:
                self._tell(event)
        self._tell(DONE)
        self._end()

    def _tell(self, *events: Event) -> None:
        self.events.extend(events)
        self._wake()

    def _end(self) -> None:
        self.done = True
        self._job = None
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class Background:
    """The answers in the background of this server: all that run, and the last that ended."""

    def __init__(self, most_events: int = MOST_EVENTS) -> None:
        self._most_events = most_events
        self._all: OrderedDict[str, Running] = OrderedDict()

    def start(self, job: Job, answer: KeptAnswer) -> Running:
        """Generates the answer of ``job`` from now on, whoever listens."""
        self._make_room()
        running = self._all[answer.id] = Running(job, answer)
        return running

    def get(self, key: str) -> Running | None:
        """The answer with this id, if its events are remembered."""
        return self._all.get(key)

    async def forget(self, key: str) -> bool:
        """Cancels it if it runs; whether there was one."""
        running = self._all.pop(key, None)
        if running is not None:
            await running.cancel()
        return running is not None

    def _make_room(self) -> None:
        ended = [running for running in self._all.values() if running.done]
        events = sum(len(running.events) for running in ended)
        for running in ended:
            if events <= self._most_events:
                return
            events -= len(running.events)
            del self._all[running.id]
