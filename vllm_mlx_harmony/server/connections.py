"""Limits on connections, before any request: how many, and how long a request's head may take.

uvicorn has neither. Whoever can connect, with or without a key, could hold all file descriptors of
the process with heads that never end (https://en.wikipedia.org/wiki/Slowloris_(cyber_attack)); the
server would accept nobody else for as long as they stay, and log each failure to accept. So:

- A head must be complete ``HEAD_SECONDS`` after its connection was opened, or after its first byte
  on a connection that is reused. uvicorn itself closes idle ones. Bodies and answers have limits of
  their own (`body`, `streams`).
- Half of the file descriptors are left for files, and connections to engines and Redis. Connections
  above that are closed. The limit of descriptors is raised first, as far as the system allows.
- WebSocket messages are not compressed: 16 KB can become 16 MB, which count as 16 KB until then.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from socket import socket

    import uvicorn

logger = logging.getLogger("vllm_mlx_harmony")

HEAD_SECONDS = 20.0

DESCRIPTORS = (65_536, 10_240)
"""Limits of file descriptors that are tried; macOS allows no more than the second."""

RESERVED = 64
"""Descriptors for the process itself: libraries, logs, the weights."""


def with_connection_limits(server: type[uvicorn.Server]) -> type[uvicorn.Server]:
    """uvicorn's ``server`` class with these limits."""

    class Limited(server):  # type: ignore[misc]  # no stubs are read for uvicorn
        async def serve(self, sockets: list[socket] | None = None) -> None:
            if not self.config.loaded:
                self.config.load()
            _limit(self.config)
            await super().serve(sockets)

    return Limited


def _limit(config: uvicorn.Config) -> None:
    most = (_raise_descriptors() - RESERVED) // 2
    bases = (LimitedConnection, config.http_protocol_class)
    namespace = {"connection_limit": ConnectionLimit(most)}
    config.http_protocol_class = type("LimitedProtocol", bases, namespace)
    config.ws_per_message_deflate = False
    accepting = logging.getLogger("asyncio")
    if not any(isinstance(existing, OncePerSecond) for existing in accepting.filters):
        accepting.addFilter(OncePerSecond())


def _raise_descriptors() -> int:
    """Raises the limit of this process's descriptors as far as possible, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in DESCRIPTORS:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return limit
    return DESCRIPTORS[0] if soft == resource.RLIM_INFINITY else soft


class ConnectionLimit:
    """The number of connections that a server may have, and its log of those above that."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._logged = -inf

    def log_rejected(self) -> None:
        """Logs that connections are closed, once a second at most."""
        if time.monotonic() - self._logged >= 1:
            self._logged = time.monotonic()
            logger.warning("closing new connections: %d are open", self.most)


class LimitedConnection:
    """Mixed into uvicorn's HTTP protocols."""

    connection_limit: ConnectionLimit
    connections: set[object]
    transport: Any
    cycle: Any
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        if len(self.connections) > self.connection_limit.most:
            self.connection_limit.log_rejected()
            transport.abort()
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)  # type: ignore[misc]

    def _expect_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        upgraded = self.transport.get_protocol() is not self  # it is a WebSocket by now
        if not upgraded and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()


class OncePerSecond(logging.Filter):
    """Shortens a log in which nothing else happens: a process without free descriptors fails to
    accept connections thousands of times a second, each time with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -inf

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            return True
        record.exc_info = None
        if time.monotonic() - self._last < 1:
            return False
        self._last = time.monotonic()
        return True
