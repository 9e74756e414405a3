"""Connections without a request: they must not keep others out, whoever opens them."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn")

import httpx
import uvicorn
from app_server import run_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.sync.client import connect

from vllm_mlx_harmony.server import connections
from vllm_mlx_harmony.server.connections import OncePerSecond, with_connection_limits

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
SECONDS = 0.5


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


async def slow(request: Request) -> PlainTextResponse:
    await asyncio.sleep(3 * SECONDS)
    return PlainTextResponse("slow")


async def over_websocket(websocket: WebSocket) -> None:
    await websocket.accept()
    while True:
        await websocket.send_text(await websocket.receive_text())


APP = Starlette(
    routes=[
        Route("/", echo, methods=["POST"]),
        Route("/slow", slow),
        WebSocketRoute("/ws", over_websocket),
    ]
)


@pytest.fixture(params=["httptools", "h11"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(connections, "HEAD_SECONDS", SECONDS)
    with run_server(APP, server=with_connection_limits(uvicorn.Server), http=request.param) as url:
        yield url


def open_connection(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    """Waits for the server to close it, or to send something."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("head", [b"", b"P", HEAD], ids=["nothing", "a byte", "half"])
def test_head_that_does_not_end_closes_its_connection(url: str, head: bytes) -> None:
    with open_connection(url) as connection:
        connection.sendall(head)
        assert is_closed(connection)


def test_second_head_that_does_not_end_closes_its_connection(url: str) -> None:
    with open_connection(url) as connection:
        connection.sendall(HEAD + b"\r\nok")
        time.sleep(0.1)
        assert connection.recv(1000).endswith(b"ok")
        connection.sendall(HEAD)
        assert is_closed(connection)


@pytest.mark.nightly(sample=2)
def test_slow_bodies_and_answers_are_not_cut(url: str) -> None:
    with open_connection(url) as connection:
        connection.sendall(HEAD[:20])
        time.sleep(SECONDS / 2)
        connection.sendall(HEAD[20:] + b"\r\no")
        time.sleep(2 * SECONDS)
        connection.sendall(b"k")
        assert connection.recv(1000).endswith(b"ok")
    with httpx.Client(base_url=url) as client:
        assert client.get("/slow").text == "slow"
        time.sleep(2 * SECONDS)  # idle, on the same connection
        assert client.post("/", content=b"ok").text == "ok"


def test_websocket_outlives_its_head_and_is_not_compressed(url: str) -> None:
    with connect(url.replace("http", "ws") + "/ws") as websocket:
        assert "Sec-WebSocket-Extensions" not in websocket.response.headers
        time.sleep(2 * SECONDS)
        websocket.send("still here")
        assert websocket.recv() == "still here"


@pytest.mark.nightly(sample=2)
def test_connections_above_the_limit_are_closed(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_raise_descriptors", lambda: connections.RESERVED + 10)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 3.0)
    with run_server(APP, server=with_connection_limits(uvicorn.Server)) as few:
        held = [open_connection(few) for _ in range(30)]
        for connection in held[5:]:
            assert is_closed(connection)
        assert sum("closing new connections" in message for message in caplog.messages) <= 3
        with pytest.raises(httpx.HTTPError):
            httpx.post(few, content=b"ok")
        for connection in held[:5]:
            assert is_closed(connection), "their heads are late"
        assert httpx.post(few, content=b"ok").text == "ok"
        for connection in held:
            connection.close()


def test_descriptors_are_raised_as_far_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = (256, 4096)
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: changed.append(limits))
    assert connections._raise_descriptors() == 4096
    assert changed == [(4096, 4096)]


def test_macos_allows_fewer_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def allow(_: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10_240:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", allow)
    assert connections._raise_descriptors() == 10_240


def test_failures_to_accept_are_logged_once_a_second() -> None:
    def record(error: BaseException) -> logging.LogRecord:
        exc_info: Any = (type(error), error, None)
        return logging.LogRecord("asyncio", logging.ERROR, "", 1, "accept", (), exc_info)

    shortened = OncePerSecond()
    full = [record(OSError(errno.EMFILE, "too many")) for _ in range(1000)]
    passed = [failure for failure in full if shortened.filter(failure)]
    assert len(passed) <= 2 and passed[0].exc_info is None
    other = record(ValueError("a fault"))
    assert shortened.filter(other) and other.exc_info is not None
