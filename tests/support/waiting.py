"""Waiting for a state, with a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS = 120.0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """Waits for ``condition``, at most ``seconds``; ``what`` says in a failure what is missing."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


async def wait_until_async(
    condition: Callable[[], bool], what: str, seconds: float = SECONDS
) -> None:
    """``wait_until`` in an event loop, for what another task of it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.001)
