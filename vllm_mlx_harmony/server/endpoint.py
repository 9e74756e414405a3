"""Endpoints of the front end as values.

`server.app` serves them as an application of their own, `host.mount` among the routes of vllm-mlx.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

Handler: TypeAlias = "Callable[[Request], Awaitable[Response]]"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An HTTP endpoint, served in place of any route that the server itself has at ``path``.

    ``answer`` takes the request, and the path parameters by name. It runs behind the dependencies
    (API key, rate limit) of the server's own route for the same path and methods. Where the server
    has none, ``like`` names the route, by path and method, whose dependencies apply. ``around``
    wraps the endpoint and its dependencies. ``open``: no key is required. ``other_methods`` answers
    requests with any other method. ``why`` is a short reason, for the log and ``doctor``.
    """

    path: str
    methods: Collection[str]
    answer: Callable[..., Any]
    why: str = ""
    like: tuple[str, str] | None = None
    around: Callable[[Handler], Handler] | None = None
    open: bool = False
    other_methods: Callable[[Request], Response] | None = None


class EndpointRoute(Route):
    """A route whose ``other_methods``, if given, answers methods that its path does not have."""

    other_methods: Callable[[Request], Response] | None = None

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.other_methods is None or scope["method"] in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = self.other_methods(Request(scope))
        response.headers["Allow"] = methods_at(self.path, scope["app"].routes)
        await response(scope, receive, send)


def methods_at(path: str, routes: Iterable[BaseRoute]) -> str:
    """The value of an ``Allow`` header: all methods of ``path``, which several routes may share.

    https://www.rfc-editor.org/rfc/rfc9110#section-10.2.1
    """
    matching = [route for route in routes if getattr(route, "path", None) == path]
    names = {name for route in matching for name in getattr(route, "methods", None) or ()}
    return ", ".join(sorted(names))
