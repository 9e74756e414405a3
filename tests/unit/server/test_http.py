"""HTTP around the three APIs, in process: unknown paths, keys, time limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("starlette")

from harmony_text import ids_of
from loops import run
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.requests import HTTPConnection, Request
from starlette.testclient import TestClient

from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.server import body as body_module
from vllm_mlx_harmony.server import (
    serving,
    streams,
)
from vllm_mlx_harmony.server.answers import SHUTTING_DOWN
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.front_end import front_end_of, installed_in
from vllm_mlx_harmony.server.host import Deadline, Lease
from vllm_mlx_harmony.server.observer import ObservedRequest

pytestmark = pytest.mark.usefixtures("no_grammars")

SCRIPTS = {"Hello!": "<|channel|>final<|message|>Good day.<|return|>"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}
MESSAGES: dict[str, Any] = {**CHAT, "max_tokens": 100}


def client(host: SingleEngineHost, **headers: str) -> TestClient:
    headers = headers or {"Authorization": f"Bearer {KEY}"}
    return TestClient(host.app, base_url="http://localhost", headers=headers)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/foo"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/chat"),
        ("GET", "/v1/responses/resp_x/nothing"),
        ("POST", "/v1/messages/batches"),
        ("GET", "/"),
    ],
)
@pytest.mark.parametrize("key", [KEY, "wrong"])
def test_unknown_path_gets_error_of_its_api(method: str, path: str, key: str) -> None:
    """Nothing is redirected: a client would lose its body, or send it twice."""
    test_client = client(SingleEngineHost(ScriptedEngine(SCRIPTS)), authorization=f"Bearer {key}")
    answer = test_client.request(method, path, json=CHAT, follow_redirects=False)
    if path == "/":  # there is a HEAD, for Claude Code
        assert (answer.status_code, answer.headers["allow"]) == (405, "HEAD")
        return
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert path in error["message"]
    if path.startswith("/v1/messages"):
        assert error["type"] == "not_found_error"
        assert answer.headers["request-id"] == answer.json()["request_id"]
    else:
        assert (error["type"], error["code"], error["param"]) == (
            "invalid_request_error",
            "not_found",
            None,
        )


class Counts(SingleEngineHost):
    """A host that counts its key checks."""

    authenticated = 0

    async def authenticate(self, connection: HTTPConnection) -> None:
        self.authenticated += 1
        await super().authenticate(connection)


RIGHT, WRONG, ODD = f"Bearer {KEY}", "Bearer wrong", "Bearer sécret".encode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": RIGHT}, 200),
        ({"x-api-key": KEY}, 200),
        ({"Authorization": RIGHT, "x-api-key": KEY}, 200),
        ({"Authorization": RIGHT, "x-api-key": "wrong"}, 200),
        ({"Authorization": WRONG, "x-api-key": KEY}, 200),
        ({"Authorization": ODD, "x-api-key": KEY}, 200),
        ({"Authorization": WRONG, "x-api-key": "wrong"}, 401),
        ({"Authorization": WRONG}, 401),
    ],
)
def test_key_is_checked_once(headers: dict[str, Any], status: int) -> None:
    """Hosts count and log each rejection."""
    host = Counts(ScriptedEngine(SCRIPTS))
    test_client = TestClient(host.app, base_url="http://localhost", headers=headers)
    assert test_client.post("/v1/messages", json=MESSAGES).status_code == status
    assert host.authenticated == 1


class Slow(ScriptedEngine):
    """Takes ten seconds, but never more than 0.1 seconds for an id."""

    async def generate(self, request: GenerationRequest) -> Steps:
        for _ in range(100):
            yield Step(ids_of("Hm"))
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGES)]
)
def test_timeout_is_counted_as_timeout(path: str, body: dict[str, Any]) -> None:
    """An answer that is not streamed is ended by its limit during generation."""
    host = SingleEngineHost(Slow(SCRIPTS), seconds=0.5)
    answer = client(host).post(path, json=body)
    assert answer.status_code == 504
    assert "timed out" in answer.text
    assert [tracker.results[0] for tracker in host.trackers] == ["timeout"]
    assert host.leases == 0


class Watches(SingleEngineHost):
    """A host that watches for a disconnect of the client while it loads a model."""

    async def acquire(self, request: Request, model: str | None, deadline: Deadline) -> Lease:
        messages: list[str] = []

        async def wait_for_disconnect() -> None:
            while len(messages) < 9 and "http.disconnect" not in messages:
                messages.append((await request.receive())["type"])

        await _wait_at_most(0.1, wait_for_disconnect())
        assert len(messages) < 2, messages
        return await super().acquire(request, model, deadline)


async def _wait_at_most(seconds: float, waiting: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return


def test_failing_release_does_not_stop_the_others() -> None:
    ended: list[int] = []

    async def ending(number: int) -> None:
        ended.append(number)
        if number < 2:
            raise OSError("a bug")

    lease = Lease(None, "", Deadline(1.0, 1.0), lambda: ending(0))
    for number in (2, 1):
        lease.endings.push_async_callback(ending, number)
    with pytest.raises(OSError, match="a bug"):
        asyncio.run(lease.release())
    asyncio.run(lease.release())
    assert ended == [0, 1, 2]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("handed_over", [False, True])
def test_lease_ends_with_its_block_or_is_handed_over(handed_over: bool, fails: bool) -> None:
    releases: list[str] = []

    async def give_back() -> None:
        releases.append("released")

    async def test() -> None:
        async with Lease(ScriptedEngine({}), "", Deadline(1.0, 1.0), give_back) as lease:
            if handed_over:
                lease.hand_over()
            if fails:
                raise KeyError

    with pytest.raises(KeyError) if fails else nullcontext():
        asyncio.run(test())
    assert releases == ([] if handed_over else ["released"])


def test_host_can_wait_for_websocket_disconnect() -> None:
    with client(Watches(ScriptedEngine(SCRIPTS))).websocket_connect("/v1/responses") as socket:
        socket.send_json({"type": "response.create", "model": MODEL, "input": "Hello!"})
        names = [socket.receive_json()["type"]]
        while names[-1] not in ("response.completed", "error"):
            names.append(socket.receive_json()["type"])
    assert names[-1] == "response.completed"


def test_stalled_upload_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "UPLOAD_SECONDS", 0.05)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        if started:
            await asyncio.sleep(600)
        started.append(True)
        return {"type": "http.request", "body": b'{"model": ', "more_body": True}

    started: list[bool] = []
    host = SingleEngineHost(ScriptedEngine(SCRIPTS))
    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers,
             "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
             "server": ("localhost", 80), "client": ("127.0.0.1", 1)}  # fmt: skip
    run(application(host)(scope, receive, send))
    assert sent[0]["status"] == 408
    assert b"was not received within 0.05 seconds" in sent[1]["body"]
    assert b"request_timeout" in sent[1]["body"]


def test_long_prompt_is_rejected_before_grammar_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    async def constraint_for(*_: Any) -> None:
        raise AssertionError("a grammar was made")

    monkeypatch.setattr(serving, "constraint_for", constraint_for)
    response = client(SingleEngineHost(ScriptedEngine(SCRIPTS, context_length=10))).post(
        "/v1/chat/completions", json=CHAT
    )
    assert (response.status_code, response.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )


def test_answer_begun_during_shutdown_fails() -> None:
    class Slow(SingleEngineHost):
        """The shutdown begins while the engine is leased."""

        async def acquire(self, request: Request, *more: Any) -> Lease:
            front_end_of(request).answers.reject_new(True)
            return await super().acquire(request, *more)

    response = client(Slow(ScriptedEngine(SCRIPTS))).post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == SHUTTING_DOWN


class Transport:
    """The methods of a transport that streams use. Like uvloop's, it raises once it is closed."""

    def __init__(self, calls_before_closed: int = 100) -> None:
        self.limits: list[int | None] = []
        self._left = calls_before_closed

    def is_closing(self) -> bool:
        return self._left == 0

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        if self.is_closing():
            raise RuntimeError("unable to perform operation; the handler is closed")
        self._left -= 1
        self.limits.append(high)


@pytest.mark.parametrize(("calls_before_closed", "limits"), [(100, [0, None]), (1, [0]), (0, [])])
def test_stream_restores_write_buffer_limits(
    calls_before_closed: int, limits: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a later answer on the connection, whose reader has no time limit, would wait for
    each write.

    A closed connection is left alone, and the engine is released all the same.
    """
    transport = Transport(calls_before_closed)
    monkeypatch.setattr(streams, "transport_of", lambda _: transport)
    host = SingleEngineHost(ScriptedEngine(SCRIPTS))
    response = client(host).post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.text.endswith("data: [DONE]\n\n")
    assert (transport.limits, host.leases) == (limits, 0)


class RemoteEngine(ScriptedEngine):
    async def generate(self, request: GenerationRequest) -> Steps:
        """The same, after the empty step of a request that was accepted."""
        yield Step(())
        async for step in super().generate(request):
            yield step


@pytest.mark.parametrize("engine", [ScriptedEngine, RemoteEngine])
def test_ready_events_of_remote_engines_are_sent_together(engine: type[ScriptedEngine]) -> None:
    host = SingleEngineHost(engine(SCRIPTS, at_once=100, remote=engine is RemoteEngine))
    bodies: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if body := message.get("body"):
                bodies.append(body)
            await send(message)

        await host.app(scope, receive, sending)

    with TestClient(app, headers={"Authorization": f"Bearer {KEY}"}) as test_client:
        test_client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    together = max(body.count(b"data: ") for body in bodies)
    assert (together > 1) == (engine is RemoteEngine)


class Fails:
    """An observer of which one method raises."""

    def __init__(self, method: str) -> None:
        self._method = method

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> None:
            if name == self._method:
                raise ValueError(name)

        return call


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", ["", "prompt", "step", "events", "whole", "ended"])
def test_failing_observer_changes_no_answer(method: str, stream: bool) -> None:
    host = SingleEngineHost(ScriptedEngine(SCRIPTS))
    test_client = client(host)

    def make(_: ObservedRequest) -> Any:
        if not method:
            raise ValueError("no observer")
        return Fails(method)

    body = {**CHAT, "stream": stream}
    installed_in(host.app).observer_factories.append(make)
    response = test_client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert "Good" in response.text and ("[DONE]" in response.text) is stream
    assert host.trackers[0].results == ["success"]
    assert host.leases == 0


@pytest.mark.parametrize(
    ("timeout", "used"), [(2, 2), (0.5, 0.5), (0, None), (10**400, None), (1e9, None), ("2", None)]
)
def test_invalid_timeout_is_ignored(timeout: object, used: float | None) -> None:
    assert serving._routing({"model": "m", "timeout": timeout}) == ("m", used)
