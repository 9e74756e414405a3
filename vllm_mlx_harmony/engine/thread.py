"""The thread that loads a model, computes with it and frees it.

Arrays of mlx belong to the stream of the thread that created them
(https://ml-explore.github.io/mlx/build/html/usage/using_streams.html). Other threads post calls,
which run between two pieces of the engine's own work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Stopped(RuntimeError):
    """The thread has ended, or died: it accepts no more calls."""


class EngineThread:
    """Runs ``work`` again and again while there is more to do, and calls in between.

    ``work`` returns how long to wait before it runs again, in seconds; ``None``: until a call
    comes. If it raises, the thread dies: it calls ``on_death`` with the error, and every pending
    call fails.
    """

    def __init__(
        self, name: str, work: Callable[[], float | None], on_death: Callable[[BaseException], None]
    ) -> None:
        self._work, self._on_death = work, on_death
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = SimpleQueue()
        self._lock = threading.Lock()
        self.alive = True
        """Whether it accepts calls."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """The result of ``function``, once the thread has run it. Raises ``Stopped``."""
        result: Future[T] = Future()
        with self._lock:
            if not self.alive:
                raise Stopped("the engine's thread has ended")
            self._calls.put((function, result))
        return result

    def close(self) -> None:
        """Ends the thread after all posted calls, and waits for it."""
        with self._lock:
            if self.alive:
                self.alive = False
                self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        wait: float | None = None
        try:
            while self._run_calls(wait):
                wait = self._work()
        except BaseException as error:
            logger.exception("the engine's thread has died")
            with self._lock:
                self.alive = False
            try:
                self._on_death(error)
            except Exception:
                logger.exception("its requests could not be ended")
        with suppress(Empty):
            while call := self._calls.get_nowait():
                if call[1].set_running_or_notify_cancel():
                    call[1].set_exception(Stopped("the engine's thread has ended"))

    def _run_calls(self, wait: float | None) -> bool:
        """Runs all posted calls, and waits up to ``wait`` seconds for the first. Returns whether
        the thread goes on."""
        block, timeout = wait != 0, wait or None
        while True:
            try:
                call = self._calls.get(block, timeout)
            except Empty:
                return True
            if call is None:
                return False
            _run_call(*call)
            block = False


def _run_call(function: Callable[[], T], result: Future[T]) -> None:
    if result.set_running_or_notify_cancel():
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            result.set_exception(error)
