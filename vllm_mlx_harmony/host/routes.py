"""The routes of every API, and those of Chat Completions.

Knows paths and methods. Refuses to know how a request is run (serving), and what any API's bodies
and events look like (protocols).
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.host import cancel, messages, shutdown
from vllm_mlx_harmony.host.kv import status
from vllm_mlx_harmony.host.model_names import other_names, own_name
from vllm_mlx_harmony.host.mount import Around, Route
from vllm_mlx_harmony.host.refusals import refuse, refusing_in
from vllm_mlx_harmony.host.responses import routes as responses
from vllm_mlx_harmony.host.seams import Seam
from vllm_mlx_harmony.host.serving import Api, serve
from vllm_mlx_harmony.host.window import length_of
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

    listed = (await server.list_models()).model_dump(mode="json")
    entries = [_with_length(entry) for entry in listed["data"]]
    if not model_id:
        others = [{**entries[0], "id": name} for name in other_names()]
        return JSONResponse({**listed, "data": entries + others})
    own = own_name(model_id)
    for entry in entries:
        if entry["id"] == own:
            return JSONResponse({**entry, "id": model_id})
    missing = RequestError(
        f"the model {model_id!r} does not exist", param="model", code="model_not_found", status=404
    )
    return refuse(chat.error_body, missing)


async def list_models(request: Request) -> Response:
    """``GET /v1/models``: the host's list, and the other names of its model, as they were given."""
    return await retrieve_model(request, "")


def _with_length(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with ``max_model_len``, as vLLM calls it: clients are set up by it (``connect``)."""
    from vllm_mlx import server

    single = server._model_path is not None and entry["id"] == server._model_name
    length = length_of(server._model_path) if single else None
    return entry if length is None else {**entry, "max_model_len": length}


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
        Route("/v1/models", ("GET",), list_models, "the host tells no context and no other names"),
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

ROUTES: tuple[Seam, ...] = (
    *shutdown.SEAMS,
    ORIGINS,
    *_CHAT,
    *messages.ROUTES,
    *responses.ROUTES,
    *cancel.ROUTES,
    *status.ROUTES,
)
