"""SIGTERM on a real server: who is refused, may end or is ended in words, and when it is gone.

All kinds of answers run at once.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from server import FLAG, HARMONY
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

STEP_MS = 2500
"""What a step of a slow answer takes: longer than there is between an end and the last words."""

SLOW = Script(
    "Slowly.", "<|channel|>final<|message|>" + " word" * 20 + "<|return|>", delay_ms=STEP_MS
)
LONG = Script("", "<|channel|>final<|message|>" + " word" * 400 + "<|return|>", delay_ms=50)

SLOWLY: dict[str, Any] = {"messages": [{"role": "user", "content": "Slowly."}]}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")

LIMIT = 4
"""Seconds, by the host's ``--timeout``. Requests name a longer one, for themselves."""

LONGER = {"timeout": 60}
ENDING = "the server is shutting down"


# --- Clients: each waits for a long answer, and returns what it was told at the end.

PreparedRequest = Callable[[], None]
"""Called when the stream has begun, before anything is generated."""


@contextmanager
def openai_of(server: Server) -> Iterator[openai.OpenAI]:
    url = f"{server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@contextmanager
def anthropic_of(server: Server) -> Iterator[anthropic.Anthropic]:
    url = server.base_url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(server: Server, model: str, _: PreparedRequest) -> str:
    with openai_of(server) as client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=model, **SLOWLY, extra_body=LONGER)
    assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
    return caught.value.message


def read(stream: Iterable[Any], begun: PreparedRequest) -> Any:
    """Reads it to its end. Returns its last chunk or event."""
    read = []
    for each in stream:
        read.append(each)
        begun()
    return read[-1]


def chat_streamed(server: Server, model: str, begun: PreparedRequest) -> str:
    with openai_of(server) as client:
        chunks = client.chat.completions.create(
            model=model, **SLOWLY, stream=True, extra_body=LONGER
        )
        with pytest.raises(openai.APIError) as caught:
            read(chunks, begun)
    assert caught.value.code == "shutting_down"
    return caught.value.message


def responses(server: Server, model: str, _: PreparedRequest) -> str:
    with openai_of(server) as client, pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model=model, input="Slowly.", extra_body=LONGER)
    assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
    return caught.value.message


def responses_streamed(server: Server, model: str, begun: PreparedRequest) -> str:
    with openai_of(server) as client:
        events = client.responses.create(
            model=model, input="Slowly.", stream=True, extra_body=LONGER
        )
        last = read(events, begun)
    assert last.type == "response.failed"
    return str(last.response.error.message)


def responses_over_a_websocket(server: Server, model: str, begun: PreparedRequest) -> str:
    asked = {"type": "response.create", "model": model, "input": "Slowly.", **LONGER}
    last: dict[str, Any] = {}
    with connect(server.base_url.replace("http", "ws") + "/v1/responses") as connection:
        connection.send(json.dumps(asked))
        with suppress(ConnectionClosed):
            while True:
                last = json.loads(connection.recv(60))
                begun()
    assert last["type"] == "response.failed", last
    return str(last["response"]["error"]["message"])


def messages(server: Server, model: str, _: PreparedRequest) -> str:
    with anthropic_of(server) as client, pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(model=model, max_tokens=1000, **SLOWLY, extra_body=LONGER)
    assert caught.value.status_code == 503
    return caught.value.message


def messages_streamed(server: Server, model: str, begun: PreparedRequest) -> str:
    with anthropic_of(server) as client:
        events = client.messages.create(
            model=model, max_tokens=1000, stream=True, **SLOWLY, extra_body=LONGER
        )
        with pytest.raises(anthropic.APIError) as caught:
            read(events, begun)
    return str(caught.value.body)


WHOLE = (chat, responses, messages)
STREAMED = (chat_streamed, responses_streamed, responses_over_a_websocket, messages_streamed)


# --- Servers.


def model_of(server: Server) -> str:
    with server.client() as client:
        return str(client.get("/v1/models").json()["data"][0]["id"])


@contextmanager
def busy_machine() -> Iterator[None]:
    """Two programs that take whatever they can get."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.of_vllm_mlx
def test_all_that_run_are_ended_in_words(start: Start, standin_dir: Path) -> None:
    """On a busy machine, too: who runs is ended, who waits or comes is refused; then it is gone."""
    standin.rescript(standin_dir, [SLOW])
    one = start(*FLAG, "--timeout", str(LIMIT), command=HARMONY)
    model = model_of(one)
    clients: dict[str, Future[str]] = {}
    ended: dict[str, float] = {}

    def note(name: str, _: Future[str]) -> None:
        ended[name] = time.monotonic()

    # Made before: reading certificates takes a second on a busy machine.
    with ThreadPoolExecutor(10) as pool, one.client() as late, busy_machine():
        for client in STREAMED:
            begun = threading.Event()
            clients[client.__name__] = pool.submit(client, one, model, begun.set)
            assert begun.wait(60)
        for client in WHOLE:
            clients[client.__name__] = pool.submit(client, one, model, lambda: None)
        until = time.monotonic() + 60
        while sum(one.requests()) < len(clients):  # these have come, too
            assert time.monotonic() < until
            time.sleep(0.1)
        for name, future in clients.items():
            future.add_done_callback(partial(note, name))
        signalled = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = [refusal(late, path) for path in PATHS]
        with pytest.raises(InvalidStatus) as denied:
            connect(one.base_url.replace("http", "ws") + "/v1/responses")
        one.process.wait(LIMIT + 10)
        took = time.monotonic() - signalled
        words = {name: future.result(10) for name, future in clients.items()}
    print(f"gone {took:.2f} s after SIGTERM, with a limit of {LIMIT} s; ended:")
    print(*(f"{name} {at - signalled:.2f}" for name, at in ended.items()), sep=", ")
    assert refused == [503] * len(PATHS)
    assert denied.value.response.status_code == 503
    assert {name for name, text in words.items() if ENDING in text} == set(clients)
    assert all(at > signalled + LIMIT / 2 for at in ended.values())
    assert took < LIMIT + 1 + SLACK
    assert "Traceback" not in one.log


SLACK = 2.0
"""Seconds that a busy machine may take to end a process and to see it."""


def refusal(client: httpx.Client, path: str) -> int:
    """The status of a request that comes now. Raises where it is refused in other words."""
    response = client.post(path, json={"model": "any"})
    assert ENDING in response.json()["error"]["message"]
    return int(response.status_code)


def test_idle_server_stops_at_once(start: Start, standin_dir: Path) -> None:
    standin.rescript(standin_dir, [LONG])
    server = start(*FLAG, command=HARMONY)
    with httpx.Client(base_url=server.base_url) as idle:
        assert idle.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(5)
    assert "Traceback" not in server.log


def test_the_second_signal_kills(start: Start, standin_dir: Path) -> None:
    standin.rescript(standin_dir, [LONG])
    server = start(*FLAG, command=HARMONY)
    reader = threading.Thread(target=_reads, args=(server,), daemon=True)
    reader.start()
    server.wait_for_requests(running=1)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert server.process.poll() is None  # it waits for the answer
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == -signal.SIGTERM  # the answer would take twice as long
    reader.join(5)


def _reads(server: Server) -> None:
    """Asks for a long answer, and reads it until the server is gone."""
    with suppress(httpx.TransportError), server.client(60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        messages = [{"role": "user", "content": "Slowly."}]
        body = {"model": model, "messages": messages, "stream": True}
        client.post("/v1/chat/completions", json=body)
