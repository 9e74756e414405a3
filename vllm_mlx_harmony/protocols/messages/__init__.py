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

__all__ = [
    "PING",
    "Display",
    "Emitter",
    "MessagesRequest",
    "counted",
    "error_body",
    "read",
    "request_id",
]
