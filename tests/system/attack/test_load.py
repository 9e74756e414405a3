"""Streams by the hundred over every API, half of which nobody reads to the end: nothing stays."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import figures
import pytest
from apis import ANSWER, WAYS, asking
from clients import Seen, ask
from size import SEED, size

if TYPE_CHECKING:
    from target import Target

pytestmark = pytest.mark.served

ROUNDS, STREAMS = size(8, 3), size(200, 24)
GROWTH_MIB = size(8.0, 48.0)
"""Resident memory that a round may add: the least of the later rounds against that of the earlier
ones, without the first. A leak grows with every round; what an allocator holds comes and goes."""


async def a_round(target: Target, chance: random.Random) -> list[tuple[str, bool, Seen]]:
    """All streams at once; every other client is gone after some events."""
    url, model = target.server.base_url, target.model
    asked = []
    for number in range(STREAMS):
        way = WAYS[number // 2 % len(WAYS)]
        body = asking(way, model, "Twelve words.")
        leaves = number % 2 == 0
        after = chance.randint(1, 10) if leaves else None
        asked.append((way, leaves, asyncio.ensure_future(ask(url, way, body, after))))
    _, pending = await asyncio.wait([task for *_, task in asked], timeout=300)
    assert not pending, f"{len(pending)} of {STREAMS} streams have no end"
    return [(way, leaves, task.result()) for way, leaves, task in asked]


def test_finished_requests_leave_nothing(target: Target) -> None:
    chance = random.Random(SEED)
    began = time.monotonic()
    memory, left, dropped = [], None, 0
    before = target.inspection.baseline()
    for _ in range(ROUNDS):
        for way, leaves, seen in asyncio.run(a_round(target, chance)):
            if leaves and seen.end == "left":
                dropped += 1
            else:  # or the whole answer came in fewer events than its client wanted to read
                assert (seen.status, seen.end, seen.text) == (200, "completed", ANSWER), (way, seen)
        left = target.inspection.quiet(before)
        memory.append(left.rss)
    assert left is not None
    assert dropped > ROUNDS * STREAMS / 4
    assert not left.more_than(before), (before, left)
    half = ROUNDS // 2
    early, late = memory[1 : 1 + half], memory[1 + half :]
    assert (min(late) - min(early)) / half <= GROWTH_MIB, memory
    with target.server.client() as client:
        status = client.get("/v1/status").json()
    assert (status["num_running"], status["num_waiting"], status["requests"]) == (0, 0, [])
    next_one = asyncio.run(
        ask(target.server.base_url, "chat", asking("chat", target.model, "Twelve words."))
    )
    assert next_one.text == ANSWER
    assert "Traceback" not in target.server.log
    figures.report(
        "load",
        f"{ROUNDS * STREAMS} streams, {STREAMS} at once, {dropped} of them dropped, in "
        f"{time.monotonic() - began:.0f} s: RSS {' '.join(f'{each:.0f}' for each in memory)} MiB, "
        f"tasks {before.tasks} -> {left.tasks}, files {before.files} -> {left.files}, "
        f"buffers and jobs left: {sum(left.objects.values())}",
    )
