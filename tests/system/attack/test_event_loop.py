"""Nothing that one request contains holds the event loop: others are answered meanwhile.

Each of `inputs` is sent to each API while another client asks for `/health` every 10 ms and reads
a stream. What it waits for `/health` for the server's sake (`observer`) is 50 ms at most. On a slow
machine, it is what half a million additions in Python take, or half as long again as one library
call over the longest text, whichever is longer. The next part of its stream may have to wait for
the engine, which computes the prompts of all: that is no matter of the event loop, and is printed
only.

What an input does it does each time. A processor that is shared with other machines is slower, by
half within minutes, and its clock does not say so: where the wait is too long, the input is sent
again, and one of three waits has to be short enough.
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

ADDITIONS = 500_000
"""About 25 ms on the slow processors of a virtual machine that nobody else uses."""

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
            _report("nothing", "", observer.waits(), LIMIT_MS)
            yield Observed(server, model, observer)
        assert "Traceback" not in server.log
    finally:
        server.stop()


def _ready(server: served.Server) -> str:
    """The name of the model, once every API has answered for the first time."""
    with server.client(timeout=120) as client:
        model: str = client.get("/v1/models").json()["data"][0]["id"]
        for api in inputs.PATHS:
            body = inputs.described("d").body(api, model)
            client.post(_path(client, api), json=body).raise_for_status()
    return model


@pytest.fixture(scope="module")
def library_call_ms() -> float:
    """What a library call that writes the longest text of `inputs` takes: it holds the interpreter
    lock, so that others wait for it on any machine."""
    text = "a" * (30 * inputs.MIB)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        marshal.dumps([text])
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def _additions_ms() -> float:
    """What ``ADDITIONS`` take now."""
    began, total = time.perf_counter(), 0
    for number in range(ADDITIONS):
        total += number
    return 1e3 * (time.perf_counter() - began)


@pytest.mark.parametrize("row", size([*inputs.ROWS], inputs.WORST))
def test_others_are_answered_meanwhile(
    observed: Observed, library_call_ms: float, row: str
) -> None:
    over = {}
    for way in WAYS:
        body = inputs.encoded(row, "responses" if way == WEBSOCKET else way, observed.model)
        attempts: list[tuple[float, float]] = []
        while len(attempts) < ATTEMPTS and not any(held <= limit for held, limit in attempts):
            before = _additions_ms()
            observed.observer.waits()
            if way == WEBSOCKET:
                _converse(observed.server, body)
            else:
                _post(observed.server, way, body)
            waits = observed.observer.waits()
            additions = statistics.mean([before, _additions_ms()])
            limit = max(LIMIT_MS, additions, 1.5 * library_call_ms)
            _report(row, way, waits, limit)
            attempts.append((waits.health.held, limit))
        if not any(held <= limit for held, limit in attempts):
            over[way] = attempts
    assert not over


def _report(row: str, way: str, waits: Waits, limit: float) -> None:
    health, stream = (
        f"{one.held:.0f} of {one.wall:.0f} ms" for one in (waits.health, waits.stream)
    )
    limited = f"{health:>14} (limit {limit:.0f})"
    figures.report("loop", f"{row:30} {way:13} /health {limited}, stream {stream:>14}")


def _path(client: httpx.Client, way: str) -> str:
    """The path that a request is sent to. Items are added to a new conversation."""
    path = inputs.PATHS[way]
    if "{conversation}" not in path:
        return path
    conversation = client.post(inputs.PATHS["conversations"], json={}).raise_for_status()
    return path.format(conversation=conversation.json()["id"])


def _post(server: served.Server, way: str, body: bytes) -> None:
    with server.client(timeout=120) as client:
        try:
            response = client.post(_path(client, way), content=body)
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
