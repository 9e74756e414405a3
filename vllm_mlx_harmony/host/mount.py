"""Puts the front end into vllm-mlx's FastAPI application, and passes requests on to its routes.

A route of ours stands in front of the original one, which stays and can still answer: replacing
the function that a decorator has registered would have no effect.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from fastapi.routing import APIRoute, request_response
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope, Send

from vllm_mlx_harmony.required_names import Undo, find_problem, locate
from vllm_mlx_harmony.server import app as server
from vllm_mlx_harmony.server import traces
from vllm_mlx_harmony.server.endpoint import Endpoint, EndpointRoute
from vllm_mlx_harmony.server.front_end import FrontEnd, host_of, installed_in
from vllm_mlx_harmony.server.host import Host
from vllm_mlx_harmony.server.installation import install, uninstall
from vllm_mlx_harmony.server.responses.websocket import UVICORN, without_traceback

APP = "vllm_mlx.server:app"


class Mounted(EndpointRoute, APIRoute):
    """A route of ours, in front of `original`, if vllm-mlx has one for the same path.

    Requests pass the dependencies (API key, rate limit) of `guard`, a route of vllm-mlx.
    """

    def __init__(
        self, endpoint: Endpoint, original: APIRoute | None, guard: APIRoute | None
    ) -> None:
        APIRoute.__init__(
            self,
            endpoint.path,
            endpoint.handler,
            methods=list(endpoint.methods),
            dependencies=guard.dependencies if guard else None,
            dependency_overrides_provider=guard.dependency_overrides_provider if guard else None,
            response_model=None,
            include_in_schema=False,  # vllm-mlx's own entry keeps describing the path
        )
        self.behind = original and without_dependencies(original)
        self.endpoint_error = endpoint.error
        guarded = self.get_route_handler()

        async def handle(request: Request) -> Response:
            reject_non_ascii_key(request)
            return await guarded(request)

        # Errors without a format of ours stay those of vllm-mlx.
        handler = guarded if endpoint.error is None else handle
        self.app = request_response(endpoint.with_errors(handler))


def reject_non_ascii_key(connection: HTTPConnection) -> None:
    """Raises ``HTTPException`` 401 for a key that is not ASCII.

    ``--api-key`` is always ASCII (`activation`), and vllm-mlx's comparison raises ``TypeError`` for
    anything else.
    """
    key = connection.headers.get("authorization", "")
    if host_of(connection).requires_key and not key.strip().isascii():
        raise HTTPException(401, "Invalid API key")  # as vllm-mlx's own error


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint in front of vllm-mlx's route for the same path and methods.

    It gets the `dependencies` (API key, rate limit) of that route. If there is none, it gets those
    of the route in `Endpoint.dependencies_of`.
    """

    endpoint: Endpoint
    required: bool = True

    @property
    def label(self) -> str:
        return f"{'|'.join(sorted(self.endpoint.methods))} {self.endpoint.path}"

    @property
    def why(self) -> str:
        return self.endpoint.why

    def problem(self) -> str | None:
        try:
            original, guard = self._originals(locate(APP).router.routes)
        except (ImportError, AttributeError, TypeError) as error:
            return f"{APP} has no routes ({error})"
        guard_at = self.endpoint.dependencies_of
        wanted = "{1} {0}".format(*guard_at) if guard_at else self.label
        return None if original or guard else f"{APP} has no route {wanted}"

    def apply(self) -> Undo:
        application = locate(APP)
        present: list[BaseRoute] = application.router.routes
        original, guard = self._originals(present)
        mounted = Mounted(self.endpoint, original, guard)
        present.insert(len(present) if original is None else present.index(original), mounted)
        return partial(present.remove, mounted)

    def _originals(self, present: list[BaseRoute]) -> tuple[APIRoute | None, APIRoute | None]:
        """The route for the same path, and the one whose dependencies apply."""
        original = _find(present, self.endpoint.path, set(self.endpoint.methods))
        if original is not None or self.endpoint.dependencies_of is None:
            return original, original
        path, method = self.endpoint.dependencies_of
        return None, _find(present, path, {method})


def _find(present: list[BaseRoute], path: str, methods: set[str]) -> APIRoute | None:
    """vllm-mlx's own route, never one of ours."""
    for route in present:
        if not isinstance(route, APIRoute) or isinstance(route, Mounted):
            continue
        if route.path == path and methods & (route.methods or set()):
            return route
    return None


@dataclass(frozen=True, slots=True)
class Addition:
    """A change to the application other than a route; ``add`` returns a function that undoes it."""

    label: str
    why: str
    add: Callable[[FastAPI], Undo]
    required: bool = True

    def problem(self) -> str | None:
        names = ("state", "router", "user_middleware", "middleware_stack")
        return next(filter(None, (find_problem(f"{APP}.{name}") for name in names)), None)

    def apply(self) -> Undo:
        return self.add(locate(APP))


def front_end(host: Host) -> Addition:
    """What our routes need: the host, middleware around that of vllm-mlx, and WebSockets."""

    def add(application: FastAPI) -> Undo:
        stack, present = application.middleware_stack, application.router.routes
        install(application, host, traces.factories())
        middleware = server.middleware(host.server_settings)
        application.user_middleware[:0] = middleware
        application.middleware_stack = None  # the next request builds it again
        present.extend(server.SOCKETS)
        logging.getLogger(UVICORN).addFilter(without_traceback)

        def undo() -> None:
            logging.getLogger(UVICORN).removeFilter(without_traceback)
            for socket in server.SOCKETS:
                present.remove(socket)
            for one in middleware:
                application.user_middleware.remove(one)
            application.middleware_stack = stack
            uninstall(application)

        return undo

    return Addition("app", "gives requests their host, middleware and WebSockets", add)


def installed_front_end() -> FrontEnd:
    """The front end in vllm-mlx's application, for what runs outside of a request."""
    return installed_in(locate(APP))


def without_dependencies(route: APIRoute) -> APIRoute:
    """A copy of the route for requests that have passed its dependencies already.

    Passing them again would count a request twice against the rate limit.
    """
    names = set(inspect.signature(APIRoute.__init__).parameters) - {"self", "dependencies"}
    return APIRoute(**{name: getattr(route, name) for name in names if hasattr(route, name)})


async def forward_to_host(request: Request) -> Response:
    """vllm-mlx's own response to `request`, whose body it receives unchanged.

    For the endpoint of a `Route`. Raises LookupError if vllm-mlx has no route for it.
    """
    route = request.scope.get("route")
    if not isinstance(route, Mounted) or route.behind is None:
        raise LookupError(f"nothing behind {request.url.path}")
    return _Forwarded(route.behind, await request.body())


class _Forwarded(Response):
    """The response of another route, which that route sends by itself."""

    def __init__(self, route: APIRoute, body: bytes) -> None:
        super().__init__()
        self._route = route
        self._messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_again() -> Message:
            return self._messages.pop() if self._messages else await receive()

        inner = {**scope, "route": self._route, "endpoint": self._route.endpoint}
        await self._route.handle(inner, receive_again, send)
