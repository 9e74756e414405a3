"""Hundreds of streams over every API, half of which are not read to the end, leave nothing."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import figures
import pytest
from apis import ANSWER, ENDPOINTS, request_body
from clients import StreamResult, read_stream
from size import SEED, size

if TYPE_CHECKING:
    from target import Target

pytestmark = pytest.mark.served

ROUNDS, STREAMS = size(8, 3), size(200, 24)
GROWTH_MIB = size(8.0, 48.0)
"""Resident memory that a round may add: the minimum of the later rounds, compared to that of the
earlier ones without the first. A leak grows with every round; an allocator's reserve varies."""


async def run_round(target: Target, chance: random.Random) -> list[tuple[str, bool, StreamResult]]:
    """Runs all streams at once. Every other client disconnects after some events."""
    url, model = target.server.base_url, target.model
    streams = []
    for number in range(STREAMS):
        endpoint = ENDPOINTS[number // 2 % len(ENDPOINTS)]
        body = request_body(endpoint, model, "Twelve words.")
        disconnects = number % 2 == 0
        disconnect_after = chance.randint(1, 10) if disconnects else None
        streams.append(
            (
                endpoint,
                disconnects,
                asyncio.ensure_future(read_stream(url, endpoint, body, disconnect_after)),
            )
        )
    _, pending = await asyncio.wait([task for *_, task in streams], timeout=300)
    assert not pending, f"{len(pending)} of {STREAMS} streams have no end"
    return [(endpoint, disconnects, task.result()) for endpoint, disconnects, task in streams]


def test_finished_requests_leave_nothing(target: Target) -> None:
    chance = random.Random(SEED)
    started = time.monotonic()
    rss_by_round, snapshot, disconnected = [], None, 0
    before = target.inspection.baseline()
    for _ in range(ROUNDS):
        for endpoint, disconnects, result in asyncio.run(run_round(target, chance)):
            if disconnects and result.end == "left":
                disconnected += 1
            else:  # or the answer had fewer events than its client wanted to read
                assert (result.status, result.end, result.text) == (200, "completed", ANSWER), (
                    endpoint,
                    result,
                )
        snapshot = target.inspection.wait_until_idle(before)
        rss_by_round.append(snapshot.rss)
    assert snapshot is not None
    assert disconnected > ROUNDS * STREAMS / 4
    assert not snapshot.more_than(before), (before, snapshot)
    half = ROUNDS // 2
    early, late = rss_by_round[1 : 1 + half], rss_by_round[1 + half :]
    assert (min(late) - min(early)) / half <= GROWTH_MIB, rss_by_round
    with target.server.client() as client:
        status = client.get("/v1/status").json()
    assert (status["num_running"], status["num_waiting"], status["requests"]) == (0, 0, [])
    next_result = asyncio.run(
        read_stream(
            target.server.base_url, "chat", request_body("chat", target.model, "Twelve words.")
        )
    )
    assert next_result.text == ANSWER
    assert "Traceback" not in target.server.log
    figures.report(
        "load",
        f"{ROUNDS * STREAMS} streams, {STREAMS} at once, {disconnected} of them dropped, in "
        f"{time.monotonic() - started:.0f} s: "
        f"RSS {' '.join(f'{rss:.0f}' for rss in rss_by_round)} MiB, "
        f"tasks {before.tasks} -> {snapshot.tasks}, files {before.files} -> {snapshot.files}, "
        f"buffers and jobs left: {sum(snapshot.objects.values())}",
    )
