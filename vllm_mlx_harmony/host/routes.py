"""The routes of every API, and those of Chat Completions.

Knows paths and methods. Refuses to know how a request is run (serving), and what any API's bodies
and events look like (protocols).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.host import messages
from vllm_mlx_harmony.host.mount import Around, Route
from vllm_mlx_harmony.host.refusals import refuse, refusing_in
from vllm_mlx_harmony.host.responses import routes as responses
from vllm_mlx_harmony.host.seams import Seam
from vllm_mlx_harmony.host.serving import Api, serve
from vllm_mlx_harmony.protocols import chat


def _read(body: object, defaults: Defaults, _tenant: str) -> chat.ChatRequest:
    return chat.read(body, defaults)


CHAT = Api("chat_completions", _read, chat.error_body)


async def create_chat_completion(request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    return await serve(CHAT, request)


async def retrieve_model(request: Request, model_id: str) -> Response:
    """``GET /v1/models/{model_id}``: the entry in the host's list; without an id, the list."""
    from vllm_mlx import server

    models = await server.list_models()
    if not model_id:
        return JSONResponse(models.model_dump(mode="json"))
    for model in models.data:
        if model.id == model_id:
            return JSONResponse(model.model_dump(mode="json"))
    missing = RequestError(
        f"the model {model_id!r} does not exist", param="model", code="model_not_found", status=404
    )
    return refuse(chat.error_body, missing)


_CHAT: tuple[Route, ...] = (
    refusing_in(
        chat.error_body,
        Route(
            "/v1/chat/completions",
            ("POST",),
            create_chat_completion,
            "token ids in and out instead of text",
        ),
    ),
    refusing_in(
        chat.error_body,
        Route(
            "/v1/models/{model_id:path}",
            ("GET",),
            retrieve_model,
            "the host lists its models, but does not tell of one",
            like=("/v1/models", "GET"),
        ),
    ),
)

ORIGINS = Around(
    "vllm_mlx_harmony.host.origins:OriginCheck",
    "without an API key, any page in a browser could use the server",
)

ROUTES: tuple[Seam, ...] = (ORIGINS, *_CHAT, *messages.ROUTES, *responses.ROUTES)
