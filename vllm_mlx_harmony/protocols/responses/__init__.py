"""The Responses API: a request body into a Turn, deltas into events or a response."""

from vllm_mlx_harmony.protocols.responses.emitter import (
    Emitter,
    ResponsesRequest,
    error_body,
    previous_response_id,
    read,
    response_id,
)

__all__ = [
    "Emitter",
    "ResponsesRequest",
    "error_body",
    "previous_response_id",
    "read",
    "response_id",
]
