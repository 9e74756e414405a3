"""Responses in the background and over a WebSocket, on the real server, and under slow readers."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from event_checker import check, check_documents, from_wire
from server import FLAG, HARMONY, KEY
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from openai import OpenAI
    from server import Server

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
        delay_ms=100,  # ten minutes: nothing here waits for its end
    ),
    Script("<|message|>Break.<|end|>", "<|channel|>final<|message|>one two three", fail_at=5),
]
SLOWLY = "Hm." + " word" * 30


@pytest.fixture(scope="module")
def server(keyed_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return keyed_server


def until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


# --- In the background.


def status(client: OpenAI, key: str) -> str:
    return str(client.responses.retrieve(key).status)


def test_polled(client: OpenAI, model: str) -> None:
    began = client.responses.create(model=model, input="Slowly.", background=True)
    assert (began.status, began.output) == ("queued", [])
    until(lambda: status(client, began.id) == "in_progress")
    until(lambda: status(client, began.id) == "completed")
    done = client.responses.retrieve(began.id)
    assert done.output_text == " word" * 30
    assert done.background is True
    more = client.responses.create(model=model, input="Hi.", previous_response_id=began.id)
    assert more.output_text == "Hello."


def streamed(server: Server, path: str) -> str:
    with server.client() as http:
        response = http.get(path, headers=BEARER)
    assert response.status_code == 200, response.text
    return response.text


def test_streamed_again_from_where_it_was(server: Server, client: OpenAI, model: str) -> None:
    body = {"model": model, "input": "Slowly.", "background": True, "stream": True}
    read: list[dict[str, Any]] = []
    with (
        server.client() as http,
        http.stream("POST", "/v1/responses", json=body, headers=BEARER) as lines,
    ):
        for line in lines.iter_lines():
            if line.startswith("data: "):
                read.append(json.loads(line.removeprefix("data: ")))
            if len(read) == 12:
                break  # and the connection is closed
    path = f"/v1/responses/{read[0]['response']['id']}?stream=true"
    rest = from_wire(streamed(server, f"{path}&starting_after=11"))
    documents = [json.loads(event.data) for event in rest[:-1]]
    final = check_documents([*read, *documents])
    assert final["status"] == "completed"
    assert check(from_wire(streamed(server, path))) == final
    assert client.responses.retrieve(final["id"]).output_text == " word" * 30
    events = client.responses.retrieve(final["id"], stream=True, starting_after=3)
    assert next(iter(events)).sequence_number == 4


def test_cancelled(server: Server, client: OpenAI, model: str) -> None:
    began = client.responses.create(model=model, input="For ever.", background=True)
    until(lambda: bool(client.responses.retrieve(began.id).output))
    cancelled = client.responses.cancel(began.id)
    assert cancelled.status == "cancelled"
    server.wait_for_requests()
    again = client.responses.cancel(began.id)
    assert again.model_dump() == cancelled.model_dump()
    final = check(from_wire(streamed(server, f"/v1/responses/{began.id}?stream=true")))
    assert final["status"] == "cancelled"


def test_cancelled_before_its_turn(server: Server, client: OpenAI, model: str) -> None:
    first, second = (
        client.responses.create(model=model, input="For ever.", background=True) for _ in range(2)
    )
    assert client.responses.cancel(second.id).status == "cancelled"
    assert client.responses.cancel(first.id).status == "cancelled"
    server.wait_for_requests()
    assert client.responses.create(model=model, input="Hi.").output_text == "Hello."


def test_deleted_while_it_runs(server: Server, client: OpenAI, model: str) -> None:
    began = client.responses.create(model=model, input="For ever.", background=True)
    server.wait_for_requests(running=1)
    client.responses.delete(began.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(began.id)
    server.wait_for_requests()
    assert client.responses.create(model=model, input="Hi.").output_text == "Hello."


def test_failed_in_the_background(client: OpenAI, model: str) -> None:
    began = client.responses.create(model=model, input="Break.", background=True)
    until(lambda: status(client, began.id) == "failed")
    error = client.responses.retrieve(began.id).error
    assert error is not None
    assert error.code == "server_error"


def test_foreground_response_cannot_be_cancelled(client: OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="Hi.")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(answer.id, stream=True)
    assert caught.value.param == "stream"


# --- Over a WebSocket.


@contextmanager
def socket(server: Server) -> Iterator[ClientConnection]:
    url = server.base_url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers=BEARER) as connection:
        yield connection


def create(connection: ClientConnection, **fields: Any) -> None:
    connection.send(json.dumps({"type": "response.create", **fields}))


ENDINGS = ("response.completed", "response.failed", "response.incomplete", "error")


def received(connection: ClientConnection) -> list[dict[str, Any]]:
    """The events up to the one that ends a turn."""
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


def test_one_response_after_the_other(server: Server, model: str) -> None:
    with socket(server) as connection:
        for asked in ("Hi.", "Quickly.", "Hi."):
            create(connection, model=model, input=asked)
        answers = [text_of(check_documents(received(connection))) for _ in range(3)]
    assert answers == ["Hello.", WORDS, "Hello."]


@pytest.mark.parametrize("store", [False, True])
def test_only_the_last_unstored_response_is_continued(
    server: Server, client: OpenAI, model: str, store: bool
) -> None:
    with socket(server) as connection:
        create(connection, model=model, input="Quickly.", store=store)
        first = check_documents(received(connection))
        create(connection, model=model, input="Hi.", previous_response_id=first["id"], store=store)
        second = check_documents(received(connection))
        assert second["usage"]["input_tokens"] > first["usage"]["output_tokens"]
        assert second["previous_response_id"] == first["id"]
        # Only the last one is remembered, unless it is stored.
        create(connection, model=model, input="Hi.", previous_response_id=first["id"])
        third = received(connection)[-1]
    if store:
        assert third["type"] == "response.completed"
        assert client.responses.retrieve(first["id"]).output_text == WORDS
    else:
        assert (third["type"], third["status"]) == ("error", 404)
        assert third["error"]["code"] == "previous_response_not_found"
    with socket(server) as connection:
        create(connection, model=model, input="Hi.", previous_response_id=second["id"])
        assert received(connection)[-1]["type"] == ("response.completed" if store else "error")


def test_prepared_without_an_answer(server: Server, model: str) -> None:
    with socket(server) as connection:
        create(connection, model=model, input="Quickly.", generate=False)
        prepared = check_documents(received(connection))
        assert (prepared["output"], prepared["usage"]["output_tokens"]) == ([], 0)
        create(connection, model=model, input="Hi.", previous_response_id=prepared["id"])
        assert text_of(check_documents(received(connection))) == "Hello."


MISTAKES = [
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


@pytest.mark.parametrize(("message", "status", "param"), MISTAKES)
def test_a_connection_outlives_mistakes(
    server: Server, model: str, message: str, status: int, param: str | None
) -> None:
    with socket(server) as connection:
        connection.send(message)
        (refused,) = received(connection)
        assert (refused["status"], refused["error"]["param"]) == (status, param)
        create(connection, model=model, input="Break.")
        assert check_documents(received(connection))["status"] == "failed"
        create(connection, model=model, input="Hi.")
        assert text_of(check_documents(received(connection))) == "Hello."


def test_closed_websocket_frees_the_engine(server: Server, client: OpenAI, model: str) -> None:
    with socket(server) as connection:
        create(connection, model=model, input="For ever.")
        while json.loads(connection.recv(timeout=30))["type"] != "response.output_text.delta":
            pass
    server.wait_for_requests()
    assert client.responses.create(model=model, input="Hi.").output_text == "Hello."


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_websocket_without_key_is_refused(server: Server, headers: dict[str, str]) -> None:
    url = server.base_url.replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus) as caught, connect(url, additional_headers=headers):
        pass
    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == "invalid_api_key"


def test_the_official_client_over_a_websocket(client: OpenAI, model: str) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model=model, input="Hi.")
        for event in connection:
            if event.type == "response.completed":
                break
        assert event.response.output_text == "Hello."  # type: ignore[union-attr]


# --- Everything else that can come in between.


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_frees_the_engine(
    server: Server, client: OpenAI, model: str, stream: bool
) -> None:
    body = {"model": model, "input": "For ever.", "stream": stream}
    with server.sent("/v1/responses", body):
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
    """Over sockets. `tests/unit/host/test_streams.py` has groups of any size."""
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


def test_a_file_survives_and_a_limit_holds(start: Start, standin_dir: Path, tmp_path: Path) -> None:
    """Killed right behind an answer, the server knows it when it is back; at most 5 a minute."""
    standin.rescript(standin_dir, SCRIPTS)
    env = {"VLLM_MLX_HARMONY_STORE": str(tmp_path / "responses.sqlite")}
    flags = (*FLAG, "--rate-limit", "5")
    server = start(*flags, command=HARMONY, env=env)
    with server.openai() as client:
        model = client.models.list().data[0].id
        answer = client.responses.create(model=model, input="Quickly.")
        server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server = start(*flags, command=HARMONY, env=env)
    try:
        with server.openai() as client:
            assert client.responses.retrieve(answer.id).output_text == WORDS
            more = client.responses.create(model=model, input="Hi.", previous_response_id=answer.id)
            assert more.output_text == "Hello."
            with socket(server) as connection:
                for _ in range(4):
                    create(connection, model=model, input="Hi.")
                kinds = [received(connection)[-1] for _ in range(4)]
            assert [kind["type"] for kind in kinds] == [*["response.completed"] * 3, "error"]
            assert kinds[-1]["status"] == 429
            with pytest.raises(openai.RateLimitError):
                client.responses.retrieve(answer.id)
    finally:
        server.stop()
