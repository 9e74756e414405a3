"""Clients that request a long answer and read nothing of it do not delay others for long."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import figures
import pytest
from apis import ANSWER, ENDPOINTS, LONG_WORDS, request_body
from clients import open_stalled_stream, read_stream
from size import size
from target import SECONDS, STREAM_BYTES

if TYPE_CHECKING:
    from target import Target

pytestmark = pytest.mark.served

STALLED = size(40, 4)
TIMEOUT = 300.0
"""Seconds for the server to give up the stalled connections, and for an answer beside them."""


def test_stalled_clients_do_not_delay_others(target: Target) -> None:
    url, model = target.server.base_url, target.model
    before = target.inspection.baseline()
    connections = [
        open_stalled_stream(url, endpoint, request_body(endpoint, model, "At length.", LONG_WORDS))
        for endpoint in (ENDPOINTS[number % len(ENDPOINTS)] for number in range(STALLED))
    ]
    started = time.monotonic()
    try:
        waits = asyncio.run(waits_of_others(target))
        while (snapshot := target.inspection.read()).files > before.files + 2:
            assert time.monotonic() - started < TIMEOUT, "their connections are not given up"
            time.sleep(0.2)
        freed_after = time.monotonic() - started
    finally:
        for connection in connections:
            connection.close()
    snapshot = target.inspection.wait_until_idle(before)
    assert not snapshot.more_than(before), (before, snapshot)
    assert "Traceback" not in target.server.log
    figures.report(
        "stall",
        f"{STALLED} clients read nothing of {STREAM_BYTES // 1024} KiB and more: others waited "
        f"{max(waits):.1f} s at most, all connections were given up after {freed_after:.1f} s "
        f"(a client's silence may last {SECONDS} s)",
    )


async def waits_of_others(target: Target) -> list[float]:
    """The waits of other clients for short answers, on every endpoint."""
    waits = []
    for endpoint in ENDPOINTS:
        started = time.monotonic()
        body = request_body(endpoint, target.model, "Twelve words.")
        result = await asyncio.wait_for(
            read_stream(target.server.base_url, endpoint, body), TIMEOUT
        )
        assert result.text == ANSWER, (endpoint, result)
        waits.append(time.monotonic() - started)
    return waits
