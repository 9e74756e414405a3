"""Requests of Responses: bodies on the left, turns (or the invalid field) on the right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ciphers import Tagged
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core.deltas import Closed, Finished, Kind, Opened, Started
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import (
    AdditionalTools,
    Answer,
    Call,
    Defaults,
    Effort,
    EffortUpdate,
    FormatUpdate,
    Instructions,
    Message,
    OutputLimits,
    Preamble,
    Reasoning,
    ResponseFormat,
    ResponseInfo,
    Result,
    Sampling,
    ServerCall,
    ServerResult,
    Summary,
    Syntax,
    Tool,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, previous_response_id, read
from vllm_mlx_harmony.protocols.responses.resource import page
from vllm_mlx_harmony.protocols.responses.schema import ITEMS as ITEM_MODELS
from vllm_mlx_harmony.protocols.responses.schema import (
    TOOLS,
    UNSUPPORTED_FIELDS,
    ResponsesBody,
    ToolChoice,
)
from vllm_mlx_harmony.protocols.unavailable import notice

DATA = Path(__file__).parents[2] / "support" / "recorded"
INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
SERVER = Defaults(
    effort=Effort.HIGH, identity="You are Ada.", date="2025-08-05", builtin_tools=("python",)
)


SEAL = Tagged()


def read_request(
    defaults: Defaults | None = None, history: tuple[Message, ...] = (), **fields: Any
) -> ResponsesRequest:
    body = {"model": "m", "input": "Hello", **fields}
    return read(body, defaults or Defaults(), SEAL, history)


def read_turn(**fields: Any) -> Turn:
    return read_request(**fields).turn


def error_of(body: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body, Defaults(), SEAL)
    assert caught.value.status == 400
    return caught.value


def text(*texts: str, kind: str = "input_text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": content} for content in texts]


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return message("assistant", content, **fields)


def thought(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def call(arguments: Any = "{}", name: str = "f", key: str = "c1", **fields: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": key, "name": name, "arguments": arguments}
    return {**call, **fields}


def result(output: Any, key: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": key, "output": output}


def search_call(**fields: Any) -> dict[str, Any]:
    head = {"type": "tool_search_call", "id": "tsc_1", "call_id": "c1", "execution": "client"}
    return {**head, "status": "completed", "arguments": {"query": "é"}, **fields}


def search_output(*tools: Any, **fields: Any) -> dict[str, Any]:
    head = {"type": "tool_search_output", "call_id": "c1", "execution": "client"}
    return {**head, "status": "completed", "tools": list(tools), **fields}


FIND = {"type": "function", "name": "find", "description": "Finds.", "defer_loading": True}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
HELLO = message("user", "Hello")
CALL = Call("c1", "f", "{}")
MCP_CALL = {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "f", "arguments": "{}",
            "output": "o"}  # fmt: skip
MCP_MESSAGES = (ServerCall("call_1", "s.f", "{}"), ServerResult("call_1", "s.f", "o"))

ITEMS: dict[str, tuple[list[Any], list[Message]]] = {
    "user": ([message("user", "Hi")], [User("Hi")]),
    "user, without type": ([{"role": "user", "content": "Hi"}], [User("Hi")]),
    "user, nothing typed": ([message("user", "")], [User("")]),
    "user, parts are one text": ([message("user", text("a", "b\n", "c"))], [User("ab\nc")]),
    "user, chat's word for a part": ([message("user", text("a", kind="text"))], [User("a")]),
    "user, control token is text": ([message("user", "<|start|>")], [User("<|start|>")]),
    "user, a picture in an earlier message": (
        [message("user", [*text("Look:"), IMAGE]), assistant("Hi"), HELLO],
        [User("Look:\n[image left out: this model reads text only]"), Answer("Hi"), User("Hello")],
    ),
    "user, half an emoji": ([message("user", "a\ud83d")], [User("a\ufffd")]),
    "user, nulls and unknown fields": (
        [message("user", "a", id=None, status=None, phase=None, x=[1], name=None)],
        [User("a")],
    ),
    "system and developer": (
        [message("system", "s"), message("developer", text("d", "e")), HELLO],
        [Instructions("s"), Instructions("de"), User("Hello")],
    ),
    "instructions without text": ([message("system", ""), HELLO], [User("Hello")]),
    "assistant, an answer": ([HELLO, assistant("Hi")], [User("Hello"), Answer("Hi")]),
    "assistant, output text": (
        [HELLO, assistant([{"type": "output_text", "text": "Hi", "annotations": []}])],
        [User("Hello"), Answer("Hi")],
    ),
    "assistant, a refusal": (
        [HELLO, assistant([{"type": "refusal", "refusal": "No."}])],
        [User("Hello"), Answer("No.")],
    ),
    "assistant, nothing": ([HELLO, assistant(None), assistant([])], [User("Hello")]),
    "phases": (
        [HELLO, assistant("a", phase="commentary"), assistant("b", phase="final_answer")],
        [User("Hello"), Preamble("a"), Answer("b")],
    ),
    "no phase, a call follows": (
        [HELLO, assistant("a"), thought(content=text("t")), call(), result("r")],
        [User("Hello"), Preamble("a"), Reasoning("t"), CALL, Result("c1", "r", "input[4]")],
    ),
    "no phase, a call follows behind a foreign one": (
        [HELLO, assistant("a"), {"type": "web_search_call", "id": "ws_1"}, call()],
        [User("Hello"), Preamble("a"), CALL],
    ),
    "no phase, the call is of another turn": (
        [HELLO, assistant("a"), message("user", "b"), call()],
        [User("Hello"), Answer("a"), User("b"), CALL],
    ),
    "no phase, the call was before": (
        [HELLO, call(), result("r"), assistant("a"), result("r")],
        [
            User("Hello"),
            CALL,
            Result("c1", "r", "input[2]"),
            Answer("a"),
            Result("c1", "r", "input[4]"),
        ],
    ),
    "no phase, a call before it has its answer behind it": (
        [HELLO, thought(content=text("t")), call(), assistant("a"), result("r")],
        [User("Hello"), Reasoning("t"), Preamble("a"), CALL, Result("c1", "r", "input[4]")],
    ),
    "no phase, between two calls": (
        [HELLO, call(), assistant("a"), call(key="c2"), result("s", "c2"), result("r")],
        [
            User("Hello"),
            Preamble("a"),
            CALL,
            Call("c2", "f", "{}"),
            Result("c2", "s", "input[4]"),
            Result("c1", "r", "input[5]"),
        ],
    ),
    "a phase, behind a call": (
        [
            HELLO,
            call(),
            assistant("a", phase="commentary"),
            thought(content=text("t")),
            result("r"),
        ],
        [User("Hello"), Preamble("a"), Reasoning("t"), CALL, Result("c1", "r", "input[4]")],
    ),
    "no phase, a server's call follows": (
        [HELLO, assistant("a"), MCP_CALL, assistant("b")],
        [User("Hello"), Preamble("a"), *MCP_MESSAGES, Answer("b")],
    ),
    "no phase, a server's call and a client's": (
        [HELLO, call(), assistant("a"), MCP_CALL, assistant("b"), result("r")],
        [
            User("Hello"),
            Preamble("a"),
            *MCP_MESSAGES,
            Preamble("b"),
            CALL,
            Result("c1", "r", "input[5]"),
        ],
    ),
    "no phase, code follows": (
        [
            HELLO,
            assistant("a"),
            {
                "type": "code_interpreter_call",
                "id": "ci_1",
                "code": "1",
                "outputs": [{"type": "logs", "logs": "2"}],
            },
            assistant("b"),
        ],
        [
            User("Hello"),
            Preamble("a"),
            ServerCall("call_1", "python", "1"),
            ServerResult("call_1", "python", "2"),
            Answer("b"),
        ],
    ),
    "no phase, a search follows": (
        [HELLO, assistant("a"), {"type": "web_search_call", "id": "ws_1"}, assistant("b")],
        [User("Hello"), Preamble("a"), Answer("b")],
    ),
    "no phase, a request for approval follows": (
        [HELLO, assistant("a"), {**MCP_CALL, "type": "mcp_approval_request"}, message("user", "b")],
        [
            User("Hello"),
            Preamble("a"),
            MCP_MESSAGES[0],
            ServerResult("call_1", "s.f", "[this call did not finish]"),
            User("b"),
        ],
    ),
    "tools added between a call and its answer": (
        [
            HELLO,
            call(),
            {"type": "additional_tools", "role": "developer", "tools": [FIND]},
            result("r"),
        ],
        [
            User("Hello"),
            CALL,
            AdditionalTools((Tool("find", "Finds.", where="input[2].tools[0]"),)),
            Result("c1", "r", "input[3]"),
        ],
    ),
    "a phase that says otherwise": (
        [HELLO, assistant("a", phase="final_answer"), call()],
        [User("Hello"), Answer("a"), CALL],
    ),
    "reasoning, its text": (
        [HELLO, thought(content=text("a", "b", kind="reasoning_text"))],
        [User("Hello"), Reasoning("a\nb")],
    ),
    "reasoning, its summary": (
        [HELLO, thought(summary=text("a", "b", kind="summary_text"), content=None)],
        [User("Hello"), Reasoning("a\nb")],
    ),
    "reasoning, its text before its summary": (
        [HELLO, thought(content=text("a"), summary=text("b"))],
        [User("Hello"), Reasoning("a")],
    ),
    "reasoning, what is encrypted before all": (
        [HELLO, thought(encrypted_content=SEAL.encrypt("a"), content=text("b"), summary=text("c"))],
        [User("Hello"), Reasoning("a")],
    ),
    "reasoning, a foreign cipher": (
        [HELLO, thought(encrypted_content="gAAAA", content=text("b"))],
        [User("Hello"), Reasoning("b")],
    ),
    "reasoning, none": ([HELLO, thought(encrypted_content=None)], [User("Hello")]),
    "compaction": (
        [{"type": "compaction", "encrypted_content": SEAL.encrypt("It was long.")}],
        [Summary("It was long.")],
    ),
    "call, text byte for byte": (
        [HELLO, call(' {"b": 1,\n "a":"\\u00e9é"} ')],
        [User("Hello"), Call("c1", "f", ' {"b": 1,\n "a":"\\u00e9é"} ')],
    ),
    "call, object": (
        [HELLO, call({"b": "é", "a": [1, None]})],
        [User("Hello"), Call("c1", "f", '{"b":"é","a":[1,null]}')],
    ),
    "call, empty": ([HELLO, call("")], [User("Hello"), CALL]),
    "call, null": ([HELLO, call(None)], [User("Hello"), CALL]),
    "call in a namespace nobody declared": (
        [HELLO, call(namespace="mcp__crm__"), call(namespace="crm", key="c2")],
        [User("Hello"), Call("c1", "mcp__crm__f", "{}"), Call("c2", "crm__f", "{}")],
    ),
    "freeform call": (
        [
            HELLO,
            {"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": 'a\n"é"'},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "r"},
        ],
        [User("Hello"), Call("c1", "f", '{"input":"a\\n\\"é\\""}'), Result("c1", "r", "input[2]")],
    ),
    "result, parts": (
        [HELLO, call(), result(text("a", "b"))],
        [User("Hello"), CALL, Result("c1", "ab", "input[2]")],
    ),
    "result, a picture": (
        [HELLO, call(), result([*text("Look:"), IMAGE, *text("nice")])],
        [
            User("Hello"),
            CALL,
            Result("c1", "Look:\n[image left out: this model reads text only]\nnice", "input[2]"),
        ],
    ),
    "result, nothing": (
        [HELLO, call(), result("")],
        [User("Hello"), CALL, Result("c1", "", "input[2]")],
    ),
    "foreign items": (
        [
            HELLO,
            {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}, "status": 1},
            {"type": "program", "call_id": 7, "code": None},
            {"type": "program_output", "call_id": "x", "result": [{"stdout": "a"}]},
            {"type": "mcp_list_tools", "name": "", "tools": []},
            {"type": "something_new", "role": "critic", "content": 5, "arguments": []},
        ],
        [User("Hello")],
    ),
    "foreign items with the output of a function": (
        [
            HELLO,
            {"type": "program", "call_id": "c9", "code": "x"},
            {"type": "program", "call_id": [], "code": {}},
            result("done", key="c9"),
            assistant("a"),
        ],
        [User("Hello"), Answer("a")],
    ),
    "an item without a call beside what was found elsewhere": (
        [
            HELLO,
            {"type": "web_search_call", "id": "ws_1"},
            search_output(FIND, call_id=None, execution="server"),
        ],
        [
            User("Hello"),
            AdditionalTools((Tool("find", "Finds.", where="input[2].tools[0]"),)),
        ],
    ),
    "references to what nobody stored": (
        [HELLO, {"type": "item_reference", "id": "msg_1"}, {"id": "rs_1", "type": None}],
        [User("Hello")],
    ),
    "references to calls that nobody stored, answered": (
        [
            HELLO,
            {"type": "item_reference", "id": "fc_1"},
            {"id": "fc_2"},
            result("r"),
            {**result("s", key="c2"), "name": "find", "namespace": "crm"},
            call(key="c3"),
            result("t", key="c3"),
        ],
        [
            User("Hello"),
            Call("c1", "unknown", "{}"),
            Result("c1", "r", "input[3]"),
            Call("c2", "crm__find", "{}"),
            Result("c2", "s", "input[4]"),
            Call("c3", "f", "{}"),
            Result("c3", "t", "input[6]"),
        ],
    ),
    "a search and what it found": (
        [
            HELLO,
            search_call(),
            search_output(
                {"type": "namespace", "name": "crm", "tools": [FIND]}, {"type": "web_search"}
            ),
            call(name="find", namespace="crm", key="c2"),
            result("r", key="c2"),
        ],
        [
            User("Hello"),
            Call("c1", "tool_search", '{"query":"é"}'),
            Result("c1", "Found. The tools can be called from now on.", "input[2]"),
            AdditionalTools((Tool("crm__find", "Finds.", where="input[2].tools[0].tools[0]"),)),
            notice(["web_search"]),
            Call("c2", "crm__find", "{}"),
            Result("c2", "r", "input[4]"),
        ],
    ),
    "a search that found nothing": (
        [HELLO, search_call(arguments='{"query": 1}'), search_output()],
        [
            User("Hello"),
            Call("c1", "tool_search", '{"query": 1}'),
            Result("c1", "No tools were found.", "input[2]"),
        ],
    ),
    "a search that a server did": (
        [HELLO, search_call(call_id=None, execution="server"), search_output(FIND, call_id=None)],
        [User("Hello"), AdditionalTools((Tool("find", "Finds.", where="input[2].tools[0]"),))],
    ),
    "an answered reference to a search": (
        [HELLO, {"id": "tsc_1"}, search_output()],
        [
            User("Hello"),
            Call("c1", "tool_search", "{}"),
            Result("c1", "No tools were found.", "input[2]"),
        ],
    ),
    "additional tools": (
        [
            {"type": "additional_tools", "role": "developer", "tools": [FIND]},
            message("developer", "Be brief."),
            HELLO,
            {"type": "additional_tools", "role": "developer", "tools": [FIND]},
        ],
        [
            AdditionalTools((Tool("find", "Finds.", where="input[0].tools[0]"),)),
            Instructions("Be brief."),
            User("Hello"),
        ],
    ),
    "another effort and format": (
        [
            HELLO,
            {"type": "configuration_update", "reasoning": {"effort": "xhigh"}},
            {
                "type": "configuration_update",
                "reasoning": {"effort": "none"},
                "text": {
                    "format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}
                },
            },
            {"type": "configuration_update", "text": {"format": {"type": "text"}}},
            {"type": "configuration_update"},
        ],
        [
            User("Hello"),
            EffortUpdate(Effort.HIGH),
            EffortUpdate(Effort.LOW, thinking=False),
            FormatUpdate(ResponseFormat({}, "n", strict=True)),
            FormatUpdate(None),
        ],
    ),
    "fields of other items say nothing": (
        [
            message("user", "Hello", tools=5, text="x", reasoning="y"),
            {**thought(content=text("t")), "tools": "x", "text": 5},
        ],
        [User("Hello"), Reasoning("t")],
    ),
}


@pytest.mark.parametrize(("items", "expected"), ITEMS.values(), ids=ITEMS)
def test_items_are_read(items: list[Any], expected: list[Message]) -> None:
    assert list(read_turn(input=items).messages) == expected


def test_string_input_is_user_message() -> None:
    assert read_turn(input="Hi").messages == (User("Hi"),)


def test_unusable_items_are_noted() -> None:
    items = [HELLO, thought(encrypted_content="gAAAA"), {"type": "item_reference", "id": "m"}]
    assert read_request(input=items).notes == (
        "input[2] refers to 'm', which is not stored: left out",
        "input[1].encrypted_content was not encrypted by this server: ignored",
    )
    assert read_request(input=[HELLO, thought(encrypted_content=SEAL.encrypt("x"))]).notes == ()


def test_reference_to_call_hides_its_result() -> None:
    reference = {"id": "ws_1", "call_id": "call_1"}
    answer = {"type": "function_call_output", "call_id": "call_1", "output": "r"}
    assert read_turn(input=[HELLO, reference, answer]).messages == read_turn(input=[HELLO]).messages


def test_references_are_looked_up() -> None:
    stored: dict[str, Mapping[str, Any]] = {
        "fc_1": call(id="fc_1", status="completed"),
        "rs_1": thought(content=text("t", kind="reasoning_text"), status="completed"),
    }
    items = [HELLO, {"type": "item_reference", "id": "rs_1"}, {"id": "fc_1"}, result("r")]
    request = read({"model": "m", "input": items}, Defaults(), SEAL, stored=stored.get)
    expected = (User("Hello"), Reasoning("t"), CALL, Result("c1", "r", "input[3]"))
    assert request.turn.messages == expected
    assert request.notes == ()


# --- The conversation of a previous response.

HISTORY = (Instructions("Be brief."), User("Hello"), Reasoning("Hm."), CALL)


def test_history_is_between_instructions_and_input() -> None:
    request = read_request(history=HISTORY, input=[result("r")], instructions="Be kind.")
    stored = (*HISTORY, Result("c1", "r", "input[0]"))
    assert request.turn.messages == (Instructions("Be kind."), *stored)
    assert request.conversation((*request.turn.messages, Answer("Hi"))) == (*stored, Answer("Hi"))


@pytest.mark.parametrize("none", [None, ""])
def test_conversation_without_instructions_is_stored_whole(none: str | None) -> None:
    request = read_request(history=HISTORY, instructions=none)
    assert request.conversation(request.turn.messages) == (*HISTORY, User("Hello"))


@pytest.mark.parametrize("nothing", [None, []])
def test_conversation_continues_without_input(nothing: Any) -> None:
    assert read_turn(history=HISTORY, input=nothing).messages == HISTORY


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"previous_response_id": "resp_1"}, "resp_1"),
        ({"previous_response_id": None}, None),
        ({"previous_response_id": 5}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_previous_response_id_is_read_from_any_body(body: Any, expected: Any) -> None:
    assert previous_response_id(body) == expected


# --- Fields.

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}

LIMITS = partial(OutputLimits, where="max_output_tokens")

FIELDS: list[tuple[dict[str, Any], str, Any]] = [
    ({"instructions": "Be brief."}, "messages", (Instructions("Be brief."), User("Hello"))),
    ({"reasoning": {"effort": "minimal"}}, "effort", Effort.LOW),
    ({"reasoning": {"effort": None}}, "effort", Effort.MEDIUM),
    ({"reasoning_effort": "xhigh"}, "effort", Effort.HIGH),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "effort", Effort.LOW),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "effort", Effort.LOW),
    ({"text": {"format": {"type": "text"}}}, "response_format", None),
    ({"text": {"verbosity": "low"}}, "response_format", None),
    ({"text": {"format": {"type": "json_object"}}}, "response_format", ResponseFormat()),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        "response_format",
        ResponseFormat(SCHEMA, "n"),
    ),
    (
        {"text": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": True}}},
        "response_format",
        ResponseFormat(SCHEMA, strict=True),
    ),
    ({"reasoning": {"effort": "none"}}, "thinking", False),
    ({"reasoning": {"effort": "none"}}, "effort", Effort.LOW),
    ({"reasoning": {"effort": "minimal"}}, "thinking", True),
    ({"thinking_token_budget": 100}, "limits", LIMITS(reasoning_tokens=100, sets_reasoning=True)),
    ({"thinking_token_budget": -1}, "limits", LIMITS(sets_reasoning=True)),
    ({"thinking_token_budget": 0}, "thinking", False),
    ({"min_tokens": 5}, "limits", LIMITS(min_tokens=5)),
    ({"max_output_tokens": 5, "timeout": 2.5}, "limits", LIMITS(5)),
    ({"parallel_tool_calls": False}, "limits", LIMITS(one_call=True)),
    (
        {"temperature": 0, "top_p": 0.5, "top_k": -1, "presence_penalty": 1},
        "sampling",
        Sampling(temperature=0, top_p=0.5, top_k=0, presence_penalty=1),
    ),
    (
        {"frequency_penalty": -2, "seed": 2**63 - 1},
        "sampling",
        Sampling(frequency_penalty=-2, seed=2**63 - 1),
    ),
    ({"chat_template_kwargs": {"model_identity": "I"}}, "identity", "I"),
    ({"chat_template_kwargs": {"builtin_tools": ["browser"]}}, "builtin_tools", ("browser",)),
]


@pytest.mark.parametrize(("fields", "name", "expected"), FIELDS)
def test_fields_are_read_into_turn(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(read_turn(**fields), name) == expected


UPDATED: list[tuple[list[str], bool]] = [
    ([], True),
    (["none"], False),
    (["none", "low"], True),
    (["high", "none"], False),
]


@pytest.mark.parametrize(("efforts", "thinking"), UPDATED)
def test_last_update_decides_whether_model_thinks(efforts: list[str], thinking: bool) -> None:
    """The response repeats the effort of the request's own field."""
    items = [
        {"type": "configuration_update", "reasoning": {"effort": effort}} for effort in efforts
    ]
    request = read_request(input=[HELLO, *items], reasoning={"effort": "medium"})
    assert (request.turn.thinking, request.turn.effort) == (thinking, Effort.MEDIUM)
    assert request.emitter(INFO).document()["reasoning"]["effort"] == "medium"
    history = request.conversation(request.turn.messages)
    again = read_request(history=history, input="More", reasoning={"effort": "medium"})
    assert again.turn.thinking == thinking


def test_tool_choice_none_keeps_found_tools_in_conversation() -> None:
    items = [HELLO, search_call(), search_output(FIND)]
    request = read_request(input=items, tool_choice="none", instructions="Be brief.")
    assert request.turn.callable_tools == ()
    stored = request.conversation((*request.turn.messages, Answer("Hi")))
    assert stored == (*read_turn(input=items).messages, Answer("Hi"))


def test_tools_found_earlier_are_known_by_name() -> None:
    crm = {"type": "namespace", "name": "crm", "tools": [FIND]}
    search = {"type": "tool_search", "execution": "client"}
    first = read_request(input=[HELLO, search_call(), search_output(crm)], tools=[search])
    history = first.conversation(first.turn.messages)
    again = read_request(history=history, input="More", tools=[search])
    assert again.turn.callable_tools == first.turn.callable_tools
    (item,) = calls_of(again, "crm__find")
    assert (item["name"], item["namespace"]) == ("find", "crm")
    choice = {"type": "function", "name": "find", "namespace": "crm"}
    forced = read_request(history=history, input="More", tool_choice=choice)
    assert forced.turn.tool_choice.names == ("crm__find",)


def calls_of(request: ResponsesRequest, name: str) -> list[dict[str, Any]]:
    emitter = request.emitter(INFO)
    for delta in (Started(1), Opened(0, Kind.CALL, name), Closed(), Finished("tool_calls")):
        emitter.feed(delta)
    output: list[dict[str, Any]] = emitter.result()["output"]
    return output


def test_unstored_call_is_assigned_to_only_tool() -> None:
    items = [HELLO, {"id": "fc_1"}, result("r")]
    request = read_request(input=items, tools=[{"type": "function", "name": "only"}])
    assert request.turn.messages[1] == Call("c1", "only", "{}")
    assert request.notes == (
        "input[1] refers to 'fc_1', which is not stored: left out",
        "input[2] answers a call that is not stored",
    )


def test_null_fields_are_like_absent_ones() -> None:
    unsupported = {name for name, *_ in UNSUPPORTED_FIELDS}
    nulls = dict.fromkeys(unsupported | ResponsesBody.model_fields.keys() - {"model", "input"})
    assert read_request(**nulls) == read_request()


def test_server_defaults_apply() -> None:
    turn = read_turn(defaults=SERVER)
    assert (turn.effort, turn.identity, turn.date, turn.builtin_tools) == (
        Effort.HIGH,
        "You are Ada.",
        "2025-08-05",
        ("python",),
    )
    document = read_request(SERVER).emitter(INFO).document()
    assert document["reasoning"] == {"effort": "high", "summary": None}


@pytest.mark.parametrize(
    ("fields", "store", "background", "stream"),
    [
        ({}, True, False, False),
        ({"store": None, "background": None, "stream": None}, True, False, False),
        ({"store": False, "stream": True}, False, False, True),
        ({"background": True, "store": True}, True, True, False),
    ],
)
def test_store_background_and_stream_are_read(
    fields: dict[str, Any], store: bool, background: bool, stream: bool
) -> None:
    request = read_request(**fields)
    assert (request.store, request.background, request.stream) == (store, background, stream)


IGNORED: list[dict[str, Any]] = [
    {"parallel_tool_calls": True, "max_tool_calls": 3, "truncation": "auto"},
    {"metadata": {f"{number:064}": "v" * 512 for number in range(16)}},
    {"moderation": None, "prompt_cache_options": {"mode": "explicit", "prewarm": False}},
    {"metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "user": "u"},
    {"client_metadata": {"x": [1]}, "service_tier": "flex", "include": ["web_search_call.results"]},
    {"reasoning": {"summary": "auto", "context": "auto"}, "stream_options": {"x": 1}},
    {"top_logprobs": 0, "type": "response.create"},
]


@pytest.mark.parametrize("fields", IGNORED)
def test_ignored_fields_change_nothing(fields: dict[str, Any]) -> None:
    assert read_turn(**fields) == read_turn()


INVALID_BODIES: list[tuple[Any, str | None]] = [
    ([], None),
    ("x", None),
    ({"input": "x"}, "model"),
    ({"model": "", "input": "x"}, "model"),
    ({"model": "m"}, "input"),
    ({"model": "m", "input": None}, "input"),
    *(
        ({"model": "m", "input": value}, param)
        for value, param in [
            ([{"type": "compaction_trigger"}, HELLO], "input[0]"),
            ([HELLO, {"type": "compaction_trigger"}, {"type": "compaction_trigger"}], "input[1]"),
            ([HELLO, {"type": "compaction_trigger"}, {"type": "web_search_call"}], "input[1]"),
            ([{"type": "compaction_trigger"}], "input"),
            (5, "input"),
            ({}, "input"),
            ([], "input"),
            ([thought()], "input"),
            ([5], "input[0]"),
            ([{}], "input[0].type"),
            ([{"type": 5}], "input[0].type"),
            ([{"type": "message", "content": "a"}], "input[0].role"),
            ([message("tool", "a")], "input[0].role"),
            ([message("user", None)], "input[0].content"),
            ([message("user", 5)], "input[0].content"),
            ([message("user", ["a"])], "input[0].content[0]"),
            ([message("user", [{}])], "input[0].content[0].type"),
            ([message("user", [{"type": "input_text"}])], "input[0].content[0].text"),
            ([message("user", [*text("a"), {"type": "input_text", "text": 5}])],
             "input[0].content[1].text"),
            ([message("user", [*text("a"), {"type": "hologram"}])], "input[0].content[1]"),
            ([message("assistant", [{"type": "refusal"}])], "input[0].content[0].refusal"),
            ([HELLO, thought(summary="a")], "input[1].summary"),
            ([HELLO, thought(encrypted_content=5)], "input[1].encrypted_content"),
            ([HELLO, call(5)], "input[1].arguments"),
            ([HELLO, call(name=None)], "input[1].name"),
            ([HELLO, call(name="")], "input[1].name"),
            ([HELLO, call(key=None)], "input[1].call_id"),
            ([HELLO, {"type": "custom_tool_call", "call_id": "c", "name": "f"}], "input[1].input"),
            ([HELLO, result(5)], "input[1].output"),
            ([HELLO, result("r", key="")], "input[1].call_id"),
            (
                [HELLO, {"type": "web_search_call"}, result("r", key=None)],  # type: ignore[arg-type]
                "input[2].call_id",
            ),
            ([HELLO, {"type": "item_reference"}], "input[1].id"),
            ([HELLO, {"type": "additional_tools", "tools": [FIND]},
              {"type": "configuration_update", "reasoning": {"effort": "huge"}}],
             "input[2].reasoning.effort"),
            ([HELLO, {"type": "configuration_update", "text": {"format": {
                "type": "json_schema"}}}], "input[1].text.format.schema"),
            ([HELLO, {"type": "additional_tools"}], "input[1].tools"),
            ([HELLO, {"type": "additional_tools", "tools": [FIND, FIND]}], "input[1].tools[1]"),
            ([{"type": "additional_tools", "tools": [FIND]}], "input"),
            ([HELLO, search_call(), search_output({"type": "function"})], "input[2].tools[0].name"),
            ([HELLO, search_call(), {**search_output(), "tools": None}], "input[2].tools"),
        ]
    ),
    *(
        ({"model": "m", "input": "x", **fields}, param)
        for fields, param in [
            ({"instructions": 5}, "instructions"),
            ({"instructions": [HELLO]}, "instructions"),
            ({"stream": "yes"}, "stream"),
            ({"previous_response_id": 5}, "previous_response_id"),
            ({"reasoning": "high"}, "reasoning"),
            ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
            ({"reasoning": {"effort": 3}}, "reasoning.effort"),
            ({"reasoning_effort": "no"}, "reasoning_effort"),
            ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
            ({"text": {"verbosity": "mute"}}, "text.verbosity"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 2.5}, "max_output_tokens"),
            ({"temperature": 3}, "temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"top_p": -1}, "top_p"),
            ({"metadata": {"a": 1}}, "metadata.a"),
            ({"include": "x"}, "include"),
            ({"top_logprobs": 21}, "top_logprobs"),
            ({"logprobs": True}, "logprobs"),
            ({"frequency_penalty": 3}, "frequency_penalty"),
            ({"seed": 2**64}, "seed"),
            ({"conversation": "c", "previous_response_id": "r"}, "conversation"),
            ({"prompt": {"id": "pmpt_1"}}, "prompt"),
            ({"truncation": "some"}, "truncation"),
            ({"background": True, "store": False}, "background"),
            ({"tools": {}}, "tools"),
            ({"tools": [5]}, "tools[0]"),
            ({"tools": [{}]}, "tools[0].type"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
            ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
            ({"tools": [{"type": "function", "name": "f", "parameters": []}]},
             "tools[0].parameters"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
            ({"tools": [{"type": "custom"}]}, "tools[0].name"),
            ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
            ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
            ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
             "tools[0].tools[0].name"),
            ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
            ({"metadata": {"k" * 65: ""}}, "metadata"),
            ({"metadata": {"k": "v" * 513}}, "metadata"),
            ({"user": "u" * 2**22}, "user"),
            ({"instructions": "a " * 2**21}, "instructions"),
            ({"tools": [{"type": "custom", "name": "f", "x": ["y" * 2**12] * 2**10}]}, "tools"),
            ({"moderation": {"model": "omni"}}, "moderation"),
            ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options"),
            ({"structured_outputs": {"json": {}}}, "structured_outputs"),
            ({"thinking_token_budget": -2}, "thinking_token_budget"),
            ({"tools": [{"type": "custom", "name": "f", "format": {
                "type": "grammar", "syntax": "peg", "definition": "a"}}]},
             "tools[0].format.syntax"),
            ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
             "tools[0].format.definition"),
            ({"tools": [{"type": "custom", "name": "f", "format": {"type": "regex"}}]},
             "tools[0].format.type"),
            ({"tools": [{"type": "function", "name": "f", "strict": "yes"}]}, "tools[0].strict"),
            ({"tools": [{"type": "tool_search", "execution": "client"}] * 2}, "tools[1]"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
            ({"tool_choice": {"type": "allowed_tools", "mode": "required"}}, "tool_choice"),
            ({"tool_choice": {"type": "allowed_tools", "mode": "auto",
                              "tools": [{"type": "function", "name": "f"}]}},
             "tool_choice.tools[0]"),
            ({"tool_choice": 5}, "tool_choice"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), INVALID_BODIES)
def test_invalid_field_is_named(body: Any, param: str | None) -> None:
    error = error_of(body)
    assert error.param == param
    assert error.message


# --- Recorded requests of real clients.


def recorded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DATA / f"responses-{name}.json").read_text())["body"]
    return body


def test_request_of_codex_is_read() -> None:
    request = read(recorded("codex-turn2"), Defaults(), SEAL)
    call = Call("call_d746d1f5237146538418f32d", "exec_command", '{"cmd": "echo marker-$((40+2))"}')
    assert request.turn.messages == (
        Instructions("(16979 characters of text)"),
        Instructions("(2136 characters of text)(362 characters of text)"),
        notice(["web_search"]),
        User("(379 characters of text)"),
        User("Please run it"),
        Reasoning("I should run the shell."),
        Preamble("Running the command."),
        call,
        Result(call.id, "(114 characters of text)", "input[7]"),
    )
    assert [tool.name for tool in request.turn.tools] == [
        "exec_command",
        "write_stdin",
        "request_user_input",
        "view_image",
        "multi_agent_v1__close_agent",
        "multi_agent_v1__resume_agent",
        "multi_agent_v1__send_input",
        "multi_agent_v1__spawn_agent",
        "multi_agent_v1__wait_agent",
        "get_goal",
        "create_goal",
        "update_goal",
    ]
    assert (request.stream, request.store, request.notes) == (True, False, ())


def test_request_of_codex_with_freeform_tool_is_read() -> None:
    request = read(recorded("codex-custom-turn2"), Defaults(), SEAL)
    key = "call_72700a5824bf49eb9a0145e2"
    patch = "*** Begin Patch\\n*** Add File: made.txt\\n+hello\\n*** End Patch\\n"
    assert request.turn.messages[2] == notice(["web_search"])
    assert request.turn.messages[5:] == (
        Reasoning("I should patch."),
        Call(key, "apply_patch", f'{{"input":"{patch}"}}'),
        Result(key, "(91 characters of text)", "input[6]"),
    )  # fmt: skip
    assert "tool_search" in [tool.name for tool in request.turn.tools]
    (tool,) = (tool for tool in request.turn.tools if tool.name == "apply_patch")
    assert tool.syntax == Syntax("lark", "(578 characters of text)")
    assert tool.description == (
        "(108 characters of text)\n\n"
        "The input must match this lark grammar:\n(578 characters of text)"
    )
    assert request.notes == (
        "input[4].encrypted_content was not encrypted by this server: ignored",
    )


def test_request_of_opencode_is_read() -> None:
    request = read(recorded("opencode-turn2"), Defaults(), SEAL)
    key = "call_345bf47beb8549118212d017"
    assert request.turn.messages == (
        Instructions("(9540 characters of text)"),
        User('"Please run it"'),
        Preamble("Running the command."),
        Call(key, "bash", '{"command":"echo marker-$((40+2))","description":"Echo a marker"}'),
        Result(key, "marker-42\n", "input[4]"),
    )
    assert request.turn.limits == LIMITS(8192)
    assert len(request.turn.tools) == 10


@pytest.mark.parametrize("name", ["codex-turn1", "codex-custom-turn1"])
def test_first_request_of_codex_is_read(name: str) -> None:
    request = read(recorded(name), Defaults(), SEAL)
    kinds = [type(message) for message in request.turn.messages]
    assert kinds == [Instructions, Instructions, Instructions, User, User]


# --- Input items, read back.


def test_input_items_are_listed() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        assistant("Hello", id="msg_1", phase="final_answer"),
        message("user", text("a")),
        call(),
        result("r"),
        {"type": "web_search_call", "id": "ws_1", "status": "failed"},
        {"type": "something_new"},
    ]
    listed = read_request(input=items).input_items(INFO)
    assert listed == [
        {"id": "msg_0123456789abcdef01238000", "type": "message", "role": "user",
         "status": "completed", "content": text("Hi")},
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
         "phase": "final_answer",
         "content": [{"type": "output_text", "text": "Hello", "annotations": []}]},
        {"id": "msg_0123456789abcdef01238002", **message("user", text("a")),
         "status": "completed"},
        {"id": "fc_0123456789abcdef01238003", **call(), "status": "completed"},
        {"id": "fco_0123456789abcdef01238004", **result("r"), "status": "completed"},
        {"type": "web_search_call", "id": "ws_1", "status": "failed"},
        {"type": "something_new", "id": "item_0123456789abcdef01238006"},
    ]  # fmt: skip


def test_string_input_is_listed_as_item() -> None:
    (item,) = read_request().input_items(INFO)
    assert (item["role"], item["content"]) == ("user", text("Hello"))


MANY = [{"id": f"msg_{number}"} for number in range(30)]

PAGES: list[tuple[dict[str, str], range, bool]] = [
    ({}, range(29, 9, -1), True),
    ({"order": "asc"}, range(20), True),
    ({"order": "asc", "after": "msg_19"}, range(20, 30), False),
    ({"order": "asc", "limit": "1", "after": "msg_3"}, range(4, 5), True),
    ({"order": "desc", "limit": "100"}, range(29, -1, -1), False),
    ({"order": "asc", "after": "msg_29"}, range(0), False),
    ({"order": "asc", "limit": "10", "after": "msg_19"}, range(20, 30), False),
    ({"order": "", "after": "", "limit": ""}, range(29, 9, -1), True),
]


@pytest.mark.parametrize(("query", "numbers", "more"), PAGES)
def test_items_are_listed_in_pages(query: dict[str, str], numbers: range, more: bool) -> None:
    ids = [f"msg_{number}" for number in numbers]
    assert page(MANY, query) == {
        "object": "list",
        "data": [{"id": key} for key in ids],
        "first_id": ids[0] if ids else "",
        "last_id": ids[-1] if ids else "",
        "has_more": more,
    }


@pytest.mark.parametrize(
    ("param", "value"),
    [("order", "up"), ("limit", "0"), ("limit", "101"), ("limit", "x"), ("limit", "²"),
     ("limit", "9" * 5000), ("after", "msg_30")],
)  # fmt: skip
def test_invalid_page_is_rejected(param: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        page(MANY, {param: value})
    assert (caught.value.param, caught.value.status) == (param, 400)


# --- Any JSON.

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    sorted(
        {"text", "refusal"}.union(
            *(model.model_fields for model in (*ITEM_MODELS.values(), *TOOLS.values(), ToolChoice))
        )
    )
)
WORDS = st.sampled_from(
    [*ITEM_MODELS, *TOOLS, "user", "assistant", "input_text", "refusal", "allowed_tools", "auto"]
)
SHAPED = st.recursive(
    VALUES | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
FIELD_NAMES = st.sampled_from(
    [*ResponsesBody.model_fields, *(name for name, *_ in UNSUPPORTED_FIELDS), "unknown"]
)


@given(VALUES)
def test_any_json_is_read_or_rejected(body: Any) -> None:
    with suppress(RequestError):
        read(body, Defaults(), SEAL)


@given(st.dictionaries(FIELD_NAMES, SHAPED, max_size=6))
def test_any_fields_are_read_or_rejected(fields: dict[str, Any]) -> None:
    with suppress(RequestError):
        read({"model": "m", "input": "x", **fields}, Defaults(), SEAL)


@given(st.lists(st.dictionaries(KEYS, SHAPED | WORDS, max_size=7), max_size=4))
def test_any_items_are_read_or_rejected(items: list[Any]) -> None:
    with suppress(RequestError):
        read_request(input=[HELLO, *items]).input_items(INFO)
