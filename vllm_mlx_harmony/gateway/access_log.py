"""One line for each request: whose it was, what it cost and how it ended. No key is in it.

A line is written when both have ended: the exchange over HTTP, and what was generated for it. An
answer in the background ends later than its exchange. WebSockets have no lines.

Fields, in this order, ``-`` or ``null`` for what is not known: ``time`` (UTC), ``key`` (its name in
the settings), ``method``, ``path``, ``status``, ``result`` (of what was generated: success, error,
timeout, client_closed), ``model``, ``input``, ``cached``, ``output`` and ``reasoning`` (tokens:
cached ones are part of the input, those of reasoning of the output), ``first`` and ``seconds`` (to
the first token, and to the end).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger("vllm_mlx_harmony.access")

Format = Literal["off", "text", "json"]
FORMATS: tuple[Format, ...] = ("off", "text", "json")

current: ContextVar[Access | None] = ContextVar("access", default=None)
"""That of the request which is being answered."""


@dataclass(frozen=True, slots=True)
class Line:
    """What is written of a request."""

    time: str
    key: str | None
    method: str
    path: str
    status: int
    result: str | None
    model: str
    input: int
    cached: int
    output: int
    reasoning: int
    first: float | None
    seconds: float

    def written(self, form: Format) -> str:
        """The line; names and paths are quoted, so that no client can forge another."""
        if form == "json":
            return json.dumps(asdict(self), ensure_ascii=True)
        return " ".join(f"{name}={_text(value)}" for name, value in asdict(self).items())


def _text(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, str):
        plain = value.isascii() and value.isprintable() and not set(value) & set(' "=\\')
        return value if plain else json.dumps(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@dataclass(slots=True, eq=False)
class Access:
    """A request that is being answered; ``generating`` counts what has not ended for it."""

    form: Format
    method: str
    path: str
    model: str
    begun: float
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

    def ended(self) -> None:
        """Writes the line, if all has ended."""
        if self.generating or not self.exchanged:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        names = ("key", "method", "path", "status", "result", "model")
        counts = ("input", "cached", "output", "reasoning", "first")
        values: dict[str, Any] = {name: getattr(self, name) for name in (*names, *counts)}
        line = Line(time=now, seconds=time.monotonic() - self.begun, **values)
        logger.info("%s", line.written(self.form))


def to_standard_output() -> None:
    """Writes the lines as they are, whatever the level of other logs."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


async def logged(access: Access, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with ``app``; a line is written of it."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            access.status = message["status"]
        await send(message)

    token = current.set(access)
    try:
        await app(scope, receive, sending)
    finally:
        current.reset(token)
        access.exchanged = True
        access.ended()
