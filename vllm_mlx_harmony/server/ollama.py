"""The endpoints of Ollama's API."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.deltas import Delta
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols import ollama
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server import models
from vllm_mlx_harmony.server.body import read_document
from vllm_mlx_harmony.server.endpoint import Endpoint
from vllm_mlx_harmony.server.errors import error_response
from vllm_mlx_harmony.server.front_end import Caller, front_end_of
from vllm_mlx_harmony.server.host import Context
from vllm_mlx_harmony.server.serving import LeasedTurnRequest, TurnApi, generate, serve
from vllm_mlx_harmony.server.streams import LINES


@dataclass(frozen=True, slots=True)
class _Timed:
    """An emitter that is told the time of each delta, for the durations in the last line."""

    emitter: ollama.Emitter

    def feed(self, delta: Delta) -> list[Event]:
        return self.emitter.feed(delta, time.monotonic_ns())

    def keep_alive(self) -> Event:
        return self.emitter.keep_alive()

    def result(self) -> dict[str, Any]:
        return self.emitter.result()


def _emitter(
    parsed: ollama.OllamaRequest, info: ResponseInfo, context: Context, caller: Caller
) -> _Timed:
    return _Timed(parsed.emitter(info, time.monotonic_ns()))


CHAT = TurnApi(
    "ollama_chat",
    lambda body, defaults, caller: ollama.read_chat(body, defaults),
    emitter=_emitter,
    framing=LINES,
)
GENERATE = TurnApi(
    "ollama_generate",
    lambda body, defaults, caller: ollama.read_generate(body, defaults),
    emitter=_emitter,
    framing=LINES,
)


async def _answer(leased_request: LeasedTurnRequest) -> Response:
    """Generates. A request without a prompt only loads the model: it is loaded while leased."""
    document = leased_request.document.value
    if not ollama.loads_only(document):
        return await generate(leased_request)
    defaults = leased_request.front_end.host.defaults(None)
    parsed = leased_request.api.read(document, defaults, leased_request.caller)
    name = leased_request.front_end.names.echoed_name(parsed.model)
    return JSONResponse(ollama.loaded(name, int(time.time()), chat=parsed.chat))


async def create_chat(request: Request) -> Response:
    """``POST /api/chat``."""
    return await serve(CHAT, request, _answer)


async def create_text(request: Request) -> Response:
    """``POST /api/generate``."""
    return await serve(GENERATE, request, _answer)


async def list_models(request: Request) -> Response:
    """``GET /api/tags``."""
    return JSONResponse(ollama.tags(await models.entries(front_end_of(request))))


async def list_running(request: Request) -> Response:
    """``GET /api/ps``: the models whose context length is known, as it is once they are loaded."""
    front_end = front_end_of(request)
    listed = (await front_end.host.models())["data"]
    alone = front_end.host.model_name is not None
    return JSONResponse(
        ollama.running(model for model in listed if alone or "max_model_len" in model)
    )


async def show_model(request: Request) -> Response:
    """``POST /api/show``."""
    front_end = front_end_of(request)
    request, document = await read_document(request, front_end.settings)
    name = ollama.model_in(document.value)
    return JSONResponse(ollama.shown(await models.entry(front_end, name)))


async def version(_: Request) -> Response:
    """``GET /api/version``."""
    return JSONResponse({"version": ollama.VERSION})


error = partial(error_response, ollama.error_body)
"""The response for an error in Ollama's format."""

_CHAT, _MODELS = ("/v1/chat/completions", "POST"), ("/v1/models", "GET")

ENDPOINTS: tuple[Endpoint, ...] = tuple(
    Endpoint(f"/api/{name}", (method,), handler, why, dependencies_of=guard, error=error)
    for name, method, handler, why, guard in (
        ("chat", "POST", create_chat, "Ollama's chat", _CHAT),
        ("generate", "POST", create_text, "Ollama's answer to one prompt", _CHAT),
        ("tags", "GET", list_models, "Ollama's list of models", _MODELS),
        ("ps", "GET", list_running, "Ollama's list of loaded models", _MODELS),
        ("show", "POST", show_model, "Ollama's facts about a model", _MODELS),
        ("version", "GET", version, "the version of Ollama whose API this is", _MODELS),
    )
)
