"""Endpoint definitions, and error responses in each API's format.

`server.app` serves them as an application of their own, `host.mount` among the routes of vllm-mlx.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vllm_mlx_harmony.core.errors import (
    INTERNAL,
    HarmonyFailure,
    HostError,
    OutputError,
    RequestError,
)
from vllm_mlx_harmony.protocols.events import encode_in_chunks
from vllm_mlx_harmony.protocols.openai_answer import error_body
from vllm_mlx_harmony.server.host import Host
from vllm_mlx_harmony.tasks import in_thread

logger = logging.getLogger(__name__)

Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"
ErrorResponse: TypeAlias = "Callable[[Exception], Response]"

# --- Errors

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


async def json_in_thread(make: Callable[..., object], *arguments: Any) -> Response:
    """The document that ``make`` returns, which may be long: it is made and encoded in a thread."""
    text = await in_thread(lambda: encode_in_chunks(make(*arguments)))
    return Response(text, media_type=JSONResponse.media_type)


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


# --- Endpoints


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An HTTP endpoint, served in place of any route that the host itself has at ``path``."""

    path: str
    methods: Collection[str]
    handler: Callable[..., Any]
    """Called with the request and the path parameters, after the checks of API key and rate limit.
    In vllm-mlx, these are the dependencies of the host's own route at this path, if it has one."""
    why: str = ""
    """A short reason, for the log and ``doctor``."""
    like: tuple[str, str] | None = None
    """Path and method of the host's route whose dependencies apply if it has none at ``path``."""
    error: ErrorResponse | None = None
    """Turns every exception into a response, those of the checks and 405 for other methods
    included. Without it, the host handles them."""
    before: Callable[[Request], Awaitable[None]] | None = None
    """Called before the checks, if there is an ``error``."""
    open: bool = False
    """Whether no key is required."""

    def with_errors(self, guarded: Handler) -> Handler:
        """``guarded``, the handler behind its dependencies, with ``error`` for its exceptions.

        Exception handlers of the application would also catch errors of the host's other routes.
        """
        error, before = self.error, self.before
        if error is None:
            return guarded

        async def handle(request: Request) -> Response:
            try:
                if before is not None:
                    await before(request)
                return await guarded(request)
            except Exception as raised:  # noqa: BLE001 - every error gets the API's format
                return error(raised)

        return handle


OpenAIEndpoint = partial(Endpoint, error=openai_error)
"""An endpoint whose errors have OpenAI's format."""


class EndpointRoute(Route):
    """A route whose 405 responses are made by its endpoint's ``error``."""

    endpoint_error: ErrorResponse | None = None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.endpoint_error is None or scope["method"] in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        problem = f"method {scope['method']} is not allowed for {scope['path']}"
        failure = RequestError(problem, status=405, code="method_not_allowed")
        response = self.endpoint_error(failure)
        # Several routes may share a path (https://www.rfc-editor.org/rfc/rfc9110#section-10.2.1).
        same = [route for route in scope["app"].routes if getattr(route, "path", None) == self.path]
        names = {name for route in same for name in getattr(route, "methods", None) or ()}
        response.headers["Allow"] = ", ".join(sorted(names))
        await response(scope, receive, send)


def guarded(endpoint: Endpoint, host: Host) -> EndpointRoute:
    """The route of ``endpoint`` behind the host's checks of API key and rate limit."""

    async def handle(request: Request) -> Response:
        if not endpoint.open:
            await host.authenticate(request)
            await host.check_rate_limit(request)
        response: Response = await endpoint.handler(request, **request.path_params)
        return response

    methods = list(endpoint.methods)
    route = EndpointRoute(endpoint.path, endpoint.with_errors(handle), methods=methods)
    route.endpoint_error = endpoint.error
    return route
