"""The routes of the Anthropic Messages API.

Knows its header names and how its tokens are counted. Refuses to know its bodies and events
(protocols.anthropic) and how a request is run (serving).
"""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.core.turn import Defaults, Stamp
from vllm_mlx_harmony.host.mount import Route
from vllm_mlx_harmony.host.refusals import refusing_in
from vllm_mlx_harmony.host.seal import server_seal
from vllm_mlx_harmony.host.serving import Api, count, serve
from vllm_mlx_harmony.protocols import anthropic

REQUEST_ID = "request-id"
API_KEY = b"x-api-key"


def _read(body: object, defaults: Defaults) -> anthropic.MessagesRequest:
    return anthropic.read(body, defaults, server_seal())


def _read_to_count(body: object, defaults: Defaults) -> anthropic.MessagesRequest:
    return anthropic.read(body, defaults, server_seal(), counting=True)


MESSAGES = Api("anthropic_messages", _read, anthropic.error_body, ping=anthropic.PING)


async def create_message(request: Request) -> Response:
    """``POST /v1/messages``."""
    key = uuid4().hex
    return _signed(await serve(_of(MESSAGES, key), request, key), key)


async def count_tokens(request: Request) -> Response:
    """``POST /v1/messages/count_tokens``: what the same request would put into the prompt."""
    key = uuid4().hex
    api = _of(replace(MESSAGES, read=_read_to_count), key)
    return _signed(await count(api, request, anthropic.counted), key)


async def root() -> Response:
    """``HEAD /``: Claude Code asks whether anybody is there."""
    return Response()


def _of(api: Api, key: str) -> Api:
    """``api`` whose errors name the request."""
    return replace(api, error_body=lambda failure: _error_body(failure, key))


def _error_body(failure: HarmonyFailure, key: str) -> dict[str, object]:
    return anthropic.error_body(failure, anthropic.request_id(Stamp(key, 0, "")))


def _signed(response: Response, key: str) -> Response:
    response.headers[REQUEST_ID] = anthropic.request_id(Stamp(key, 0, ""))
    return response


def bearer(request: Request) -> None:
    """Lets ``x-api-key`` stand for the bearer token that the host's dependency looks for."""
    headers = dict(request.scope["headers"])
    if API_KEY in headers and b"authorization" not in headers:
        token = (b"authorization", b"Bearer " + headers[API_KEY])
        request.scope["headers"] = [*request.scope["headers"], token]


ROUTES: tuple[Route, ...] = (
    refusing_in(
        anthropic.error_body,
        Route("/v1/messages", ("POST",), create_message, "content blocks from token ids"),
        before=bearer,
    ),
    refusing_in(
        anthropic.error_body,
        Route(
            "/v1/messages/count_tokens",
            ("POST",),
            count_tokens,
            "the host counts the text, not the prompt",
        ),
        before=bearer,
    ),
    Route("/", ("HEAD",), root, "Claude Code's first question", like=("/health", "GET")),
)
