"""The state of engines: their caches, requests and health, as routes and for the inspector.

vllm-mlx's `/v1/cache/stats` and `DELETE /v1/cache` import mlx_vlm, and torch with it, on the event
loop, which blocks all requests for seconds. A Harmony model has nothing in the caches of mlx_vlm:
while one is a server's only model, the answer is that of vllm-mlx without mlx_vlm, unless that is
imported already. Drop this when vllm-mlx no longer imports it there. Its `/health` reports healthy
even if the engine's thread has died.
"""

from __future__ import annotations

import sys

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.engine import exposition, resources
from vllm_mlx_harmony.host.mount import Route, forward_to_host
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine, serving
from vllm_mlx_harmony.inspector.routes import Section
from vllm_mlx_harmony.server.endpoint import Endpoint

VISION = "mlx_vlm.utils"
"""The module that is slow to import."""


async def caches(request: Request) -> Response:
    """``GET /v1/cache/stats``, and ``DELETE /v1/cache``, which empties the caches of all models."""
    clears = request.method == "DELETE"
    if clears:
        await resources.clear()
    engine = server()._engine
    if VISION in sys.modules or not isinstance(engine, HarmonyEngine):
        return await forward_to_host(request)
    done = {"status": "cleared"} if clears else {}
    held = exposition.CLEARED if clears else engine.get_cache_stats()
    missing = f"Cache {'clear' if clears else 'stats'} not available (mlx_vlm not loaded)"
    return JSONResponse({**done, "engine_cache": held, "error": missing})


async def status(_: Request) -> Response:
    """``GET /harmony/status``: all requests, with the progress of their prompts, and the steps."""
    return JSONResponse(exposition.document(serving()))


async def health(request: Request) -> Response:
    """``GET /health``: 503 while the thread of any loaded engine is dead."""
    if all(engine.healthy for _, engine in serving()):
        return await forward_to_host(request)
    return JSONResponse({**await server().health(), "status": "unhealthy"}, 503)


def inspected() -> list[Section]:
    """For the inspector: memory and the queue of each model, and what the prefix cache holds."""
    return exposition.sections(serving())


_CACHES = "vllm-mlx's own route imports mlx_vlm on the event loop"

ROUTES = tuple(
    Route(Endpoint(path, (method,), answer, why, dependencies_of=guard), required=False)
    for path, method, answer, why, guard in (
        ("/health", "GET", health, "reports an engine whose thread has died", None),
        ("/harmony/status", "GET", status, "lists the requests", ("/v1/status", "GET")),
        ("/v1/cache/stats", "GET", caches, _CACHES, None),
        ("/v1/cache", "DELETE", caches, _CACHES, None),
    )
)
