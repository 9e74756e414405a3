"""The Responses API: a request body into a Turn, deltas into events or a response."""

from vllm_mlx_harmony.protocols.openai_answer import error_body
from vllm_mlx_harmony.protocols.responses.emitter import Emitter, response_id
from vllm_mlx_harmony.protocols.responses.request import (
    ResponsesRequest,
    previous_response_id,
    read,
)
from vllm_mlx_harmony.protocols.responses.server_tools import client_servers

__all__ = [
    "Emitter",
    "ResponsesRequest",
    "client_servers",
    "error_body",
    "previous_response_id",
    "read",
    "response_id",
]
