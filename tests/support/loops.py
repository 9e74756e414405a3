"""Event loops for tests: one with a limit, and one in which no time passes."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], seconds: float = 120.0) -> T:
    """The result of ``coroutine`` in a loop of its own, within ``seconds``."""
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def run_in_virtual_time(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of ``coroutine`` in a loop whose clock jumps to the next timer instead of
    waiting for it."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 seconds. Its clock stands still while a thread of its executor works."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, *arguments: Any) -> Any:  # type: ignore[override]
        future = super().run_in_executor(*arguments)
        self._jumping.threads.add(future)
        future.add_done_callback(self._jumping.threads.discard)
        return future


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.threads: set[Any] = set()

    def select(self, timeout: float | None = None) -> Any:
        if self.threads:
            return super().select(0 if timeout == 0 else None)
        assert timeout is not None, "nothing will ever happen"
        self.now += timeout
        return super().select(0)
