"""Helpers for asyncio tasks, timers and threads.

Long work runs in a thread, without Python's garbage collector. A collection holds the interpreter
lock while it visits every object. The modules and models that a server has loaded take 200 ms and
more, in whichever request happens to allocate many objects. So they are excluded when the server
starts (``gc.freeze``), and collections visit newer objects only. Work that creates many lasting
objects, such as parsing 20,000 messages, runs without collections: each of them would visit these
objects again and free nothing.

A thread that computes releases the interpreter lock only after another thread has waited for it for
the switch interval, and the event loop needs the lock several times per request. So the interval is
shorter than Python's default (``SWITCH_SECONDS``).
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SWITCH_SECONDS = 0.001
"""Python's default is 5 ms, with which `/health` waits 60 to 90 ms while a text of 20 MB is
encoded; with 1 ms, it waits 10 to 30 ms."""


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


class Timer:
    """Restartable timeout, which calls ``expired`` ``seconds`` after the last ``start``.

    ``start`` and ``stop`` only record a time; one event-loop timer is rescheduled when it fires
    early. A new one for every token would cost several times as much.
    """

    def __init__(self, seconds: float, expired: Callable[[], object]) -> None:
        self._seconds, self._expired = seconds, expired
        self._loop = asyncio.get_running_loop()
        self._due: float | None = None
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due = self._loop.time() + self._seconds
        if self._handle is None:
            self._handle = self._loop.call_at(self._due, self._fire)

    def stop(self) -> None:
        self._due = None

    def close(self) -> None:
        """Stops it for good, and frees what it refers to."""
        self._due = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._handle = self._loop.call_at(self._due, self._fire)
        else:
            self._due = None
            self._expired()


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Calls ``function`` in a thread, without garbage collections."""
    return await asyncio.to_thread(_without_collections, function, *arguments)


_frozen = False


def prepare_process() -> None:
    """Prepares the process for serving. Called once its modules and models are loaded.

    If requests are running, those of their objects that form reference cycles are never freed.
    """
    global _frozen
    _frozen = True
    gc.freeze()
    sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))


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
    if not _frozen:
        prepare_process()  # the engine was loaded, or loaded again, for a request
    ours = gc.isenabled()
    gc.disable()
    try:
        return function(*arguments)
    finally:
        if ours:
            gc.enable()
