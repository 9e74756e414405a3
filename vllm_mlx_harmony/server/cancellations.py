"""Cancelling an answer that another server generates, where servers share a Redis.

A server that is asked to cancel an answer it does not have writes a request for it to Redis, and
waits. Each server reads, every ``BEAT`` seconds, the requests for the answers that it generates,
and deletes those that it carries out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from vllm_mlx_harmony.server import answer as answers
from vllm_mlx_harmony.server.shared import Shared, SharedError, server_shared, shared_key

BEAT = 0.5
"""Seconds between two looks at the requests."""

PATIENCE = 3 * BEAT
"""Seconds without a reply after which no server has the answer."""

TICK = 0.05

_watching: asyncio.Future[None] | None = None

_idle = 0
"""Looks in a row that found no answer generated here, since the last ``watch``."""


def watch() -> None:
    """Looks for requests from now on, until no answer is generated here any more."""
    global _watching, _idle
    shared = server_shared()
    _idle = 0  # the task may be about to end
    if shared is not None and (_watching is None or _watching.done()):
        _watching = asyncio.ensure_future(_watch(shared))


async def cancel_elsewhere(id_seed: str, tenant: str) -> bool:
    """Has another server end the answer of ``tenant`` with this seed; whether one had it.

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
    while _idle < 2:  # noqa: PLR2004 - one that was prepared just now runs when we look again
        await asyncio.sleep(BEAT)
        running = answers.running()
        _idle = 0 if running else _idle + 1
        try:
            wanted = await asyncio.to_thread(_taken, shared, running)
        except SharedError:
            continue
        for answer in wanted:
            answers.cancel(*answer)


def _taken(shared: Shared, answers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of ``answers`` that are to be cancelled, each returned once. For a thread."""
    names = [_name(*answer) for answer in answers]
    if not names:
        return []

    def left(redis: Any) -> list[bytes | None]:
        found: list[bytes | None] = redis.mget(names)
        return found

    wanted = [each for each, word in zip(answers, shared.call(left), strict=True) if word]
    if wanted:
        shared.call(lambda redis: redis.delete(*(_name(*answer) for answer in wanted)))
    return wanted


def _name(id_seed: str, tenant: str) -> str:
    return shared_key("cancel", tenant, id_seed)
