"""All endpoints of the front end, and its middleware. Paths are defined with their APIs."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute

from vllm_mlx_harmony.server import cancel, chat, ids, messages
from vllm_mlx_harmony.server.endpoint import Endpoint
from vllm_mlx_harmony.server.origins import OriginCheck
from vllm_mlx_harmony.server.responses import routes as responses
from vllm_mlx_harmony.server.responses.websocket import converse
from vllm_mlx_harmony.server.shutdown import RejectDuringShutdown

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
