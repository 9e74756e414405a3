"""Everything that the front end answers: the endpoints of every API, and what is around them.

Knows no path and no method: each stands with its API (chat, messages, responses, cancel).
"""

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
"""What the front end answers over HTTP."""

SOCKETS = (WebSocketRoute("/v1/responses", converse),)
"""What it answers over WebSockets; each checks the API key by itself."""

MIDDLEWARE = (Middleware(OriginCheck), Middleware(RejectDuringShutdown))
"""Around the whole application of a server, the outermost first."""
