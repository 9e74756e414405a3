"""Cancelling an answer at another server than the one that generates it, where they share a Redis.

Whoever is asked for an answer that it does not have leaves word under the answer's name, and waits.
Each server takes, every ``BEAT`` seconds, what was left for the answers that it generates: a word
that is gone was taken. Knows words and times. Refuses to know how an answer ends (generation).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from vllm_mlx_harmony.server import generation
from vllm_mlx_harmony.server.shared import Shared, SharedError, server_shared, shared_key

BEAT = 0.5
"""Seconds between two times that a server looks."""

PATIENCE = 3 * BEAT
"""Seconds after which nobody generates the answer."""

TICK = 0.05

_watching: asyncio.Future[None] | None = None

_idle = 0
"""Looks in a row that found nothing generated here, since the last ``watch``."""


def watch() -> None:
    """From now on, until nothing is generated here any more, others may cancel what is."""
    global _watching, _idle
    shared = server_shared()
    _idle = 0  # who watches may be about to end
    if shared is not None and (_watching is None or _watching.done()):
        _watching = asyncio.ensure_future(_watch(shared))


async def cancel_elsewhere(id_seed: str, tenant: str) -> bool:
    """Whether another server generated the answer of ``tenant`` with this seed, and ends it now.

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
        answers = generation.running()
        _idle = 0 if answers else _idle + 1
        try:
            wanted = await asyncio.to_thread(_taken, shared, answers)
        except SharedError:
            continue
        for answer in wanted:
            generation.cancel(*answer)


def _taken(shared: Shared, answers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of ``answers`` for which word was left. Taken once: for a thread."""
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
