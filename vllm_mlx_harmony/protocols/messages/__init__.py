"""The Anthropic Messages API: a request body into a Turn, deltas into events or a message."""

from vllm_mlx_harmony.protocols.messages.emitter import PING as PING
from vllm_mlx_harmony.protocols.messages.emitter import Display as Display
from vllm_mlx_harmony.protocols.messages.emitter import Emitter as Emitter
from vllm_mlx_harmony.protocols.messages.emitter import error_body as error_body
from vllm_mlx_harmony.protocols.messages.emitter import request_id as request_id
from vllm_mlx_harmony.protocols.messages.emitter import token_count as token_count
from vllm_mlx_harmony.protocols.messages.request import MessagesRequest as MessagesRequest
from vllm_mlx_harmony.protocols.messages.request import read as read
from vllm_mlx_harmony.protocols.messages.server_tools import client_servers as client_servers
