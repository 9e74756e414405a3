"""Error responses in each API's format, and exceptions as the failures that they report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.core.errors import (
    INTERNAL,
    HarmonyFailure,
    HostError,
    OutputError,
    RequestError,
)
from vllm_mlx_harmony.protocols.openai_answer import error_body

logger = logging.getLogger(__name__)

ErrorResponse: TypeAlias = "Callable[[Exception], Response]"

CLIENT_CLOSED = 499
"""nginx's status for a client that closed the connection; also used for cancelled requests."""

RETRY_SECONDS = 5
"""``Retry-After`` in seconds, if the error does not set one."""

RETRYABLE_STATUSES = (429, 503)
"""Statuses of requests that may succeed later. The SDKs of OpenAI and Anthropic wait as long as
``Retry-After`` asks, up to a minute."""

_CODES: dict[int, tuple[str | None, str | None]] = {
    404: ("model_not_found", "model"),
    504: ("timeout", None),
}
"""Error code and parameter for errors of the host that have only a status."""


def retry_headers(failure: HarmonyFailure) -> dict[str, str]:
    """The header ``Retry-After``, if the request may succeed later."""
    seconds = failure.retry_after
    if seconds is None and failure.status in RETRYABLE_STATUSES:
        seconds = RETRY_SECONDS
    return {} if seconds is None else {"Retry-After": str(seconds)}


def error_response(body: Callable[[HarmonyFailure], dict[str, Any]], error: Exception) -> Response:
    """The response for ``error``; ``body`` makes its JSON."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED)
    failure = failure_of(error)
    headers = retry_headers(failure)
    if failure.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(body(failure), status_code=failure.status, headers=headers)


openai_error = partial(error_response, error_body)
"""The response for an error in OpenAI's format, of Chat Completions and Responses."""


def failure_of(error: Exception, what: str = "a request failed") -> HarmonyFailure:
    """``error`` as a ``HarmonyFailure``.

    An ``HTTPException`` keeps its status, message and ``Retry-After``. Anything unknown is a bug,
    logged as ``what``.
    """
    if isinstance(error, HarmonyFailure):
        return error
    if not isinstance(error, HTTPException):
        logger.error("%s", what, exc_info=error)
        return OutputError(INTERNAL, code="internal_error")
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
