"""Puts a route in front of one of the host's, or a middleware around all of them.

A request can be passed on to the route behind. Re-binding an endpoint's name changes nothing: the
decorator has captured the function. Knows FastAPI's routing; refuses to know any path or endpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastapi.routing import APIRoute, request_response
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope, Send

from .seams import Undo, locate

APP = "vllm_mlx.server:app"

Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"


class Mounted(APIRoute):
    """A route of ours. `behind` is the host's route that it stands in front of, if there is one.

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
        response.headers["Allow"] = ", ".join(sorted(methods))
        await response(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Route:
    """A route that is put in front of the host's for the same path and methods.

    It gets the very `dependencies` of the host's route (API key, rate limit). For a path that the
    host does not have, `like` names the `(path, method)` whose dependencies it gets instead.
    The endpoint may give a request back to the host with `pass_on`. `around` is put around all of
    it, the dependencies included. `other_methods` answers for methods that the path does not have.
    """

    path: str
    methods: Collection[str]
    endpoint: Callable[..., Any]
    why: str = ""
    like: tuple[str, str] | None = None
    app: str = APP
    around: Callable[[Handler], Handler] | None = None
    other_methods: Callable[[Request], Response] | None = None

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
        """Inserts it before the host's route, or at the end; undone, the order is as before."""
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
            self.endpoint,
            methods=list(self.methods),
            dependencies=model.dependencies if model else None,
            dependency_overrides_provider=model.dependency_overrides_provider if model else None,
            response_model=None,
            include_in_schema=False,  # the host's own entry keeps describing the path
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
    """An ASGI middleware around the host's whole application, outside of those it has.

    ``middleware`` is a class that takes the application; as a string it is imported when applied.
    """

    middleware: str
    why: str
    app: str = APP

    @property
    def label(self) -> str:
        """The middleware's name."""
        return f"around {self.app.partition(':')[2]}: {self.middleware.rpartition(':')[2]}"

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
        entry = Middleware(locate(self.middleware))
        before = application.middleware_stack
        application.user_middleware.insert(0, entry)
        application.middleware_stack = None  # built anew by the next request

        def undo() -> None:
            application.user_middleware.remove(entry)
            application.middleware_stack = before

        return undo


def _find(routes: list[BaseRoute], path: str, methods: set[str]) -> APIRoute | None:
    """The host's own route; never one of ours, which a second look would find first."""
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


async def pass_on(request: Request) -> Response:
    """The host's own answer to `request`, its body byte for byte as it came.

    For the endpoint of a `Route` that has one of the host's behind it, which runs as if ours were
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
