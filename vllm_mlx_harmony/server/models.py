"""The models of the server, as each API lists them: OpenAI's and LM Studio's endpoints."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import BROWSER
from vllm_mlx_harmony.server.endpoint import Endpoint, OpenAIEndpoint
from vllm_mlx_harmony.server.front_end import FrontEnd, front_end_of
from vllm_mlx_harmony.server.model_names import check_length


async def entries(front_end: FrontEnd) -> list[dict[str, Any]]:
    """The entries of ``GET /v1/models``: the host's, and one for each alias of its model."""
    described = [_described(front_end, model) for model in (await front_end.host.models())["data"]]
    aliases = ({**described[0], "id": name} for name in front_end.names.aliases)
    return [*described, *aliases]


async def entry(front_end: FrontEnd, name: str) -> dict[str, Any]:
    """The entry of one model, under the ``name`` that it is asked for. Raises ``RequestError``."""
    check_length(name)
    canonical = front_end.names.canonical_name(name)
    for model in (await front_end.host.models())["data"]:
        if model["id"] == canonical:
            return {**_described(front_end, model), "id": name}
    problem = f"the model {name!r} does not exist"
    raise RequestError(problem, param="model", code="model_not_found", status=404)


LENGTHS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""The fields in which clients look for the context length: those of vLLM and SGLang, OpenRouter,
Groq, and LM Studio. llama.cpp has it as ``n_ctx`` of ``meta``."""


WEB_SEARCH = "web_search"
"""The field that says that the server searches the web for requests which ask for that."""


def _described(front_end: FrontEnd, entry: dict[str, Any]) -> dict[str, Any]:
    toolbox = front_end.host.toolbox
    browses = toolbox is not None and any(
        namespace.name == BROWSER and namespace.tools for namespace in toolbox.namespaces
    )
    return {**_with_lengths(entry), **({WEB_SEARCH: True} if browses else {})}


def _with_lengths(entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` with the context length in all of these fields, if it is known."""
    length = entry.get("max_model_len")
    if length is None:
        return entry
    return {**entry, **dict.fromkeys(LENGTHS, length), "meta": {"n_ctx": length}}


async def list_models(request: Request) -> Response:
    """``GET /v1/models``."""
    front_end = front_end_of(request)
    return JSONResponse({**await front_end.host.models(), "data": await entries(front_end)})


async def retrieve_model(request: Request, model_id: str) -> Response:
    """``GET /v1/models/{model_id}``; without an id, the list."""
    if not model_id:  # the `:path` converter also matches /v1/models/
        return await list_models(request)
    return JSONResponse(await entry(front_end_of(request), model_id))


# --- LM Studio (https://lmstudio.ai/docs/developer/rest/endpoints)


def _of_lm_studio(entry: dict[str, Any]) -> dict[str, Any]:
    length = entry.get("max_model_len")
    lengths = {"max_context_length": length, "loaded_context_length": length}
    return {
        "id": entry["id"],
        "object": "model",
        "type": "llm",
        "publisher": "openai",
        "arch": "gpt-oss",
        "state": "loaded",
        "capabilities": ["tool_use"],
        **({} if length is None else lengths),
    }


async def list_of_lm_studio(request: Request) -> Response:
    """``GET /api/v0/models``."""
    found = await entries(front_end_of(request))
    return JSONResponse({"object": "list", "data": [*map(_of_lm_studio, found)]})


async def retrieve_of_lm_studio(request: Request, model_id: str) -> Response:
    """``GET /api/v0/models/{model_id}``."""
    if not model_id:
        return await list_of_lm_studio(request)
    return JSONResponse(_of_lm_studio(await entry(front_end_of(request), model_id)))


_MODELS_ROUTE = ("/v1/models", "GET")

ENDPOINTS: tuple[Endpoint, ...] = (
    OpenAIEndpoint("/v1/models", ("GET",), list_models, "lists the model's aliases, too"),
    OpenAIEndpoint(
        "/v1/models/{model_id:path}",
        ("GET",),
        retrieve_model,
        "returns one model of the list",
        dependencies_of=_MODELS_ROUTE,
    ),
    OpenAIEndpoint(
        "/api/v0/models",
        ("GET",),
        list_of_lm_studio,
        "LM Studio's list of models",
        dependencies_of=_MODELS_ROUTE,
    ),
    OpenAIEndpoint(
        "/api/v0/models/{model_id:path}",
        ("GET",),
        retrieve_of_lm_studio,
        "returns one model of LM Studio's list",
        dependencies_of=_MODELS_ROUTE,
    ),
)
