"""Errors as HTTP answers: ours and the host's, each in the shape of the API that was called."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import (
    INTERNAL,
    HarmonyFailure,
    HostError,
    OutputError,
    RequestError,
)
from vllm_mlx_harmony.server.endpoint import Endpoint, Handler
from vllm_mlx_harmony.server.host import host_of

logger = logging.getLogger(__name__)

TOO_LARGE = 413

RETRY_SECONDS = 5
"""``Retry-After`` of a rejection whose cause gives no better number."""

LATER = (429, 503)
"""Statuses of a request that may succeed when it is repeated. The SDKs of OpenAI and Anthropic wait
for as long as ``Retry-After`` says, up to a minute."""

ErrorBody: TypeAlias = Callable[[HarmonyFailure], dict[str, Any]]
ErrorResponse: TypeAlias = Callable[[HarmonyFailure], Response]
Before: TypeAlias = Callable[[Request], Awaitable[None]]

_CODES: dict[int, tuple[str | None, str | None]] = {
    404: ("model_not_found", "model"),
    504: ("timeout", None),
}
"""Code and guilty field of what the host refuses with a status alone."""


def _wrong_key() -> HTTPException:
    """As the host says it."""
    return HTTPException(401, "Invalid API key")


def retry_headers(failure: HarmonyFailure) -> dict[str, str]:
    """``Retry-After``, where the client should repeat the request that ``failure`` answers."""
    seconds = failure.retry_after
    if seconds is None and failure.status in LATER:
        seconds = RETRY_SECONDS
    return {} if seconds is None else {"Retry-After": str(seconds)}


def error_response(body: ErrorBody, failure: HarmonyFailure) -> Response:
    """``failure`` as an answer, with `retry_headers`."""
    headers = retry_headers(failure)
    if failure.status == TOO_LARGE:
        headers["Connection"] = "close"  # what is left of the request is not read
    return JSONResponse(body(failure), status_code=failure.status, headers=headers)


def failure_of(error: HarmonyFailure | HTTPException) -> HarmonyFailure:
    """``error`` as one of ours, with the host's status, message and ``Retry-After``."""
    if isinstance(error, HarmonyFailure):
        return error
    status = error.status_code
    code, param = _CODES.get(status, (None, None))
    retry_after = (error.headers or {}).get("Retry-After", "")
    kind = RequestError if status < HostError.status else HostError
    detail: Any = error.detail
    if isinstance(detail, dict):
        detail = detail.get("message") or detail
    return kind(
        str(detail),
        status=status,
        code=code,
        param=param,
        retry_after=int(retry_after) if retry_after.isdigit() else None,
    )


def logged_failure(error: Exception, what: str) -> HarmonyFailure:
    """``error``, if it is one of ours; anything else is a bug, and logged as ``what``."""
    if isinstance(error, HarmonyFailure):
        return error
    logger.error("%s", what, exc_info=error)
    return OutputError(INTERNAL, code="internal_error")


async def admit(connection: HTTPConnection) -> None:
    """The host's own check of the API key, for a request or a WebSocket. Raises ``HTTPException``.

    Its comparison raises ``TypeError`` for a key that is not ASCII, which is as wrong as any other.
    """
    try:
        await host_of(connection).authenticate(connection)
    except TypeError as error:
        raise _wrong_key() from error


async def admitted(request: Request) -> bool:
    """Whether the host's own check of the API key lets ``request`` in."""
    try:
        # A request of its own: headers that were read once are not read again.
        await admit(Request(request.scope))
    except HTTPException:
        return False
    return True


def with_error_body(body: ErrorBody, endpoint: Endpoint) -> Endpoint:
    """``endpoint``, whose dependencies (API key, rate limit) refuse in the shape of ``body``."""
    return with_error_responses(partial(error_response, body), endpoint)


def with_error_responses(
    respond: ErrorResponse, endpoint: Endpoint, before: Before | None = None
) -> Endpoint:
    """``endpoint``, where ``respond`` answers for its dependencies; ``before`` sees requests first.

    Exception handlers would do it for the whole application: the host's other routes keep theirs.
    """

    def around(answer: Handler) -> Handler:
        async def answering(request: Request) -> Response:
            if before is not None:
                await before(request)
            try:
                return await answer(request)
            except HTTPException as error:
                return respond(failure_of(error))
            except TypeError:
                if await admitted(request):
                    raise
                return respond(failure_of(_wrong_key()))

        return answering

    def other_methods(request: Request) -> Response:
        problem = f"{request.method} is not a method of {request.url.path}"
        return respond(RequestError(problem, status=405, code="method_not_allowed"))

    return replace(endpoint, around=around, other_methods=other_methods)
