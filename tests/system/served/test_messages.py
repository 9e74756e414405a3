"""The Messages API through the real server and the official client: rows of all kinds, and more.

Every row goes through the front end in process (`tests/unit/server/test_rows.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic_checker import checked, prompt_tokens
from row_answers import (
    GENERATED,
    check_messages,
    messages_request,
    messages_tools,
    served_rows,
)
from rows import Row, ids
from server import KEY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import Message
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served


SERVED = served_rows(GENERATED)
ASKED = "Weather in Paris?"
CALLS = (
    "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city":"Zürich"}<|call|>'
)
RECORDED = Path(__file__).parents[2] / "support" / "recorded" / "claude-code-turn1.json"
"""A session of Claude Code with its texts taken out."""
SHELL = (
    "<|channel|>analysis<|message|>I should run the shell.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>Running the command.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.Bash <|constrain|>json<|message|>"
    '{"command":"echo é","description":"(13 characters of text)"}<|call|>'
)
SCRIPTS = [
    *(Script(f"<|message|>{row.id}<|end|>", row.output) for row in SERVED),
    Script(f"<|message|>{ASKED}<|end|>", CALLS),
    Script(
        "<|start|>functions.weather to=assistant",
        "<|channel|>final<|message|>It is 18 °C.<|return|>",
    ),
    Script("(6062 characters of text)<|end|>", SHELL),
    Script(
        "<|start|>functions.Bash to=assistant<|channel|>commentary<|message|>marker-42<|end|>",
        "<|channel|>final<|message|>It says marker-42.<|return|>",
    ),
    Script("<|message|>Break.<|end|>", "<|channel|>final<|message|>one two three", fail_at=5),
    Script(
        "<|message|>Slowly.<|end|>",
        "<|channel|>final<|message|>one two<|return|>",
        delay_ms=1500,
    ),
]


@pytest.fixture(scope="module")
def server(keyed_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return keyed_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    http = anthropic.DefaultHttpxClient(event_hooks={"response": [check]})
    with anthropic.Anthropic(
        base_url=server.base_url, api_key=KEY, max_retries=0, timeout=60, http_client=http
    ) as client:
        yield client


def check(response: Any) -> None:
    """Every stream that the client reads is checked as it stands on the wire."""
    if response.headers["content-type"].startswith("text/event-stream"):
        assert checked(named(response.read().decode())).error is None


def named(stream: str) -> list[tuple[str, str]]:
    """Names and data of the events of ``stream``."""
    lines = [block.split("\n") for block in stream.split("\n\n") if block[:1] == "e"]
    return [(name.removeprefix("event: "), data.removeprefix("data: ")) for name, data in lines]


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


def total(message: Message) -> int:
    return prompt_tokens(message.usage.model_dump())


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED])
def test_row(client: Anthropic, model: str, row: Row) -> None:
    request = messages_request(row, model)
    check_messages(row, *(ask(client, stream=stream, **request) for stream in (False, True)))


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED[::3]])
def test_counted_is_what_is_used(client: Anthropic, model: str, row: Row) -> None:
    request = messages_request(row, model)
    counted = {key: request[key] for key in ("model", "messages", "tools")}
    answer = ask(client, stream=False, **request)
    assert client.messages.count_tokens(**counted).input_tokens == total(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_with_thinking(client: Anthropic, model: str, stream: bool) -> None:
    request = {
        "model": model,
        "tools": messages_tools("weather"),
        "max_tokens": 500,
        "stream": stream,
    }
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
    grown = total(final) - total(answer)
    assert final.usage.cache_read_input_tokens >= total(answer) + answer.usage.output_tokens
    assert grown == answer.usage.output_tokens + len(handed_back("weather", "18 °C"))


def handed_back(tool: str, result: str) -> list[int]:
    """What a prompt has more than the model's own output when a tool has answered."""
    header = f"<|start|>functions.{tool} to=assistant<|channel|>commentary"
    return ids(f"{header}<|message|>{result}<|end|><|start|>assistant")


@pytest.mark.skipif(not hasattr(anthropic, "beta_tool"), reason="the client has no tool loop")
@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_tool_loop(client: Anthropic, model: str, stream: bool) -> None:
    """It asks for a thread at first, and goes on without one."""
    run = client.beta.messages.tool_runner(
        model=model,
        max_tokens=500,
        messages=[user(ASKED)],
        tools=[anthropic.beta_tool(weather)],
        stream=stream,
    )
    (final,) = run.until_done().content
    assert final.text == "It is 18 °C."


@pytest.mark.parametrize("stream", [False, True])
def test_warmed_prompt_is_reused_and_counted(
    server: Server, client: Anthropic, model: str, stream: bool
) -> None:
    system = f"Computed {'streamed' if stream else 'whole'}. " * 60
    warm = {"model": model, "system": system, "max_tokens": 0, "messages": [user(".")]}
    first = ask(client, stream=stream, **warm)
    assert (first.content, first.stop_reason, first.usage.output_tokens) == ([], "max_tokens", 0)
    assert first.usage.cache_read_input_tokens == 0
    prompt = {field: warm[field] for field in ("model", "system", "messages")}
    counted = client.messages.count_tokens(**prompt).input_tokens
    assert first.usage.input_tokens == total(first) == counted
    again = ask(client, stream=stream, **warm)
    assert (again.usage.input_tokens, total(again)) == (1, counted)
    asked = {**warm, "max_tokens": 50, "messages": [user("plain answer")]}
    received = events(server, asked)
    start, end = document(received[0])["message"]["usage"], document(received[-2])["usage"]
    assert start["cache_read_input_tokens"] == end["cache_read_input_tokens"] > 200
    assert start["input_tokens"] == end["input_tokens"] > 1


def test_documents_and_answered_pictures_are_accepted(client: Anthropic, model: str) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "plain answer"}
    picture = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    answer = client.messages.create(
        model=model,
        max_tokens=50,
        messages=[  # type: ignore[arg-type]
            user([picture, {"type": "text", "text": "What is it?"}]),
            {"role": "assistant", "content": "A cat."},
            user([{"type": "document", "title": "A", "source": source}]),
        ],
    )
    assert answer.stop_reason == "end_turn"


def weather(city: str) -> str:
    """The weather of a city."""
    return "18 °C"


def events(server: Server, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and data of the events of the stream that answers ``body``."""
    with server.client() as http:
        response = http.post(
            "/v1/messages", json={**body, "stream": True}, headers={"x-api-key": KEY}
        )
    assert response.headers["request-id"].startswith("req_")
    return named(response.text)


def document(event: tuple[str, str]) -> Any:
    return json.loads(event[1])


def test_two_turns_of_claude_code(server: Server, model: str) -> None:
    body = {**json.loads(RECORDED.read_text())["body"], "model": model}
    first = checked(events(server, body)).message
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    echoed = {"role": "assistant", "content": first["content"]}
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"]}
    answered = user([{**result, "content": "marker-42", "is_error": False}])
    second = checked(events(server, {**body, "messages": [*body["messages"], echoed, answered]}))
    assert second.message["content"] == [{"type": "text", "text": "It says marker-42."}]
    assert second.message["stop_reason"] == "end_turn"
    grown = prompt_tokens(second.message["usage"]) - prompt_tokens(first["usage"])
    assert grown == first["usage"]["output_tokens"] + len(handed_back("Bash", "marker-42"))


def test_a_failing_engine_ends_the_stream_with_an_error(server: Server, model: str) -> None:
    received = events(server, {"model": model, "max_tokens": 50, "messages": [user("Break.")]})
    assert received[0][0] == "message_start"
    assert (received[-1][0], document(received[-1])["error"]["type"]) == ("error", "api_error")


def test_a_silent_stream_pings(server: Server, model: str) -> None:
    received = events(server, {"model": model, "max_tokens": 2, "messages": [user("Slowly.")]})
    assert checked(received).error is None
    assert "ping" in [name for name, _ in received]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "wrong", "Authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "Authorization": "Bearer another"}, 200),
        ({"x-api-key": "wrong", "Authorization": "Bearer another"}, 401),
        ({"x-api-key": "sécret".encode()}, 401),
        ({}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_keys(server: Server, model: str, headers: dict[str, Any], status: int, path: str) -> None:
    body = {"model": model, "max_tokens": 5, "messages": [user("plain answer")]}
    with server.client() as http:
        response = http.post(path, json=body, headers=headers)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.json()["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"max_tokens": None}, anthropic.BadRequestError, "max_tokens"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        (
            {"tools": messages_tools("f"), "tool_choice": {"type": "tool", "name": "g"}},
            anthropic.BadRequestError,
            "tool_choice.name",
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
