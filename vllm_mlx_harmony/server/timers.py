"""Timers that are restarted for every token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
