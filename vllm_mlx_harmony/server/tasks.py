"""Helpers for asyncio tasks and threads.

Long work runs in a thread, without Python's garbage collector. A collection holds the interpreter
lock while it visits every object. The modules and models that a server has loaded take 200 ms and
more, in whichever request happens to allocate many objects. So they are excluded when the server
starts (``gc.freeze``), and collections visit newer objects only. Work that creates many lasting
objects, such as parsing 20,000 messages, runs without collections: each of them would visit these
objects again and free nothing.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from vllm_mlx_harmony.server.deadline import Deadline

T = TypeVar("T")


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
    """Waits until ``task`` is done; a cancellation of the caller is raised only then."""
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


async def unless_disconnected(
    coming: Awaitable[T], request: Request, deadline: Deadline | None = None
) -> T | None:
    """Awaits ``coming``. If the client disconnects first, cancels it and returns ``None``.

    The request's body must have been read. Raises ``HostError`` 504 at the ``deadline``. If it has
    already passed, waits one second more, so that ``coming`` can raise its own error.
    """
    task = asyncio.ensure_future(coming)
    gone = asyncio.ensure_future(_disconnected(request))
    ends: set[asyncio.Future[Any]] = {task, gone}
    try:
        seconds = None if deadline is None else deadline.left or 1.0
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if deadline is not None and not gone.done():
            raise deadline.passed()
        return None
    finally:
        gone.cancel()
        if not task.done():
            await cancel_and_wait(task)


async def _disconnected(request: Request) -> None:
    """Returns once the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Calls ``function`` in a thread, without garbage collections."""
    return await asyncio.to_thread(_without_collections, function, *arguments)


_frozen = False


def unfreeze() -> None:
    """Includes all objects in collections again, for example because an engine was stopped."""
    global _frozen
    gc.unfreeze()
    _frozen = False


def _without_collections(function: Callable[..., T], *arguments: object) -> T:
    """Calls ``function`` with collections disabled.

    If calls overlap, the one that disabled them enables them again, even if others are still
    running.
    """
    global _frozen
    if not _frozen:
        _frozen = True
        gc.freeze()  # again, as the engine may have been loaded since the server started
    ours = gc.isenabled()
    gc.disable()
    try:
        return function(*arguments)
    finally:
        if ours:
            gc.enable()
