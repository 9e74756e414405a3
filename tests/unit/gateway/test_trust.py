"""What a gateway does not trust its engines with."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack

import pytest

pytest.importorskip("prometheus_client")

import httpx
from app_server import run_server
from deployment import BODIES, TEXT, Deployment
from fake_engines import KINDS, FakeEngine
from gateway_in_process import MODEL, CountingGateway
from waiting import wait_until

from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine_api.engine import GenerationSettings
from vllm_mlx_harmony.gateway.engines import http
from vllm_mlx_harmony.gateway.engines.dialect import count_of
from vllm_mlx_harmony.server.app import application

ENDLESS = "<|channel|>final<|message|>One" + " two" * 2000


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_engine_that_ignores_the_limit_is_cut(kind: str, stream: bool) -> None:
    engine = FakeEngine(kind, {"Hello": ENDLESS}, limitless=True, pause=0.02)
    with ExitStack() as stack:
        deployment = Deployment(stack, engine)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = deployment.ask(stream=stream, max_tokens=50, **options)
        assert '"finish_reason":"length"' in answer.text
        assert '"completion_tokens":50' in answer.text
        assert answer.text.count(" two") <= 50
        wait_until(lambda: engine.running == 0, "the engine to be closed")
        assert engine.aborted == 1


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("kind", KINDS)
def test_engine_that_keeps_to_the_limit_ends_its_stream(kind: str) -> None:
    engine = FakeEngine(kind, {"Hello": ENDLESS}, pause=0.02)
    with ExitStack() as stack:
        answer = Deployment(stack, engine).ask(max_tokens=50).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 50
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        wait_until(lambda: engine.running == 0, "the engine to end")
        assert engine.aborted == 0


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", None),
        ("5", 5),
        ("0", 0),
        ("3600", 3600),
        ("86400", 3600),
        ("9" * 20, 3600),
        ("9" * 5000, 3600),
        ("-5", None),
        ("1.5", None),
        ("\u00b2", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_at_most_an_hour(header: str, expected: int | None) -> None:
    assert http._retry_after(header) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (0, 0), (-3, 0), (True, 0), ("3", 0), (3.0, 0), (None, 0), (10**30, 0)],
)
def test_invalid_count_is_zero(value: object, expected: int) -> None:
    assert count_of(value) == expected


def test_cached_tokens_are_at_most_the_prompt() -> None:
    turn = http._Turn(None, GenerationSettings(max_tokens=5, temperature=1.0, top_p=1.0), 40)
    turn.count(cached=30)
    assert turn.step().cached_tokens == 30
    turn.count(cached=50_000)
    assert turn.step().cached_tokens == 40


class Endless:
    """A stream that sends pieces of 64 KiB without end."""

    def __init__(self, piece: bytes) -> None:
        self.pieces, self._piece = 0, piece

    async def readany(self) -> bytes:
        self.pieces += 1
        return self._piece


@pytest.mark.parametrize("piece", [b"x" * 65_536, b"data: x\n" * 8192], ids=["a line", "lines"])
def test_event_without_an_end_is_an_error(piece: bytes) -> None:
    content = Endless(piece)

    async def read() -> None:
        async for _ in http._events(content):  # type: ignore[arg-type]
            raise AssertionError("there is no event")

    with pytest.raises(OutputError, match="too large"):
        asyncio.run(read())
    assert content.pieces <= http.MAX_EVENT_BYTES // 8192 + 2


def test_large_event_is_read() -> None:
    pieces = [b"data: ", *[b"x" * 65_536] * 40, b"\n\n", b"data: y\n\n", b""]

    class Pieces:
        async def readany(self) -> bytes:
            return pieces.pop(0)

    async def read() -> list[int]:
        groups = [group async for group in http._events(Pieces())]  # type: ignore[arg-type]
        return [len(event) for group in groups for event in group]

    assert asyncio.run(read()) == [40 * 65_536, 1]


@pytest.mark.parametrize("path", BODIES)
def test_clients_do_not_see_the_address_of_an_engine(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()
    engine = FakeEngine("vllm", {"Hello": TEXT})
    with ExitStack() as stack:
        host = CountingGateway("", (engine, f"http://127.0.0.1:{port}"))
        url = stack.enter_context(run_server(application(host)))
        answer = httpx.post(url + path, json={"model": MODEL, **BODIES[path]}, timeout=60)
    assert answer.status_code == 503
    assert str(port) not in answer.text and "127.0.0.1" not in answer.text
    assert str(port) in caplog.text
