"""The limits of keys, counted for all gateways that share a Redis.

``Limiter`` is all that the rest of the gateway uses. Without a Redis, and while Redis does not
answer, each gateway counts for itself. Its own counts are kept up to date for that.

Concurrent requests are a sorted set for each key: the running requests by the time at which their
entry expires. A gateway renews its entries, so that those of one that died are gone after a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from vllm_mlx_harmony.gateway.limits import Budget, Counts, KeyLimits, Quota, exceeded
from vllm_mlx_harmony.server.peers.connection import (
    Connection,
    PeersError,
    key_of,
)

T = TypeVar("T")

EXPIRY_SECONDS = 60
"""Seconds until the entry of a running request expires unless it is renewed."""

RENEWAL_SECONDS = 20
"""Seconds between two renewals: two of them may fail in a row."""


class Limiter:
    """Counts what keys use, on ``connection`` too, if there is one. Names identify the keys."""

    def __init__(self, connection: Connection | None = None) -> None:
        self._connection = connection
        self._counts = Counts()
        self._running: dict[str, str] = {}
        """The key of each running request, by the request's id."""
        self._concurrent: Counter[str] = Counter()
        """The number of running requests of each key."""
        self._writing: set[asyncio.Task[object]] = set()

    async def request(self, name: str, limits: KeyLimits) -> list[Budget]:
        """Counts a request; returns what is left. A request that exceeds a limit is not counted."""
        if not (quotas := limits.quotas(requests=1)):
            return []
        now = time.time()
        own = self._counts.add(name, quotas, now)
        budgets = (
            await self._call_redis(lambda connection: add(connection, name, quotas, now)) or own
        )
        if exceeded(budgets, "requests"):
            back = limits.quotas(requests=-1)
            self._counts.add(name, back, now)
            await self._call_redis(lambda connection: add(connection, name, back, now))
        return budgets

    def tokens(self, name: str, limits: KeyLimits, tokens: int) -> None:
        quotas = limits.quotas(tokens=tokens)
        quotas = [quota for quota in quotas if quota.unit == "tokens"]
        if quotas:
            now = time.time()
            self._counts.add(name, quotas, now)
            if self._connection is not None:
                coming = self._call_redis(lambda connection: add(connection, name, quotas, now))
                task: asyncio.Task[object] = asyncio.ensure_future(coming)
                self._writing.add(task)
                task.add_done_callback(self._writing.discard)

    async def acquire(self, name: str, limit: int) -> Callable[[], Awaitable[None]] | None:
        """Counts a running request; returns what releases it, or ``None`` if it is one too many."""
        request, acquired = uuid4().hex, False
        self._concurrent[name] += 1
        self._running[request] = name

        async def release() -> None:
            self._concurrent[self._running.pop(request)] -= 1
            await self._call_redis(lambda connection: remove(connection, name, request))

        try:
            running = await self._call_redis(
                lambda connection: acquire_slot(connection, name, request, time.time())
            )
            acquired = (running or self._concurrent[name]) <= limit
        finally:
            if not acquired:
                await release()
        return release if acquired else None

    async def renew(self) -> None:
        """Renews the entries of running requests, for as long as the process runs."""
        while True:
            await asyncio.sleep(RENEWAL_SECONDS)
            if running := tuple(self._running.items()):
                await self._call_redis(partial(renew, running=running, now=time.time()))

    async def close(self) -> None:
        """Returns when all counts have been written."""
        await asyncio.gather(*self._writing)

    async def _call_redis(self, command: Callable[[Connection], T]) -> T | None:
        """Calls ``command`` in a thread; ``None`` without a Redis, or if Redis does not answer."""
        if self._connection is not None:
            with suppress(PeersError):
                return await asyncio.to_thread(command, self._connection)
        return None


# --- Commands, which block and raise ``PeersError``; ``now`` is Unix time


def add(connection: Connection, name: str, quotas: list[Quota], now: float) -> list[Budget]:
    """``Counts.add`` for all gateways."""

    def counted(redis: Any) -> list[Any]:
        pipe = redis.pipeline()
        for quota in quotas:
            this, last = (_place(name, quota, quota.window(now) - ago) for ago in (0, 1))
            pipe.incrby(this, quota.amount)
            pipe.expire(this, 3 * quota.seconds)
            pipe.get(last)
        return list(pipe.execute())

    found = connection.call(counted)
    return [
        quota.budget(now, int(count), int(last or 0))
        for quota, count, last in zip(quotas, found[::3], found[2::3], strict=True)
    ]


def _place(name: str, quota: Quota, window: int) -> str:
    return key_of("rate", name, quota.unit, str(quota.seconds), str(window))


def acquire_slot(connection: Connection, name: str, request: str, now: float) -> int:
    """Adds a running request; returns the number of all."""
    place = key_of("running", name)

    def add_and_count(redis: Any) -> list[Any]:
        pipe = redis.pipeline()
        pipe.zremrangebyscore(place, "-inf", now)
        pipe.zadd(place, {request: now + EXPIRY_SECONDS})
        pipe.expire(place, 2 * EXPIRY_SECONDS)
        pipe.zcard(place)
        return list(pipe.execute())

    return int(connection.call(add_and_count)[-1])


def remove(connection: Connection, name: str, request: str) -> None:
    connection.call(lambda redis: redis.zrem(key_of("running", name), request))


def renew(connection: Connection, running: tuple[tuple[str, str], ...], now: float) -> None:
    """Renews the entries of ``running`` requests, which are ids and names of keys."""

    def renewed(redis: Any) -> None:
        pipe = redis.pipeline()
        for request, name in running:
            pipe.zadd(key_of("running", name), {request: now + EXPIRY_SECONDS}, xx=True)
            pipe.expire(key_of("running", name), 2 * EXPIRY_SECONDS)
        pipe.execute()

    connection.call(renewed)
