"""The Responses API on the real server, with the official client: rows, tool loops, storage.

`tests/unit/server/test_rows.py` sends every row through the front end in process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest
from event_checker import check, from_wire
from harmony_text import ids_of
from pydantic import BaseModel
from row_answers import (
    GENERATED,
    check_responses,
    responses_request,
    responses_tools,
    served_rows,
)
from rows import Row
from server_process import KEY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.responses import Response
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

DATA = Path(__file__).parents[2] / "support" / "recorded"


SERVED = served_rows([row for row in GENERATED if not row.stop])
START = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Ask the tool.<|end|>"
PREAMBLE_TEXT = "<|channel|>commentary<|message|>One moment: é 😀.<|end|>"


def tool_call(name: str, arguments: str) -> str:
    header = f"{START}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{THOUGHT}{START}{PREAMBLE_TEXT}{header}{arguments}<|call|>"


ECHO = '{"cmd": "echo é"}'
PATCH = '*** Begin\n+a "é"\n'
SCRIPTS = [
    *(Script(f"<|message|>{row.id}<|end|>", row.output) for row in SERVED),
    Script("<|message|>Weather in Paris?<|end|>", tool_call("weather", '{"city":"Zürich"}')),
    Script(
        "<|start|>functions.weather to=assistant",
        "<|channel|>final<|message|>It is 18 °C.<|return|>",
    ),
    Script(
        "<|start|>functions.exec_command to=assistant",
        "<|channel|>final<|message|>Ran.<|return|>",
    ),
    Script(
        "<|start|>functions.apply_patch to=assistant",
        "<|channel|>final<|message|>Patched.<|return|>",
    ),
    Script(
        "<|start|>functions.crm__find to=assistant",
        "<|channel|>final<|message|>Ada is number 42.<|return|>",
    ),
    Script("type crm__find = ", tool_call("crm__find", "{}")),
    Script("<|message|>Find Ada.<|end|>", tool_call("tool_search", '{"paths":["crm"]}')),
    Script("<|message|>Please run it<|end|>", tool_call("exec_command", ECHO)),
    Script(
        "<|message|>Please patch it<|end|>",
        tool_call("apply_patch", '{"input":"*** Begin\\n+a \\"é\\"\\n"}'),
    ),
    Script("<|message|>As JSON.<|end|>", '<|channel|>final<|message|>{"celsius":18}<|return|>'),
    Script(
        "before your next message will be gone",
        "<|channel|>final<|message|>We said hello.<|return|>",
    ),
    Script("We said hello.", "<|channel|>final<|message|>I remember.<|return|>"),
    Script("<|message|>Break.<|end|>", "<|channel|>final<|message|>one two three", fail_at=5),
    Script("<|message|>Break now.<|end|>", "<|channel|>final<|message|>one", fail_at=0),
]


@pytest.fixture(scope="module")
def server(keyed_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return keyed_server


def create(client: OpenAI, *, stream: bool, **request: Any) -> Response:
    """The response; a streamed one is assembled by the client's own accumulator."""
    if not stream:
        return client.responses.create(**request)
    with client.responses.stream(**request) as events:
        for _ in events:
            pass
        return events.get_final_response()


def checked_stream(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The final response of a stream, after all its events were checked as they are on the wire."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with server.client() as http:
        response = http.post("/v1/responses", json={**body, "stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    return check(from_wire(response.text))


# --- The same answer, streamed and not.


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED])
def test_responses_match_row(server: Server, client: OpenAI, model: str, row: Row) -> None:
    request = responses_request(row, model)
    whole = client.responses.create(**request).model_dump(mode="json", exclude_unset=True)
    check_responses(row, whole, checked_stream(server, request))


NOT_CUT = [row for row in SERVED if row.finish != "length"]
"""The client's accumulator has no final response when it is incomplete."""


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in NOT_CUT[::3]])
def test_client_accumulator_builds_same_response(client: OpenAI, model: str, row: Row) -> None:
    request = responses_request(row, model)
    whole, streamed = (create(client, stream=stream, **request) for stream in (False, True))
    assert streamed.output_text == whole.output_text
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]


class Weather(BaseModel):
    celsius: int


def test_answer_is_parsed(client: OpenAI, model: str) -> None:
    response = client.responses.parse(model=model, input="As JSON.", text_format=Weather)
    assert response.output_parsed == Weather(celsius=18)


# --- Tool loops, with stored responses and with all items sent back.


def is_continuation(first: Response, second: Response, result: str) -> bool:
    """Whether the second prompt is the first one, its output and the tool result, and no more."""
    assert first.usage and second.usage
    rest = f"{result}<|end|>{START}"
    expected = first.usage.input_tokens + first.usage.output_tokens + len(ids_of(rest))
    return second.usage.input_tokens == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_tool_loop_is_continued(client: OpenAI, model: str, stream: bool, stored: bool) -> None:
    fields = {"model": model, "tools": responses_tools("weather"), "store": stored,
             "include": ["reasoning.encrypted_content"]}  # fmt: skip
    user = {"role": "user", "content": "Weather in Paris?"}
    first = create(client, stream=stream, input=[user], **fields)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[-1]
    assert call.type == "function_call"
    assert call.arguments == '{"city":"Zürich"}'
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"}
    if stored:
        second = create(
            client, stream=stream, input=[result], previous_response_id=first.id, **fields
        )
    else:
        output = [item.model_dump(exclude_none=True) for item in first.output]
        second = create(client, stream=stream, input=[user, *output, result], **fields)
    assert second.output_text == "It is 18 °C."
    header = "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
    assert is_continuation(first, second, f"{header}18 °C")


CODEX = {
    "function": ("codex-turn1", "Please run it", "exec_command", "arguments", ECHO, "Ran."),
    "freeform": (
        "codex-custom-turn1",
        "Please patch it",
        "apply_patch",
        "input",
        PATCH,
        "Patched.",
    ),
}


@pytest.mark.parametrize(("name", "text", "tool", "field", "value", "answer"), CODEX.values(), ids=CODEX)  # fmt: skip # noqa: E501
def test_tool_loop_of_codex_is_continued(
    server: Server, model: str, name: str, text: str, tool: str, field: str, value: str, answer: str
) -> None:
    body = json.loads((DATA / f"responses-{name}.json").read_text())["body"]
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    body = {**body, "model": model, "input": [*body["input"][:-1], user]}
    first = checked_stream(server, body)
    call = first["output"][-1]
    assert (call["name"], call[field]) == (tool, value)
    output = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "done\n"}
    opaque = [
        {**item, "content": []} if item["type"] == "reasoning" else item for item in first["output"]
    ]
    second = checked_stream(server, {**body, "input": [*body["input"], *opaque, output]})
    assert second["output"][-1]["content"][0]["text"] == answer
    header = f"<|start|>functions.{tool} to=assistant<|channel|>commentary<|message|>"
    rest = len(ids_of(f"{header}done\n<|end|>{START}"))
    before = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert second["usage"]["input_tokens"] == before + rest


def test_reference_to_item_of_earlier_response_is_resolved(client: OpenAI, model: str) -> None:
    first = client.responses.create(
        model=model, input="Weather in Paris?", tools=responses_tools("weather")
    )
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"}
    user = {"role": "user", "content": "Weather in Paris?"}
    second = client.responses.create(
        model=model, input=[user, *references, result], tools=responses_tools("weather")
    )
    assert second.output_text == "It is 18 °C."


# --- Stored responses.


@pytest.mark.parametrize("stream", [False, True])
def test_response_is_stored_until_deleted(client: OpenAI, model: str, stream: bool) -> None:
    sent: Any = client.responses.create(model=model, input="plain answer", stream=stream)
    response = [*sent][-1].response if stream else sent
    stored = client.responses.retrieve(response.id)
    assert stored.to_dict() == response.to_dict()
    assert stored.output_text == "Hi."
    items = client.responses.input_items.list(response.id).data
    assert [item.content[0].text for item in items] == ["plain answer"]  # type: ignore[union-attr]
    client.responses.delete(response.id)
    for method in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):  # fmt: skip # noqa: E501
        with pytest.raises(openai.NotFoundError):
            method(response.id)


def test_response_is_deleted_while_streaming(client: OpenAI, model: str) -> None:
    with client.responses.create(model=model, input="plain answer", stream=True) as events:
        created = next(iter(events))
        assert created.type == "response.created"
        client.responses.delete(created.response.id)
        *_, last = events
    assert (last.type, last.response.output_text) == ("response.completed", "Hi.")
    for method in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            method(created.response.id)


FOUND_NAMESPACE = {"type": "namespace", "name": "crm", "description": "The customers.",
         "tools": [{"type": "function", "name": "find", "defer_loading": True,
                    "parameters": {"type": "object", "properties": {}}}]}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_tool_found_by_search_is_called(
    client: OpenAI, model: str, stream: bool, stored: bool
) -> None:
    """The client searches; tools that it finds belong to the conversation from then on."""
    tools: Any = [{"type": "tool_search", "execution": "client"}]
    items: list[Any] = [{"role": "user", "content": "Find Ada."}]
    continuation: dict[str, Any] = {}
    prompt_tokens = 0
    for kind in ("tool_search_call", "function_call", "message"):
        request = {"model": model, "tools": tools, "input": items, **continuation}
        response = create(client, stream=stream, **request)
        output = response.output[-1]
        assert output.type == kind
        if response.usage is not None and prompt_tokens:
            assert response.usage.input_tokens_details.cached_tokens >= prompt_tokens - 1
        prompt_tokens = response.usage.input_tokens if response.usage else 0
        results: list[Any] = []
        if output.type == "tool_search_call":
            results = [{"type": "tool_search_output", "call_id": output.call_id,
                        "execution": "client", "tools": [FOUND_NAMESPACE]}]  # fmt: skip
        elif output.type == "function_call":
            assert (output.name, output.namespace) == ("find", "crm")
            results = [{"type": "function_call_output", "call_id": output.call_id, "output": "42"}]
        outputs = [item.to_dict(mode="json") for item in response.output]
        continuation = {"previous_response_id": response.id} if stored else {}
        items = results if stored else [*items, *outputs, *results]
    assert response.output_text == "Ada is number 42."


def test_output_of_missing_call_is_answered(client: OpenAI, model: str) -> None:
    weather = {"type": "function", "name": "weather", "strict": False,
               "parameters": {"type": "object", "properties": {}}}  # fmt: skip
    items: Any = [
        {"role": "user", "content": "Weather in Paris?"},
        {"type": "item_reference", "id": "fc_gone"},
        {"type": "function_call_output", "call_id": "call_gone", "output": "18 °C"},
    ]
    response = client.responses.create(model=model, input=items, tools=[weather])  # type: ignore[list-item]
    assert response.output_text == "It is 18 °C."


def test_input_items_come_in_pages(client: OpenAI, model: str) -> None:
    texts = ["one", "two", "plain answer"]
    messages = [{"role": "user", "content": text} for text in texts]
    response = client.responses.create(model=model, input=messages)  # type: ignore[arg-type]
    pages = client.responses.input_items.list(response.id, limit=1, order="asc")
    assert [item.content[0].text for item in pages] == texts  # type: ignore[union-attr]


def test_unstored_responses_are_not_kept(client: OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="plain answer", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_instructions_are_for_one_request(client: OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="plain answer", instructions="Be brief.")
    request = {"model": model, "input": "plain answer", "previous_response_id": first.id}
    plain = client.responses.create(**request)
    instructed = client.responses.create(**request, instructions="Be very, very kind.")
    assert first.usage and plain.usage and instructed.usage
    developer = "<|start|>developer<|message|># Instructions\n\n{}<|end|>"
    assert instructed.usage.input_tokens - plain.usage.input_tokens == len(
        ids_of(developer.format("Be very, very kind."))
    )


@pytest.mark.parametrize("stream", [False, True])
def test_missing_previous_response_is_an_error(client: OpenAI, model: str, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(
            model=model, input="Hi", previous_response_id="resp_none", stream=stream
        )
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED[::3]])
def test_counted_input_tokens_match_usage(client: OpenAI, model: str, row: Row) -> None:
    request = {"model": model, "input": row.id, "tools": responses_tools(*row.tools)}
    response = client.responses.create(**request, max_output_tokens=1)
    assert response.usage
    count = client.responses.input_tokens.count(**request)
    assert count.input_tokens == response.usage.input_tokens


def test_conversation_is_compacted(client: OpenAI, model: str) -> None:
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello, too."},
    ]
    compacted = client.responses.compact(model=model, input=messages)  # type: ignore[arg-type]
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    window = [item.model_dump(exclude_none=True) for item in compacted.output]
    response = client.responses.create(model=model, input=window)  # type: ignore[arg-type]
    assert response.output_text == "I remember."


# --- Errors.


@pytest.mark.parametrize("prompt", ["Break.", "Break now."])
def test_engine_failure_ends_stream_with_failed_response(
    server: Server, client: OpenAI, model: str, prompt: str
) -> None:
    response = checked_stream(server, {"model": model, "input": prompt})
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert client.responses.retrieve(response["id"]).status == "failed"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=model, input=prompt)
    assert client.responses.create(model=model, input="plain answer").output_text == "Hi."


@pytest.mark.parametrize(
    ("changed", "error", "param"),
    [
        ({"input": None}, openai.BadRequestError, "input"),
        ({"input": []}, openai.BadRequestError, "input"),
        ({"background": True, "store": False}, openai.BadRequestError, "background"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens"),
        ({"model": "another"}, openai.NotFoundError, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_parameter_is_named(
    client: OpenAI,
    model: str,
    changed: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str,
    stream: bool,
) -> None:
    body = {"model": model, "input": "plain answer", "stream": stream, **changed}
    with pytest.raises(error) as caught:
        client.post("/responses", body=body, cast_to=object)
    assert caught.value.param == param


def test_responses_are_added_to_conversation(client: OpenAI, model: str) -> None:
    conversation = client.conversations.create(metadata={"topic": "demo"})
    request: dict[str, Any] = {
        "model": model,
        "input": "plain answer",
        "conversation": conversation.id,
    }
    whole = client.responses.create(**request)
    with client.responses.stream(**request) as events:
        streamed = events.get_final_response()
    assert whole.output_text == streamed.output_text
    item_ids = [item.id for item in client.conversations.items.list(conversation.id, order="asc")]
    assert [*(item.id for item in whole.output)] == item_ids[1 : len(whole.output) + 1]
    assert len(item_ids) == 2 * (1 + len(whole.output))
    assert client.conversations.delete(conversation.id).deleted


PATHS = [
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/compact"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/resp_x"),
    ("DELETE", "/v1/responses/resp_x"),
    ("GET", "/v1/responses/resp_x/input_items"),
    ("POST", "/v1/responses/resp_x/cancel"),
    ("GET", "/v1/conversations/conv_x/items"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"Authorization": f"Bearer {KEY}"}, 404, None),
    ],
)
def test_key_is_required(
    server: Server, method: str, path: str, headers: dict[str, str], status: int, code: str | None
) -> None:
    with server.client() as http:
        body = {"model": "none", "input": "Hi"} if method == "POST" else None
        response = http.request(method, path, json=body, headers=headers)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert code in (None, error["code"])
