"""The front end as an application of its own, for a host that has none.

Knows endpoints and middleware. A server that has an application puts them among its own routes
instead (for vllm-mlx: `host.mount`).
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from vllm_mlx_harmony.server.endpoint import Endpoint, Handler, methods_at
from vllm_mlx_harmony.server.host import Host, host_of, install
from vllm_mlx_harmony.server.routes import ENDPOINTS, MIDDLEWARE, SOCKETS


def application(host: Host) -> Starlette:
    """All that the front end answers, over ``host``; every endpoint asks for its key and limit."""
    app = Starlette(
        routes=[
            *map(_OneOf, ENDPOINTS),
            *(WebSocketRoute(each.path, each.converse) for each in SOCKETS),
        ],
        middleware=[Middleware(each) for each, _ in MIDDLEWARE],
    )
    install(app, host)
    return app


class _OneOf(Route):
    """An endpoint as a route, which answers for the methods that its path does not have, too."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint.path, _guarded(endpoint), methods=list(endpoint.methods))
        self._other_methods = endpoint.other_methods

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        methods = self.methods or set()
        if self._other_methods is None or scope["method"] in methods:
            await super().handle(scope, receive, send)
            return
        response = self._other_methods(Request(scope))
        response.headers["Allow"] = methods_at(self.path, scope["app"].routes)
        await response(scope, receive, send)


def _guarded(endpoint: Endpoint) -> Handler:
    """``endpoint``, behind the host's checks, unless it is open to all."""

    async def answer(request: Request) -> Response:
        host = host_of(request)
        if not endpoint.open:
            await host.authenticate(request)
            await host.check_rate_limit(request)
        response: Response = await endpoint.answer(request, **request.path_params)
        return response

    return answer if endpoint.around is None else endpoint.around(answer)
