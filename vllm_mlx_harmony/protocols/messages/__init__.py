"""The Anthropic Messages API: a request body into a Turn, deltas into events or a message."""

from vllm_mlx_harmony.protocols.messages.emitter import (
    PING,
    Display,
    Emitter,
    MessagesRequest,
    counted,
    error_body,
    read,
    request_id,
)

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
