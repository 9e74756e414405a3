"""The access log: one line per request with its key's name, tokens, times and result.

A line is written once both the HTTP exchange and the generation have ended; a background response
outlives its exchange. A request over a WebSocket has a line with the method ``WEBSOCKET`` if it was
answered or exceeded a limit; its status is 101 unless it was rejected. Keys are never logged.

Fields, in this order, with ``-`` or ``null`` for unknown values: ``time`` (UTC), ``key`` (its name
in the settings), ``method``, ``path``, ``status``, ``result`` (of the generation: success, error,
timeout, client_closed), ``model``, ``input``, ``cached``, ``output`` and ``reasoning`` (tokens:
``cached`` is part of ``input``, ``reasoning`` of ``output``), ``first`` and ``seconds`` (time to
the first token, and in total).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_mlx_harmony.gateway.limits import Budget

logger = logging.getLogger("vllm_mlx_harmony.access")

Format = Literal["off", "text", "json"]
FORMATS: tuple[Format, ...] = ("off", "text", "json")

current: ContextVar[Entry | None] = ContextVar("access", default=None)
"""The entry of the current request."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request and its limits. ``generating`` and ``exchanged`` say which half of it has ended."""

    form: Format
    method: str
    path: str
    model: str
    started: float
    """On the monotonic clock."""
    key: str | None = None
    status: int = 0
    result: str | None = None
    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    first: float | None = None
    generating: bool = False
    exchanged: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Added to those of the response."""
    exhausted: Budget | None = None
    """The limit of tokens that had been reached before the request."""

    def ended(self) -> None:
        """Writes the line if both halves have ended."""
        if self.form != "off" and self.exchanged and not self.generating:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            logger.info("%s", self.line(now, time.monotonic() - self.started))

    def line(self, now: str, seconds: float) -> str:
        """The line; names and paths are quoted, so that no client can forge a line."""
        names = ("key", "method", "path", "status", "result", "model")
        counts = ("input", "cached", "output", "reasoning", "first")
        values = {name: getattr(self, name) for name in (*names, *counts)}
        values = {"time": now, **values, "seconds": seconds}
        if self.form == "json":
            rounded = {n: round(v, 4) if isinstance(v, float) else v for n, v in values.items()}
            return json.dumps(rounded, ensure_ascii=True)
        return " ".join(f"{name}={_text(value)}" for name, value in values.items())


def _text(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, str):
        plain = value.isascii() and value.isprintable() and not set(value) & set(' "=\\')
        return value if plain else json.dumps(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def to_standard_output() -> None:
    """Sends the lines to standard output, without a prefix and independent of the log level."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


async def logged(access: Entry, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Runs ``app`` for one request, with its headers, and logs it."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            access.status = message["status"]
            if access.headers:
                message = {**message, "headers": [*message["headers"], *access.headers]}
        await send(message)

    token = current.set(access)
    try:
        await app(scope, receive, sending)
    finally:
        current.reset(token)
        access.exchanged = True
        access.ended()
