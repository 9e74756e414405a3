"""SIGTERM: new requests are rejected at once, and running answers have time to end.

uvicorn, which the host runs under, reacts to SIGTERM and SIGINT in ``Server.shutdown``: it stops
listening, hangs up on every WebSocket, and waits without a limit for HTTP responses. The lifespan
of the application ends after that, too late to end an answer in words. So all this comes before:

1. New requests get 503 (``RejectDuringShutdown``).
2. Answers that are being generated go on until shortly before the limit, counted from the signal,
   and then end with an error in their API's shape, over a WebSocket, too. None of them waits for
   its engine to stop (``Answer.end``).
3. When they have been written, uvicorn's own shutdown, with what is left of the limit for
   everything else the host answers.
4. A step of an engine that computes a long prompt cannot be interrupted, and Python waits for the
   thread it runs in: ``GRACE`` seconds after the limit the process ends all the same.

A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError
from vllm_mlx_harmony.server import answer
from vllm_mlx_harmony.server.apis import api_at
from vllm_mlx_harmony.server.errors import error_response

logger = logging.getLogger("vllm_mlx_harmony")

LONGEST = 30.0
"""The longest grace period in seconds; shorter if the host's ``--timeout`` is."""

LAST_WORDS = 0.8
"""Seconds before the limit in which the errors at the end are written; a quarter of a short one."""

GRACE = 0.7
"""Seconds after the limit until the process ends, whatever still runs."""

TICK = 0.05

_SIGNALLED = "_vllm_mlx_harmony_signalled"
"""Attribute of a uvicorn server: when it was told to end, on the monotonic clock."""

Shutdown = Callable[..., Awaitable[None]]


def gracefully(original: Shutdown, limit: Callable[[], float]) -> Shutdown:
    """``original``, uvicorn's shutdown, when our answers have ended: ``limit`` seconds at most."""

    @functools.wraps(original)
    async def shutdown(self: Any, sockets: Any = None) -> None:
        now = time.monotonic()
        until = getattr(self, _SIGNALLED, now) + limit()
        if getattr(self, "_captured_signals", ()):  # of the process, not of a server within one
            _end_after(until + GRACE - now)
        answer.reject_new(_failure())
        try:
            await _answered(until - min(LAST_WORDS, limit() / 4))
            if answer.running():
                logger.warning("shutting down: answers that have not ended are ended")
                answer.end_all(_failure())
            await _answered(until + GRACE / 2)
            left = max(until - time.monotonic(), GRACE / 4)
            given = self.config.timeout_graceful_shutdown
            self.config.timeout_graceful_shutdown = left if given is None else min(given, left)
            await original(self, sockets)
        finally:
            answer.reject_new(None)

    return shutdown


async def _answered(until: float) -> None:
    """Waits until all answers are generated and read, or it is ``until``."""
    while (answer.running() or answer.unread()) and time.monotonic() < until:
        await asyncio.sleep(TICK)


def _end_after(seconds: float) -> None:
    """Ends the process after ``seconds``, with the exit code of SIGTERM as a shell has it."""

    def end() -> None:
        logger.warning("shutting down: the engine is in the middle of a step, and is left there")
        logging.shutdown()
        os._exit(128 + signal.SIGTERM)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _failure() -> HarmonyFailure:
    """A new one each time: who raises it adds to its traceback."""
    return HostError("the server is shutting down", code="shutting_down")


def at_once(original: Callable[..., None]) -> Callable[..., None]:
    """``original``, uvicorn's signal handler, for the first signal; the second one kills."""

    @functools.wraps(original)
    def handle_exit(self: Any, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        setattr(self, _SIGNALLED, time.monotonic())
        original(self, sig, frame)

    return handle_exit


class RejectDuringShutdown:
    """Middleware: while the server shuts down, every request that comes is answered with 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = answer.rejection()
        if failure is None or scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        response = error_response(api_at(scope["path"]).error_body, failure)
        response.headers["Connection"] = "close"
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)
