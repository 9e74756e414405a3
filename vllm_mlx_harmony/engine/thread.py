"""One thread that makes every call to mlx for one model.

Arrays and caches of mlx belong to the stream of the thread that made them: a model is loaded,
computed with and freed on the same one (https://ml-explore.github.io/mlx/build/html/usage/using_streams.html).
Whoever needs something of it posts a call, which runs between two pieces of work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

IDLE = 0.2
"""Seconds between two looks for work that waits for something else, memory for instance."""


class Stopped(RuntimeError):
    """The thread has ended, or died: nothing runs on it any more."""


class EngineThread:
    """Runs ``work`` again and again while it says that there is more, and calls in between.

    ``work`` returns how long to wait before the next one, in seconds: 0 for not at all, ``None``
    until a call comes. When it raises, the thread has died: ``died`` is called with the error, on
    the thread, and every call that waits fails.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], float | None],
        died: Callable[[BaseException], None],
    ) -> None:
        self._work, self._died = work, died
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return self._open

    def call(self, function: Callable[[], T]) -> Future[T]:
        """What ``function`` returns, when the thread has run it. Raises ``Stopped``."""
        result: Future[T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller's, whatever it is
                result.set_exception(error)

        def put_off() -> None:
            if result.set_running_or_notify_cancel():
                result.set_exception(Stopped("the engine's thread has ended"))

        run.put_off = put_off  # type: ignore[attr-defined]
        self.post(run)
        return result

    def post(self, function: Callable[[], None]) -> None:
        """Has the thread run ``function``, which must not raise. Raises ``Stopped``."""
        with self._lock:
            if not self._open:
                raise Stopped("the engine's thread has ended")
            self._calls.put(function)

    def close(self, seconds: float | None = None) -> bool:
        """Ends the thread when it has run what was posted; whether it has ended in time."""
        with self._lock:
            if self._open:
                self._open = False
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            wait: float | None = None
            while self._served(wait):
                wait = self._work()
        except BaseException as error:
            logger.exception("the engine's thread has died")
            with self._lock:
                self._open = False
            self._died(error)
        finally:
            self._fail_waiting()

    def _served(self, wait: float | None) -> bool:
        """Runs the calls that have come, after up to ``wait`` seconds; False behind the last."""
        try:
            call = self._calls.get(block=wait != 0, timeout=wait or None)
            while call is not None:
                call()
                call = self._calls.get_nowait()
        except Empty:
            return True
        return False

    def _fail_waiting(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            put_off = getattr(call, "put_off", None)
            if put_off is not None:
                put_off()
