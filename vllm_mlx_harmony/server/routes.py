"""Everything that the front end answers: the endpoints of every API, and what is around them.

Knows no path and no method: each stands with its API (chat, messages, responses, cancel).
"""

from __future__ import annotations

from typing import Any

from vllm_mlx_harmony.server import cancel, chat, ids, messages
from vllm_mlx_harmony.server.endpoint import Endpoint, SocketEndpoint
from vllm_mlx_harmony.server.origins import OriginCheck
from vllm_mlx_harmony.server.responses import routes as responses
from vllm_mlx_harmony.server.shutdown import RejectDuringShutdown

ENDPOINTS: tuple[Endpoint, ...] = (
    *chat.ENDPOINTS,
    *messages.ENDPOINTS,
    *responses.ENDPOINTS,
    *cancel.ENDPOINTS,
    *ids.ENDPOINTS,
)
"""What the front end answers over HTTP."""

SOCKETS: tuple[SocketEndpoint, ...] = responses.SOCKETS
"""What it answers over WebSockets."""

MIDDLEWARE: tuple[tuple[Any, str], ...] = (
    (OriginCheck, "without an API key, any page in a browser could use the server"),
    (RejectDuringShutdown, "who comes while the server shuts down is told so"),
)
"""What is around all of a server's application, from the outside in, and why."""
