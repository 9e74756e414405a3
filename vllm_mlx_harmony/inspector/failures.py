"""``Failures``: middleware that adds error responses of the APIs to the log.

Most of them are sent before there is a prompt, so that no observer has seen their requests.
"""

from __future__ import annotations

import json
import time
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_mlx_harmony.inspector.record import Failure, Log
from vllm_mlx_harmony.server.host import tenant_of

PATHS = ("/v1/", "/harmony/v1/")
MAX_LENGTH = 4_000
"""Characters of a message in the log; the rest is cut off. Messages may quote the request."""

ERROR = 400


class Failures:
    """ASGI middleware around an application."""

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PATHS):
            await self._app(scope, receive, send)
            return
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= ERROR:
                owner = tenant_of(HTTPConnection(scope))
                text = _message(message.get("body", b""))
                method, path = scope["method"], scope["path"]
                self._log.failures.append(Failure(time.time(), method, path, status, text, owner))
                status = 0
            await send(message)

        await self._app(scope, receive, sending)


def _message(body: bytes) -> str:
    """The message in the body of an error, or the body."""
    try:
        error: Any = json.loads(body)
        error = error.get("error", error.get("detail", error))
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, AttributeError, KeyError):
        text = body.decode("utf-8", "replace")
    return text[:MAX_LENGTH]
