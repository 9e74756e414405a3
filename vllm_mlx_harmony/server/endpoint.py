"""An endpoint of the front end, as a value: a path, methods, and what answers there.

Knows nothing of how a server puts it among its own (for vllm-mlx: `host.mount`).
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
    """What answers to ``methods`` at ``path``, instead of whatever else the server has there.

    ``answer`` takes the request, and the parameters of the path by name. It is behind the
    dependencies (API key, rate limit) that the server has for the same path and methods; for a path
    that a server does not have, behind those for ``like``, a path and a method. ``around`` is put
    around all of it, the dependencies included. ``open``: nobody is asked for a key.
    ``other_methods`` answers for methods that the path does not have. ``why`` says what it is there
    for, in a few words.
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
    """The methods that ``routes`` have at ``path``, each maybe in a route of its own: an ``Allow``.

    https://www.rfc-editor.org/rfc/rfc9110#section-10.2.1 wants all of them.
    """
    there = [each for each in routes if getattr(each, "path", None) == path]
    names = {name for each in there for name in getattr(each, "methods", None) or ()}
    return ", ".join(sorted(names))
