"""The endpoints of the Anthropic Messages API."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import messages
from vllm_mlx_harmony.server.endpoint import Endpoint
from vllm_mlx_harmony.server.errors import error_response
from vllm_mlx_harmony.server.front_end import Caller, host_of
from vllm_mlx_harmony.server.serving import TurnApi, count, generate, serve

REQUEST_ID = "request-id"
API_KEY, BEARER = b"x-api-key", b"authorization"

logger = logging.getLogger("vllm_mlx_harmony")


def _read(body: object, defaults: Defaults, caller: Caller) -> messages.MessagesRequest:
    parsed = messages.read(body, defaults, caller.cipher)
    for note in parsed.notes:
        logger.info("messages: %s", note)
    return parsed


MESSAGES = TurnApi(
    "anthropic_messages",
    _read,
    comments_progress=True,
    reports_cached=True,
    servers=messages.client_servers,
    emitter=lambda request, info, context, caller: request.emitter(info),
    citation_text=lambda _: "",  # a citation is beside the text
)


COUNT = replace(
    MESSAGES,
    read=lambda body, defaults, caller: messages.read(body, defaults, caller.cipher, counting=True),
)


async def create_message(request: Request) -> Response:
    """``POST /v1/messages``."""
    id_seed = uuid4().hex
    response = await serve(MESSAGES, request, generate, id_seed=id_seed)
    response.headers[REQUEST_ID] = messages.request_id(id_seed)
    return response


async def count_tokens(request: Request) -> Response:
    """``POST /v1/messages/count_tokens``: the length of the prompt of the same request."""
    response = await count(COUNT, request, messages.token_count)
    response.headers[REQUEST_ID] = messages.request_id(uuid4().hex)
    return response


def error(raised: Exception) -> Response:
    """The response for an error, with a request id like every other response."""
    request_id = messages.request_id(uuid4().hex)
    response = error_response(partial(messages.error_body, request_id=request_id), raised)
    response.headers[REQUEST_ID] = request_id
    return response


async def bearer(request: Request) -> None:
    """Copies ``x-api-key`` to ``Authorization``, where the host's dependency looks for the key.

    Claude Code sends both if it has both. One valid key is enough.
    """
    headers, host = dict(request.scope["headers"]), host_of(request)
    if API_KEY not in headers:
        return
    if BEARER in headers:
        scheme, _, key = headers[BEARER].decode("latin-1").partition(" ")
        if not host.requires_key or (scheme.lower() == "bearer" and host.is_key(key.strip())):
            return
    other_headers = [header for header in request.scope["headers"] if header[0] != BEARER]
    request.scope["headers"] = [*other_headers, (BEARER, b"Bearer " + headers[API_KEY])]


_endpoint = partial(Endpoint, error=error, before_checks=bearer)

ENDPOINTS: tuple[Endpoint, ...] = (
    _endpoint("/v1/messages", ("POST",), create_message, "content blocks from token ids"),
    _endpoint(
        "/v1/messages/count_tokens",
        ("POST",),
        count_tokens,
        "counts the tokens of the whole prompt",
    ),
)
