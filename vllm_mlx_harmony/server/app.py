"""The front end as an application: all endpoints, whose paths are defined with their APIs."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute

from vllm_mlx_harmony.server import cancel, chat, ids, messages
from vllm_mlx_harmony.server.endpoint import Endpoint, guarded
from vllm_mlx_harmony.server.host import Host, install
from vllm_mlx_harmony.server.middleware import OriginCheck, RejectDuringShutdown
from vllm_mlx_harmony.server.responses import routes as responses
from vllm_mlx_harmony.server.responses.websocket import converse

ENDPOINTS: tuple[Endpoint, ...] = (
    *chat.ENDPOINTS,
    *messages.ENDPOINTS,
    *responses.ENDPOINTS,
    *cancel.ENDPOINTS,
    *ids.ENDPOINTS,
)

SOCKETS = (WebSocketRoute("/v1/responses", converse),)
"""WebSocket endpoints, which check the API key themselves."""

MIDDLEWARE = (Middleware(OriginCheck), Middleware(RejectDuringShutdown))
"""Middleware of the whole application, from the outside in."""


def application(host: Host) -> Starlette:
    """An application of its own, which uses ``host`` for models, keys and limits."""
    app = Starlette(routes=[*map(guarded, ENDPOINTS), *SOCKETS], middleware=MIDDLEWARE)
    install(app, host)
    return app
