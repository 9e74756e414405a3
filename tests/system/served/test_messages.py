"""The Messages API on the real server, with the official client: rows, tool loops, keys.

`tests/unit/server/test_rows.py` sends every row through the front end in process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic_checker import check_stream, prompt_tokens
from harmony_text import ids_of
from row_answers import (
    GENERATED,
    check_messages,
    messages_request,
    messages_tools,
    served_rows,
)
from rows import Row
from server_process import KEY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import Message
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served


SERVED = served_rows(GENERATED)
QUESTION = "Weather in Paris?"
WEATHER_CALL = (
    "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city":"Zürich"}<|call|>'
)
RECORDED = Path(__file__).parents[2] / "support" / "recorded" / "claude-code-turn1.json"
"""A session of Claude Code with its texts removed."""
SHELL = (
    "<|channel|>analysis<|message|>I should run the shell.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>Running the command.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.Bash <|constrain|>json<|message|>"
    '{"command":"echo é","description":"(13 characters of text)"}<|call|>'
)
SCRIPTS = [
    *(Script(f"<|message|>{row.id}<|end|>", row.output) for row in SERVED),
    Script(f"<|message|>{QUESTION}<|end|>", WEATHER_CALL),
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
    http = anthropic.DefaultHttpxClient(event_hooks={"response": [check_response]})
    with anthropic.Anthropic(
        base_url=server.base_url, api_key=KEY, max_retries=0, timeout=60, http_client=http
    ) as client:
        yield client


def check_response(response: Any) -> None:
    """Checks the events of every stream that the client reads."""
    if response.headers["content-type"].startswith("text/event-stream"):
        assert check_stream(parse_events(response.read().decode())).error is None


def parse_events(stream: str) -> list[tuple[str, str]]:
    """Names and data of the events of ``stream``."""
    lines = [block.split("\n") for block in stream.split("\n\n") if block[:1] == "e"]
    return [(name.removeprefix("event: "), data.removeprefix("data: ")) for name, data in lines]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def create(client: Anthropic, *, stream: bool, **request: Any) -> Message:
    """The message; a streamed one is assembled by the client's own accumulator."""
    if not stream:
        return client.messages.create(**request)
    with client.messages.stream(**request) as events:
        for _ in events:
            pass
        return events.get_final_message()


def total(message: Message) -> int:
    return prompt_tokens(message.usage.model_dump())


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED])
def test_messages_match_row(client: Anthropic, model: str, row: Row) -> None:
    request = messages_request(row, model)
    check_messages(row, *(create(client, stream=stream, **request) for stream in (False, True)))


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED[::3]])
def test_counted_tokens_match_usage(client: Anthropic, model: str, row: Row) -> None:
    request = messages_request(row, model)
    counted_fields = {key: request[key] for key in ("model", "messages", "tools")}
    message = create(client, stream=False, **request)
    assert client.messages.count_tokens(**counted_fields).input_tokens == total(message)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop_with_thinking_is_continued(client: Anthropic, model: str, stream: bool) -> None:
    request = {
        "model": model,
        "tools": messages_tools("weather"),
        "max_tokens": 500,
        "stream": stream,
    }
    first = create(client, messages=[user(QUESTION)], **request)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Zürich"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 °C"}
    assistant = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    history = [user(QUESTION), assistant, user([result])]
    second = create(client, messages=history, **request)
    assert second.stop_reason == "end_turn"
    assert second.content[0].type == "text"
    assert second.content[0].text == "It is 18 °C."
    added = total(second) - total(first)
    assert second.usage.cache_read_input_tokens >= total(first) + first.usage.output_tokens
    assert added == first.usage.output_tokens + len(tool_result_ids("weather", "18 °C"))


def tool_result_ids(tool: str, result: str) -> tuple[int, ...]:
    """The ids that a tool's result adds to a prompt, after the model's own output."""
    header = f"<|start|>functions.{tool} to=assistant<|channel|>commentary"
    return ids_of(f"{header}<|message|>{result}<|end|><|start|>assistant")


@pytest.mark.parametrize("stream", [False, True])
def test_client_tool_runner_finishes_loop(client: Anthropic, model: str, stream: bool) -> None:
    """The runner asks for a thread at first, and continues without one."""
    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=500,
        messages=[user(QUESTION)],
        tools=[anthropic.beta_tool(weather)],
        stream=stream,
    )
    (final,) = runner.until_done().content
    assert final.text == "It is 18 °C."


@pytest.mark.parametrize("stream", [False, True])
def test_warmed_prompt_is_reused_and_counted(
    server: Server, client: Anthropic, model: str, stream: bool
) -> None:
    system = f"Computed {'streamed' if stream else 'whole'}. " * 60
    request = {"model": model, "system": system, "max_tokens": 0, "messages": [user(".")]}
    first = create(client, stream=stream, **request)
    assert (first.content, first.stop_reason, first.usage.output_tokens) == ([], "max_tokens", 0)
    assert first.usage.cache_read_input_tokens == 0
    prompt = {field: request[field] for field in ("model", "system", "messages")}
    counted = client.messages.count_tokens(**prompt).input_tokens
    assert first.usage.input_tokens == total(first) == counted
    repeated = create(client, stream=stream, **request)
    assert (repeated.usage.input_tokens, total(repeated)) == (1, counted)
    question_request = {**request, "max_tokens": 50, "messages": [user("plain answer")]}
    events = stream_events(server, question_request)
    start, end = (
        document(events[0])["message"]["usage"],
        document(events[-2])["usage"],
    )
    assert start["cache_read_input_tokens"] == end["cache_read_input_tokens"] > 200
    assert start["input_tokens"] == end["input_tokens"] > 1


def test_documents_and_earlier_pictures_are_accepted(client: Anthropic, model: str) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "plain answer"}
    picture = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    message = client.messages.create(
        model=model,
        max_tokens=50,
        messages=[  # type: ignore[arg-type]
            user([picture, {"type": "text", "text": "What is it?"}]),
            {"role": "assistant", "content": "A cat."},
            user([{"type": "document", "title": "A", "source": source}]),
        ],
    )
    assert message.stop_reason == "end_turn"


def weather(city: str) -> str:
    """The weather of a city."""
    return "18 °C"


def stream_events(server: Server, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and data of the events of the stream that answers ``body``."""
    with server.client() as http:
        response = http.post(
            "/v1/messages", json={**body, "stream": True}, headers={"x-api-key": KEY}
        )
    assert response.headers["request-id"].startswith("req_")
    return parse_events(response.text)


def document(event: tuple[str, str]) -> Any:
    return json.loads(event[1])


def test_tool_loop_of_claude_code_is_continued(server: Server, model: str) -> None:
    body = {**json.loads(RECORDED.read_text())["body"], "model": model}
    first = check_stream(stream_events(server, body)).message
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assistant = {"role": "assistant", "content": first["content"]}
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"]}
    result_turn = user([{**result, "content": "marker-42", "is_error": False}])
    second = check_stream(
        stream_events(server, {**body, "messages": [*body["messages"], assistant, result_turn]})
    )
    assert second.message["content"] == [{"type": "text", "text": "It says marker-42."}]
    assert second.message["stop_reason"] == "end_turn"
    added = prompt_tokens(second.message["usage"]) - prompt_tokens(first["usage"])
    assert added == first["usage"]["output_tokens"] + len(tool_result_ids("Bash", "marker-42"))


def test_engine_failure_ends_stream_with_error(server: Server, model: str) -> None:
    events = stream_events(server, {"model": model, "max_tokens": 50, "messages": [user("Break.")]})
    assert events[0][0] == "message_start"
    assert (events[-1][0], document(events[-1])["error"]["type"]) == ("error", "api_error")


def test_silent_stream_sends_pings(server: Server, model: str) -> None:
    events = stream_events(server, {"model": model, "max_tokens": 2, "messages": [user("Slowly.")]})
    assert check_stream(events).error is None
    assert "ping" in [name for name, _ in events]


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
def test_either_key_header_is_accepted(
    server: Server, model: str, headers: dict[str, Any], status: int, path: str
) -> None:
    body = {"model": model, "max_tokens": 5, "messages": [user("plain answer")]}
    with server.client() as http:
        response = http.post(path, json=body, headers=headers)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.json()["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    ("changed", "error", "expected"),
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
def test_invalid_field_is_named(
    client: Anthropic,
    model: str,
    changed: dict[str, Any],
    error: type[anthropic.APIStatusError],
    expected: str,
    stream: bool,
) -> None:
    body = {"model": model, "max_tokens": 5, "messages": [user("plain answer")], **changed}
    with pytest.raises(error) as caught:
        client.post("/v1/messages", body={**body, "stream": stream}, cast_to=object)
    document = caught.value.body
    assert isinstance(document, dict)
    assert document["type"] == "error"
    assert expected in document["error"]["message"]
    assert document["request_id"] == caught.value.response.headers["request-id"]


def test_head_of_root_is_answered(server: Server) -> None:
    with server.client() as http:
        assert http.head("/").status_code == 200
