"""The gateway as a server: its own endpoints, start, reload and shutdown.

``/health`` is 200 while the process runs. ``/ready`` is 200 while an engine would take a request,
and 503 from SIGTERM on, so that load balancers stop sending requests. ``/metrics`` is for
Prometheus. None of the three requires a key or contains one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from socket import socket

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from vllm_mlx_harmony import inspector
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.gateway import access_log, workers
from vllm_mlx_harmony.gateway.access_log import logged
from vllm_mlx_harmony.gateway.host import Gateway
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.gateway.workers import Reload
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.connections import with_connection_limits
from vllm_mlx_harmony.server.endpoint import guarded_route
from vllm_mlx_harmony.server.front_end import installed_in
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.shutdown import with_graceful_shutdown
from vllm_mlx_harmony.tasks import cancel_and_wait, prepare_process

logger = logging.getLogger("vllm_mlx_harmony")

# --- The application


def gateway(settings: GatewaySettings, reload: Reload | None = None) -> _GatewayApp:
    """The gateway as an ASGI application, whose lifespan starts and ends everything.

    Loads the model if that is in this process. Raises ``HostError`` if it cannot.
    """
    host = _host(settings)
    app = application(host, host.sharing)
    app.router.routes.extend(guarded_route(endpoint, host) for endpoint in host.endpoints)
    if settings.inspect:
        inspector.install(app, host.sections)
    return _GatewayApp(host, app, reload)


def _host(settings: GatewaySettings) -> Gateway:
    if settings.local_model is None:
        return Gateway(settings)
    # While mlx-lm is imported, and the weights are read.
    enforcement.warm_up(ServerSettings.read().grammar)
    try:
        from vllm_mlx_harmony.gateway.local import LocalGateway
    except ImportError as error:
        raise HostError(
            f"a model in this process requires mlx-lm, which cannot be imported ({error}): "
            "pip install 'vllm-mlx-harmony-server[mlx]'"
        ) from error
    return LocalGateway(settings)


class _GatewayApp:
    """Wraps the front end with the process's own endpoints, its lifespan and the access log."""

    def __init__(self, host: Gateway, app: Starlette, reload: Reload | None = None) -> None:
        self.host = host
        self._reload = reload
        self._app = app
        self.front_end = installed_in(app)
        app.router.lifespan_context = self._lifespan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in ENDPOINTS and scope["method"] in ("GET", "HEAD"):
            await ENDPOINTS[scope["path"]](self)(scope, receive, send)
        else:
            await logged(self.host.access(scope), self._app, scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if self._reload is not None:  # first: without a handler, SIGHUP kills the process
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._on_sighup, self._reload)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # of a worker
        async with contextlib.AsyncExitStack() as stack:
            if (toolbox := self.host.toolbox) is not None:
                await toolbox.start()
                stack.push_async_callback(toolbox.stop)
                for line in toolbox.lines:
                    logger.info("tools %s", line)
                if self.host.settings.workers == 1:
                    self.host.metrics.registry.register(toolbox)
            stack.push_async_callback(self.host.limiter.close)
            renewing = asyncio.ensure_future(self.host.limiter.renew())
            stack.push_async_callback(cancel_and_wait, renewing)
            await stack.enter_async_context(self.host.serving())
            gc.collect()
            prepare_process()
            yield

    def _on_sighup(self, reload: Reload) -> None:
        """On SIGHUP: applies the engines, keys, limits and defaults of the reloaded settings."""
        try:
            self.host.reload(reload())
        except HostError as error:
            logger.error("the settings were not reloaded: %s", error.message)


def health(app: _GatewayApp) -> Response:
    host = app.host
    server = "vllm-mlx-harmony gateway"
    status = "ok" if host.healthy else "unhealthy"
    content = {"status": status, "server": server, "model": host.settings.model}
    return JSONResponse(content, 200 if host.healthy else 503)


def ready(app: _GatewayApp) -> Response:
    engines = app.host.states()
    ending = app.front_end.answers.rejection() is not None
    is_ready = not ending and any(engine["up"] for engine in engines)
    status = "draining" if ending else "ready" if is_ready else "no engine is up"
    return JSONResponse({"status": status, "engines": engines}, 200 if is_ready else 503)


def metrics(app: _GatewayApp) -> Response:
    return Response(app.host.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


ENDPOINTS: dict[str, Callable[[_GatewayApp], Response]] = {
    "/health": health,
    "/ready": ready,
    "/metrics": metrics,
}


# --- The process


def run(settings: GatewaySettings, reload: Reload) -> int:
    """Serves until SIGTERM or SIGINT; returns the process's exit code.

    On SIGHUP, ``reload`` reads the settings again (``Gateway.reload``).
    """
    if settings.open:
        logger.warning(
            "no keys are set: everyone who can reach %s:%d can use the engines (set --key)",
            settings.host,
            settings.port,
        )
    return workers.run(settings, reload, serve) if settings.workers > 1 else serve(settings, reload)


def serve(
    settings: GatewaySettings,
    reload: Reload,
    listener: socket | None = None,
    ending: Connection | None = None,
) -> int:
    """Serves in this process; as a worker, on ``listener`` until ``ending`` is closed."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    app = gateway(settings, reload)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=False,
        timeout_keep_alive=75,
        backlog=4096,
    )
    logging.getLogger("vllm_mlx_harmony").setLevel(settings.log_level.upper())
    access_log.to_standard_output()
    draining_server = with_graceful_shutdown(
        with_connection_limits(uvicorn.Server),
        lambda: app.front_end.answers,
        lambda: settings.shutdown_grace,
    )
    server = draining_server(config)
    if ending is not None:
        workers.stop_with(ending, server)
    server.run(None if listener is None else [listener])
    return 0 if server.started else 1
