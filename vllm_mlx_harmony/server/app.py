"""The front end as an application of its own, for a host that has none.

Knows endpoints and middleware. A server that has an application puts them among its own routes
instead (for vllm-mlx: `host.mount`).
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony.server.endpoint import Endpoint, EndpointRoute, Handler
from vllm_mlx_harmony.server.host import Host, host_of, install
from vllm_mlx_harmony.server.routes import ENDPOINTS, MIDDLEWARE, SOCKETS


def application(host: Host) -> Starlette:
    """All that the front end answers, over ``host``; every endpoint asks for its key and limit."""
    app = Starlette(routes=[*map(_OneOf, ENDPOINTS), *SOCKETS], middleware=MIDDLEWARE)
    install(app, host)
    return app


class _OneOf(EndpointRoute):
    """An endpoint, behind the host's checks."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint.path, _guarded(endpoint), methods=list(endpoint.methods))
        self.other_methods = endpoint.other_methods


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
