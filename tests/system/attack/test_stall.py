"""Clients that ask for a long answer and read nothing of it hold nobody else up for long."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import figures
import pytest
from apis import ANSWER, LONG_WORDS, WAYS, asking
from clients import ask, stalled
from size import size
from target import ROOM, SECONDS

if TYPE_CHECKING:
    from target import Target

pytestmark = pytest.mark.served

STALLED = size(40, 4)
PATIENCE = 300.0


def test_others_are_answered(target: Target) -> None:
    url, model = target.server.base_url, target.model
    before = target.inspection.baseline()
    connections = [
        stalled(url, way, asking(way, model, "At length.", LONG_WORDS))
        for way in (WAYS[number % len(WAYS)] for number in range(STALLED))
    ]
    began = time.monotonic()
    try:
        waits = asyncio.run(others(target))
        while (left := target.inspection.now()).files > before.files + 2:
            assert time.monotonic() - began < PATIENCE, "their connections are not given up"
            time.sleep(0.2)
        freed = time.monotonic() - began
    finally:
        for connection in connections:
            connection.close()
    left = target.inspection.quiet(before)
    assert not left.more_than(before), (before, left)
    assert "Traceback" not in target.server.log
    figures.report(
        "stall",
        f"{STALLED} clients read nothing of {ROOM // 1024} KiB and more: others waited "
        f"{max(waits):.1f} s at most, all connections were given up after {freed:.1f} s "
        f"(a client's silence may last {SECONDS} s)",
    )


async def others(target: Target) -> list[float]:
    """How long others waited for short answers, over every API, while nobody read the long ones."""
    waits = []
    for way in WAYS:
        began = time.monotonic()
        body = asking(way, target.model, "Twelve words.")
        seen = await asyncio.wait_for(ask(target.server.base_url, way, body), PATIENCE)
        assert seen.text == ANSWER, (way, seen)
        waits.append(time.monotonic() - began)
    return waits
