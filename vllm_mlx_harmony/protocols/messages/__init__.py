"""The Anthropic Messages API: a request body into a Turn, deltas into events or a message."""

from vllm_mlx_harmony.protocols.messages.emitter import (
    PING,
    Display,
    Emitter,
    counted,
    error_body,
    request_id,
)
from vllm_mlx_harmony.protocols.messages.request import MessagesRequest, read
from vllm_mlx_harmony.protocols.messages.server_tools import client_servers

__all__ = [
    "PING",
    "Display",
    "Emitter",
    "MessagesRequest",
    "client_servers",
    "counted",
    "error_body",
    "read",
    "request_id",
]
