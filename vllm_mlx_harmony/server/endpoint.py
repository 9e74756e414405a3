"""Endpoint definitions, whose errors have each API's format (`errors`).

`server.app` serves them as an application of their own, `host.mount` among the routes of vllm-mlx.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.events import encode_in_chunks
from vllm_mlx_harmony.server.errors import ErrorResponse, openai_error
from vllm_mlx_harmony.server.host import Host
from vllm_mlx_harmony.tasks import in_thread

Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"


async def json_in_thread(make: Callable[..., object], *arguments: Any) -> Response:
    """The document that ``make`` returns, which may be long: it is made and encoded in a thread."""
    text = await in_thread(lambda: encode_in_chunks(make(*arguments)))
    return Response(text, media_type=JSONResponse.media_type)


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
    dependencies_of: tuple[str, str] | None = None
    """Path and method of the host's route whose dependencies apply if it has none at ``path``."""
    error: ErrorResponse | None = None
    """Turns every exception into a response, those of the checks and 405 for other methods
    included. Without it, the host handles them."""
    before_checks: Callable[[Request], Awaitable[None]] | None = None
    """Called before the checks, if there is an ``error``."""
    public: bool = False
    """Whether no key is required."""

    def with_errors(self, guarded: Handler) -> Handler:
        """``guarded``, the handler behind its dependencies, with ``error`` for its exceptions.

        Exception handlers of the application would also catch errors of the host's other routes.
        """
        error, before_checks = self.error, self.before_checks
        if error is None:
            return guarded

        async def handle(request: Request) -> Response:
            try:
                if before_checks is not None:
                    await before_checks(request)
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


def guarded_route(endpoint: Endpoint, host: Host) -> EndpointRoute:
    """The route of ``endpoint`` behind the host's checks of API key and rate limit."""

    async def handle(request: Request) -> Response:
        if not endpoint.public:
            await host.authenticate(request)
            await host.check_rate_limit(request)
        response: Response = await endpoint.handler(request, **request.path_params)
        return response

    methods = list(endpoint.methods)
    route = EndpointRoute(endpoint.path, endpoint.with_errors(handle), methods=methods)
    route.endpoint_error = endpoint.error
    return route
