"""The APIs of the front end, and which of them a path belongs to."""

from __future__ import annotations

from vllm_mlx_harmony.server.chat import CHAT
from vllm_mlx_harmony.server.messages import MESSAGES
from vllm_mlx_harmony.server.responses.routes import RESPONSES
from vllm_mlx_harmony.server.serving import Api

APIS: tuple[Api, ...] = (MESSAGES, RESPONSES, CHAT)


def api_at(path: str) -> Api:
    """The API that ``path`` belongs to, which decides the shape of errors there.

    For any other path, Chat Completions: most clients understand OpenAI's shape.
    """
    return next((api for api in APIS if api.prefix and path.startswith(api.prefix)), CHAT)
