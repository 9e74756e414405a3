"""The endpoints of Chat Completions and of the list of models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server.endpoint import Endpoint, OpenAIEndpoint
from vllm_mlx_harmony.server.front_end import front_end_of
from vllm_mlx_harmony.server.serving import Api, serve

CHAT = Api("chat_completions", lambda body, defaults, tenant: chat.read(body, defaults))


async def create_chat_completion(request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    return await serve(CHAT, request)


async def retrieve_model(request: Request, model_id: str) -> Response:
    """``GET /v1/models/{model_id}``: one model of the host's list; without an id, the list."""
    front_end = front_end_of(request)
    listed, names = await front_end.host.models(), front_end.names
    entries = listed["data"]
    if not model_id:  # the `:path` converter also matches /v1/models/
        aliases = [{**entries[0], "id": name} for name in names.aliases]
        return JSONResponse({**listed, "data": entries + aliases})
    name = names.canonical_name(model_id)
    for entry in entries:
        if entry["id"] == name:
            return JSONResponse({**entry, "id": model_id})
    problem = f"the model {model_id!r} does not exist"
    raise RequestError(problem, param="model", code="model_not_found", status=404)


async def list_models(request: Request) -> Response:
    """``GET /v1/models``: the host's list, extended by the aliases of its model."""
    return await retrieve_model(request, "")


ENDPOINTS: tuple[Endpoint, ...] = (
    OpenAIEndpoint(
        "/v1/chat/completions",
        ("POST",),
        create_chat_completion,
        "prompt and answer as token ids",
    ),
    OpenAIEndpoint("/v1/models", ("GET",), list_models, "lists the model's other names, too"),
    OpenAIEndpoint(
        "/v1/models/{model_id:path}",
        ("GET",),
        retrieve_model,
        "returns one model of the list",
        like=("/v1/models", "GET"),
    ),
)
