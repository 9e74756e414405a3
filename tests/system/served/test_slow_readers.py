"""Clients that read nothing, on real sockets, do not delay others."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from harmony_text import ids_of
from server_process import FLAG
from waiting import wait_until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from pathlib import Path

    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

LONG_TOKEN = " " * 128
"""One id of the vocabulary, so that few steps of the model generate many bytes."""


def long_answer(tokens: int) -> tuple[int, ...]:
    """An answer as ids, since the reference encoder cannot encode millions of spaces."""
    return ids_of("<|channel|>final<|message|>") + ids_of(LONG_TOKEN) * tokens + (vocab.RETURN,)


SCRIPTS = [
    Script("<|message|>Hi.<|end|>", "<|channel|>final<|message|>Hi.<|return|>"),
    Script("<|message|>Without end.<|end|>", long_answer(30_000)),
    Script("<|message|>Watched.<|end|>", long_answer(700)),
    Script("<|message|>Soon over.<|end|>", long_answer(120)),
]

SECONDS, BYTES = 4, 20_000
"""The server's settings: how long a client may read nothing, and how much may be unread."""

CLIENT_BUFFER, SERVER_BUFFER = 2048, 16_384
"""Bytes that the system buffers at each end of a connection. The defaults are megabytes, which
take half a minute to fill."""

UNREAD = 400_000
"""The most bytes of an answer in flight: twice the buffers of the system, of asyncio (64 KiB) and
of the server, as the last events repeat the answer."""

SMALL_BUFFERS = f"""
import runpy, socket, sys
sys.modules["uvloop"] = None  # uvicorn takes it where it is installed, and it accepts by itself
accept = socket.socket.accept
def small(listening):
    connection, address = accept(listening)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {SERVER_BUFFER})
    return connection, address
socket.socket.accept = small
runpy.run_module("vllm_mlx_harmony", run_name="__main__")
"""
"""The plugin's command with small send buffers."""

GIVEN_UP = "has read nothing for"

TIMEOUT = 300
"""Seconds to wait for an event: hundreds of the engine's steps on a busy machine."""


@pytest.fixture(scope="module")
def server(start: Start, standin_dir: Path) -> Iterator[Server]:
    standin.rescript(standin_dir, SCRIPTS)
    env = {
        "VLLM_MLX_HARMONY_STREAM_SECONDS": str(SECONDS),
        "VLLM_MLX_HARMONY_STREAM_BYTES": str(BYTES),
    }
    command = (sys.executable, "-c", SMALL_BUFFERS, "serve")
    server = start(*FLAG, command=command, env=env)
    yield server
    assert "Traceback" not in server.log
    server.stop()


# --- Readers.

ECHOED = {"instructions": LONG_TOKEN * 4_000, "metadata": {f"k{n}": "v" * 512 for n in range(16)}}
"""Fields that every event of a response repeats: half a megabyte each time."""


def body(path: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """A request to ``path`` for the script of ``prompt``."""
    if path == "/v1/responses":
        return {"input": prompt, **fields}
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 32_768, **fields}


WITHOUT_END = {
    "/v1/chat/completions": body("/v1/chat/completions", "Without end."),
    "/v1/responses": body("/v1/responses", "Without end.", max_output_tokens=32_768, **ECHOED),
    "/v1/messages": body("/v1/messages", "Without end."),
}


def dial(server: Server) -> socket.socket:
    """A connection with a small receive buffer."""
    host, port = server.base_url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CLIENT_BUFFER)
    connection.settimeout(TIMEOUT)
    connection.connect((host, int(port)))
    return connection


def open_stream(server: Server, path: str, document: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request for a stream and has read nothing."""
    content = json.dumps({"stream": True, **document}).encode()
    kind = "Content-Type: application/json"
    length = f"Content-Length: {len(content)}"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n{length}\r\n\r\n"
    connection = dial(server)
    connection.sendall(head.encode() + content)
    return connection


def read_until_closed(connection: socket.socket) -> bytes:
    """All bytes until the answer ends or the server closes the connection."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            received += chunk
            if received.endswith(b"\r\n0\r\n\r\n"):  # the answer ended, the connection did not
                break
    return bytes(received)


def read_messages_until_closed(connection: Connection) -> None:
    """Raises when the server closes the connection."""
    while True:
        connection.recv(TIMEOUT)


def is_free(server: Server) -> bool:
    return server.requests()[0] == 0


def resident(server: Server) -> int:
    """The server's resident memory in bytes."""
    return psutil.Process(server.pid).memory_info().rss


# --- Clients that read nothing.


def test_stalled_readers_do_not_delay_others(server: Server, model: str) -> None:
    """Their answers are generated beside others, up to the limit of unread bytes."""
    request = {"model": model, **body("/v1/chat/completions", "Hi.")}
    with server.client(TIMEOUT) as client:  # the first request loads the vocabulary
        client.post("/v1/chat/completions", json=request).raise_for_status()
    before, given_up = resident(server), server.log.count(GIVEN_UP)
    url = server.base_url.replace("http", "ws") + "/v1/responses"
    with ExitStack() as stack:
        connections = [
            stack.enter_context(open_stream(server, path, {"model": model, **document}))
            for path, document in WITHOUT_END.items()
        ]
        raw = stack.enter_context(dial(server))
        websocket = stack.enter_context(
            connect(url, sock=raw, max_queue=1, compression=None, open_timeout=60)
        )
        document = {"type": "response.create", "model": model, **WITHOUT_END["/v1/responses"]}
        websocket.send(json.dumps(document))
        with server.client(TIMEOUT) as client:
            response = client.post("/v1/chat/completions", json=request)
        assert response.json()["choices"][0]["message"]["content"] == "Hi."
        wait_until(
            lambda: is_free(server), "the engine to be free", TIMEOUT
        )  # though no client has read anything
        wait_until(lambda: server.log.count(GIVEN_UP) == given_up + 4, "four readers", TIMEOUT)
        assert resident(server) - before < 64 * 1024 * 1024
        assert all(len(read_until_closed(connection)) < UNREAD for connection in connections)
        with pytest.raises(ConnectionClosed):
            read_messages_until_closed(websocket)


ONLY_GENERATED = {**WITHOUT_END, "/v1/responses": body("/v1/responses", "Without end.")}
"""The same without the repeated fields: only generated text fills the buffers."""


@pytest.mark.parametrize("path", ONLY_GENERATED)
def test_slow_reader_receives_error(server: Server, model: str, path: str) -> None:
    """The engine is free long before, and the last bytes that can be read are an error message."""
    before = server.finished()
    with open_stream(server, path, {"model": model, **ONLY_GENERATED[path]}) as connection:
        wait_until(
            lambda: server.finished() > before, "the end", TIMEOUT
        )  # and nothing has been read
        received = read_until_closed(connection)
    assert b"the stream was closed because the client read it too slowly" in received
    assert len(received) < UNREAD


def test_stalled_reader_of_finished_answer_is_disconnected(server: Server, model: str) -> None:
    """The rest of the answer fits into asyncio's buffer, but not into the system's."""
    path, given_up = "/v1/chat/completions", server.log.count(GIVEN_UP)
    with open_stream(server, path, {"model": model, **body(path, "Soon over.")}):
        wait_until(lambda: server.log.count(GIVEN_UP) > given_up, "the reader", TIMEOUT)


def test_stalled_websocket_reader_is_disconnected(server: Server, model: str) -> None:
    url, given_up = server.base_url.replace("http", "ws"), server.log.count(GIVEN_UP)
    request = {"type": "response.create", "model": model, **body("/v1/responses", "Soon over.")}
    with dial(server) as raw:
        websocket = connect(f"{url}/v1/responses", sock=raw, max_queue=1, compression=None)
        websocket.send(json.dumps(request))
        wait_until(lambda: server.log.count(GIVEN_UP) > given_up, "the reader", TIMEOUT)
        with pytest.raises(ConnectionClosed):
            read_messages_until_closed(websocket)


def test_background_response_outlives_its_stalled_reader(server: Server, model: str) -> None:
    """It is generated to its end, as its events are stored for other readers."""
    given_up = server.log.count(GIVEN_UP)
    request = {"model": model, **body("/v1/responses", "Watched."), "background": True}
    with open_stream(server, "/v1/responses", request) as connection, server.client() as client:
        received = connection.recv(4096)
        match = re.search(rb"resp_\w+", received)
        while match is None:
            received += connection.recv(4096)
            match = re.search(rb"resp_\w+", received)
        path = f"/v1/responses/{match[0].decode()}"
        wait_until(lambda: server.log.count(GIVEN_UP) > given_up, "the reader", TIMEOUT)
        wait_until(lambda: client.get(path).json()["status"] == "completed", "the end", TIMEOUT)
        read_until_closed(connection)
