"""Requests in front of an engine that serves one at a time: first come, first served, and bounded.

Knows order, places and time. Refuses to know what a request is, and what the engine does with it.
"""

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
"""Environment variable: how many requests may wait for one engine; more are refused with 503."""

DEFAULT_PLACES = 32
RETRY_SECONDS = 5
"""After which a client may try again, where nothing is known of how long it will take."""


class Queue:
    """Lets one at a time through, the others in the order they came, ``places`` of them at most.

    For one event loop. Nobody is let through twice, and no slot is lost: whoever gives up, is
    cancelled or runs out of time frees the place, or passes the slot on when it came just then.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._waiting)

    def reject_waiting(self, failure: HarmonyFailure) -> None:
        """Sends all who wait away: their ``slot`` raises ``failure``."""
        while self._waiting:
            self._waiting.popleft().set_exception(failure)

    @asynccontextmanager
    async def slot(self, seconds: float) -> AsyncIterator[None]:
        """Holds the engine for as long as the context lasts; waits up to ``seconds`` for it.

        Raises ``HostError``: 503 with ``retry_after`` at once when every place is taken, 504 when
        the time ran out, and what those who wait are rejected with.
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
    """The queue in front of ``engine``: always the same one for the same engine."""
    queue = _queues.get(engine)
    if queue is None:
        queue = _queues[engine] = Queue(places())
    return queue


def reject_all_waiting(failure: HarmonyFailure) -> None:
    """Sends all away who wait for any engine, with ``failure``."""
    for queue in list(_queues.values()):
        queue.reject_waiting(failure)


def places() -> int:
    """Places in a queue, as the environment says; the default where it says no whole number."""
    return number(PLACES_VARIABLE, DEFAULT_PLACES)
