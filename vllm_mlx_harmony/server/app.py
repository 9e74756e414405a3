"""The front end as an application of its own, for a host that has none."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from vllm_mlx_harmony.server.endpoint import Endpoint, EndpointRoute
from vllm_mlx_harmony.server.host import Host, host_of, install
from vllm_mlx_harmony.server.routes import ENDPOINTS, MIDDLEWARE, SOCKETS


def application(host: Host) -> Starlette:
    """An application with all endpoints, which uses ``host`` for models, keys and limits."""
    app = Starlette(routes=[*map(_GuardedRoute, ENDPOINTS), *SOCKETS], middleware=MIDDLEWARE)
    install(app, host)
    return app


class _GuardedRoute(EndpointRoute):
    """The route of an endpoint behind the host's checks of API key and rate limit."""

    def __init__(self, endpoint: Endpoint) -> None:
        async def answer(request: Request) -> Response:
            host = host_of(request)
            if not endpoint.open:
                await host.authenticate(request)
                await host.check_rate_limit(request)
            response: Response = await endpoint.answer(request, **request.path_params)
            return response

        around = endpoint.around
        guarded = answer if around is None else around(answer)
        super().__init__(endpoint.path, guarded, methods=list(endpoint.methods))
        self.other_methods = endpoint.other_methods
