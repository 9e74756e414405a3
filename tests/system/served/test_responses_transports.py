"""Responses in the background, over a WebSocket and to slow readers, on the real server."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from event_checker import check, check_documents, from_wire
from server_process import FLAG, HARMONY, KEY
from sse import arriving, documents
from waiting import wait_until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from openai import OpenAI
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

BEARER = {"Authorization": f"Bearer {KEY}"}
WORDS = " word é 😀" * 20
SCRIPTS = [
    Script("<|message|>Hi.<|end|>", "<|channel|>final<|message|>Hello.<|return|>"),
    Script("<|message|>Quickly.<|end|>", f"<|channel|>final<|message|>{WORDS}<|return|>"),
    Script(
        "<|message|>Slowly.<|end|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        + " word" * 30
        + "<|return|>",
        delay_ms=60,
    ),
    Script(
        "<|message|>For ever.<|end|>",
        "<|channel|>final<|message|>" + " word" * 6000 + "<|return|>",
        delay_ms=100,  # ten minutes: no test waits for its end
    ),
    Script("<|message|>Break.<|end|>", "<|channel|>final<|message|>one two three", fail_at=5),
]
SLOW_TEXT = "Hm." + " word" * 30


@pytest.fixture(scope="module")
def server(keyed_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return keyed_server


# --- In the background.


def status(client: OpenAI, response_id: str) -> str:
    return str(client.responses.retrieve(response_id).status)


def test_background_response_is_polled(client: OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="Slowly.", background=True)
    assert (response.status, response.output) == ("queued", [])
    wait_until(lambda: status(client, response.id) == "in_progress", "its start")
    wait_until(lambda: status(client, response.id) == "completed", "its end")
    completed = client.responses.retrieve(response.id)
    assert completed.output_text == " word" * 30
    assert completed.background is True
    continuation = client.responses.create(
        model=model, input="Hi.", previous_response_id=response.id
    )
    assert continuation.output_text == "Hello."


def get_stream(server: Server, path: str) -> str:
    with server.client() as http:
        response = http.get(path, headers=BEARER)
    assert response.status_code == 200, response.text
    return response.text


def test_stream_resumes_where_it_was_cut(server: Server, client: OpenAI, model: str) -> None:
    body = {"model": model, "input": "Slowly.", "background": True, "stream": True}
    with (
        server.client() as http,
        http.stream("POST", "/v1/responses", json=body, headers=BEARER) as stream,
    ):
        first_events = list(islice(arriving(stream.iter_lines()), 12))
    path = f"/v1/responses/{first_events[0]['response']['id']}?stream=true"
    rest = documents(get_stream(server, f"{path}&starting_after=11"))
    final = check_documents([*first_events, *rest])
    assert final["status"] == "completed"
    assert check(from_wire(get_stream(server, path))) == final
    assert client.responses.retrieve(final["id"]).output_text == " word" * 30
    events = client.responses.retrieve(final["id"], stream=True, starting_after=3)
    assert next(iter(events)).sequence_number == 4


def test_background_response_is_cancelled(server: Server, client: OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="For ever.", background=True)
    wait_until(lambda: bool(client.responses.retrieve(response.id).output), "output")
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    server.wait_for_requests()
    repeated = client.responses.cancel(response.id)
    assert repeated.model_dump() == cancelled.model_dump()
    final = check(from_wire(get_stream(server, f"/v1/responses/{response.id}?stream=true")))
    assert final["status"] == "cancelled"


def test_waiting_response_is_cancelled(server: Server, client: OpenAI, model: str) -> None:
    first, second = (
        client.responses.create(model=model, input="For ever.", background=True) for _ in range(2)
    )
    assert client.responses.cancel(second.id).status == "cancelled"
    assert client.responses.cancel(first.id).status == "cancelled"
    server.wait_for_requests()
    assert client.responses.create(model=model, input="Hi.").output_text == "Hello."


def test_running_response_is_deleted(server: Server, client: OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="For ever.", background=True)
    server.wait_for_requests(running=1)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    server.wait_for_requests()
    assert client.responses.create(model=model, input="Hi.").output_text == "Hello."


def test_background_failure_is_stored(client: OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="Break.", background=True)
    wait_until(lambda: status(client, response.id) == "failed", "its failure")
    error = client.responses.retrieve(response.id).error
    assert error is not None
    assert error.code == "server_error"


def test_foreground_response_cannot_be_cancelled(client: OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="Hi.")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(response.id, stream=True)
    assert caught.value.param == "stream"


# --- Over a WebSocket.


@contextmanager
def open_socket(server: Server) -> Iterator[ClientConnection]:
    url = server.base_url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers=BEARER) as connection:
        yield connection


def create(connection: ClientConnection, **fields: Any) -> None:
    connection.send(json.dumps({"type": "response.create", **fields}))


ENDINGS = ("response.completed", "response.failed", "response.incomplete", "error")


def receive_turn(connection: ClientConnection) -> list[dict[str, Any]]:
    """The events up to the one that ends the turn."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ENDINGS:
        events.append(json.loads(connection.recv(timeout=30)))
    return events


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def test_websocket_serves_requests_in_order(server: Server, model: str) -> None:
    with open_socket(server) as connection:
        for prompt in ("Hi.", "Quickly.", "Hi."):
            create(connection, model=model, input=prompt)
        answers = [text_of(check_documents(receive_turn(connection))) for _ in range(3)]
    assert answers == ["Hello.", WORDS, "Hello."]


@pytest.mark.parametrize("store", [False, True])
def test_only_the_last_unstored_response_is_continued(
    server: Server, client: OpenAI, model: str, store: bool
) -> None:
    with open_socket(server) as connection:
        create(connection, model=model, input="Quickly.", store=store)
        first = check_documents(receive_turn(connection))
        create(connection, model=model, input="Hi.", previous_response_id=first["id"], store=store)
        second = check_documents(receive_turn(connection))
        assert second["usage"]["input_tokens"] > first["usage"]["output_tokens"]
        assert second["previous_response_id"] == first["id"]
        # Unstored responses are forgotten when the next one completes.
        create(connection, model=model, input="Hi.", previous_response_id=first["id"])
        third = receive_turn(connection)[-1]
    if store:
        assert third["type"] == "response.completed"
        assert client.responses.retrieve(first["id"]).output_text == WORDS
    else:
        assert (third["type"], third["status"]) == ("error", 404)
        assert third["error"]["code"] == "previous_response_not_found"
    with open_socket(server) as connection:
        create(connection, model=model, input="Hi.", previous_response_id=second["id"])
        assert receive_turn(connection)[-1]["type"] == ("response.completed" if store else "error")


def test_response_without_generation_is_continued(server: Server, model: str) -> None:
    with open_socket(server) as connection:
        create(connection, model=model, input="Quickly.", generate=False)
        prepared = check_documents(receive_turn(connection))
        assert (prepared["output"], prepared["usage"]["output_tokens"]) == ([], 0)
        create(connection, model=model, input="Hi.", previous_response_id=prepared["id"])
        assert text_of(check_documents(receive_turn(connection))) == "Hello."


INVALID_MESSAGES = [
    pytest.param("{", 400, None, id="no JSON"),
    pytest.param("[]", 400, "type", id="no object"),
    pytest.param('{"type":"response.unknown"}', 400, "type", id="another type"),
    pytest.param('{"type":"response.create","input":"Hi."}', 400, "model", id="no model"),
    pytest.param(
        '{"type":"response.create","model":"another","input":"Hi."}',
        404,
        "model",
        id="another model",
    ),
]


@pytest.mark.parametrize(("message", "status", "param"), INVALID_MESSAGES)
def test_websocket_survives_invalid_messages(
    server: Server, model: str, message: str, status: int, param: str | None
) -> None:
    with open_socket(server) as connection:
        connection.send(message)
        (event,) = receive_turn(connection)
        assert (event["status"], event["error"]["param"]) == (status, param)
        create(connection, model=model, input="Break.")
        assert check_documents(receive_turn(connection))["status"] == "failed"
        create(connection, model=model, input="Hi.")
        assert text_of(check_documents(receive_turn(connection))) == "Hello."


def test_closed_websocket_frees_the_engine(server: Server, client: OpenAI, model: str) -> None:
    with open_socket(server) as connection:
        create(connection, model=model, input="For ever.")
        while json.loads(connection.recv(timeout=30))["type"] != "response.output_text.delta":
            pass
    server.wait_for_requests()
    assert client.responses.create(model=model, input="Hi.").output_text == "Hello."


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_websocket_without_key_is_rejected(server: Server, headers: dict[str, str]) -> None:
    url = server.base_url.replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus) as caught, connect(url, additional_headers=headers):
        pass
    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == "invalid_api_key"


def test_official_client_uses_websocket(client: OpenAI, model: str) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model=model, input="Hi.")
        for event in connection:
            if event.type == "response.completed":
                break
        assert event.response.output_text == "Hello."  # type: ignore[union-attr]


# --- Disconnects, slow readers, restarts.


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_frees_the_engine(
    server: Server, client: OpenAI, model: str, stream: bool
) -> None:
    body = {"model": model, "input": "For ever.", "stream": stream}
    with server.open_request("/v1/responses", body):
        server.wait_for_requests(running=1)
    server.wait_for_requests()
    assert client.responses.create(model=model, input="Hi.").output_text == "Hello."


READERS = 5


def read_slowly(server: Server, body: dict[str, Any]) -> str:
    parts = []
    with (
        server.client() as http,
        http.stream("POST", "/v1/responses", json=body, headers=BEARER) as response,
    ):
        for chunk in response.iter_raw(512):
            parts.append(chunk)
            time.sleep(0.01)
    return b"".join(parts).decode()


def test_slow_readers_miss_nothing(server: Server, model: str) -> None:
    """Over sockets; `tests/unit/server/test_streams.py` tests groups of any size."""
    body = {"model": model, "input": "Quickly.", "stream": True}
    with ThreadPoolExecutor(READERS) as pool:
        streams = list(pool.map(lambda _: read_slowly(server, body), range(READERS)))
    for stream in streams:
        events = from_wire(stream)
        deltas = "".join(
            json.loads(event.data)["delta"]
            for event in events
            if event.name == "response.output_text.delta"
        )
        assert deltas == text_of(check(events)) == WORDS


@pytest.mark.nightly
def test_store_survives_kill_and_rate_limit_is_enforced(
    start: Start, standin_dir: Path, tmp_path: Path
) -> None:
    """A response survives a kill right after it, and at most 5 requests a minute are accepted."""
    standin.rescript(standin_dir, SCRIPTS)
    env = {"VLLM_MLX_HARMONY_STORE": str(tmp_path / "responses.sqlite")}
    flags = (*FLAG, "--rate-limit", "5")
    server = start(*flags, command=HARMONY, env=env)
    with server.openai() as client:
        model = client.models.list().data[0].id
        response = client.responses.create(model=model, input="Quickly.")
        server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server = start(*flags, command=HARMONY, env=env)
    try:
        with server.openai() as client:
            assert client.responses.retrieve(response.id).output_text == WORDS
            continuation = client.responses.create(
                model=model, input="Hi.", previous_response_id=response.id
            )
            assert continuation.output_text == "Hello."
            with open_socket(server) as connection:
                for _ in range(4):
                    create(connection, model=model, input="Hi.")
                last_events = [receive_turn(connection)[-1] for _ in range(4)]
            assert [event["type"] for event in last_events] == [
                *["response.completed"] * 3,
                "error",
            ]
            assert last_events[-1]["status"] == 429
            with pytest.raises(openai.RateLimitError):
                client.responses.retrieve(response.id)
    finally:
        server.stop()
