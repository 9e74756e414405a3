"""The gateway as a server: its ``Host``, its own endpoints, and its life from start to drain.

Knows the process. Refuses to know APIs (``server``), engines (`engines`) and routing (`router`).

``/health`` says that the process lives, ``/ready`` whether an engine would take a request (503
while none is up, and from SIGTERM on: a load balancer sends nothing any more), ``/metrics`` is for
Prometheus. None of the three asks for a key, and none names one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

import uvicorn
from aiohttp import ClientSession
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.core.turn import Defaults, Sampling
from vllm_mlx_harmony.gateway import access_log
from vllm_mlx_harmony.gateway.access_log import Access, logged
from vllm_mlx_harmony.gateway.engines import http as engine_http
from vllm_mlx_harmony.gateway.engines.detection import (
    Spec,
    detect,
    first_id,
    same_model,
    start_line,
)
from vllm_mlx_harmony.gateway.engines.http import EngineSilent, EngineUnavailable, HttpEngine
from vllm_mlx_harmony.gateway.limits import Keys, RateLimit
from vllm_mlx_harmony.gateway.metrics import Metrics, RequestTracker
from vllm_mlx_harmony.gateway.router import NOT_FOUND, Backend, Fleet
from vllm_mlx_harmony.gateway.routing import Health, Rule
from vllm_mlx_harmony.gateway.settings import GatewaySettings
from vllm_mlx_harmony.gateway.shared_limit import SharedRateLimit
from vllm_mlx_harmony.server import defaults, enforcement, generation
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.engine import Engine
from vllm_mlx_harmony.server.garbage import set_aside
from vllm_mlx_harmony.server.host import Context, Deadline, Lease, Tracker, tenant_of
from vllm_mlx_harmony.server.shared import SharedError, server_shared
from vllm_mlx_harmony.server.shutdown import at_once, gracefully
from vllm_mlx_harmony.server.tools import config as tools
from vllm_mlx_harmony.server.tools.client_servers import ClientServers
from vllm_mlx_harmony.server.tools.metrics import ToolMetrics
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

logger = logging.getLogger("vllm_mlx_harmony")

T = TypeVar("T")

TICK = 0.1
"""Seconds between two looks which engines are to be probed."""

PROBE_SECONDS = 5.0
"""In which an engine has to say that it is well."""

AT_THE_START = ("model", "host", "port", "mcp_config", "shutdown_grace", "log_level")
"""Settings that a reload leaves as they are."""

_TRANSPORT = "vllm_mlx_harmony.transport"


class Gateway:
    """A server of its own as the front end's ``Host``."""

    archive: Archive | None = None
    renderer: Callable[..., Any] = staticmethod(render)
    context: Callable[..., Context] = StreamingHarmonyContext

    def __init__(self, settings: GatewaySettings, rule: Rule | None = None) -> None:
        self.settings = settings
        self.fleet = Fleet(settings.model, settings.engines, rule, limit=settings.timeout)
        self.metrics = Metrics(self.fleet)
        self._keys = Keys(settings.keys)
        self._limit = RateLimit(settings.rate_limit)
        self._created = int(time.time())
        self.toolbox = _toolbox(settings)

    def reload(self, settings: GatewaySettings) -> None:
        """What is configured from now on; requests under way end as they began.

        Raises ``HostError`` where that would open a gateway with keys to everybody: nothing has
        changed then.
        """
        if self._keys and not settings.keys:
            raise HostError("no key is left; a gateway without keys is started as one")
        kept = {name: getattr(self.settings, name) for name in AT_THE_START}
        changed = [name for name in AT_THE_START if getattr(settings, name) != kept[name]]
        if changed:
            logger.warning("%s: as at the start; restart for another", ", ".join(changed))
        self.settings = replace(settings, **kept)
        self._keys = Keys(settings.keys)
        self._limit.limit = settings.rate_limit
        self.fleet.limit = self.settings.timeout
        self.fleet.update(settings.engines)
        urls = ", ".join(each.url for each in settings.engines)
        logger.warning("settings read again: %d keys, engines: %s", len(settings.keys), urls)

    @property
    def model_name(self) -> str | None:
        """See ``Host``."""
        return self.settings.model

    async def models(self) -> dict[str, Any]:
        """See ``Host``."""
        entry: dict[str, Any] = {
            "id": self.settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm-mlx-harmony",
        }
        if self.fleet.context_length is not None:
            entry["max_model_len"] = self.fleet.context_length
        return {"object": "list", "data": [entry]}

    async def acquire(
        self, request: Request, model: str | None, deadline: Deadline
    ) -> Lease | None:
        """See ``Host``. Nothing is loaded, and an engine is chosen when the prompt is there."""
        if model not in (None, self.settings.model):
            raise HTTPException(404, f"The model `{model}` does not exist.")
        return Lease(self.fleet.within(deadline), tenant_of(request), deadline, _nothing)

    async def forward(self, request: Request) -> Response:
        """Nobody is behind."""
        raise LookupError(request.url.path)

    def deadline(self, timeout: float | None) -> Deadline:
        """See ``Host``."""
        seconds = self.settings.timeout if timeout is None else min(timeout, self.settings.timeout)
        return Deadline(seconds, time.monotonic() + seconds)

    def defaults(self, engine: Engine | None) -> Defaults:
        """See ``Host``."""
        settings = self.settings
        flags = Sampling(temperature=settings.temperature, top_p=settings.top_p)
        read = defaults.read(settings.template_options)
        return replace(read, sampling=defaults.sampling(flags, {}))

    def max_tokens(self, asked: int | None) -> int:
        """See ``Host``."""
        if asked is None:
            return self.settings.default_max_output_tokens
        limit = self.settings.max_output_tokens
        if asked > limit:
            raise HTTPException(400, f"max_tokens exceeds server limit ({limit})")
        return asked

    @property
    def reasoning_tokens(self) -> int | None:
        """See ``Host``."""
        return self.settings.reasoning_tokens

    @property
    def requires_key(self) -> bool:
        """See ``Host``."""
        return bool(self._keys)

    async def authenticate(self, connection: HTTPConnection) -> None:
        """See ``Host``."""
        if not self._keys:
            return
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        name = self._keys.name_of(key.strip(" \t")) if scheme.lower() == "bearer" else None
        if access := access_log.current.get():
            access.key = name
        if name is None:
            self.metrics.refused.labels("key").inc()
            raise HTTPException(401, "Invalid API key")

    async def check_rate_limit(self, connection: HTTPConnection) -> None:
        """See ``Host``."""
        # Without keys everybody is one: else whoever sends another header each time has no limit.
        tenant = tenant_of(connection) if self._keys else ""
        seconds = self._limit.count(tenant, time.monotonic())
        shared = server_shared() if self.settings.rate_limit and not seconds else None
        if shared is not None:
            limit = SharedRateLimit(shared, self.settings.rate_limit)
            with contextlib.suppress(SharedError):  # then each gateway counts by itself
                seconds = await asyncio.to_thread(limit.count, tenant, time.time())
            if seconds:
                self._limit.take_back(tenant)
        if seconds:
            self.metrics.refused.labels("rate limit").inc()
            problem = f"Rate limit exceeded ({self.settings.rate_limit} requests per minute)"
            raise HTTPException(429, problem, {"Retry-After": str(seconds)})

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        """See ``Host``."""
        return RequestTracker(self.metrics, api, stream=stream, access=access_log.current.get())

    async def unless_gone(
        self, coming: Awaitable[T], request: Request, seconds: float, total: float
    ) -> T | None:
        """See ``Host``."""
        task = asyncio.ensure_future(coming)
        gone = asyncio.ensure_future(_gone(request))
        ends: set[asyncio.Future[Any]] = {task, gone}
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                return None
            raise HTTPException(504, f"Request timed out after {total:.1f} seconds")
        finally:
            gone.cancel()
            if not task.done():
                await generation.stopped(task)

    def until_gone(self, frames: AsyncIterable[str], request: Request) -> AsyncIterator[str]:
        """See ``Host``. Starlette's own task hears of a client that has gone."""
        return aiter(frames)

    def transport(self, connection: HTTPConnection) -> asyncio.WriteTransport | None:
        """See ``Host``."""
        transport: asyncio.WriteTransport | None = connection.scope.get(_TRANSPORT)
        return transport


def _toolbox(settings: GatewaySettings) -> Toolbox | None:
    """The tools that the gateway runs. Raises ``HostError`` for a configuration that is none, and
    for one that does nothing.
    """
    use, path = tools.use(), settings.mcp_config
    if use is tools.Use.OFF:
        if path is not None:
            raise HostError(f"--mcp-config does nothing without {tools.VARIABLE}=on")
        ClientServers.of_environment(use, 0.0)
        return None
    return Toolbox.of(tools.ToolsConfig() if path is None else tools.read(path), use)


async def _nothing() -> None:
    """An engine that nobody unloads needs no giving back."""


async def _gone(request: Request) -> None:
    """Ends when the client has gone; for a request whose body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- The application


Reload: TypeAlias = Callable[[], GatewaySettings]
"""Reads the settings again. Raises ``HostError``."""


def gateway(
    settings: GatewaySettings, rule: Rule | None = None, reload: Reload | None = None
) -> ASGIApp:
    """The whole of it as one ASGI application, engines included: found while it runs."""
    host = Gateway(settings, rule)
    return _Outer(host, application(host), reload)


class _Outer:
    """What is around the front end: the process's own endpoints, its life, and connections."""

    def __init__(self, host: Gateway, app: Starlette, reload: Reload | None = None) -> None:
        self.host = host
        self._reload = reload
        self._app = app
        app.router.lifespan_context = self._life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            answer = _OWN.get(scope["path"])
            if answer is not None and scope["method"] in ("GET", "HEAD"):
                await answer(self.host)(scope, receive, send)
                return
        if scope["type"] in ("http", "websocket"):
            scope[_TRANSPORT] = getattr(getattr(receive, "__self__", None), "transport", None)
        settings = self.host.settings
        if scope["type"] == "http" and settings.access_log != "off":
            method, path = scope["method"], scope["path"]
            access = Access(settings.access_log, method, path, settings.model, time.monotonic())
            await logged(access, self._app, scope, receive, send)
            return
        await self._app(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        if self._reload is not None:  # before all that takes a while: SIGHUP kills without it
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._reloaded, self._reload)
        enforcement.get_ready()
        async with engine_http.client() as http, self._running_tools():
            watching = asyncio.ensure_future(watch(http, self.host.fleet))
            try:
                # Engines are detected before it listens, so that first requests need no retry.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_asked(self.host.fleet), timeout=10.0)
                _log_unusable(self.host.fleet)
                set_aside()
                yield
            finally:
                await generation.stopped(watching)

    @contextlib.asynccontextmanager
    async def _running_tools(self) -> AsyncIterator[None]:
        toolbox = self.host.toolbox
        if toolbox is None:
            yield
            return
        await toolbox.start()
        for line in toolbox.lines:
            logger.info("tools %s", line)
        self.host.metrics.registry.register(ToolMetrics(toolbox))
        try:
            yield
        finally:
            await toolbox.stop()

    def _reloaded(self, reload: Reload) -> None:
        """SIGHUP: engines, keys, limits and defaults are what the settings have now."""
        try:
            self.host.reload(reload())
        except HostError as error:
            logger.error("the settings are as they were: %s", error.message)


async def _asked(fleet: Fleet) -> None:
    """Ends when it is known of every engine whether it is there."""
    while any(each.engine is None and each.problem == NOT_FOUND for each in fleet.backends):
        await asyncio.sleep(0.02)


def _log_unusable(fleet: Fleet) -> None:
    """Logs at the start that no request can be answered, and what each engine lacks."""
    if all(each.engine is None and each.problem != NOT_FOUND for each in fleet.backends):
        problems = "".join(f"\n  {each.spec.url}: {each.problem}" for each in fleet.backends)
        logger.error("no engine can be used; until one can, requests get 503:%s", problems)


async def watch(http: ClientSession, fleet: Fleet) -> None:
    """Probes engines when they are due, each beside the others."""
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
    """Asks an engine how it is. One that is doubted, or was down, has to generate an id; one that
    was down may be another one now, and is found anew."""
    if backend not in backend.routing.engines:
        return  # taken away since it was due
    try:
        if backend.routing.doubted(backend) and backend.engine is not None:
            await _generates(backend, backend.engine)
        if backend.routing.health(backend) not in (Health.UP, Health.DRAINING):
            engine = await detect(http, backend.spec, model)
            backend.found(engine)
            _log_found(engine, model)
        elif backend.routing.doubted(backend):
            backend.probed("")
        else:
            await is_well(http, backend.spec)
            if not backend.routing.doubted(backend):
                backend.probed("")
    except EngineUnavailable as error:
        if not (error.is_full and backend.up):
            backend.probed(error.message)
    except HostError as error:
        backend.probed(error.message)
    except Exception as error:  # whatever it is, the engine is asked again
        logger.exception("engine %s could not be probed", backend.spec.url)
        backend.probed(str(error) or type(error).__name__)


def _log_found(engine: HttpEngine, model: str) -> None:
    logger.info("engine %s", start_line(engine))
    if not same_model(engine.served_name, model):
        problem = "engine %s serves %r, and is asked for whatever is sent to %r"
        logger.warning(problem, engine.url, engine.served_name, model)


async def _generates(backend: Backend, engine: HttpEngine) -> None:
    """Raises ``EngineSilent`` where no id comes, for the probe or for anybody else, and what
    else it fails by, unless that engine is down: then another may have taken its place."""
    began = time.monotonic()
    seconds = max(backend.routing.rule.patience / 2, backend.expected())
    try:
        await first_id(engine, seconds)
    except EngineSilent:
        if backend.generated_at <= began:
            raise
    except EngineUnavailable:
        if backend.routing.health(backend) in (Health.UP, Health.DRAINING):
            raise


async def is_well(http: ClientSession, spec: Spec) -> None:
    """Raises ``EngineUnavailable`` for one that does not say so; every kind has ``/health``."""
    try:
        url = f"{spec.url.rstrip('/')}/health"
        async with http.get(url, timeout=engine_http.silence(PROBE_SECONDS)) as response:
            status = response.status
    except engine_http.FAILURES as error:
        problem = f"it does not say how it is ({str(error) or type(error).__name__})"
        raise EngineUnavailable(problem) from error
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise EngineUnavailable(f"it is not well: /health says {status}")


def _health(host: Gateway) -> Response:
    server = "vllm-mlx-harmony gateway"
    return JSONResponse({"status": "ok", "server": server, "model": host.settings.model})


def _ready(host: Gateway) -> Response:
    engines = [
        {"url": each.spec.url, "up": each.up, "health": each.health, "problem": each.problem}
        for each in host.fleet.backends
    ]
    ending = generation.rejection() is not None
    ready = not ending and any(each["up"] for each in engines)
    status = "draining" if ending else "ready" if ready else "no engine is up"
    return JSONResponse({"status": status, "engines": engines}, 200 if ready else 503)


def _metrics(host: Gateway) -> Response:
    return Response(host.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


_OWN: dict[str, Callable[[Gateway], Response]] = {
    "/health": _health,
    "/ready": _ready,
    "/metrics": _metrics,
}


# --- The process


def run(settings: GatewaySettings, reload: Reload | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the process's exit code.

    SIGHUP has ``reload`` read the settings again (``Gateway.reload``).
    """
    config = uvicorn.Config(
        gateway(settings, reload=reload),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=False,
        timeout_keep_alive=75,
        backlog=4096,
    )
    logging.getLogger("vllm_mlx_harmony").setLevel(settings.log_level.upper())
    access_log.to_standard_output()
    if settings.open:
        logger.warning(
            "no keys are set: whoever reaches %s:%d may use the engines (--key, or the file)",
            settings.host,
            settings.port,
        )
    server = _server(settings.shutdown_grace)(config)
    server.run()
    return 0 if server.started else 1


def _server(grace: float) -> type[uvicorn.Server]:
    """uvicorn's server, which gives running requests ``grace`` seconds to finish."""

    class Draining(uvicorn.Server):  # type: ignore[misc]  # no stubs are read for uvicorn
        shutdown = gracefully(uvicorn.Server.shutdown, lambda: grace)
        handle_exit = at_once(uvicorn.Server.handle_exit)

    return Draining
