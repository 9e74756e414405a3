"""Responses as the official client sees them: its models, its accumulator."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, get_args

import pytest
from ciphers import Tagged
from event_checker import check
from rows import ROWS, Row

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Failed,
    Finished,
    Kind,
    Opened,
    Started,
    Text,
    Usage,
)
from vllm_mlx_harmony.core.errors import OutputError, RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, read
from vllm_mlx_harmony.protocols.responses.resource import page

pytest.importorskip("openai", minversion="2")

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import BaseModel, TypeAdapter

INFO = ResponseInfo("fedcba9876543210fedcba9876543210", 1_754_352_000, "gpt-oss-20b")
MODELS: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(ResponseStreamEvent)[0])
}
FIELDS: list[dict[str, Any]] = [
    {},
    {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
]


def read_request(stream: bool, **fields: Any) -> ResponsesRequest:
    body = {"model": "m", "input": "Hi", "stream": stream, **fields}
    return read(body, Defaults(), Tagged())


def stream_events(deltas: Iterable[Delta], **fields: Any) -> list[Event]:
    emitter = read_request(True, **fields).emitter(INFO, lambda: 1.5)
    return [event for delta in deltas for event in emitter.feed(delta)]


def collect(deltas: Iterable[Delta], **fields: Any) -> dict[str, Any]:
    emitter = read_request(False, **fields).emitter(INFO, lambda: 1.5)
    for delta in deltas:
        emitter.feed(delta)
    return emitter.result()


def validate_events(events: Iterable[Event]) -> list[Any]:
    """The events as the client's models, each validated by the model of its type."""
    return [MODELS[event.name].model_validate_json(event.data) for event in events if event.name]


def accumulate(events: Iterable[Any]) -> Any:
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(event)
    return state._completed_response


def deltas_of(row: Row) -> list[Delta]:
    tools = [{"type": "function", "name": name} for name in row.tools]
    parser = Parser(Names.of(read_request(True, tools=tools).turn), row.stop, one_call=row.one_call)
    ids = vocab.encoding().encode(row.output, allowed_special="all")
    deltas = [delta for token in ids for delta in parser.feed([token])]
    return [Started(5), *deltas, *parser.close("length" if row.cut else "stop")]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("fields", FIELDS, ids=["plainly", "with everything"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_is_read_by_client(row: Row, fields: dict[str, Any]) -> None:
    deltas = deltas_of(row)
    events = validate_events(stream_events(deltas, **fields))
    expected = Response.model_validate(collect(deltas, **fields))
    final = accumulate(events)
    assert events[-1].response == expected
    if expected.status == "completed":  # the client shows no response with another end
        assert final.output_text == expected.output_text
        parsed = {"parsed", "parsed_arguments"}
        shown = [drop_fields(item.to_dict(mode="json"), parsed) for item in final.output]
        assert shown == [drop_fields(item.to_dict(mode="json"), parsed) for item in expected.output]
        assert (final.id, final.usage) == (expected.id, expected.usage)
    streamed_text = "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    assert streamed_text == expected.output_text


def drop_fields(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: drop_fields(item, names) for key, item in value.items() if key not in names}
    return [drop_fields(item, names) for item in value] if isinstance(value, list) else value


def call(name: str, *texts: str) -> list[Delta]:
    message = [Opened(0, Kind.CALL, name), *map(Text, texts), Closed()]
    return [Started(1), *message, Finished("tool_calls", None, Usage(1, 2))]


TOOLS = [
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {"type": "web_search"},
    *({"type": kind} for kind in ("shell", "local_shell", "apply_patch", "computer")),
    {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {}},
    {
        "type": "namespace",
        "name": "crm",
        "description": "Customers.",
        "tools": [{"type": "function", "name": "find"}],
    },
]


@pytest.mark.parametrize(
    "deltas",
    [
        call("patch", '{"input":"', "a", '"}'),
        call("crm__find", "{", "}"),
        call("tool_search", '{"query": 1}'),
        call("shell", '{"commands": ["ls", ""]}'),
        call("local_shell", '{"command": ["ls"]}'),
        call("apply_patch", '{"operation": {"type": "delete_file", "path": "a"}}'),
        call("computer", '{"actions": [{"type": "wait"}]}'),
        call("shell", "ls"),
    ],
)
def test_calls_are_accumulated(deltas: list[Delta]) -> None:
    events = validate_events(stream_events(deltas, tools=TOOLS))
    expected = Response.model_validate(collect(deltas, tools=TOOLS))
    assert events[-1].response == expected
    assert accumulate(events).output[0].call_id == expected.output[0].call_id  # type: ignore[union-attr]


FAILED = [Started(1), Opened(0, Kind.ANSWER), Text("Hel"), Failed(OutputError("no"))]


@pytest.mark.parametrize("fields", [{}, {"background": True}])
def test_failure_is_read_by_client(fields: dict[str, Any]) -> None:
    events = stream_events(FAILED, **fields)
    check(events)
    models = validate_events(events)
    assert models[-1].response.error.code == "server_error"
    assert models[-1].response.output[0].status == "incomplete"


def test_event_union_reads_every_event() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in stream_events(call("x", "{}"))[:-1]:
        assert adapter.validate_json(event.data).type == event.name


def test_input_items_are_read_by_client() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": "Hello", "phase": "final_answer"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "custom_tool_call", "call_id": "d", "name": "f", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "r"},
        {"type": "tool_search_call", "call_id": "e", "arguments": {"query": "q"}},
        {"type": "tool_search_output", "call_id": "e", "tools": [*TOOLS]},
        {"type": "additional_tools", "role": "developer", "tools": [TOOLS[0]]},
    ]
    listed = page(read_request(False, input=items).input_items(INFO), {"order": "asc"})
    read_back = ResponseItemList.model_validate_json(json.dumps(listed))
    assert [item.type for item in read_back.data] == [item.get("type", "message") for item in items]


REFUSED: dict[str, Any] = {
    "moderation": {"model": "omni-moderation-latest"},
    "prompt": {"id": "pmpt_1"},
    "top_logprobs": 21,
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_field_is_named(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_request(False, **{name: REFUSED[name]})
    assert (caught.value.param, caught.value.status) == (name, 400)
