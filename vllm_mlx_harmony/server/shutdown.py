"""Graceful shutdown: SIGTERM rejects new requests immediately and lets running answers finish.

At SIGTERM and SIGINT, uvicorn's ``Server.shutdown`` stops listening, closes every WebSocket, and
waits for HTTP responses without a limit. The application's lifespan ends only after that, too late
to send an error. So the following comes first:

1. New requests get 503 (`middleware.Admission`).
2. Running answers continue until shortly before the limit, which counts from the signal. Then they
   end with an error in their API's format, also over a WebSocket. They do not wait for their
   engine to stop (``Answer.end``).
3. When the errors are sent, uvicorn shuts down, with the rest of the limit for all other responses.
4. An engine cannot be interrupted within a step, and Python waits for its thread. ``GRACE`` seconds
   after the limit the process ends in any case.

A second signal ends the process immediately.

If a native library aborts the process, the answers end with an error, too (`abort`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from socket import socket
from types import FrameType
from typing import TYPE_CHECKING

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server.abort import before_abort
from vllm_mlx_harmony.server.answers import Answers, shutdown_error

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger("vllm_mlx_harmony")

MAX_GRACE = 30.0
"""Maximum grace period in seconds. The host's ``--timeout`` may make it shorter."""

ERROR_SECONDS = 0.8
"""Seconds before the limit at which answers are ended; a quarter of the limit if that is less."""

GRACE = 0.7
"""Seconds after the limit at which the process ends in any case."""

ABORT_SECONDS = 2.0
"""Seconds for which a process that is aborted waits until the errors are sent."""

TICK = 0.05


def with_graceful_shutdown(
    server: type[uvicorn.Server],
    find_answers: Callable[[], Answers],
    limit: Callable[[], float],
    finish: Callable[[], object] = lambda: None,
) -> type[uvicorn.Server]:
    """uvicorn's ``server`` class, which shuts down after the answers of the front end that it
    serves, in ``limit()`` seconds.

    At the end, ``finish`` is called in a thread.
    """

    class Draining(server):  # type: ignore[misc]  # no stubs are read for uvicorn
        _signalled: float | None = None
        _restore_abort: Callable[[], None] | None = None

        async def startup(self, sockets: list[socket] | None = None) -> None:
            await super().startup(sockets)
            self._restore_abort = before_abort(partial(_fail, find_answers()), ABORT_SECONDS)

        async def shutdown(self, sockets: list[socket] | None = None) -> None:
            now = time.monotonic()
            until = (now if self._signalled is None else self._signalled) + limit()
            if self._signalled is not None:  # it runs by itself, not within another
                timer = threading.Timer(until + GRACE - now, _end_process)
                timer.daemon = True
                timer.start()
            answers = find_answers()
            answers.reject_new(True)
            try:
                await _wait_for(answers, until - min(ERROR_SECONDS, limit() / 4))
                if answers.running:
                    logger.warning("shutting down: ending the remaining answers")
                    answers.end_all(shutdown_error())
                await _wait_for(answers, until + GRACE / 2)
                left = max(until - time.monotonic(), GRACE / 4)
                configured = self.config.timeout_graceful_shutdown
                self.config.timeout_graceful_shutdown = (
                    left if configured is None else min(configured, left)
                )
                await super().shutdown(sockets)
                await asyncio.to_thread(finish)
            finally:
                answers.reject_new(False)
                if self._restore_abort is not None:
                    self._restore_abort()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self._signalled is not None:
                signal.signal(sig, signal.SIG_DFL)
                signal.raise_signal(sig)
            self._signalled = time.monotonic()
            if not self.should_exit:  # or uvicorn takes it for the second signal
                super().handle_exit(sig, frame)

    return Draining


async def _wait_for(answers: Answers, until: float) -> None:
    """Waits for the end of all answers, until that time at most."""
    while (answers.running or answers.unread) and time.monotonic() < until:
        await asyncio.sleep(TICK)


async def _fail(answers: Answers) -> None:
    """Ends all answers because the process is being aborted."""
    logger.error("a native library has aborted the process: ending the running answers")
    answers.reject_new(True)
    problem = "the engine failed and the server is restarting: send the request again"
    answers.end_all(HostError(problem, code="engine_failed"))
    await _wait_for(answers, time.monotonic() + ABORT_SECONDS)


def _end_process() -> None:
    """Ends the process with the exit code that a shell reports for SIGTERM."""
    logger.warning("shutting down: the engine did not stop in time")
    logging.shutdown()
    os._exit(128 + signal.SIGTERM)
