"""Engines that fail in every way, slow and vanished clients: requests end as their API says, or are
answered by another engine."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sse import documents

pytest.importorskip("prometheus_client")

import httpx
from app_server import run_server
from deployment import BODIES, CHAT, SCRIPTS, TEXT, Deployment
from fake_engines import EXCHANGES, KINDS, EngineFault, FakeEngine
from gateway_in_process import MODEL, CountingGateway, engine_at
from harmony_text import ids_of
from loops import run
from starlette.requests import Request
from waiting import wait_until, wait_until_async

from vllm_mlx_harmony.engine_api.engine import GenerationSettings
from vllm_mlx_harmony.gateway.app import _GatewayApp
from vllm_mlx_harmony.gateway.engines import http
from vllm_mlx_harmony.gateway.engines.detection import KINDS as DIALECTS
from vllm_mlx_harmony.gateway.engines.dialect import EngineRequest
from vllm_mlx_harmony.gateway.routing_policy import Rule
from vllm_mlx_harmony.server.app import application

REQUEST = EngineRequest(
    "m", ids_of("Hello"), GenerationSettings(max_tokens=50, temperature=1.0, top_p=1.0)
)


def content_of(response: httpx.Response) -> str:
    """The content of an answer, streamed or not."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    return "".join(
        choice["delta"].get("content") or ""
        for event in documents(response.text)
        for choice in event.get("choices", ())
    )


BEFORE: dict[str, tuple[EngineFault, int, str | None]] = {
    "500": (EngineFault(status=500), 503, "5"),
    "503": (EngineFault(status=503, headers=(("Retry-After", "3"),)), 503, "3"),
    "429": (EngineFault(status=429, headers=(("Retry-After", "7"),)), 429, "7"),
    "dies before a status": (EngineFault(then="die", after=None), 503, "5"),
}
"""Faults before any output: the status that a client gets, and its ``Retry-After``."""

AT_ONCE = [EngineFault(then=then, after=0) for then in ("die", "close", "garbage", "error")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("fault", "status", "retry_after"), BEFORE.values(), ids=BEFORE)
def test_failure_before_the_stream_has_a_status(
    fault: EngineFault, status: int, retry_after: str | None, stream: bool
) -> None:
    with ExitStack() as stack:
        deployment = Deployment(stack, FakeEngine("vllm", SCRIPTS, faults=[fault]))
        for path in BODIES:
            deployment.engines[0].faults[:] = [fault]
            deployment.host.fleet.backends[0].succeeded()
            answer = deployment.ask(path, stream=stream)
            assert answer.status_code == status
            assert answer.headers.get("retry-after") == retry_after
            assert answer.json()["error"]["message"]
        assert deployment.host.leases == 0


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", [*(fault for fault, *_ in BEFORE.values()), *AT_ONCE], ids=str)
def test_failed_request_without_output_is_retried(fault: EngineFault, stream: bool) -> None:
    with ExitStack() as stack:
        failing = FakeEngine("vllm", SCRIPTS, faults=[fault])
        deployment = Deployment(stack, failing, FakeEngine("sglang", SCRIPTS))
        answer = deployment.ask(stream=stream)
        assert (answer.status_code, content_of(answer)) == (200, TEXT)
        assert [len(engine.bodies) for engine in deployment.engines] == [1, 1]


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("then", ["die", "close", "garbage", "error"])
@pytest.mark.parametrize("kind", KINDS)
def test_failure_after_the_first_output_is_an_error(kind: str, then: str) -> None:
    """In the shape of each API; no other engine is tried."""
    with ExitStack() as stack:
        failing, other = FakeEngine(kind, SCRIPTS), FakeEngine("sglang", SCRIPTS)
        deployment = Deployment(stack, failing, other)
        for path in BODIES:
            failing.faults[:] = [EngineFault(then=then, after=8)]
            answer = deployment.ask(path, stream=True)
            last = documents(answer.text)[-1]
            assert answer.status_code == 200
            error = last.get("error") or last.get("response", last).get("error")
            assert error["message"], last
            if path == CHAT:
                assert TEXT.startswith(content_of(answer))
            failing.faults[:] = [EngineFault(then=then, after=8)]
            assert deployment.ask(path).status_code == 500
        assert other.bodies == []
        assert deployment.host.leases == 0


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("after", [None, 5], ids=["before a status", "in the middle"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_hanging_engine_times_out(after: int | None, stream: bool) -> None:
    with ExitStack() as stack:
        fault = EngineFault(then="hang", after=after)
        timeout = 5.0 if stream and after else 1.0  # enough for the first ids
        deployment = Deployment(stack, FakeEngine("vllm", SCRIPTS, faults=[fault]), timeout=timeout)
        answer = deployment.ask(stream=stream)
        if stream and after is not None:
            assert documents(answer.text)[-1]["error"]["code"] == "timeout"
        else:
            assert answer.status_code == 504
        wait_until(lambda: deployment.host.leases == 0, "the lease")
        wait_until(lambda: deployment.engines[0].running == 0, "the engine's request to be closed")


def test_restarted_engine_is_used_again() -> None:
    with ExitStack() as stack:
        first = FakeEngine("vllm", SCRIPTS)
        running = ExitStack()
        url = running.enter_context(run_server(first.app))
        host = CountingGateway("", (first, url))
        gateway = stack.enter_context(run_server(_GatewayApp(host, application(host))))
        body = {"model": MODEL, **BODIES[CHAT]}
        assert httpx.post(gateway + CHAT, json=body, timeout=180).status_code == 200
        running.close()
        for _ in range(Rule().failure_threshold):
            refused = httpx.post(gateway + CHAT, json=body, timeout=180)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "engine_unavailable")
        assert not host.fleet.backends[0].up
        second = FakeEngine("vllm", SCRIPTS)
        stack.enter_context(run_server(second.app, port=int(url.rpartition(":")[2])))
        wait_until(lambda: host.fleet.backends[0].up, "a probe")
        assert httpx.post(gateway + CHAT, json=body, timeout=180).status_code == 200
        assert len(second.bodies) == 1


def test_client_disconnect_frees_the_engine() -> None:
    with ExitStack() as stack:
        deployment = Deployment(stack, FakeEngine("vllm", SCRIPTS, pause=0.05))
        engine = deployment.engines[0]

        async def read_some() -> None:
            async with (
                httpx.AsyncClient(timeout=180) as client,
                deployment.streaming(client) as answer,
            ):
                async for _ in answer.aiter_text():
                    if engine.bytes_sent > 500:
                        return

        run(read_some(), 180)
        wait_until(lambda: engine.aborted == 1, "the engine to be freed")
        wait_until(lambda: deployment.host.leases == 0, "the lease")
        assert [tracker.results for tracker in deployment.host.trackers] == [["client_closed"]]


class Late(FakeEngine):
    """An engine whose faults delay the status by half a second."""

    async def _before(self, request: Request, fault: EngineFault) -> None:
        await asyncio.sleep(0.5)


def test_response_without_a_reader_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine sends its status late; the reader is slow, and then leaves."""
    monkeypatch.setattr(http, "ACCEPTED_AFTER_SECONDS", 0.1)
    engine = Late("vllm", SCRIPTS, held=True, faults=[EngineFault(after=None)])

    async def read_status(url: str) -> None:
        steps = engine_at(url, "vllm").stream(REQUEST)
        assert await anext(steps) is http.ACCEPTED
        await wait_until_async(lambda: engine.running > 0, "the engine to begin")
        await asyncio.sleep(0.1)  # what it sent has arrived
        await steps.aclose()
        await wait_until_async(lambda: engine.aborted > 0, "the engine to be freed")

    with run_server(engine.app) as url:
        run(read_status(url), 180)
    assert (engine.running, engine.aborted) == (0, 1)


def test_response_during_cancellation_is_closed() -> None:
    """Both in one step of the event loop."""

    class Answer:
        closed = False

        def close(self) -> None:
            self.closed = True

    answer = Answer()

    async def cancel_request() -> None:
        class Client:
            async def post(self, *_: Any, **__: Any) -> Answer:
                await asyncio.sleep(0.05)
                asyncio.get_running_loop().call_soon(task.cancel)
                return answer

        client: Any = Client()
        engine = http.HttpEngine(client, "http://a", DIALECTS["vllm"], MODEL, MODEL)
        task = asyncio.ensure_future(anext(engine.stream(REQUEST)))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_request())
    assert answer.closed


@pytest.mark.nightly
def test_500_streams_run_at_once() -> None:
    with ExitStack() as stack:
        deployment = Deployment(stack, FakeEngine("vllm", SCRIPTS, pause=0.05))

        async def read_stream(client: httpx.AsyncClient) -> str:
            async with deployment.streaming(client) as answer:
                await answer.aread()
                return content_of(answer)

        async def read_all() -> list[str]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(limits=limits, timeout=120) as client:
                return await asyncio.gather(*(read_stream(client) for _ in range(500)))

        output = run(read_all(), 200)
        assert output == [TEXT] * 500
        assert deployment.engines[0].most_running > 100
        wait_until(lambda: deployment.engines[0].running == 0, "the engine to be freed")
        wait_until(lambda: deployment.host.leases == 0, "the leases")


@pytest.mark.nightly
def test_slow_reader_slows_its_engine_and_gets_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3.5 MB of ids for one answer: what is not read is neither lost nor held in memory."""

    def in_steps(_: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
        for at in range(0, len(output), 50):
            last = at + 50 >= len(output)
            yield json.dumps({"ids": output[at : at + 50], "finish": finish if last else None})

    exchange = replace(EXCHANGES["vllm-mlx"], events=in_steps)
    monkeypatch.setitem(EXCHANGES, "vllm-mlx", exchange)
    long = "All work and no play. " * 100_000
    script = f"<|channel|>final<|message|>{long}<|return|>"
    with ExitStack() as stack:
        engine = FakeEngine("vllm-mlx", {"Hello": script})
        url = stack.enter_context(run_server(engine.app, buffer=65_536))
        host = CountingGateway("", (engine, url), default_max_output_tokens=10**6)
        remote = host.fleet.backends[0].engine = engine_at(url, "vllm-mlx", 65_536)
        remote.context_length = None
        gateway = stack.enter_context(run_server(application(host), buffer=65_536))
        client = stack.enter_context(unread_stream(gateway))
        wait_until(lambda: engine.bytes_sent > 0, "the engine to begin")
        sent = 0
        while engine.bytes_sent != sent:
            sent = engine.bytes_sent
            time.sleep(1.0)
        assert engine.running == 1
        assert engine.bytes_sent < 2_800_000, "the engine was not made to wait"
        read = b""
        while b"[DONE]" not in read[-200:]:
            read += client.recv(1 << 20)
        text = b"".join(_unchunked(read.partition(b"\r\n\r\n")[2])).decode()
        output = "".join(
            event["choices"][0]["delta"].get("content") or ""
            for event in documents(text)
            if event["choices"]
        )
        assert output == long
        assert engine.bytes_sent > 3_500_000


@contextmanager
def unread_stream(url: str) -> Iterator[socket.socket]:
    """A connection on which a stream was requested, and nothing of it read."""
    body = json.dumps({"model": MODEL, "stream": True, **BODIES[CHAT]}).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        client.connect((host, int(port)))
        client.settimeout(60)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield client


def _unchunked(content: bytes) -> list[bytes]:
    pieces = []
    while content:
        size, _, content = content.partition(b"\r\n")
        if not size or int(size, 16) == 0:
            break
        pieces.append(content[: int(size, 16)])
        content = content[int(size, 16) + 2 :]
    return pieces
