"""A gateway in this process over fake engines on real sockets, for inspection by tests."""

from __future__ import annotations

import asyncio
import socket
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import ClientSession, TCPConnector
from fake_engines import FakeEngine
from starlette.applications import Starlette
from starlette.requests import Request

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.engine_api.engine import Engine
from vllm_mlx_harmony.gateway.engines import http
from vllm_mlx_harmony.gateway.engines.detection import KINDS, Spec
from vllm_mlx_harmony.gateway.engines.http import HttpEngine
from vllm_mlx_harmony.gateway.host import Gateway
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.routing_policy import Rule
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.host import Deadline, Lease, Tracker

MODEL = "gpt-oss-20b"


class ClientOfLoop:
    """An HTTP client for each event loop, since every test has its own."""

    def __init__(self, receive_buffer: int | None = None) -> None:
        self._receive_buffer = receive_buffer
        self._clients: WeakKeyDictionary[Any, ClientSession] = WeakKeyDictionary()

    def post(self, *arguments: Any, **keywords: Any) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = self._new_client()
        return self._clients[loop].post(*arguments, **keywords)

    def _new_client(self) -> ClientSession:
        if self._receive_buffer is None:
            return http.client()
        return ClientSession(connector=TCPConnector(limit=0, socket_factory=self._socket))

    def _socket(self, address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        new_socket = socket.socket(family, kind, protocol)
        new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        return new_socket


def engine_at(
    url: str, kind: str, receive_buffer: int | None = None, length: int = 4096
) -> HttpEngine:
    """An engine of a kind at a URL, as if it had been detected there."""
    client: Any = ClientOfLoop(receive_buffer)
    dialect = KINDS[kind.removesuffix("-incremental")]
    return HttpEngine(client, url, dialect, MODEL, "m", length)


class RecordingTracker:
    """A tracker that records results."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.results: list[str] = []

    def observe_ttft(self) -> None:
        self._tracker.observe_ttft()

    def reasoning_ended(self, reason: str) -> None:
        self._tracker.reasoning_ended(reason)

    def finish(self, result: str, usage: Usage) -> None:
        self.results.append(result)
        self._tracker.finish(result, usage)


class CountingGateway(Gateway):
    """A gateway with detected engines, which counts its leases."""

    def __init__(
        self,
        key: str,
        *engines: tuple[FakeEngine, str],
        rule: Rule | None = None,
        **settings: Any,
    ) -> None:
        specs = tuple(Spec(url) for _, url in engines)
        keys = (Key("test", digest(key)),) if key else ()
        limits = {"max_output_tokens": 1000, "default_max_output_tokens": 1000}
        values: dict[str, Any] = {**limits, **settings}
        super().__init__(GatewaySettings(engines=specs, model=MODEL, keys=keys, **values), rule)
        for backend, (fake, url) in zip(self.fleet.backends, engines, strict=True):
            backend.found(engine_at(url, fake.kind, length=fake.length))
        self.engine = engines[0][0]
        self.leases = 0
        self.trackers: list[RecordingTracker] = []

    @cached_property
    def app(self) -> Starlette:
        """The application that it serves."""
        return application(self)

    async def acquire(self, request: Request, model: str | None, deadline: Deadline) -> Lease:
        lease = await super().acquire(request, model, deadline)
        self.leases += 1

        async def give_back() -> None:
            self.leases -= 1

        return Lease(lease.engine, lease.tenant, lease.deadline, give_back)

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        self.trackers.append(RecordingTracker(super().tracker(api, stream=stream)))
        return self.trackers[-1]

    def defaults(self, engine: Engine | None) -> Defaults:
        """No date: prompts are the same every day."""
        return Defaults(date=None)
