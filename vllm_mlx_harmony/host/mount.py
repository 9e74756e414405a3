"""Puts a route in front of one of vllm-mlx's, or a middleware around all of them.

A request can be passed on to the route behind. Re-binding an endpoint's name changes nothing: the
decorator has captured the function. Knows FastAPI's routing; refuses to know any path or endpoint.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from fastapi.routing import APIRoute, request_response
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send

from vllm_mlx_harmony.host.patching import Undo, locate
from vllm_mlx_harmony.server.endpoint import Endpoint, SocketEndpoint, methods_at
from vllm_mlx_harmony.server.host import Host, install, uninstall
from vllm_mlx_harmony.server.responses.websocket import UVICORN, without_traceback

APP = "vllm_mlx.server:app"


class Mounted(APIRoute):
    """A route of ours. `behind` is vllm-mlx's route that it stands in front of, if there is one.

    `other_methods` answers what comes to its path with a method that no route there has.
    """

    behind: APIRoute | None = None
    other_methods: Callable[[Request], Response] | None = None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        methods = self.methods or set()
        if self.other_methods is None or scope["method"] in methods:
            await super().handle(scope, receive, send)
            return
        response = self.other_methods(Request(scope))
        response.headers["Allow"] = methods_at(self.path, scope["app"].routes)
        await response(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Route(Endpoint):
    """An endpoint that is put in front of vllm-mlx's route for the same path and methods.

    It gets the very `dependencies` of vllm-mlx's route, or of the one it is `like`. It may give a
    request back to vllm-mlx with `forward_to_host`.
    """

    app: str = APP
    required: bool = True

    @classmethod
    def of(cls, endpoint: Endpoint) -> Route:
        """The same endpoint, in front of vllm-mlx's."""
        return cls(**{each.name: getattr(endpoint, each.name) for each in fields(endpoint)})

    @property
    def label(self) -> str:
        """Methods and path."""
        return f"{'|'.join(sorted(self.methods))} {self.path}"

    def problem(self) -> str | None:
        """Why it cannot be put there in this host, or None."""
        try:
            routes = locate(self.app).router.routes
        except (ImportError, AttributeError) as error:
            return f"{self.app} is missing ({error})"
        if not isinstance(routes, list):
            return f"{self.app}: its routes are not a list"
        if self._original(routes) is None and self._model(routes) is None:
            return f"{self.app} has no route {self.like or (self.path, *sorted(self.methods))}"
        return None

    def apply(self) -> Undo:
        """Inserts it before vllm-mlx's route, or at the end; undone, the order is as before."""
        routes: list[BaseRoute] = locate(self.app).router.routes
        original = self._original(routes)
        mounted = self._mounted(original, original or self._model(routes))
        routes.insert(len(routes) if original is None else routes.index(original), mounted)

        def undo() -> None:
            places = [place for place, route in enumerate(routes) if route is mounted]
            del routes[places[0]]

        return undo

    def _mounted(self, original: APIRoute | None, model: APIRoute | None) -> Mounted:
        mounted = Mounted(
            self.path,
            self.answer,
            methods=list(self.methods),
            dependencies=model.dependencies if model else None,
            dependency_overrides_provider=model.dependency_overrides_provider if model else None,
            response_model=None,
            include_in_schema=False,  # vllm-mlx's own entry keeps describing the path
        )
        mounted.behind = original and without_dependencies(original)
        mounted.other_methods = self.other_methods
        if self.around is not None:
            mounted.app = request_response(self.around(mounted.get_route_handler()))
        return mounted

    def _original(self, routes: list[BaseRoute]) -> APIRoute | None:
        return _find(routes, self.path, set(self.methods))

    def _model(self, routes: list[BaseRoute]) -> APIRoute | None:
        return _find(routes, self.like[0], {self.like[1]}) if self.like else None


@dataclass(frozen=True, slots=True)
class Around:
    """An ASGI middleware around vllm-mlx's whole application, outside of those it has.

    ``middleware`` is a class that takes the application.
    """

    middleware: Any
    why: str
    app: str = APP
    required: bool = True

    @property
    def label(self) -> str:
        """The middleware's name."""
        return f"around {self.app.partition(':')[2]}: {self.middleware.__name__}"

    def problem(self) -> str | None:
        """Why it cannot be put there in this host, or None."""
        try:
            application = locate(self.app)
        except (ImportError, AttributeError) as error:
            return f"{self.app} is missing ({error})"
        fits = hasattr(application, "user_middleware") and hasattr(application, "middleware_stack")
        return None if fits else f"{self.app} takes no middleware"

    def apply(self) -> Undo:
        """Puts it around the others; undone, they are as before."""
        application = locate(self.app)
        entry = Middleware(self.middleware)
        before = application.middleware_stack
        application.user_middleware.insert(0, entry)
        application.middleware_stack = None  # built anew by the next request

        def undo() -> None:
            application.user_middleware.remove(entry)
            application.middleware_stack = before

        return undo


@dataclass(frozen=True, slots=True)
class SocketRoute(SocketEndpoint):
    """A WebSocket that is added to vllm-mlx's routes, which has none there."""

    app: str = APP
    required: bool = True

    @classmethod
    def of(cls, endpoint: SocketEndpoint) -> SocketRoute:
        """The same, among vllm-mlx's."""
        return cls(**{each.name: getattr(endpoint, each.name) for each in fields(endpoint)})

    @property
    def label(self) -> str:
        """Its protocol and path."""
        return f"WebSocket {self.path}"

    def problem(self) -> str | None:
        """Why it cannot be put there in this host, or None."""
        try:
            routes = locate(self.app).router.routes
        except (ImportError, AttributeError) as error:
            return f"{self.app} is missing ({error})"
        return None if isinstance(routes, list) else f"{self.app}: its routes are not a list"

    def apply(self) -> Undo:
        """Adds it at the end; undone, the routes are as before."""
        routes = locate(self.app).router.routes
        mounted = WebSocketRoute(self.path, self.converse)
        routes.append(mounted)
        logging.getLogger(UVICORN).addFilter(without_traceback)

        def undo() -> None:
            logging.getLogger(UVICORN).removeFilter(without_traceback)
            places = [place for place, route in enumerate(routes) if route is mounted]
            del routes[places[0]]

        return undo


@dataclass(frozen=True, slots=True)
class Installed:
    """vllm-mlx, as the front end sees it, left where the requests to its application find it."""

    host: Host
    why: str
    app: str = APP
    required: bool = True

    @property
    def label(self) -> str:
        """The application's state."""
        return f"{self.app.partition(':')[2]}.state"

    def problem(self) -> str | None:
        """Why it cannot be left there, or None."""
        try:
            state = locate(self.app).state
        except (ImportError, AttributeError) as error:
            return f"{self.app} is missing ({error})"
        return None if state is not None else f"{self.app} has no state"

    def apply(self) -> Undo:
        """Leaves it there; undone, it is gone."""
        application = locate(self.app)
        install(application, self.host)
        return lambda: uninstall(application)


def _find(routes: list[BaseRoute], path: str, methods: set[str]) -> APIRoute | None:
    """vllm-mlx's own route; never one of ours, which a second look would find first."""
    for route in routes:
        own = isinstance(route, APIRoute) and not isinstance(route, Mounted)
        if own and route.path == path and methods & route.methods:  # type: ignore[attr-defined]
            return route  # type: ignore[return-value]
    return None


def without_dependencies(route: APIRoute) -> APIRoute:
    """The same route again, for a request that went through its dependencies already.

    Going through them a second time would count the request twice against the rate limit.
    """
    names = set(inspect.signature(APIRoute.__init__).parameters) - {"self", "dependencies"}
    return APIRoute(**{name: getattr(route, name) for name in names if hasattr(route, name)})


async def forward_to_host(request: Request) -> Response:
    """vllm-mlx's own answer to `request`, its body byte for byte as it came.

    For the endpoint of a `Route` that has one of vllm-mlx's behind it, which runs as if ours were
    not there. Raises LookupError otherwise.
    """
    route = request.scope.get("route")
    if not isinstance(route, Mounted) or route.behind is None:
        raise LookupError(f"nothing behind {request.url.path}")
    return _PassedOn(route.behind, await request.body())


class _PassedOn(Response):
    """What another route answers, sent by that route itself."""

    def __init__(self, route: APIRoute, body: bytes) -> None:
        super().__init__()
        self._route = route
        self._request_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = {**scope, "route": self._route, "endpoint": self._route.endpoint}
        await self._route.handle(inner, _replay(self._request_body, receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` once more from the start: the body, and then whatever comes (a disconnect)."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
