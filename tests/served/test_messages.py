"""The Messages API through the real server and the official client: every row, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic_checker import checked
from rows import ANSWER, CALL, PREAMBLE, REASONING, ROWS, Row, can_be_generated, ids
from server import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import Message
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

KEY = "secret"


SERVED = [row for row in ROWS if can_be_generated(row)][::5]
"""Some of each kind: all of them go through the emitter without a server, and here as chats."""
ASKED = "Weather in Paris?"
CALLS = (
    "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city":"Zürich"}<|call|>'
)
SCRIPTS = [
    *(Script(f"<|message|>{row.id}<|end|>", row.output) for row in SERVED),
    Script(f"<|message|>{ASKED}<|end|>", CALLS),
    Script(
        "<|start|>functions.weather to=assistant",
        "<|channel|>final<|message|>It is 18 °C.<|return|>",
    ),
    Script("<|message|>Break.<|end|>", "<|channel|>final<|message|>one two three", fail_at=5),
    Script(
        "<|message|>Slowly.<|end|>",
        "<|channel|>final<|message|>one two<|return|>",
        delay_ms=2500,
    ),
]


@pytest.fixture(scope="module")
def server(start: Start, engine: str, standin_dir: Path) -> Iterator[Server]:
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, "--api-key", KEY, engine=engine, command=HARMONY)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    with anthropic.Anthropic(
        base_url=server.base_url, api_key=KEY, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: Anthropic) -> str:
    return str(client.get("/v1/models", cast_to=object, options=bearer())["data"][0]["id"])  # type: ignore[index]


def bearer() -> Any:
    return {"headers": {"Authorization": f"Bearer {KEY}"}}


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "input_schema": {"type": "object"}} for name in names]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(client: Anthropic, *, stream: bool, **request: Any) -> Message:
    """The answer; streamed, as the client's own accumulator puts it together."""
    if not stream:
        return client.messages.create(**request)
    with client.messages.stream(**request) as events:
        for _ in events:
            pass
        return events.get_final_message()


def story(message: Message) -> dict[str, Any]:
    """What an answer says, whatever way it came and whenever."""
    document = message.model_dump(exclude={"id"}, exclude_none=True)
    document["usage"].pop("cache_read_input_tokens", None)
    for block in document["content"]:
        for changing in ("signature", "id", "parsed_output", "caller"):
            block.pop(changing, None)
    return document


def request_for(row: Row, model: str) -> dict[str, Any]:
    limit = len(ids(row.output)) if row.cut else 1000
    stop = {"stop_sequences": list(row.stop)} if row.stop else {}
    request = {"model": model, "messages": [user(row.id)], "tools": tools(*row.tools)}
    return {**request, **stop, "max_tokens": limit}


STOPPED = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
BLOCKS = {REASONING: "thinking", PREAMBLE: "text", ANSWER: "text"}


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED])
def test_row(client: Anthropic, model: str, row: Row) -> None:
    whole, streamed = (
        story(ask(client, stream=stream, **request_for(row, model))) for stream in (False, True)
    )
    assert whole == streamed
    texts = [block for block in whole["content"] if block["type"] != "tool_use"]
    assert [(block["type"], block[block["type"]]) for block in texts] == [
        (BLOCKS[part[0]], part[1]) for part in row.said if part[0] != CALL
    ]
    names = [block["name"] for block in whole["content"] if block["type"] == "tool_use"]
    assert names == [part[1] for part in row.said if part[0] == CALL]
    expected = "stop_sequence" if row.stopped_by else STOPPED[row.finish]
    assert (whole["stop_reason"], whole.get("stop_sequence")) == (expected, row.stopped_by)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED[::3]])
def test_counted_is_what_is_used(client: Anthropic, model: str, row: Row) -> None:
    request = request_for(row, model)
    counted = {key: request[key] for key in ("model", "messages", "tools")}
    answer = ask(client, stream=False, **request)
    assert client.messages.count_tokens(**counted).input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_with_thinking(client: Anthropic, model: str, stream: bool) -> None:
    request = {"model": model, "tools": tools("weather"), "max_tokens": 500, "stream": stream}
    answer = ask(client, messages=[user(ASKED)], **request)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    call = answer.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Zürich"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 °C"}
    echoed = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
    history = [user(ASKED), echoed, user([result])]
    final = ask(client, messages=history, **request)
    assert final.stop_reason == "end_turn"
    assert final.content[0].type == "text"
    assert final.content[0].text == "It is 18 °C."
    grown = final.usage.input_tokens - answer.usage.input_tokens
    assert grown == answer.usage.output_tokens + len(
        ids(
            "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>18 °C<|end|>"
            "<|start|>assistant"
        )
    )


def events(server: Server, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and data of the events of a stream, as they stand on the wire."""
    with server.client() as http:
        response = http.post(
            "/v1/messages", json={**body, "stream": True}, headers={"x-api-key": KEY}
        )
    assert response.headers["request-id"].startswith("req_")
    lines = [block.split("\n") for block in response.text.split("\n\n") if block[:1] == "e"]
    return [(name.removeprefix("event: "), data.removeprefix("data: ")) for name, data in lines]


def document(event: tuple[str, str]) -> Any:
    return json.loads(event[1])


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED[::3]])
def test_streams_are_in_order(server: Server, model: str, row: Row) -> None:
    told = events(server, request_for(row, model))
    assert checked(told).error is None
    assert document(told[0])["message"]["usage"]["input_tokens"] > 0


def test_a_failing_engine_ends_the_stream_with_an_error(server: Server, model: str) -> None:
    told = events(server, {"model": model, "max_tokens": 50, "messages": [user("Break.")]})
    assert told[0][0] == "message_start"
    assert (told[-1][0], document(told[-1])["error"]["type"]) == ("error", "api_error")


def test_a_silent_stream_pings(server: Server, model: str) -> None:
    told = events(server, {"model": model, "max_tokens": 4, "messages": [user("Slowly.")]})
    assert checked(told).error is None
    assert "ping" in [name for name, _ in told]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "wrong", "Authorization": f"Bearer {KEY}"}, 200),
        ({}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_keys(server: Server, model: str, headers: dict[str, str], status: int, path: str) -> None:
    body = {"model": model, "max_tokens": 5, "messages": [user("plain answer")]}
    with server.client() as http:
        response = http.post(path, json=body, headers=headers)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"max_tokens": None}, anthropic.BadRequestError, "max_tokens"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        (
            {"messages": [user([{"type": "image", "source": {"type": "url", "url": "x"}}])]},
            anthropic.BadRequestError,
            "messages[0].content[0]",
        ),
        ({"model": "another"}, anthropic.NotFoundError, "another"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_named(
    client: Anthropic,
    model: str,
    changed: dict[str, Any],
    error: type[anthropic.APIStatusError],
    named: str,
    stream: bool,
) -> None:
    body = {"model": model, "max_tokens": 5, "messages": [user("plain answer")], **changed}
    with pytest.raises(error) as caught:
        client.post("/v1/messages", body={**body, "stream": stream}, cast_to=object)
    document = caught.value.body
    assert isinstance(document, dict)
    assert document["type"] == "error"
    assert named in document["error"]["message"]
    assert document["request_id"] == caught.value.response.headers["request-id"]


def test_somebody_is_there(server: Server) -> None:
    with server.client() as http:
        assert http.head("/").status_code == 200
