"""Cancels answers on other servers that share a Redis with this one.

A server that is asked to cancel an answer it does not have writes a request to Redis and waits.
Every ``BEAT`` seconds, each server reads the requests for its own running answers, and deletes
those that it carries out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from vllm_mlx_harmony.server import answer as answers
from vllm_mlx_harmony.server.shared import Shared, SharedError, server_shared, shared_key

BEAT = 0.5
"""Seconds between two reads of the requests."""

PATIENCE = 3 * BEAT
"""Seconds after which no server has the answer."""

TICK = 0.05

_watching: asyncio.Future[None] | None = None

_idle = 0
"""Consecutive reads without a running answer here, since the last ``watch``."""


def watch() -> None:
    """Reads requests from now on, until no answer is running here."""
    global _watching, _idle
    shared = server_shared()
    _idle = 0  # the task may be about to end
    if shared is not None and (_watching is None or _watching.done()):
        _watching = asyncio.ensure_future(_watch(shared))


async def cancel_on_other_servers(id_seed: str, tenant: str) -> bool:
    """Cancels the answer with this seed on another server; returns whether one had it.

    Raises ``SharedError``.
    """
    shared = server_shared()
    if shared is None:
        return False
    name = _name(id_seed, tenant)
    lifetime = int(2 * PATIENCE)
    await asyncio.to_thread(shared.call, lambda redis: redis.set(name, b"1", ex=lifetime))
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        await asyncio.sleep(TICK)
        if not await asyncio.to_thread(shared.call, lambda redis: redis.exists(name)):
            return True
    return not await asyncio.to_thread(shared.call, lambda redis: redis.delete(name))


async def _watch(shared: Shared) -> None:
    global _idle
    while _idle < 2:  # noqa: PLR2004 - an answer that is about to start is found by the next read
        await asyncio.sleep(BEAT)
        running = answers.running()
        _idle = 0 if running else _idle + 1
        try:
            requested = await asyncio.to_thread(_requested, shared, running)
        except SharedError:
            continue
        for answer in requested:
            answers.cancel(*answer)


def _requested(shared: Shared, answers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of ``answers`` whose cancellation is requested. Deletes the requests. Blocks."""
    names = [_name(*answer) for answer in answers]
    if not names:
        return []
    found = shared.call(lambda redis: redis.mget(names))
    requested = [each for each, request in zip(answers, found, strict=True) if request]
    if requested:
        shared.call(lambda redis: redis.delete(*(_name(*answer) for answer in requested)))
    return requested


def _name(id_seed: str, tenant: str) -> str:
    return shared_key("cancel", tenant, id_seed)
