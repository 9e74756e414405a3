"""The Responses API: a request body into a Turn, deltas into events or a response."""

from vllm_mlx_harmony.protocols.openai_answer import error_body as error_body
from vllm_mlx_harmony.protocols.responses.emitter import Emitter as Emitter
from vllm_mlx_harmony.protocols.responses.emitter import response_id as response_id
from vllm_mlx_harmony.protocols.responses.request import ResponsesRequest as ResponsesRequest
from vllm_mlx_harmony.protocols.responses.request import conversation_id as conversation_id
from vllm_mlx_harmony.protocols.responses.request import (
    previous_response_id as previous_response_id,
)
from vllm_mlx_harmony.protocols.responses.request import read as read
from vllm_mlx_harmony.protocols.responses.server_tools import client_servers as client_servers
