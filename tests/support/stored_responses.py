"""A response on its way from the deltas of an answer to a store, without an engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from scripted_host import ScriptedEngine, SingleEngineHost
from starlette.applications import Starlette
from starlette.requests import Request

from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Started, Text, Usage
from vllm_mlx_harmony.core.turn import Answer, Defaults, Instructions, ResponseInfo, User
from vllm_mlx_harmony.server import answer as answers
from vllm_mlx_harmony.server.answers import Answers
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.front_end import Caller, FrontEnd
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.host import Deadline, tenant_of
from vllm_mlx_harmony.server.responses.lookup import References, read
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.storage.persistence import StoringEmitter
from vllm_mlx_harmony.server.storage.single_server import SingleServer
from vllm_mlx_harmony.server.storage.store import ResourceKey

KEY = "0f1e2d3c4b5a69788796"
INFO = ResponseInfo(KEY, 1_754_352_000, "gpt-oss-20b")
ID = f"resp_{KEY}"
TENANT = tenant_of(Request({"type": "http", "headers": []}))
"""Whoever sends no key."""
RESOURCE = ResourceKey(ID, TENANT)
NEVER = 3600.0
"""Seconds of a wait that a test must end itself."""
DELTA_GROUPS: list[list[Delta]] = [
    [Started(3)],
    [Opened(0, Kind.ANSWER), Text("Hel")],
    [Text("lo."), Closed()],
    [Finished("stop", None, Usage(3, 2))],
]


def application_with(store: Any) -> Starlette:
    """The application of a host without a key, which stores responses in ``store``."""
    host = SingleEngineHost(ScriptedEngine({}))
    host.requires_key = False
    return application(host, SingleServer(store))


def storing_emitter(front_end: FrontEnd, **fields: Any) -> StoringEmitter:
    body = {"model": "m", "input": "Hi", "stream": True, "instructions": "Be kind.", **fields}
    context = SimpleNamespace(messages=(Instructions("Be kind."), User("Hi"), Answer("Hello.")))
    request = read(body, Defaults(), References(Caller(front_end, TENANT)))
    return front_end.responses.emitter(request, INFO, context, TENANT)


class FakeLease:
    engine = SimpleNamespace(remote=False)
    tenant = TENANT

    def __init__(self, may_release: asyncio.Event | None) -> None:
        self.deadline = Deadline(NEVER, time.monotonic() + NEVER)
        self._may_release = may_release
        self.released = False

    async def release(self) -> None:
        if self._may_release is not None:
            await self._may_release.wait()
        self.released = True


def job(emitter: StoringEmitter, may_release: asyncio.Event | None = None) -> Job:
    """A job whose engine is not released before ``may_release`` is set."""
    arguments: Any = (FakeLease(may_release), None, None)
    settings = ServerSettings.read()
    stream = emitter.request.stream
    job = Job(*arguments, emitter, stream=stream, id_seed=KEY, server_settings=settings)
    return replace(job, write_last=emitter.write_last)


def begin(job: Job, **options: Any) -> answers.Answer:
    tracker: Any = SimpleNamespace(finish=lambda result, usage: None)
    return answers.Answer(job, tracker, Answers(), **options)
