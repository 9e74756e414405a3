"""Nothing that one request contains holds the event loop: others are answered meanwhile.

Each input of `tests/attack/inputs.py` is sent to each API, while another client asks for `/health`
all the time and a third streams an answer. Figures are printed (``-s``); the goal is 50 ms, which
``VLLM_MLX_HARMONY_TEST_GAP`` asserts. Where other tests run beside this one the limit has to leave
room for them, and still be far below what each input took before it was bounded.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from server import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

sys.path.insert(0, str(Path(__file__).parents[1] / "attack"))

import inputs

if TYPE_CHECKING:
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

LIMIT_MS = float(os.environ.get("VLLM_MLX_HARMONY_TEST_GAP", "400"))

SCRIPTS = [
    Script(
        "<|message|>Go on.<|end|>",
        "<|channel|>final<|message|>" + " word" * 20_000 + "<|return|>",
        delay_ms=10,
    ),
    Script("<|end|>", "<|channel|>final<|message|>Hi.<|return|>"),
]


@pytest.fixture(scope="module")
def server(start: Start, standin_dir: Path) -> Iterator[Server]:
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, engine="batched", command=HARMONY)
    yield server
    server.stop()


class Beat:
    """Asks for `/health` every 10 ms on a connection of its own, and notes the longest answer."""

    def __init__(self, server: Server) -> None:
        url = httpx.URL(server.base_url)
        self._socket = socket.create_connection((url.host, url.port or 80))
        self._socket.settimeout(60)
        self._request = f"GET /health HTTP/1.1\r\nHost: {url.host}:{url.port}\r\n\r\n".encode()
        self.longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            asked = time.perf_counter()
            self._socket.sendall(self._request)
            self._socket.recv(65_536)
            self.longest = max(self.longest, (time.perf_counter() - asked) * 1e3)

    def __enter__(self) -> Beat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()


@contextmanager
def streaming(server: Server, model: str) -> Iterator[None]:
    """An answer comes in, slowly, for as long as the context lasts."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": 20_000,
        "stream": True,
    }
    stop = threading.Event()
    begun = threading.Event()

    def read() -> None:
        with (
            server.client(timeout=120) as client,
            client.stream("POST", inputs.PATHS["chat"], json=body) as response,
        ):
            for _ in response.iter_lines():
                begun.set()
                if stop.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("row", inputs.ROWS)
def test_others_are_answered_meanwhile(server: Server, row: str) -> None:
    with server.client(timeout=120) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        client.post(inputs.PATHS["chat"], json=inputs.Asked().body("chat", model))
    gaps: dict[str, float] = {}
    with streaming(server, model):
        for api, path in inputs.PATHS.items():
            gaps[api] = gap(server, path, inputs.encoded(row, api, model))
    print(row, {api: f"{longest:.1f} ms" for api, longest in gaps.items()})
    assert max(gaps.values()) <= LIMIT_MS
    assert "Traceback" not in server.log


def gap(server: Server, path: str, body: bytes) -> float:
    """The longest that `/health` took while the request was answered, in milliseconds."""
    with Beat(server) as beat, server.client(timeout=120) as client:
        try:
            response = client.post(path, content=body)
        except httpx.TransportError:  # 413, and the connection is closed before all is sent
            assert len(body) > 32 * inputs.MIB
            return beat.longest
    assert response.status_code in (200, 400, 413), response.text[:500]
    return beat.longest
