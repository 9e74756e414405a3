"""Nothing that one request contains holds the event loop: others are answered meanwhile.

Each of `inputs` is sent to each API while another client asks for `/health` every 10 ms and reads
a stream. What it waits for `/health` for the server's sake (`observer`) is 50 ms at most, or half
as long again as one library call over the longest text takes on this machine. The next part of its
stream may have to wait for the engine, which computes the prompts of all: that is no matter of the
event loop, and is printed only.

What an input does it does each time. A processor that is shared is slower, and its clock does not
say so: where the wait is too long, the input is sent again, and the shortest of three counts.
"""

from __future__ import annotations

import json
import logging
import marshal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import figures
import httpx
import inputs
import pytest
import server as served
from observer import MESSAGES, Observer, Waits
from size import size

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

pytestmark = pytest.mark.served

LIMIT_MS = 50.0 if sys.platform == "linux" else 400.0
"""Elsewhere there is no telling what the machine has to do with it (`observer`)."""

ATTEMPTS = 3

WEBSOCKET = "websocket"
WAYS = (*inputs.PATHS, WEBSOCKET)

SCRIPTS = [
    Script(
        f"{MESSAGES[0]['content']}<|end|>",
        "<|channel|>final<|message|>" + " word" * 50 + "<|return|>",
        delay_ms=10,
    ),
    Script("<|end|>", "<|channel|>final<|message|>Hi.<|return|>"),
]


@dataclass(frozen=True)
class Observed:
    """A server that somebody else uses."""

    server: served.Server
    model: str
    observer: Observer


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """The host with the plugin."""
    place = tmp_path_factory.mktemp("event_loop")
    directory = standin.write(place / "gpt-oss-standin", SCRIPTS)
    flags = served.FLAG
    home = place / "home"
    # In full, as users start it: what a fork shares with others is no part of what is measured.
    forked = size(False, True)
    server = served.start(directory, *flags, home=home, command=served.HARMONY, preloaded=forked)
    try:
        model = _ready(server)
        with closing(Observer(server.base_url, server.pid, model)) as observer:
            observer.waits()
            time.sleep(2)
            _report("nothing", "", observer.waits())
            yield Observed(server, model, observer)
        assert "Traceback" not in server.log
    finally:
        server.stop()


def _ready(server: served.Server) -> str:
    """The name of the model, once every API has answered for the first time."""
    with server.client(timeout=120) as client:
        model: str = client.get("/v1/models").json()["data"][0]["id"]
        for api, path in inputs.PATHS.items():
            client.post(path, json=inputs.described("d").body(api, model)).raise_for_status()
    return model


@pytest.fixture(scope="module")
def limit_ms() -> float:
    """A library call that writes the longest text of `inputs` holds the interpreter lock: on a slow
    machine, that alone may take longer than ``LIMIT_MS``."""
    text = "a" * (30 * inputs.MIB)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        marshal.dumps([text])
        times.append(time.perf_counter() - began)
    return max(LIMIT_MS, 1.5e3 * statistics.median(times))


@pytest.mark.parametrize("row", size([*inputs.ROWS], inputs.WORST))
def test_others_are_answered_meanwhile(observed: Observed, limit_ms: float, row: str) -> None:
    over = {}
    for way in WAYS:
        body = inputs.encoded(row, "responses" if way == WEBSOCKET else way, observed.model)
        held = []
        while len(held) < ATTEMPTS and min(held, default=limit_ms + 1) > limit_ms:
            observed.observer.waits()
            if way == WEBSOCKET:
                _converse(observed.server, body)
            else:
                _post(observed.server, inputs.PATHS[way], body)
            waits = observed.observer.waits()
            _report(row, way, waits)
            held.append(waits.health.held)
        if min(held) > limit_ms:
            over[way] = held
    assert not over


def _report(row: str, way: str, waits: Waits) -> None:
    health, stream = (
        f"{one.held:.0f} of {one.wall:.0f} ms" for one in (waits.health, waits.stream)
    )
    figures.report("loop", f"{row:30} {way:10} /health {health:>14}, stream {stream:>14}")


def _post(server: served.Server, path: str, body: bytes) -> None:
    with server.client(timeout=120) as client:
        try:
            response = client.post(path, content=body)
        except httpx.TransportError:  # 413, and the connection is closed before all is sent
            assert len(body) > 32 * inputs.MIB
            return
    assert response.status_code in (200, 400, 404, 413), response.text[:500]


def _converse(server: served.Server, body: bytes) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    # Its thread logs a traceback when the connection ends while it sends.
    logging.getLogger("websockets.client").disabled = True
    message = b'{"type": "response.create", ' + body[1:]
    url = server.base_url.replace("http", "ws", 1) + inputs.PATHS["responses"]
    try:
        with connect(url, max_size=None, compression=None) as connection:
            connection.send(message.decode("utf-8", "replace"))
            while _type(connection.recv(timeout=120)) not in _LAST:
                pass
    except ConnectionClosed:
        if len(message) <= 16 * inputs.MIB:  # as much as uvicorn takes in a message
            raise


_LAST = ("error", "response.completed", "response.incomplete", "response.failed")


def _type(event: str | bytes) -> Any:
    return json.loads(event)["type"]
