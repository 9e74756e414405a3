"""Chat Completions: a request body into a Turn, deltas into chunks or a completion."""

from vllm_mlx_harmony.protocols.chat.emitter import (
    ChatRequest,
    Emitter,
    error_body,
    read,
)

__all__ = [
    "ChatRequest",
    "Emitter",
    "error_body",
    "read",
]
