"""Chat Completions: a request body into a Turn, deltas into chunks or a completion."""

from vllm_mlx_harmony.protocols.chat.emitter import Emitter as Emitter
from vllm_mlx_harmony.protocols.chat.request import ChatRequest as ChatRequest
from vllm_mlx_harmony.protocols.chat.request import read as read
from vllm_mlx_harmony.protocols.openai_answer import error_body as error_body
