"""Waiting for a state, with a limit."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 100.0
"""Less than what a whole test on an event loop may take: the message says more than its timeout."""


def wait_until(condition: Callable[[], T], what: str, seconds: float = SECONDS) -> T:
    """Waits for ``condition``, at most ``seconds``, and returns its first true value. ``what`` says
    in a failure what is missing."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return value


async def wait_until_async(
    condition: Callable[[], object], what: str, seconds: float = SECONDS
) -> None:
    """``wait_until`` in an event loop, for what another task of it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.001)


def wait_for_port(port: int) -> None:
    """Waits until something listens on a local port."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, f"a server on port {port}")
