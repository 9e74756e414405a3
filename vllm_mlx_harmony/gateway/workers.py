"""Several processes that share one port: ``--workers``.

The parent binds the port and starts the workers; it serves nothing itself. Each worker accepts
connections from the same socket and is a gateway of its own, so everything that several gateways
share through Redis is shared here: limits, stored responses, generated turns, encrypted reasoning.
Metrics are written to files by prometheus_client, and any worker can sum them up.

**Signals.** The parent blocks its signals and takes them one by one (``sigwait``), so that none
gets lost while a worker is started. Workers inherit the mask, and accept SIGHUP once they can
reload.

**Shutdown.** systemd and terminals signal all processes of a group, and a second signal ends a
process at once. So the parent sends no SIGTERM. Each worker holds one end of a pipe, and shuts down
gracefully when the other end is closed: on SIGTERM and SIGINT, and also if the parent dies.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from socket import socket
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeAlias

import uvicorn
from prometheus_client.multiprocess import mark_process_dead

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.server.peers.connection import connect
from vllm_mlx_harmony.server.settings import STORE_VARIABLE, ServerSettings

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

logger = logging.getLogger("vllm_mlx_harmony")

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client: the directory of the processes' metrics."""

SIGNALS = {signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}

PAUSE = 1.0
"""Seconds before a worker that died is replaced: it may die again."""

Reload: TypeAlias = Callable[[], GatewaySettings]
"""Reloads the settings. Raises ``HostError``."""

Serve: TypeAlias = Callable[[GatewaySettings, Reload, socket, Connection], int]
"""Serves on a socket until the connection is closed; returns an exit code."""


def check(settings: GatewaySettings) -> None:
    """Raises ``HostError`` if several workers could not share what clients rely on."""
    if settings.workers == 1:
        return
    if settings.local_model is not None:
        raise HostError(
            "a model in this process (mlx:) requires --workers 1: each worker would load it"
        )
    if connect(ServerSettings.read()) is None:
        raise HostError(
            f"--workers {settings.workers} requires a Redis ({STORE_VARIABLE}=redis://…): without "
            "it, each worker would have limits, stored responses and generated turns of its own"
        )
    if settings.inspect:
        raise HostError(
            "--inspect requires --workers 1: each worker would show its own requests only"
        )


def run(settings: GatewaySettings, reload: Reload, serve: Serve) -> int:
    """Runs ``settings.workers`` processes until SIGTERM or SIGINT; returns an exit code."""
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal that is ignored cannot be waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with TemporaryDirectory() as directory:
        os.environ[METRICS_VARIABLE] = directory
        workers = _Workers(settings, reload, serve)
        try:
            while workers.running:
                received = signal.sigwait(SIGNALS)
                if received == signal.SIGHUP:
                    workers.reload()
                elif received == signal.SIGCHLD:
                    workers.replace()
                elif workers.stopping:
                    for worker in workers.running:
                        worker.kill()
                else:
                    workers.stop()
        finally:
            workers.stop()
        return workers.code


class _Workers:
    """The processes, and what a new one of them needs."""

    def __init__(self, settings: GatewaySettings, reload: Reload, serve: Serve) -> None:
        self._settings = settings
        self._reload = reload
        self._serve = serve
        # A new interpreter would look for modules in the working directory first (semantics E6).
        os.environ["PYTHONSAFEPATH"] = "1"
        self._context = multiprocessing.get_context("spawn")
        self._ending, self._alive = self._context.Pipe(duplex=False)
        config = uvicorn.Config("", host=settings.host, port=settings.port)
        self._listener = config.bind_socket()
        self.code = 0
        self.running = [self._started() for _ in range(settings.workers)]

    def _started(self) -> SpawnProcess:
        shared = self._serve, self._settings, self._reload, self._listener, self._ending
        worker = self._context.Process(target=_work, args=shared)
        worker.start()
        # The resource tracker, which the first start launches, unblocks SIGINT and SIGTERM.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return worker

    @property
    def stopping(self) -> bool:
        return self._alive.closed

    def stop(self) -> None:
        """Shuts the workers down gracefully."""
        self._alive.close()
        self._listener.close()  # or connections would wait in its queue for no one

    def reload(self) -> None:
        """Reloads the settings in all workers, and for new ones, if they are valid."""
        try:
            self._settings = self._settings.reloaded(self._reload())
        except HostError as error:
            logger.error("the settings were not reloaded: %s", error.message)
            return
        for worker in self.running:
            os.kill(worker.pid or 0, signal.SIGHUP)

    def replace(self) -> None:
        """Replaces workers that were killed. One that ended with an error ends all."""
        for worker in [worker for worker in self.running if not worker.is_alive()]:
            self.running.remove(worker)
            mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
            code = worker.exitcode or 0
            if self.stopping:
                continue
            if 0 < code < 128:  # noqa: PLR2004 - an exit code of its own, and no signal
                self.code = code
                self.stop()
            else:
                logger.error("worker %s died (%s): replacing it", worker.pid, code)
                time.sleep(PAUSE)
                self.running.append(self._started())


def _work(
    serve: Serve, settings: GatewaySettings, reload: Reload, listener: socket, ending: Connection
) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS - {signal.SIGHUP})
    raise SystemExit(serve(settings, reload, listener, ending))


def stop_with(ending: Connection, server: uvicorn.Server) -> None:
    """Shuts ``server`` down gracefully once the other end of the pipe is closed."""

    def wait() -> None:
        ending.poll(None)
        # Not that of ``with_graceful_shutdown``: a signal to all processes may still come, and is
        # no second one.
        uvicorn.Server.handle_exit(server, signal.SIGTERM, None)

    threading.Thread(target=wait, daemon=True).start()
