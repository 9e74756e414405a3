"""The front end as a Starlette application: all endpoints.

Each API's module defines its own paths.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.server import cancel, chat, ids, messages
from vllm_mlx_harmony.server.client import Transports
from vllm_mlx_harmony.server.endpoint import Endpoint, guarded
from vllm_mlx_harmony.server.host import Host, install
from vllm_mlx_harmony.server.middleware import OriginCheck, RejectDuringShutdown, error_at
from vllm_mlx_harmony.server.responses import routes as responses
from vllm_mlx_harmony.server.responses.websocket import converse


async def _root(_: Request) -> Response:
    """``HEAD /``, with which Claude Code checks whether the server is up."""
    return Response()


ENDPOINTS: tuple[Endpoint, ...] = (
    *chat.ENDPOINTS,
    *messages.ENDPOINTS,
    *responses.ENDPOINTS,
    *cancel.ENDPOINTS,
    *ids.ENDPOINTS,
    Endpoint(
        "/",
        ("HEAD",),
        _root,
        "Claude Code checks whether the server is up",
        like=("/health", "GET"),
        open=True,
    ),
)

SOCKETS = (WebSocketRoute("/v1/responses", converse),)
"""WebSocket endpoints, which check the API key themselves."""

MIDDLEWARE = (Middleware(Transports), Middleware(OriginCheck), Middleware(RejectDuringShutdown))
"""Middleware around the whole application, outermost first."""


def application(host: Host) -> Starlette:
    """A standalone application that gets models, keys and limits from ``host``."""
    app = Starlette(
        routes=[*map(guarded, ENDPOINTS), *SOCKETS],
        middleware=MIDDLEWARE,
        exception_handlers={404: _unknown_path},
    )
    app.router.redirect_slashes = False
    install(app, host)
    return app


async def _unknown_path(request: Request, _: Exception) -> Response:
    path = request.url.path
    failure = RequestError(f"no such path: {path}", status=404, code="not_found")
    return error_at(path)(failure)
