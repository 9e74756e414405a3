"""Endpoints of the front end as values.

`server.app` serves them as an application of their own, `host.mount` among the routes of vllm-mlx.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.server.errors import openai_error
from vllm_mlx_harmony.server.host import host_of

Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"
ErrorResponse: TypeAlias = "Callable[[Exception], Response]"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An HTTP endpoint, served in place of any route that the host itself has at ``path``.

    ``handler`` is called with the request and the path parameters, after the dependencies (API key,
    rate limit) of the host's own route for the same path and methods, or else of the route that
    ``like`` names by path and method. ``error`` turns every exception into a response, including
    those of the dependencies and 405 for other methods; without it, the host handles them.
    ``before`` is called first with every request, if there is an ``error``. ``open``: no key is
    required. ``why`` is a short reason, for the log and ``doctor``.
    """

    path: str
    methods: Collection[str]
    handler: Callable[..., Any]
    why: str = ""
    like: tuple[str, str] | None = None
    error: ErrorResponse | None = None
    before: Callable[[Request], Awaitable[None]] | None = None
    open: bool = False

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
            except Exception as raised:  # noqa: BLE001 - every error gets the API's shape
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
        response.headers["Allow"] = methods_at(self.path, scope["app"].routes)
        await response(scope, receive, send)


def guarded(endpoint: Endpoint) -> EndpointRoute:
    """The route of ``endpoint`` behind the host's checks of API key and rate limit."""

    async def handle(request: Request) -> Response:
        host = host_of(request)
        if not endpoint.open:
            await host.authenticate(request)
            await host.check_rate_limit(request)
        response: Response = await endpoint.handler(request, **request.path_params)
        return response

    methods = list(endpoint.methods)
    route = EndpointRoute(endpoint.path, endpoint.with_errors(handle), methods=methods)
    route.endpoint_error = endpoint.error
    return route


def methods_at(path: str, routes: Iterable[BaseRoute]) -> str:
    """The value of an ``Allow`` header: all methods of ``path``, which several routes may share.

    https://www.rfc-editor.org/rfc/rfc9110#section-10.2.1
    """
    matching = [route for route in routes if getattr(route, "path", None) == path]
    names = {name for route in matching for name in getattr(route, "methods", None) or ()}
    return ", ".join(sorted(names))
