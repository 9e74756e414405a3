"""asyncio tasks: starts them, and waits until they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_tasks: set[asyncio.Task[None]] = set()


def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts a task, and refers to it until it ends: asyncio itself has only weak references."""
    task = asyncio.ensure_future(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def cancel_and_wait(task: asyncio.Future[Any]) -> None:
    """Cancels the task and waits for its end. A generator cannot be closed while it runs."""
    task.cancel()
    await wait_until_done(task)


async def wait_until_done(task: asyncio.Future[Any]) -> None:
    """Waits for the end of the task, and only then raises a cancellation of the caller."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled  # it and this frame would refer to each other
