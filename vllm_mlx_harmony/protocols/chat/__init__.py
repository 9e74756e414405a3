"""Chat Completions: a request body into a Turn, deltas into chunks or a completion."""

from vllm_mlx_harmony.protocols.chat.emitter import Emitter
from vllm_mlx_harmony.protocols.chat.request import ChatRequest, read
from vllm_mlx_harmony.protocols.openai_answer import error_body

__all__ = ["ChatRequest", "Emitter", "error_body", "read"]
