"""The gateway as a server: its ``Host``, its own endpoints, start, reload and shutdown.

``/health`` is 200 while the process runs. ``/ready`` is 200 while an engine would take a request,
and 503 from SIGTERM on, so that load balancers stop sending requests. ``/metrics`` is for
Prometheus. None of the three requires a key or contains one.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import logging
import math
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

import uvicorn
from aiohttp import ClientSession
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_mlx_harmony import inspector
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.grammar import Policy
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.core.turn import Defaults, Sampling
from vllm_mlx_harmony.gateway import access_log, limits, workers
from vllm_mlx_harmony.gateway.access_log import Entry, logged
from vllm_mlx_harmony.gateway.engines import http as engine_http
from vllm_mlx_harmony.gateway.engines.detection import detect, first_id, get
from vllm_mlx_harmony.gateway.engines.http import EngineSilent, EngineUnavailable, HttpEngine
from vllm_mlx_harmony.gateway.limits import Limits, digest, exceeded
from vllm_mlx_harmony.gateway.metrics import Metrics, RequestTracker
from vllm_mlx_harmony.gateway.router import NOT_FOUND, Backend, Fleet, FleetEngine
from vllm_mlx_harmony.gateway.routing import Health, Rule
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key
from vllm_mlx_harmony.gateway.shared_limit import Limiter
from vllm_mlx_harmony.gateway.workers import Reload
from vllm_mlx_harmony.inspector.routes import Section
from vllm_mlx_harmony.server import defaults, enforcement
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.connections import limited
from vllm_mlx_harmony.server.engine import Engine
from vllm_mlx_harmony.server.host import (
    Context,
    Deadline,
    Lease,
    Tracker,
    rejection,
    tenant_of,
)
from vllm_mlx_harmony.server.settings import ServerSettings, Use
from vllm_mlx_harmony.server.shutdown import draining
from vllm_mlx_harmony.server.tasks import cancel_and_wait
from vllm_mlx_harmony.server.tools import config as tools
from vllm_mlx_harmony.server.tools.client_servers import ClientServers
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

logger = logging.getLogger("vllm_mlx_harmony")

TICK = 0.1
"""Seconds between two checks for engines whose probe is due."""


class Gateway:
    """The front end's ``Host`` for a gateway: methods are described there."""

    archive: Archive | None = None
    renderer: Callable[..., Any] = staticmethod(render)
    context: Callable[..., Context] = StreamingHarmonyContext

    def __init__(self, settings: GatewaySettings, rule: Rule | None = None) -> None:
        self.settings = settings
        self._server = ServerSettings.read()
        self.fleet = Fleet(settings.model, settings.engines, rule, limit=settings.timeout)
        self.metrics = Metrics(self.fleet, by_key=settings.metrics_by_key)
        self.limiter = Limiter()
        self._use(settings)
        self._created = int(time.time())
        self.toolbox = _toolbox(settings.mcp_config, self._server)

    def reload(self, settings: GatewaySettings) -> None:
        """Applies new settings; running requests keep those that they started with.

        Raises ``HostError``, without changing anything, if all keys were removed: the gateway would
        be open to everyone.
        """
        self.settings = self.settings.reloaded(settings)
        self._use(settings)
        self.fleet.limit = self.settings.timeout
        self.fleet.update(settings.engines)
        urls = ", ".join(each.url for each in settings.engines)
        logger.warning("settings reloaded: %d keys, engines: %s", len(settings.keys), urls)

    def _use(self, settings: GatewaySettings) -> None:
        """Computes what requests read from the settings."""
        flags = Sampling(temperature=settings.temperature, top_p=settings.top_p)
        read = defaults.read(settings.template_options, self._server)
        self._defaults = replace(read, sampling=defaults.sampling(flags, {}))
        self._day = datetime.date.min
        self._keys = {key.digest: key for key in settings.keys}
        self.metrics.start([key.name for key in settings.keys])
        own = {key.name: settings.limits(key) for key in settings.keys}
        self._limits_of = {"": settings.limits(), **own}

    @property
    def policy(self) -> Policy:
        return self._server.grammar

    @property
    def model_name(self) -> str | None:
        return self.settings.model

    async def models(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": self.settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm-mlx-harmony",
        }
        if self.fleet.context_length is not None:
            entry["max_model_len"] = self.fleet.context_length
        return {"object": "list", "data": [entry]}

    async def must_load(self, model: str | None) -> bool:
        return False

    async def acquire(self, request: Request, model: str | None, deadline: Deadline) -> Lease:
        """Leases the whole fleet: an engine is chosen once the prompt is known."""
        if model not in (None, self.settings.model):
            raise HTTPException(404, f"The model `{model}` does not exist.")
        access = access_log.current.get() or self.access(request.scope)
        if access.exhausted is not None:
            raise self._too_many(access, str(access.exhausted), access.exhausted.wait)
        end: Callable[[], Awaitable[None]] | None = _no_release
        if limit := self._limits(access.key).concurrent_requests:
            end = await self.limiter.begin(access.key or "", limit)
        if end is None:
            raise self._too_many(access, f"{limit} concurrent requests")
        return Lease(FleetEngine(self.fleet, deadline), tenant_of(request), deadline, end)

    async def forward(self, request: Request) -> Response:
        """There is no server behind this one."""
        raise LookupError(request.url.path)

    def deadline(self, timeout: float | None) -> Deadline:
        seconds = self.settings.timeout if timeout is None else min(timeout, self.settings.timeout)
        return Deadline(seconds, time.monotonic() + seconds)

    def defaults(self, engine: Engine | None) -> Defaults:
        if self._day != (today := datetime.date.today()):
            date = defaults.current_date(self._server.date)
            self._day, self._defaults = today, replace(self._defaults, date=date)
        return self._defaults

    def max_tokens(self, asked: int | None) -> int:
        if asked is None:
            return self.settings.default_max_output_tokens
        return min(asked, self.settings.max_output_tokens)

    @property
    def reasoning_tokens(self) -> int | None:
        return self.settings.reasoning_tokens

    @property
    def requires_key(self) -> bool:
        return bool(self._keys)

    def is_key(self, text: str) -> bool:
        return digest(text) in self._keys

    async def authenticate(self, connection: HTTPConnection) -> None:
        if self._keys and self._key(connection) is None:
            self.metrics.refused.labels("key").inc()
            raise HTTPException(401, "Invalid API key")

    def _key(self, connection: HTTPConnection) -> Key | None:
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        found = self._keys.get(digest(key.strip(" \t"))) if scheme.lower() == "bearer" else None
        if access := access_log.current.get():
            access.key = None if found is None else found.name
        return found

    async def check_rate_limit(self, connection: HTTPConnection) -> None:
        access = access_log.current.get()
        if access is None or connection.scope["type"] == "websocket":
            access = self.access(connection.scope)
            access_log.current.set(access)
            await self.authenticate(connection)  # the key may have been revoked since it connected
        budgets = await self.limiter.request(access.key or "", self._limits(access.key))
        access.headers = tuple(limits.headers(budgets))
        access.exhausted = exceeded(budgets, "tokens")
        if full := exceeded(budgets, "requests"):
            raise self._too_many(access, str(full), full.wait)

    def access(self, scope: Scope) -> Entry:
        """The entry of a request, which over a WebSocket has no HTTP exchange of its own."""
        form, path = self.settings.access_log, scope["path"]
        begun, model = time.monotonic(), self.settings.model
        if scope["type"] == "websocket":
            return Entry(form, "WEBSOCKET", path, model, begun, status=101, exchanged=True)
        return Entry(form, scope["method"], path, model, begun)

    def _limits(self, name: str | None) -> Limits:
        """The limits of a key; those of every key if it was revoked while its request ran."""
        return self._limits_of.get(name or "", self._limits_of[""])

    def _too_many(self, access: Entry, limit: str, wait: float | None = None) -> HTTPException:
        """The error of a request that exceeds ``limit`` for ``wait`` seconds."""
        self.metrics.refused.labels("rate limit").inc()
        if wait is not None and wait > limits.MINUTE:
            access.headers += ((b"x-should-retry", b"false"),)
        if access.exchanged:
            access.status = 429
            access.ended()
        retry = None if wait is None else {"Retry-After": str(math.ceil(wait))}
        return HTTPException(429, f"Rate limit exceeded ({limit})", retry)

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        access = access_log.current.get()
        name = None if access is None else access.key

        def spend(tokens: int) -> None:
            self.limiter.tokens(name or "", self._limits(name), tokens)

        return RequestTracker(self.metrics, api, stream=stream, access=access, spend=spend)


def _toolbox(path: str | None, settings: ServerSettings) -> Toolbox | None:
    """The server-side tools. Raises ``HostError`` for a configuration that is invalid or would
    have no effect.
    """
    if settings.tools is Use.OFF:
        if path is not None:
            raise HostError(f"--mcp-config has no effect without {tools.VARIABLE}=on")
        ClientServers.of(settings)
        return None
    return Toolbox.of(tools.ToolsConfig() if path is None else tools.read(path), settings)


async def _no_release() -> None:
    """Leases need no release: engines behind HTTP are never unloaded."""


# --- The application


def gateway(settings: GatewaySettings, reload: Reload | None = None) -> ASGIApp:
    """The gateway as an ASGI application; its lifespan detects and probes the engines."""
    host = Gateway(settings)
    app = application(host)
    if settings.inspect:
        inspector.install(app, partial(status, host))
    return _GatewayApp(host, app, reload)


class _GatewayApp:
    """Wraps the front end with the process's own endpoints, its lifespan and the access log."""

    def __init__(self, host: Gateway, app: Starlette, reload: Reload | None = None) -> None:
        self.host = host
        self._reload = reload
        self._app = app
        app.router.lifespan_context = self._lifespan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in ENDPOINTS and scope["method"] in ("GET", "HEAD"):
            await ENDPOINTS[scope["path"]](self.host)(scope, receive, send)
        else:
            await logged(self.host.access(scope), self._app, scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if self._reload is not None:  # first: without a handler, SIGHUP kills the process
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._on_sighup, self._reload)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # of a worker
        enforcement.warm_up(self.host.policy)
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(engine_http.client())
            if (toolbox := self.host.toolbox) is not None:
                await toolbox.start()
                stack.push_async_callback(toolbox.stop)
                for line in toolbox.lines:
                    logger.info("tools %s", line)
                if self.host.settings.workers == 1:
                    self.host.metrics.registry.register(toolbox)
            stack.push_async_callback(self.host.limiter.close)
            for task in (watch(http, self.host.fleet), self.host.limiter.renew()):
                stack.push_async_callback(cancel_and_wait, asyncio.ensure_future(task))
            # Engines are detected before it listens, so that first requests need no retry.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_probed(), timeout=10.0)
            engines = self.host.fleet.backends
            if all(each.engine is None and each.problem != NOT_FOUND for each in engines):
                problems = "".join(f"\n  {each.spec.url}: {each.problem}" for each in engines)
                logger.error("no engine can be used; until one can, requests get 503:%s", problems)
            gc.collect()
            gc.freeze()  # `server.tasks`
            yield

    async def _all_probed(self) -> None:
        """Returns once every engine has been probed."""
        while any(each.problem == NOT_FOUND for each in self.host.fleet.backends):
            await asyncio.sleep(0.02)

    def _on_sighup(self, reload: Reload) -> None:
        """On SIGHUP: applies the engines, keys, limits and defaults of the reloaded settings."""
        try:
            self.host.reload(reload())
        except HostError as error:
            logger.error("the settings were not reloaded: %s", error.message)


async def watch(http: ClientSession, fleet: Fleet) -> None:
    """Probes engines concurrently, each when it is due."""
    probes: dict[Backend, asyncio.Future[None]] = {}
    try:
        while True:
            fleet.drained()
            probes = {backend: task for backend, task in probes.items() if not task.done()}
            for backend in fleet.routing.due(time.monotonic(), probes):
                probes[backend] = asyncio.ensure_future(probe(http, backend, fleet.model))
            await asyncio.sleep(TICK)
    finally:
        for task in probes.values():
            task.cancel()


async def probe(http: ClientSession, backend: Backend, model: str) -> None:
    """Checks the health of an engine. One that is doubted, or was down, must generate an id; one
    that was down may have been replaced, and is detected again."""
    if backend not in backend.routing.engines:
        return  # removed since it was due
    try:
        if backend.routing.doubted(backend) and backend.engine is not None:
            await _check_generation(backend, backend.engine)
        if backend.routing.health(backend) not in (Health.UP, Health.DRAINING):
            backend.found(await detect(http, backend.spec, model))
        elif backend.routing.doubted(backend):
            backend.probed("")
        else:
            await get(http, backend.spec, "/health")
            if not backend.routing.doubted(backend):
                backend.probed("")
    except EngineUnavailable as error:
        if not (error.is_full and backend.up):
            backend.probed(error.message)
    except HostError as error:
        backend.probed(error.message)
    except Exception as error:  # whatever it is, the engine is probed again
        logger.exception("engine %s could not be probed", backend.spec.url)
        backend.probed(str(error) or type(error).__name__)


async def _check_generation(backend: Backend, engine: HttpEngine) -> None:
    """Raises ``EngineSilent`` if no id comes for the probe, and neither ids nor progress for any
    other request. Other failures are raised unless the engine is down: another one may have taken
    its place."""
    began = time.monotonic()
    seconds = max(backend.routing.rule.patience / 2, backend.expected())
    try:
        await first_id(engine, seconds)
    except EngineSilent:
        if backend.alive_at <= began:
            raise
    except EngineUnavailable:
        if backend.routing.health(backend) in (Health.UP, Health.DRAINING):
            raise


def health(host: Gateway) -> Response:
    server = "vllm-mlx-harmony gateway"
    return JSONResponse({"status": "ok", "server": server, "model": host.settings.model})


def ready(host: Gateway) -> Response:
    engines = [
        {"url": each.spec.url, "up": each.up, "health": each.health, "problem": each.problem}
        for each in host.fleet.backends
    ]
    ending = rejection() is not None
    is_ready = not ending and any(each["up"] for each in engines)
    status = "draining" if ending else "ready" if is_ready else "no engine is up"
    return JSONResponse({"status": status, "engines": engines}, 200 if is_ready else 503)


def metrics(host: Gateway) -> Response:
    return Response(host.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def status(host: Gateway) -> list[Section]:
    """The engines, for the inspector."""
    return [
        (
            each.spec.url,
            [
                ("health", str(each.health), ""),
                ("requests", each.in_flight, ""),
                ("problem", each.problem or None, ""),
            ],
        )
        for each in host.fleet.backends
    ]


ENDPOINTS: dict[str, Callable[[Gateway], Response]] = {
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
    config = uvicorn.Config(
        gateway(settings, reload),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=False,
        timeout_keep_alive=75,
        backlog=4096,
    )
    logging.getLogger("vllm_mlx_harmony").setLevel(settings.log_level.upper())
    access_log.to_standard_output()
    server = draining(limited(uvicorn.Server), lambda: settings.shutdown_grace)(config)
    if ending is not None:
        workers.stop_with(ending, server)
    server.run(None if listener is None else [listener])
    return 0 if server.started else 1
