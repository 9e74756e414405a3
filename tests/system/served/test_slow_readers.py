"""Clients that read nothing, on real sockets: they hold nobody up."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from server import FLAG
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

LONG_TOKEN = " " * 128
"""One id of the vocabulary: few steps of the model make many bytes."""


def ids(text: str) -> tuple[int, ...]:
    return tuple(vocab.encoding().encode(text, allowed_special="all"))


def long_answer(tokens: int) -> tuple[int, ...]:
    """As ids: the reference encoder cannot read millions of spaces."""
    return ids("<|channel|>final<|message|>") + ids(LONG_TOKEN) * tokens + (vocab.RETURN,)


SCRIPTS = [
    Script("<|message|>Hi.<|end|>", "<|channel|>final<|message|>Hi.<|return|>"),
    Script("<|message|>Without end.<|end|>", long_answer(30_000)),
    Script("<|message|>Watched.<|end|>", long_answer(700)),
    Script("<|message|>Soon over.<|end|>", long_answer(120)),
]

SECONDS, BYTES = 4, 20_000
"""What the server is set to: how long a client may take nothing, how much may wait for it."""

RECEIVED, SENT = 2048, 16_384
"""Bytes that the system buffers for a client and for the server, of each connection; the defaults
are megabytes, and would take half a minute to fill."""

UNREAD = 400_000
"""Bytes of an answer that are on their way, at most: in buffers of the system and of asyncio (64
KiB), and in ours; twice that, for what events repeat of the answer at its end."""

SMALL_BUFFERS = f"""
import runpy, socket, sys
sys.modules["uvloop"] = None  # uvicorn takes it where it is installed, and it accepts by itself
accept = socket.socket.accept
def small(listening):
    connection, address = accept(listening)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {SENT})
    return connection, address
socket.socket.accept = small
runpy.run_module("vllm_mlx_harmony", run_name="__main__")
"""
"""The plugin's command, on a system that buffers little."""

GIVEN_UP = "has read nothing for"

PATIENCE = 300
"""Seconds that what has to happen may take: hundreds of steps of the engine, on a busy machine."""


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
"""What a response repeats in every event about itself: half a megabyte each time."""


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
    """A connection whose client's buffer is full at once."""
    host, port = server.base_url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED)
    connection.settimeout(PATIENCE)
    connection.connect((host, int(port)))
    return connection


def ask(server: Server, path: str, document: dict[str, Any]) -> socket.socket:
    """A connection with a request for a stream, of which nothing has been read."""
    content = json.dumps({"stream": True, **document}).encode()
    kind = "Content-Type: application/json"
    length = f"Content-Length: {len(content)}"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n{length}\r\n\r\n"
    connection = dial(server)
    connection.sendall(head.encode() + content)
    return connection


def read_to_the_end(connection: socket.socket) -> bytes:
    """Everything until the server has hung up."""
    read = bytearray()
    with suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            read += chunk
            if read.endswith(b"\r\n0\r\n\r\n"):  # the answer ended, the connection did not
                break
    return bytes(read)


def read_messages(connection: Connection) -> None:
    """Until the server has hung up."""
    while True:
        connection.recv(PATIENCE)


def wait_until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < end, f"not within {PATIENCE} s"
        time.sleep(0.1)


def is_free(server: Server) -> bool:
    return server.requests()[0] == 0


def resident(server: Server) -> int:
    """Bytes of memory that the server has."""
    pages = Path(f"/proc/{server.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


# --- Who reads nothing.


@pytest.mark.skipif(not Path("/proc").exists(), reason="memory is read from /proc")
def test_stalled_readers_do_not_delay_others(server: Server, model: str) -> None:
    """Their answers are generated beside others until they are as long as may be unread."""
    asked = {"model": model, **body("/v1/chat/completions", "Hi.")}
    with server.client(PATIENCE) as client:  # the first request loads the vocabulary
        client.post("/v1/chat/completions", json=asked).raise_for_status()
    before, given_up = resident(server), server.log.count(GIVEN_UP)
    url = server.base_url.replace("http", "ws") + "/v1/responses"
    with ExitStack() as stack:
        connections = [
            stack.enter_context(ask(server, path, {"model": model, **document}))
            for path, document in WITHOUT_END.items()
        ]
        raw = stack.enter_context(dial(server))
        websocket = stack.enter_context(
            connect(url, sock=raw, max_queue=1, compression=None, open_timeout=60)
        )
        document = {"type": "response.create", "model": model, **WITHOUT_END["/v1/responses"]}
        websocket.send(json.dumps(document))
        with server.client(PATIENCE) as client:
            answer = client.post("/v1/chat/completions", json=asked)
        assert answer.json()["choices"][0]["message"]["content"] == "Hi."
        wait_until(lambda: is_free(server))  # and nobody has read anything
        wait_until(lambda: server.log.count(GIVEN_UP) == given_up + 4)
        assert resident(server) - before < 64 * 1024 * 1024
        assert all(len(read_to_the_end(each)) < UNREAD for each in connections)
        with pytest.raises(ConnectionClosed):
            read_messages(websocket)


LATE = {**WITHOUT_END, "/v1/responses": body("/v1/responses", "Without end.")}
"""The same without what a response repeats: only what is generated fills the buffers."""


@pytest.mark.parametrize("path", LATE)
def test_slow_reader_gets_an_error(server: Server, model: str, path: str) -> None:
    """The engine is free long before; the end of what can still be read says so, in words."""
    before = server.finished()
    with ask(server, path, {"model": model, **LATE[path]}) as connection:
        wait_until(lambda: server.finished() > before)  # and nothing has been read
        read = read_to_the_end(connection)
    assert b"the stream was closed because the client read it too slowly" in read
    assert len(read) < UNREAD


def test_stalled_reader_of_the_end_is_disconnected(server: Server, model: str) -> None:
    """An answer that has ended, and fits into what asyncio buffers, but not into the system's."""
    path, given_up = "/v1/chat/completions", server.log.count(GIVEN_UP)
    with ask(server, path, {"model": model, **body(path, "Soon over.")}):
        wait_until(lambda: server.log.count(GIVEN_UP) > given_up)


def test_stalled_websocket_reader_is_disconnected(server: Server, model: str) -> None:
    url, given_up = server.base_url.replace("http", "ws"), server.log.count(GIVEN_UP)
    asked = {"type": "response.create", "model": model, **body("/v1/responses", "Soon over.")}
    with dial(server) as raw:
        websocket = connect(f"{url}/v1/responses", sock=raw, max_queue=1, compression=None)
        websocket.send(json.dumps(asked))
        wait_until(lambda: server.log.count(GIVEN_UP) > given_up)
        with pytest.raises(ConnectionClosed):
            read_messages(websocket)


def test_background_response_outlives_its_stalled_reader(server: Server, model: str) -> None:
    """It is generated on to its end: its events are kept for others, who may come later."""
    given_up = server.log.count(GIVEN_UP)
    watched = {"model": model, **body("/v1/responses", "Watched."), "background": True}
    with ask(server, "/v1/responses", watched) as connection, server.client() as client:
        begin = connection.recv(4096)
        found = re.search(rb"resp_\w+", begin)
        while found is None:
            begin += connection.recv(4096)
            found = re.search(rb"resp_\w+", begin)
        path = f"/v1/responses/{found[0].decode()}"
        wait_until(lambda: server.log.count(GIVEN_UP) > given_up)
        wait_until(lambda: client.get(path).json()["status"] == "completed")
        read_to_the_end(connection)
