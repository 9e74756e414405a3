"""SIGTERM on a real server: which requests are refused, finish or fail, and when it exits.

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
from server_process import FLAG, HARMONY
from waiting import wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

STEP_MS = 2500
"""Duration of a step of a slow answer: longer than between the end of answers and the exit."""

SLOW = Script(
    "Slowly.", "<|channel|>final<|message|>" + " word" * 20 + "<|return|>", delay_ms=STEP_MS
)
LONG = Script("", "<|channel|>final<|message|>" + " word" * 400 + "<|return|>", delay_ms=50)

SLOWLY: dict[str, Any] = {"messages": [{"role": "user", "content": "Slowly."}]}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")

LIMIT = 4
"""Seconds of the host's ``--timeout``. Requests ask for a longer one."""

LONGER = {"timeout": 60}
ENDING = "the server is shutting down"


# --- Clients: each waits for a long answer and returns the message of the error that ends it.

StartedCallback = Callable[[], None]
"""Called when the stream has started, before anything is generated."""


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


def chat(server: Server, model: str, _: StartedCallback) -> str:
    with openai_of(server) as client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=model, **SLOWLY, extra_body=LONGER)
    assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
    return caught.value.message


def read(stream: Iterable[Any], on_start: StartedCallback) -> Any:
    """Reads the stream to its end and returns its last chunk or event."""
    items = []
    for item in stream:
        items.append(item)
        on_start()
    return items[-1]


def chat_streamed(server: Server, model: str, on_start: StartedCallback) -> str:
    with openai_of(server) as client:
        chunks = client.chat.completions.create(
            model=model, **SLOWLY, stream=True, extra_body=LONGER
        )
        with pytest.raises(openai.APIError) as caught:
            read(chunks, on_start)
    assert caught.value.code == "shutting_down"
    return caught.value.message


def responses(server: Server, model: str, _: StartedCallback) -> str:
    with openai_of(server) as client, pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model=model, input="Slowly.", extra_body=LONGER)
    assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
    return caught.value.message


def responses_streamed(server: Server, model: str, on_start: StartedCallback) -> str:
    with openai_of(server) as client:
        events = client.responses.create(
            model=model, input="Slowly.", stream=True, extra_body=LONGER
        )
        last = read(events, on_start)
    assert last.type == "response.failed"
    return str(last.response.error.message)


def responses_over_a_websocket(server: Server, model: str, on_start: StartedCallback) -> str:
    request = {"type": "response.create", "model": model, "input": "Slowly.", **LONGER}
    last: dict[str, Any] = {}
    with connect(server.base_url.replace("http", "ws") + "/v1/responses") as connection:
        connection.send(json.dumps(request))
        with suppress(ConnectionClosed):
            while True:
                last = json.loads(connection.recv(60))
                on_start()
    assert last["type"] == "response.failed", last
    return str(last["response"]["error"]["message"])


def messages(server: Server, model: str, _: StartedCallback) -> str:
    with anthropic_of(server) as client, pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(model=model, max_tokens=1000, **SLOWLY, extra_body=LONGER)
    assert caught.value.status_code == 503
    return caught.value.message


def messages_streamed(server: Server, model: str, on_start: StartedCallback) -> str:
    with anthropic_of(server) as client:
        events = client.messages.create(
            model=model, max_tokens=1000, stream=True, **SLOWLY, extra_body=LONGER
        )
        with pytest.raises(anthropic.APIError) as caught:
            read(events, on_start)
    return str(caught.value.body)


WHOLE = (chat, responses, messages)
STREAMED = (chat_streamed, responses_streamed, responses_over_a_websocket, messages_streamed)


# --- Servers.


def model_of(server: Server) -> str:
    with server.client() as client:
        return str(client.get("/v1/models").json()["data"][0]["id"])


@contextmanager
def busy_machine() -> Iterator[None]:
    """Two processes that keep the CPU busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.of_vllm_mlx
def test_running_answers_end_with_message_before_exit(start: Start, standin_dir: Path) -> None:
    """On a busy machine, too: running answers are ended, new requests refused, and it exits."""
    standin.rescript(standin_dir, [SLOW])
    server = start(*FLAG, "--timeout", str(LIMIT), command=HARMONY)
    model = model_of(server)
    clients: dict[str, Future[str]] = {}
    end_times: dict[str, float] = {}

    def note_end(name: str, _: Future[str]) -> None:
        end_times[name] = time.monotonic()

    # Created beforehand: reading certificates takes a second on a busy machine.
    with ThreadPoolExecutor(10) as pool, server.client() as late, busy_machine():
        for client in STREAMED:
            started = threading.Event()
            clients[client.__name__] = pool.submit(client, server, model, started.set)
            assert started.wait(60)
        for client in WHOLE:
            clients[client.__name__] = pool.submit(client, server, model, lambda: None)
        # Those that are not streamed, too.
        wait_until(lambda: sum(server.requests()) == len(clients), "all answers to begin")
        for name, future in clients.items():
            future.add_done_callback(partial(note_end, name))
        signalled = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        while late.post(PATHS[0], json={"model": "any"}).status_code != 503:
            time.sleep(0.05)
        refused_statuses = [refusal(late, path) for path in PATHS]
        with pytest.raises(InvalidStatus) as rejection:
            connect(server.base_url.replace("http", "ws") + "/v1/responses")
        server.process.wait(LIMIT + 10)
        elapsed = time.monotonic() - signalled
        error_messages = {name: future.result(10) for name, future in clients.items()}
    print(f"gone {elapsed:.2f} s after SIGTERM, with a limit of {LIMIT} s; ended:")
    print(*(f"{name} {at - signalled:.2f}" for name, at in end_times.items()), sep=", ")
    assert refused_statuses == [503] * len(PATHS)
    assert rejection.value.response.status_code == 503
    assert {name for name, text in error_messages.items() if ENDING in text} == set(clients)
    assert all(at > signalled + LIMIT / 2 for at in end_times.values())
    assert elapsed < LIMIT + 1 + SLACK
    assert "Traceback" not in server.log


SLACK = 2.0
"""Seconds that a busy machine may take to end a process and to see it."""


def refusal(client: httpx.Client, path: str) -> int:
    """The status of a new request. Fails unless it is refused because of the shutdown."""
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


def test_second_signal_kills(start: Start, standin_dir: Path) -> None:
    standin.rescript(standin_dir, [LONG])
    server = start(*FLAG, command=HARMONY)
    reader = threading.Thread(target=_read_long_answer, args=(server,), daemon=True)
    reader.start()
    server.wait_for_requests(running=1)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert server.process.poll() is None  # it waits for the answer
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) == -signal.SIGTERM  # the answer would take twice as long
    reader.join(5)


def _read_long_answer(server: Server) -> None:
    """Requests a long answer and reads it until the server has exited."""
    with suppress(httpx.TransportError), server.client(60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        messages = [{"role": "user", "content": "Slowly."}]
        body = {"model": model, "messages": messages, "stream": True}
        client.post("/v1/chat/completions", json=body)
