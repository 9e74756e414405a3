"""The APIs that the front end speaks, and whose a path is."""

from __future__ import annotations

from vllm_mlx_harmony.server.chat import CHAT
from vllm_mlx_harmony.server.messages import MESSAGES
from vllm_mlx_harmony.server.responses.routes import RESPONSES
from vllm_mlx_harmony.server.serving import Api

APIS: tuple[Api, ...] = (MESSAGES, RESPONSES, CHAT)


def api_at(path: str) -> Api:
    """The API that ``path`` is of: what refuses a request there speaks as it does.

    Chat Completions where it is nobody's: OpenAI's shape is the one that most clients read.
    """
    return next((api for api in APIS if api.prefix and path.startswith(api.prefix)), CHAT)
