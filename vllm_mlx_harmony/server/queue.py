"""The queue in front of an engine that serves one request at a time: in order, and bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError
from vllm_mlx_harmony.server.settings import number

PLACES_VARIABLE = "VLLM_MLX_HARMONY_QUEUE"
"""Environment variable: requests that may wait for one engine; more are rejected with 503."""

DEFAULT_PLACES = 32
RETRY_SECONDS = 5
"""Seconds after which a client may try again, where nothing better is known."""


class Queue:
    """One slot, given to requests in the order they came; at most ``places`` of them wait.

    For one event loop. The slot is never held twice and never lost: a request that is cancelled or
    runs out of time frees its place, or passes the slot on if it was given to it just then.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    def reject_waiting(self, failure: HarmonyFailure) -> None:
        """Rejects all requests that wait: their ``slot`` raises ``failure``."""
        while self._waiting:
            self._waiting.popleft().set_exception(failure)

    @asynccontextmanager
    async def slot(self, seconds: float) -> AsyncIterator[None]:
        """Holds the engine for as long as the context lasts; waits up to ``seconds`` for it.

        Raises ``HostError``: 503 with ``retry_after`` at once when every place is taken, 504 when
        the time has run out, and the failure that ``reject_waiting`` was given.
        """
        if not self._taken:
            self._taken = True
        elif len(self._waiting) < self._places:
            await self._wait(seconds)
        else:
            raise HostError(
                f"{len(self._waiting)} requests are waiting already; try again later",
                code="queue_full",
                retry_after=RETRY_SECONDS,
            )
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, seconds: float) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await asyncio.wait({place}, timeout=seconds)
        except BaseException:
            self._give_up(place)
            raise
        if not place.done():
            self._give_up(place)
            raise HostError(
                "the time for this request ran out while it waited for its turn",
                status=504,
                code="timeout",
            )
        place.result()

    def _give_up(self, place: asyncio.Future[None]) -> None:
        if not place.done():
            self._waiting.remove(place)
        elif place.exception() is None:
            self._leave()

    def _leave(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._taken = False


_queues: WeakKeyDictionary[Any, Queue] = WeakKeyDictionary()


def queue_before(engine: Any) -> Queue:
    """The queue in front of ``engine``, one for each."""
    queue = _queues.get(engine)
    if queue is None:
        queue = _queues[engine] = Queue(places())
    return queue


def reject_all_waiting(failure: HarmonyFailure) -> None:
    """Rejects all requests that wait for any engine, with ``failure``."""
    for queue in list(_queues.values()):
        queue.reject_waiting(failure)


def places() -> int:
    """Places in a queue, as the environment has it; else the default."""
    return number(PLACES_VARIABLE, DEFAULT_PLACES)
