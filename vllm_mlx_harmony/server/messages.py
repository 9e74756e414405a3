"""The routes of the Anthropic Messages API.

Knows its header names and how its tokens are counted. Refuses to know its bodies and events
(protocols.messages) and how a request is run (serving).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.core.turn import Defaults, Stamp
from vllm_mlx_harmony.protocols import messages
from vllm_mlx_harmony.server.encryption import server_seal
from vllm_mlx_harmony.server.endpoint import Endpoint
from vllm_mlx_harmony.server.errors import admitted, refuse, refusing_with
from vllm_mlx_harmony.server.serving import Api, count, serve

REQUEST_ID = "request-id"
API_KEY, BEARER = b"x-api-key", b"authorization"

logger = logging.getLogger("vllm_mlx_harmony")


def _read(body: object, defaults: Defaults, tenant: str) -> messages.MessagesRequest:
    asked = messages.read(body, defaults, server_seal(tenant))
    for note in asked.notes:
        logger.info("messages: %s", note)
    return asked


def _read_to_count(body: object, defaults: Defaults, tenant: str) -> messages.MessagesRequest:
    return messages.read(body, defaults, server_seal(tenant), counting=True)


MESSAGES = Api(
    "anthropic_messages", _read, messages.error_body, ping=messages.PING, tells_cached=True
)


async def create_message(request: Request) -> Response:
    """``POST /v1/messages``."""
    key = uuid4().hex
    return _signed(await serve(_of(MESSAGES, key), request, key), key)


async def count_tokens(request: Request) -> Response:
    """``POST /v1/messages/count_tokens``: what the same request would put into the prompt."""
    key = uuid4().hex
    api = _of(replace(MESSAGES, read=_read_to_count), key)
    return _signed(await count(api, request, messages.counted), key)


async def root(_: Request) -> Response:
    """``HEAD /``: Claude Code asks whether anybody is there."""
    return Response()


def _of(api: Api, key: str) -> Api:
    """``api`` whose errors name the request."""
    return replace(api, error_body=partial(_error_body, key=key))


def _error_body(failure: HarmonyFailure, key: str) -> dict[str, object]:
    return messages.error_body(failure, messages.request_id(Stamp(key, 0, "")))


def _signed(response: Response, key: str) -> Response:
    response.headers[REQUEST_ID] = messages.request_id(Stamp(key, 0, ""))
    return response


def _refuse(failure: HarmonyFailure) -> Response:
    """For a request that comes to no endpoint: its answer has an id, too."""
    key = uuid4().hex
    return _signed(refuse(partial(_error_body, key=key), failure), key)


async def bearer(request: Request) -> None:
    """Lets ``x-api-key`` stand for the bearer token that the host's dependency looks for.

    Claude Code sends both when it was given both: one that is right is enough.
    """
    headers = dict(request.scope["headers"])
    if API_KEY not in headers or (BEARER in headers and await admitted(request)):
        return
    others = [header for header in request.scope["headers"] if header[0] != BEARER]
    request.scope["headers"] = [*others, (BEARER, b"Bearer " + headers[API_KEY])]


def _route(path: str, endpoint: Callable[[Request], Awaitable[Response]], why: str) -> Endpoint:
    return refusing_with(_refuse, Endpoint(path, ("POST",), endpoint, why), before=bearer)


ENDPOINTS: tuple[Endpoint, ...] = (
    _route("/v1/messages", create_message, "content blocks from token ids"),
    _route("/v1/messages/count_tokens", count_tokens, "the host counts the text, not the prompt"),
    Endpoint(
        "/", ("HEAD",), root, "Claude Code's first question", like=("/health", "GET"), open=True
    ),
)
