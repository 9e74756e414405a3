"""The front end as a Starlette application: all endpoints.

Each API's module defines its own paths.
"""

from __future__ import annotations

import re
from typing import Literal

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import WebSocketRoute

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.validation import RequestModel, validate
from vllm_mlx_harmony.server import chat, decisions, ids, messages, models, ollama, tokens, traces
from vllm_mlx_harmony.server.answers import AnswerKey, ReasoningStop
from vllm_mlx_harmony.server.body import read_document
from vllm_mlx_harmony.server.endpoint import Endpoint, OpenAIEndpoint, guarded_route
from vllm_mlx_harmony.server.errors import ErrorResponse, openai_error
from vllm_mlx_harmony.server.front_end import front_end_of, host_of
from vllm_mlx_harmony.server.host import Host, tenant_of
from vllm_mlx_harmony.server.installation import install
from vllm_mlx_harmony.server.middleware import Admission
from vllm_mlx_harmony.server.responses import conversations
from vllm_mlx_harmony.server.responses import routes as responses
from vllm_mlx_harmony.server.responses.websocket import serve_socket
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.storage.sharing import Sharing
from vllm_mlx_harmony.server.storage.store import ResourceKey
from vllm_mlx_harmony.tasks import in_thread


async def _root(_: Request) -> Response:
    """``HEAD /``, with which Claude Code checks whether the server is up."""
    return Response()


class ControlBody(RequestModel):
    """The body of ``POST /v1/chat/completions/control``."""

    id: str
    action: Literal["reasoning_end"]


async def control(request: Request) -> Response:
    """``POST /v1/chat/completions/control``: ends the reasoning of an answer, as in llama.cpp.

    https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. The id is that of an
    answer in any API.
    """
    front_end = front_end_of(request)
    _, document = await read_document(request, front_end.settings)
    body = await in_thread(validate, ControlBody, document.value)
    match = _ANSWER_ID.fullmatch(body.id)
    result = ReasoningStop.UNKNOWN
    if match is not None:
        result = front_end.answers.end_reasoning(AnswerKey(match["seed"], tenant_of(request)))
    if result is ReasoningStop.ENDED:
        return JSONResponse({"success": True})
    return JSONResponse({"success": False, "message": result.value})


_ANSWER_ID = re.compile(r"[a-z]{1,16}[-_](?P<seed>[0-9a-f]{1,64})")
"""A prefix of an API, and ``LeasedRequest.id_seed``. Bounded, as it is read in the event loop."""


async def cancel_request(request: Request, request_id: str) -> Response:
    """``POST /v1/requests/{id}/cancel``: cancels an answer by the id that its client received.

    The ids of every API contain the answer's seed: ``chatcmpl-SEED``, ``resp_SEED``, ``msg_SEED``.
    Requests for unknown ids are passed on to the host, whose shape the response has.
    """
    front_end, tenant = front_end_of(request), tenant_of(request)
    key = ResourceKey(request_id, tenant)
    background = front_end.responses.background(key)
    cancelled = background is not None and not background.done
    if background is not None and cancelled:
        await background.cancel()
    elif (match := _ANSWER_ID.fullmatch(request_id)) is not None:
        answer = AnswerKey(match["seed"], tenant)
        cancelled = (
            front_end.answers.cancel(answer)
            or await front_end.responses.cancel_elsewhere(key)
            or await front_end.sharing.cancel(answer)
        )
    if not cancelled:
        try:
            return await host_of(request).forward(request)
        except LookupError as error:
            problem = f"no running request has the id {request_id!r}"
            raise RequestError(problem, status=404, param="request_id") from error
    return JSONResponse(
        {
            "object": "request.cancel",
            "id": request_id,
            "cancelled": True,
            "model": host_of(request).model_name,
        }
    )


ENDPOINTS: tuple[Endpoint, ...] = (
    *chat.ENDPOINTS,
    OpenAIEndpoint(
        "/v1/chat/completions/control",
        ("POST",),
        control,
        "ends reasoning",
        dependencies_of=("/v1/chat/completions", "POST"),
    ),
    *messages.ENDPOINTS,
    *responses.ENDPOINTS,
    *conversations.ENDPOINTS,
    *decisions.ENDPOINTS,
    *ollama.ENDPOINTS,
    *models.ENDPOINTS,
    *tokens.ENDPOINTS,
    *(
        OpenAIEndpoint(path, (method,), cancel_request, "cancels answers of this front end")
        for path, method in (
            ("/v1/requests/{request_id}/cancel", "POST"),
            ("/v1/requests/{request_id}", "DELETE"),
        )
    ),
    *ids.ENDPOINTS,
    Endpoint(
        "/",
        ("HEAD",),
        _root,
        "Claude Code checks whether the server is up",
        dependencies_of=("/health", "GET"),
        public=True,
    ),
)

SOCKETS = (WebSocketRoute("/v1/responses", serve_socket),)
"""WebSocket endpoints, which check the API key themselves."""


def error_at(path: str) -> ErrorResponse:
    """The error format of ``path``: Anthropic's for Messages, Ollama's for its API, otherwise
    OpenAI's, which LM Studio's is."""
    if f"{path}/".startswith("/v1/messages/"):
        return messages.error
    is_ollama = path.startswith("/api/") and not f"{path}/".startswith("/api/v0/")
    return ollama.error if is_ollama else openai_error


def middleware(settings: ServerSettings) -> tuple[Middleware, ...]:
    return (Middleware(Admission, error_at, origins=settings.origins, hosts=settings.hosts),)


def application(host: Host, sharing: Sharing | None = None) -> Starlette:
    """A standalone application that gets models, keys, limits and settings from ``host``.

    Opens what the settings name to be shared, unless that is passed. Raises ``HostError``.
    """
    app = Starlette(
        routes=[*(guarded_route(endpoint, host) for endpoint in ENDPOINTS), *SOCKETS],
        middleware=middleware(host.server_settings),
        exception_handlers={404: _unknown_path},
    )
    app.router.redirect_slashes = False
    install(app, host, traces.factories(), sharing)
    return app


async def _unknown_path(request: Request, _: Exception) -> Response:
    path = request.url.path
    failure = RequestError(f"no such path: {path}", status=404, code="not_found")
    return error_at(path)(failure)
