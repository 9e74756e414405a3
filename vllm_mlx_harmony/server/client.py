"""The client of a request: its connection, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_mlx_harmony.server.tasks import cancel_and_wait

T = TypeVar("T")

TRANSPORT = "vllm_mlx_harmony.transport"
"""Where the scope has the transport."""


class Transports:
    """ASGI middleware: notes the transport of each connection, for ``transport``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # ``receive`` is a method of uvicorn's connection.
        scope[TRANSPORT] = getattr(getattr(receive, "__self__", None), "transport", None)
        await self._app(scope, receive, send)


def transport(connection: HTTPConnection) -> asyncio.WriteTransport | None:
    """The transport of the connection, if known. It is aborted if the client stops reading."""
    found: asyncio.WriteTransport | None = connection.scope.get(TRANSPORT)
    return found


async def unless_disconnected(
    coming: Awaitable[T], request: Request, seconds: float | None = None, total: float = 0.0
) -> T | None:
    """Awaits ``coming``. If the client disconnects first, cancels it and returns ``None``.

    The request's body must have been read. Raises ``HTTPException`` 504 after ``seconds``, if there
    is such a limit. Its message names ``total``.
    """
    task = asyncio.ensure_future(coming)
    gone = asyncio.ensure_future(_disconnected(request))
    ends: set[asyncio.Future[Any]] = {task, gone}
    try:
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            return None
        raise HTTPException(504, f"Request timed out after {total:.1f} seconds")
    finally:
        gone.cancel()
        if not task.done():
            await cancel_and_wait(task)


async def _disconnected(request: Request) -> None:
    """Returns once the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
