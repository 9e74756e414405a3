"""The endpoint of Chat Completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server.endpoint import Endpoint, OpenAIEndpoint
from vllm_mlx_harmony.server.serving import TurnApi, generate, serve

CHAT: TurnApi[chat.ChatRequest] = TurnApi(
    "chat_completions",
    lambda body, defaults, caller: chat.read(body, defaults),
    emitter=lambda request, info, context, caller: request.emitter(info),
)


async def create_chat_completion(request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    return await serve(CHAT, request, generate)


ENDPOINTS: tuple[Endpoint, ...] = (
    OpenAIEndpoint(
        "/v1/chat/completions",
        ("POST",),
        create_chat_completion,
        "prompt and answer as token ids",
    ),
)
