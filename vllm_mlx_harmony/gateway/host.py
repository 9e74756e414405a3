"""The front end's ``Host`` for a gateway: engines, keys, limits, defaults and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Scope

from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.replay import Archive
from vllm_mlx_harmony.core.turn import Defaults, Sampling
from vllm_mlx_harmony.engine_api.engine import Engine
from vllm_mlx_harmony.gateway import access_log, limits
from vllm_mlx_harmony.gateway.access_log import Entry
from vllm_mlx_harmony.gateway.engines import http as engine_http
from vllm_mlx_harmony.gateway.fleet import NOT_FOUND, Fleet, FleetEngine
from vllm_mlx_harmony.gateway.limits import KeyLimits, digest, exceeded
from vllm_mlx_harmony.gateway.metrics import Metrics, RequestTracker
from vllm_mlx_harmony.gateway.probes import watch
from vllm_mlx_harmony.gateway.routing_policy import Rule
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key
from vllm_mlx_harmony.gateway.shared_limit import Limiter
from vllm_mlx_harmony.inspector.routes import Section
from vllm_mlx_harmony.server import defaults, enforcement
from vllm_mlx_harmony.server.endpoint import Endpoint
from vllm_mlx_harmony.server.host import (
    ContextFactory,
    Deadline,
    Lease,
    Renderer,
    Tracker,
    tenant_of,
)
from vllm_mlx_harmony.server.installation import open_sharing
from vllm_mlx_harmony.server.peers.connection import connect
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode
from vllm_mlx_harmony.server.tools import config as tools
from vllm_mlx_harmony.server.tools.client_servers import ClientServers
from vllm_mlx_harmony.server.tools.toolbox import Toolbox
from vllm_mlx_harmony.tasks import cancel_and_wait

logger = logging.getLogger("vllm_mlx_harmony")


class Gateway:
    """The front end's ``Host`` for a gateway: methods are described there."""

    archive: Archive | None = None
    endpoints: Sequence[Endpoint] = ()
    """Endpoints of its own, besides those of the front end."""
    renderer: Renderer = staticmethod(render)
    context: ContextFactory = StreamingHarmonyContext

    def __init__(self, settings: GatewaySettings, rule: Rule | None = None) -> None:
        self.settings = settings
        self.server_settings = ServerSettings.read()
        if settings.web_search:
            self.server_settings = replace(self.server_settings, web_search=settings.web_search)
        connection = connect(self.server_settings)
        self.sharing = open_sharing(self.server_settings, connection)
        """What the front end shares: for ``server.app.application``."""
        self.fleet = Fleet(settings.model, settings.http_engines, rule, limit=settings.timeout)
        self.metrics = Metrics(self.fleet, by_key=settings.metrics_by_key)
        self.limiter = Limiter(connection)
        self._use(settings)
        self._created = int(time.time())
        self.toolbox = _toolbox(settings.mcp_config, self.server_settings)

    # --- What it generates with

    @property
    def context_length(self) -> int | None:
        return self.fleet.context_length

    @property
    def healthy(self) -> bool:
        """Whether the process can do its work, engines elsewhere aside."""
        return True

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Detects the engines, and probes them until the context ends."""
        enforcement.warm_up(self.server_settings.grammar)
        async with engine_http.client() as http:
            watching = asyncio.ensure_future(watch(http, self.fleet))
            try:
                # Engines are detected before it listens, so that first requests need no retry.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(10.0):
                        await self._all_probed()
                backends = self.fleet.backends
                if all(
                    backend.engine is None and backend.problem != NOT_FOUND for backend in backends
                ):
                    problems = "".join(
                        f"\n  {backend.spec.url}: {backend.problem}" for backend in backends
                    )
                    logger.error(
                        "no engine can be used; until one can, requests get 503:%s", problems
                    )
                yield
            finally:
                await cancel_and_wait(watching)

    async def _all_probed(self) -> None:
        """Returns once every engine has been probed."""
        while any(backend.problem == NOT_FOUND for backend in self.fleet.backends):
            await asyncio.sleep(0.02)

    def engine_for(self, deadline: Deadline) -> Engine:
        """For one request: the whole fleet, since one is chosen once the prompt is known."""
        return FleetEngine(self.fleet, deadline)

    def sampling(self, flags: Sampling) -> Sampling:
        """The sampling settings of requests that do not set them."""
        return defaults.read_sampling(flags, {})

    def states(self) -> list[dict[str, Any]]:
        """The engines, for ``/ready``."""
        return [
            {
                "url": backend.spec.url,
                "up": backend.up,
                "health": backend.health,
                "problem": backend.problem,
            }
            for backend in self.fleet.backends
        ]

    def sections(self) -> list[Section]:
        """The engines, for the inspector."""
        return [
            (
                backend.spec.url,
                [
                    ("health", str(backend.health), ""),
                    ("requests", backend.in_flight, ""),
                    ("problem", backend.problem or None, ""),
                ],
            )
            for backend in self.fleet.backends
        ]

    # --- Settings

    def reload(self, settings: GatewaySettings) -> None:
        """Applies new settings; running requests keep those that they started with.

        Raises ``HostError``, without changing anything, if all keys were removed: the gateway would
        be open to everyone.
        """
        self.settings = self.settings.reloaded(settings)
        self._use(settings)
        self.fleet.limit = self.settings.timeout
        self.fleet.update(settings.http_engines)
        urls = ", ".join(engine.url for engine in settings.engines)
        logger.warning("settings reloaded: %d keys, engines: %s", len(settings.keys), urls)

    def _use(self, settings: GatewaySettings) -> None:
        """Computes what requests read from the settings."""
        flags = Sampling(temperature=settings.temperature, top_p=settings.top_p)
        read = defaults.read(settings.template_options, self.server_settings)
        self._defaults = replace(read, sampling=self.sampling(flags))
        self._day = datetime.date.min
        self._keys = {key.digest: key for key in settings.keys}
        self.metrics.start([key.name for key in settings.keys])
        own = {key.name: settings.limits(key) for key in settings.keys}
        self._limits_of = {"": settings.limits(), **own}

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
        if self.context_length is not None:
            entry["max_model_len"] = self.context_length
        return {"object": "list", "data": [entry]}

    async def must_load(self, model: str | None) -> bool:
        return False

    async def acquire(self, request: Request, model: str | None, deadline: Deadline) -> Lease:
        if model not in (None, self.settings.model):
            raise HTTPException(404, f"The model `{model}` does not exist.")
        access = access_log.current.get() or self.access(request.scope)
        if access.exhausted is not None:
            raise self._too_many(access, str(access.exhausted), access.exhausted.wait)
        release: Callable[[], Awaitable[None]] | None = _no_release
        if limit := self._limits(access.key).concurrent_requests:
            release = await self.limiter.acquire(access.key or "", limit)
        if release is None:
            raise self._too_many(access, f"{limit} concurrent requests")
        return Lease(self.engine_for(deadline), tenant_of(request), deadline, release)

    async def forward(self, request: Request) -> Response:
        """There is no server behind this one."""
        raise LookupError(request.url.path)

    def deadline(self, timeout: float | None) -> Deadline:
        seconds = self.settings.timeout if timeout is None else min(timeout, self.settings.timeout)
        return Deadline(seconds, time.monotonic() + seconds)

    def defaults(self, engine: Engine | None) -> Defaults:
        if self._day != (today := datetime.date.today()):
            date = defaults.current_date(self.server_settings.date)
            self._day, self._defaults = today, replace(self._defaults, date=date)
        return self._defaults

    def max_tokens(self, requested: int | None) -> int:
        if requested is None:
            return self.settings.default_max_output_tokens
        return min(requested, self.settings.max_output_tokens)

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
        started, model = time.monotonic(), self.settings.model
        if scope["type"] == "websocket":
            return Entry(form, "WEBSOCKET", path, model, started, status=101, exchanged=True)
        return Entry(form, scope["method"], path, model, started)

    def _limits(self, name: str | None) -> KeyLimits:
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
    if settings.tools is ToolsMode.OFF:
        if path is not None:
            raise HostError(f"--mcp-config has no effect without {tools.TOOLS_VARIABLE}=on")
        if not settings.web_search:
            ClientServers.of(settings)
            return None
    return Toolbox.of(tools.ToolsConfig() if path is None else tools.read(path), settings)


async def _no_release() -> None:
    """Leases need no release: engines are not unloaded while it serves."""
