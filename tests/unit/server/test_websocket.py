"""The Responses API over a WebSocket: how a connection ends, over a fake socket."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from loops import run
from scripted_host import ScriptedEngine, SingleEngineHost
from starlette.applications import Starlette

from vllm_mlx_harmony.server.front_end import installed_in
from vllm_mlx_harmony.server.host import NotHarmony
from vllm_mlx_harmony.server.responses.websocket import MAX_WAITING, ResponsesSocket
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.streams import TRANSPORT


@pytest.fixture
def app() -> Starlette:
    return SingleEngineHost(ScriptedEngine({})).app


def set_limits(app: Starlette, **limits: Any) -> None:
    installed_in(app).settings = ServerSettings(**limits)


class Socket:
    """Sends ``texts``, then stays silent or hangs up."""

    def __init__(self, app: Starlette, *texts: str, hangs_up: bool = False) -> None:
        self.app = app
        self.scope: dict[str, Any] = {
            "type": "websocket",
            "path": "/v1/responses",
            "headers": [],
            "app": app,
        }
        self._texts = list(texts)
        self._hangs_up = hangs_up
        self._closed = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.code: int | None = None

    async def receive(self) -> dict[str, Any]:
        if self._texts:
            return {"type": "websocket.receive", "text": self._texts.pop(0)}
        if not self._hangs_up:
            await self._closed.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send_text(self, text: str) -> None:
        self.sent.append(json.loads(text))

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self.code = code
        self._closed.set()


def test_websocket_connection_has_a_lifetime(app: Starlette) -> None:
    async def test() -> None:
        socket: Any = Socket(app)
        await ResponsesSocket(socket, lifetime=0.01).serve()
        assert [event["error"]["code"] for event in socket.sent] == [
            "websocket_connection_limit_reached"
        ]
        assert socket.code == 1000

    run(test())


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (["{}"] * MAX_WAITING, None),
        (["{}"] * (MAX_WAITING + 1), 1013),
        ([" " * 4000] * 2, None),
        ([" " * 4000] * 3, 1013),
        (["\U0001f600" * 1000] * 3, 1013),
        ([" " * 20_000], None),
        ([" " * 20_000, "{}"], 1013),
    ],
)
def test_too_many_waiting_messages_close_the_connection(
    app: Starlette, messages: list[str], code: int | None
) -> None:
    set_limits(app, max_body=10_000)

    async def test() -> None:
        socket: Any = Socket(app, *messages, hangs_up=True)
        await ResponsesSocket(socket).serve()
        assert socket.code == code

    run(test())


def test_stalled_websocket_is_aborted(app: Starlette) -> None:
    """Closing it would wait until the client has read what was written."""
    set_limits(app, stream_seconds=0.05)
    aborted: list[bool] = []

    transport = SimpleNamespace(abort=lambda: aborted.append(True))

    class Full(Socket):
        """Its buffers are full."""

        async def send_text(self, text: str) -> None:
            await asyncio.Event().wait()

    async def test() -> None:
        socket: Any = Full(app, "{}")
        socket.scope[TRANSPORT] = transport
        await ResponsesSocket(socket).serve()
        assert aborted == [True]
        assert not installed_in(app).answers.unread

    run(test())


class HostOfOthers(SingleEngineHost):
    """A host whose models are not Harmony models."""

    async def acquire(self, *_: Any) -> Any:
        raise NotHarmony


def test_other_model_has_no_websocket() -> None:
    app = HostOfOthers(ScriptedEngine({})).app

    async def test() -> None:
        message = {"type": "response.create", "model": "foreign", "input": "Bonjour ?"}
        socket: Any = Socket(app, json.dumps(message))
        talking = asyncio.ensure_future(ResponsesSocket(socket, lifetime=5).serve())
        while not socket.sent:
            await asyncio.sleep(0.01)
        talking.cancel()
        assert (socket.sent[0]["type"], socket.sent[0]["error"]["param"]) == ("error", "model")

    run(test())
