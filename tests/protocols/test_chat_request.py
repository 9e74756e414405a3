"""Chat Completions, inwards: bodies on the left, turns (or the guilty field) on the right."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Defaults,
    Effort,
    Instructions,
    Limits,
    Preamble,
    Reasoning,
    ResponseFormat,
    Result,
    Sampling,
    Tool,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.chat import ChatRequest, read
from vllm_mlx_harmony.protocols.chat.body import ChatBody

DATA = Path(__file__).parent / "data"
HELLO = [{"role": "user", "content": "Hello"}]
SERVER = Defaults(
    effort=Effort.HIGH, identity="You are Ada.", date="2025-08-05", builtin_tools=("python",)
)


def request(defaults: Defaults | None = None, **fields: Any) -> ChatRequest:
    return read({"model": "m", "messages": HELLO, **fields}, defaults or Defaults())


def turn(**fields: Any) -> Turn:
    return request(**fields).turn


def guilty(body: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body, Defaults())
    assert caught.value.status == 400
    return caught.value


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


def image() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def call(arguments: Any, name: str = "f", key: str = "c1") -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def tool(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content, **fields}


MESSAGES = {
    "user": ({"role": "user", "content": "Hi"}, [User("Hi")]),
    "user, nothing typed": ({"role": "user", "content": ""}, [User("")]),
    "user, parts are one text": (
        {"role": "user", "content": text("a", "b\n", "c")},
        [User("ab\nc")],
    ),
    "user, no parts": ({"role": "user", "content": []}, [User("")]),
    "user, Responses' word for a part": (
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        [User("a")],
    ),
    "user, control token is text": (
        {"role": "user", "content": "<|start|>"},
        [User("<|start|>")],
    ),
    "user, unknown fields": ({"role": "user", "content": "a", "name": "x", "y": [1]}, [User("a")]),
    "system": ({"role": "system", "content": "Be brief."}, [Instructions("Be brief.")]),
    "developer": ({"role": "developer", "content": text("a", "b")}, [Instructions("ab")]),
    "system, empty": ({"role": "system", "content": ""}, []),
    "assistant, answer": (assistant(content="Hi"), [Answer("Hi")]),
    "assistant, parts": (assistant(content=text("a", "b")), [Answer("ab")]),
    "assistant, nothing": (assistant(), []),
    "assistant, nulls": (
        assistant(content=None, reasoning=None, reasoning_content=None, tool_calls=None),
        [],
    ),
    "assistant, empty": (assistant(content="", reasoning_content="", tool_calls=[]), []),
    "assistant, refusal": (assistant(content=None, refusal="No."), [Answer("No.")]),
    "assistant, refusal part": (
        assistant(content=[{"type": "refusal", "refusal": "No."}]),
        [Answer("No.")],
    ),
    "assistant, reasoning_content": (
        assistant(content="b", reasoning_content="a"),
        [Reasoning("a"), Answer("b")],
    ),
    "assistant, reasoning": (assistant(content="b", reasoning="a"), [Reasoning("a"), Answer("b")]),
    "assistant, thinking": (assistant(content="b", thinking="a"), [Reasoning("a"), Answer("b")]),
    "assistant, reasoning under all names": (
        assistant(reasoning_content="1", reasoning="2", thinking="3"),
        [Reasoning("1")],
    ),
    "assistant, reasoning under two names": (
        assistant(reasoning_content=None, reasoning="2", thinking="3"),
        [Reasoning("2")],
    ),
    "assistant, the model's own order": (
        assistant(tool_calls=[call("{}")], content="Let me look.", reasoning="Hm."),
        [Reasoning("Hm."), Preamble("Let me look."), Call("c1", "f", "{}")],
    ),
    "call, text byte for byte": (
        assistant(tool_calls=[call(' {"b": 1,\n "a":"\\u00e9é"} ')]),
        [Call("c1", "f", ' {"b": 1,\n "a":"\\u00e9é"} ')],
    ),
    "call, not even JSON": (assistant(tool_calls=[call("{oops")]), [Call("c1", "f", "{oops")]),
    "call, object": (
        assistant(tool_calls=[call({"b": "é", "a": [1, None]})]),
        [Call("c1", "f", '{"b":"é","a":[1,null]}')],
    ),
    "call, empty object": (assistant(tool_calls=[call({})]), [Call("c1", "f", "{}")]),
    "call, empty": (assistant(tool_calls=[call("")]), [Call("c1", "f", "{}")]),
    "call, null": (assistant(tool_calls=[call(None)]), [Call("c1", "f", "{}")]),
    "call, no type": (
        assistant(tool_calls=[{"id": "c1", "function": {"name": "f"}}]),
        [Call("c1", "f", "{}")],
    ),
    "two identical calls": (
        assistant(tool_calls=[call("{}"), call("{}", key="c2")]),
        [Call("c1", "f", "{}"), Call("c2", "f", "{}")],
    ),
    "result": (tool("42"), [Result("c1", "42", "messages[0]")]),
    "result, null": (tool(None), [Result("c1", "", "messages[0]")]),
    "result, parts": (tool(text("a", "b")), [Result("c1", "ab", "messages[0]")]),
    "result, picture": (
        tool([image()]),
        [Result("c1", "[an image was left out: text only]", "messages[0]")],
    ),
    "result, pictures stand on their own lines": (
        tool([*text("a"), image(), image(), *text("b\n"), image(), *text("c")]),
        [
            Result(
                "c1",
                "a\n[an image was left out: text only]\n[an image was left out: text only]\nb\n"
                "[an image was left out: text only]\nc",
                "messages[0]",
            )
        ],
    ),
    "result, other kinds": (
        tool([{"type": "input_audio"}, {"type": "file"}, {"type": "hologram"}]),
        [
            Result(
                "c1",
                "[a sound recording was left out: text only]\n[a file was left out: text only]\n"
                "[a part of type 'hologram' was left out: text only]",
                "messages[0]",
            )
        ],
    ),
    "half an emoji, as JavaScript cuts it": (
        {"role": "user", "content": "a\ud83d"},
        [User("a\ufffd")],
    ),
    "half an emoji in an object": (
        assistant(tool_calls=[call({"a": "\ude00"})]),
        [Call("c1", "f", '{"a":"\ufffd"}')],
    ),
}


@pytest.mark.parametrize(("message", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_a_message(message: dict[str, Any], expected: list[Any]) -> None:
    assert turn(messages=[message]).messages == tuple(expected)


def test_results_name_their_own_place() -> None:
    messages = [*HELLO, assistant(tool_calls=[call("{}")]), tool("42")]
    assert turn(messages=messages).messages[-1] == Result("c1", "42", "messages[2]")


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}

TURNS = {
    "nothing else": ({}, Turn((User("Hello"),))),
    "every field null": (
        dict.fromkeys(set(ChatBody.model_fields) - {"model", "messages"}),
        Turn((User("Hello"),)),
    ),
    "what changes nothing": (
        {
            "n": 1,
            "logprobs": False,
            "top_logprobs": 0,
            "frequency_penalty": 0.0,
            "modalities": ["text"],
            "functions": [],
            "seed": 7,
            "user": "u",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "prediction": {"type": "content", "content": "x"},
            "enable_thinking": True,
            "response_format": {"type": "text"},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "whatever": [{"a": 1}],
        },
        Turn((User("Hello"),)),
    ),
    "sampling": (
        {
            "temperature": 1,
            "top_p": 0.5,
            "top_k": 40,
            "min_p": 0.05,
            "presence_penalty": -2,
            "repetition_penalty": 1.1,
            "logit_bias": {"0": 1, "201087": -100},
        },
        Turn(
            (User("Hello"),),
            sampling=Sampling(1.0, 0.5, 40, 0.05, -2.0, 1.1, ((0, 1.0), (201087, -100.0))),
        ),
    ),
    "one call": (
        {"parallel_tool_calls": False},
        Turn((User("Hello"),), limits=Limits(one_call=True)),
    ),
    "top_k of all": ({"top_k": -1}, Turn((User("Hello"),), sampling=Sampling(top_k=0))),
    "limits": (
        {"max_tokens": 5, "timeout": 2.5, "stop": ["a", "b", "c", "d", "e"]},
        Turn((User("Hello"),), limits=Limits(5, 2.5, ("a", "b", "c", "d", "e"))),
    ),
    "max_completion_tokens wins": (
        {"max_tokens": 5, "max_completion_tokens": 7},
        Turn((User("Hello"),), limits=Limits(7, where="max_completion_tokens")),
    ),
    "one stop string": ({"stop": "\n"}, Turn((User("Hello"),), limits=Limits(stop=("\n",)))),
    "empty stop strings": ({"stop": ["", "x"]}, Turn((User("Hello"),), limits=Limits(stop=("x",)))),
    "an empty stop string": ({"stop": ""}, Turn((User("Hello"),))),
    "tools": (
        {
            "tools": [
                {"type": "function", "function": WEATHER},
                {"type": "function", "function": {"name": "now", "strict": True}},
                {"function": {"name": "empty", "description": None, "parameters": {}}},
            ]
        },
        Turn(
            (User("Hello"),),
            tools=(
                Tool("weather", "The weather.", SCHEMA, "tools[0]"),
                Tool("now", "", None, "tools[1]"),
                Tool("empty", "", {}, "tools[2]"),
            ),
        ),
    ),
    "tool_choice none renders no tools": (
        {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "none"},
        Turn((User("Hello"),)),
    ),
    "any JSON object": (
        {"response_format": {"type": "json_object"}},
        Turn((User("Hello"),), response_format=ResponseFormat()),
    ),
    "a schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "place",
                    "description": "Where.",
                    "schema": SCHEMA,
                    "strict": True,
                },
            }
        },
        Turn((User("Hello"),), response_format=ResponseFormat(SCHEMA, "place", "Where.")),
    ),
    "a schema of nothing": (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        Turn((User("Hello"),), response_format=ResponseFormat()),
    ),
    "template kwargs": (
        {
            "chat_template_kwargs": {
                "model_identity": "You are Bo.",
                "builtin_tools": ["browser", "python", "browser"],
                "enable_thinking": True,
            }
        },
        Turn((User("Hello"),), identity="You are Bo.", builtin_tools=("browser", "python")),
    ),
}


@pytest.mark.parametrize(("fields", "expected"), TURNS.values(), ids=TURNS)
def test_a_turn(fields: dict[str, Any], expected: Turn) -> None:
    assert turn(**fields) == expected


DEFAULTS = {
    "the server's own": (
        {},
        Turn((User("Hello"),), (), Effort.HIGH, None, "You are Ada.", "2025-08-05", ("python",)),
    ),
    "the request's": (
        {
            "reasoning_effort": "low",
            "chat_template_kwargs": {"model_identity": "You are Bo.", "builtin_tools": []},
        },
        Turn((User("Hello"),), (), Effort.LOW, None, "You are Bo.", "2025-08-05", ()),
    ),
}


@pytest.mark.parametrize(("fields", "expected"), DEFAULTS.values(), ids=DEFAULTS)
def test_server_defaults_give_way_to_the_request(fields: dict[str, Any], expected: Turn) -> None:
    assert request(SERVER, **fields).turn == expected


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, Effort.HIGH),
        ({"reasoning_effort": "minimal"}, Effort.LOW),
        ({"reasoning_effort": "xhigh"}, Effort.HIGH),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, Effort.LOW),
        ({"reasoning": {"effort": None}}, Effort.HIGH),
        ({"chat_template_kwargs": {"reasoning_effort": "medium"}}, Effort.MEDIUM),
        ({"reasoning_effort": "low", "reasoning": {"effort": "medium"}}, Effort.LOW),
        (
            {
                "reasoning": {"effort": "medium"},
                "chat_template_kwargs": {"reasoning_effort": "low"},
            },
            Effort.MEDIUM,
        ),
    ],
)
def test_effort_is_the_first_that_is_given(fields: dict[str, Any], effort: Effort) -> None:
    assert request(SERVER, **fields).turn.effort is effort


LOW, MEDIUM, HIGH = Effort
SILENT = Defaults(effort=LOW, thinking=False)


@pytest.mark.parametrize(
    ("server", "fields", "expected"),
    [
        (Defaults(), {}, (MEDIUM, True)),
        (Defaults(), {"reasoning_effort": "none"}, (LOW, False)),
        (Defaults(), {"reasoning_effort": "NONE"}, (LOW, False)),
        (Defaults(), {"reasoning_effort": "minimal"}, (LOW, True)),
        (Defaults(), {"reasoning": {"effort": "none"}}, (LOW, False)),
        (Defaults(), {"chat_template_kwargs": {"reasoning_effort": "none"}}, (LOW, False)),
        (Defaults(), {"chat_template_kwargs": {"enable_thinking": False}}, (LOW, False)),
        (Defaults(), {"enable_thinking": False}, (LOW, False)),
        (Defaults(), {"enable_thinking": True}, (MEDIUM, True)),
        (Defaults(), {"enable_thinking": False, "reasoning_effort": "high"}, (HIGH, True)),
        (Defaults(none_effort=LOW), {"reasoning_effort": "none"}, (LOW, True)),
        (Defaults(none_effort=MEDIUM), {"enable_thinking": False}, (MEDIUM, True)),
        (SILENT, {}, (LOW, False)),
        (SILENT, {"reasoning_effort": "medium"}, (MEDIUM, True)),
    ],
)
def test_thinking_can_be_turned_off(
    server: Defaults, fields: dict[str, Any], expected: tuple[Effort, bool]
) -> None:
    asked = request(server, **fields).turn
    assert (asked.effort, asked.thinking) == expected


@pytest.mark.parametrize(
    ("fields", "stream", "include_usage"),
    [
        ({}, False, False),
        ({"stream": None, "stream_options": None}, False, False),
        ({"stream": True}, True, False),
        ({"stream": True, "stream_options": {}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": None}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": True, "x": 1}}, True, True),
    ],
)
def test_how_the_answer_is_wanted(
    fields: dict[str, Any], stream: bool, include_usage: bool
) -> None:
    asked = request(**fields)
    assert (asked.model, asked.stream, asked.include_usage) == ("m", stream, include_usage)


@pytest.mark.parametrize("turns", [1, 2])
def test_what_opencode_sends(turns: int) -> None:
    recorded = json.loads((DATA / f"opencode-chat-turn{turns}.json").read_text())["body"]
    asked = read(recorded, Defaults())
    loop = (
        Reasoning("I should run the shell."),
        Preamble("Running the command."),
        Call(
            "call_c895c7ba8bd246df930ceea5",
            "bash",
            '{"command":"echo marker-$((40+2))","description":"Echo a marker"}',
        ),
        Result("call_c895c7ba8bd246df930ceea5", "marker-42\n", "messages[3]"),
    )
    start = (Instructions("(9540 characters of text)"), User('"Please run it"'))
    assert asked.turn.messages == (start if turns == 1 else start + loop)
    assert asked.turn.limits == Limits(8192)
    assert [tool.name for tool in asked.turn.tools][:2] == ["bash", "edit"]
    assert len(asked.turn.tools) == 10
    assert asked.stream
    assert asked.include_usage


INFINITE = float("1e999")  # what JSON reads it as

BAD_FIELDS = [
    # field, value, the field that is named
    ("model", None, "model"),
    ("model", "", "model"),
    ("model", 3, "model"),
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", "Hello", "messages"),
    ("messages", ["Hello"], "messages[0]"),
    ("stream", 1, "stream"),
    ("stream", "true", "stream"),
    ("stream_options", [], "stream_options"),
    ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", "5", "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_completion_tokens", -1, "max_completion_tokens"),
    ("timeout", 0, "timeout"),
    ("timeout", float("nan"), "timeout"),
    ("timeout", float("inf"), "timeout"),
    ("timeout", 10**400, "timeout"),
    ("timeout", 1e9, "timeout"),
    ("temperature", 2.1, "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", float("nan"), "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", "1", "temperature"),
    ("top_p", -0.1, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("min_p", 1.1, "min_p"),
    ("presence_penalty", 2.1, "presence_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("logit_bias", [1], "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias.5"),
    ("logit_bias", {"5": "x"}, "logit_bias.5"),
    ("logit_bias", {"a": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"٣": 1}, "logit_bias"),
    ("logit_bias", {"1_0": 1}, "logit_bias"),
    ("logit_bias", {"201088": 1}, "logit_bias"),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias"),
    ("stop", 3, "stop"),
    ("stop", ["a", 3], "stop[1]"),
    ("tools", {}, "tools"),
    ("tools", [{"type": "custom", "custom": {"name": "x"}}], "tools[0].type"),
    ("tools", [{"type": "function", "name": "x"}], "tools[0].function"),
    ("tools", [{"function": WEATHER}, {"function": {}}], "tools[1].function.name"),
    ("tools", [{"function": {"name": ""}}], "tools[0].function.name"),
    ("tools", [{"function": {"name": "x", "parameters": []}}], "tools[0].function.parameters"),
    (
        "tools",
        [{"function": {"name": "x", "parameters": {"properties": {"a": [{"maximum": INFINITE}]}}}}],
        "tools[0].function.parameters.properties.a[0].maximum",
    ),
    ("nobody_reads_it", {"x": INFINITE}, "nobody_reads_it.x"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "x"}}, "tool_choice"),
    ("tool_choice", ["auto"], "tool_choice"),
    ("parallel_tool_calls", "no", "parallel_tool_calls"),
    ("response_format", "json", "response_format"),
    ("response_format", {}, "response_format.type"),
    ("response_format", {"type": "grammar"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": 3}},
        "response_format.json_schema.schema",
    ),
    ("reasoning_effort", "huge", "reasoning_effort"),
    ("reasoning_effort", 3, "reasoning_effort"),
    ("reasoning", "low", "reasoning"),
    ("reasoning", {"effort": ["low"]}, "reasoning.effort"),
    (
        "chat_template_kwargs",
        {"reasoning_effort": "huge"},
        "chat_template_kwargs.reasoning_effort",
    ),
    ("chat_template_kwargs", {"builtin_tools": ["x"]}, "chat_template_kwargs.builtin_tools[0]"),
    ("chat_template_kwargs", {"model_identity": 1}, "chat_template_kwargs.model_identity"),
    ("n", 2, "n"),
    ("n", 0, "n"),
    ("logprobs", True, "logprobs"),
    ("top_logprobs", 5, "top_logprobs"),
    ("frequency_penalty", 0.5, "frequency_penalty"),
    ("modalities", ["text", "audio"], "modalities"),
    ("audio", {"voice": "x"}, "audio"),
    ("functions", [WEATHER], "functions"),
    ("function_call", "auto", "function_call"),
    ("web_search_options", {}, "web_search_options"),
]


@pytest.mark.parametrize(("field", "value", "param"), BAD_FIELDS)
def test_a_bad_field_is_named(field: str, value: Any, param: str) -> None:
    error = guilty({"model": "m", "messages": HELLO, field: value})
    assert error.param == param


BAD_MESSAGES = {
    "no role": ({"content": "a"}, "messages[1].role"),
    "unknown role": ({"role": "critic", "content": "a"}, "messages[1].role"),
    "legacy role": ({"role": "function", "name": "f", "content": "a"}, "messages[1].role"),
    "user without content": ({"role": "user"}, "messages[1].content"),
    "system without content": ({"role": "system", "content": None}, "messages[1].content"),
    "content of a number": ({"role": "user", "content": 3}, "messages[1].content"),
    "content of an object": (assistant(content={"a": 1}), "messages[1].content"),
    "a bare string in a list": ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
    "a part without type": (
        {"role": "user", "content": [{"text": "a"}]},
        "messages[1].content[0].type",
    ),
    "a text part without text": (
        {"role": "user", "content": [*text("a"), {"type": "text"}]},
        "messages[1].content[1].text",
    ),
    "a result's text part without text": (
        tool([{"type": "text", "text": None}]),
        "messages[1].content[0].text",
    ),
    "a picture from the user": (
        {"role": "user", "content": [*text("a"), image()]},
        "messages[1].content[1]",
    ),
    "a picture in the instructions": (
        {"role": "system", "content": [image()]},
        "messages[1].content[0]",
    ),
    "a file": ({"role": "user", "content": [{"type": "file"}]}, "messages[1].content[0]"),
    "a picture from the assistant": (assistant(content=[image()]), "messages[1].content[0]"),
    "an answer that was spoken": (assistant(audio={"id": "x"}), "messages[1].audio"),
    "a legacy call": (assistant(function_call={"name": "f"}), "messages[1].function_call"),
    "reasoning of a number": (assistant(reasoning=3), "messages[1].reasoning"),
    "calls in an object": (assistant(tool_calls={}), "messages[1].tool_calls"),
    "a call without id": (
        assistant(tool_calls=[{"function": {"name": "f"}}]),
        "messages[1].tool_calls[0].id",
    ),
    "a call without name": (
        assistant(tool_calls=[call("{}", name="")]),
        "messages[1].tool_calls[0].function.name",
    ),
    "a call of another type": (
        assistant(tool_calls=[{"id": "c", "type": "custom", "custom": {}}]),
        "messages[1].tool_calls[0].type",
    ),
    "arguments of a list": (
        assistant(tool_calls=[call("{}"), call([1])]),
        "messages[1].tool_calls[1].function.arguments",
    ),
    "a result without call id": ({"role": "tool", "content": "a"}, "messages[1]"),
    "a result with an empty call id": (tool("a", tool_call_id=""), "messages[1]"),
    "a result with a call id of a number": (
        tool("a", tool_call_id=3),
        "messages[1].tool_call_id",
    ),
}


@pytest.mark.parametrize(("message", "param"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_bad_message_is_named(message: dict[str, Any], param: str) -> None:
    error = guilty({"model": "m", "messages": [*HELLO, message]})
    assert error.param == param


def nested(depth: int) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for _ in range(depth):
        document = {"a": document}
    return document


@pytest.mark.parametrize(
    "body",
    [None, True, 3, 1.5, "text", [], [{}], {}, nested(100_000), {"model": 10**5000}],
    ids=["null", "true", "int", "float", "str", "list", "nested list", "empty", "deep", "long"],
)
def test_what_is_no_request_at_all(body: object) -> None:
    guilty(body)


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        ({"model": None}, "model must be a valid string", "invalid_type"),
        ({"messages": []}, "messages must not be empty", "invalid_value"),
        ({"messages": [{}]}, "messages[0].role is required", "missing_required_parameter"),
        ({"messages": [3]}, "messages[0] must be an object", "invalid_type"),
        ({"top_p": 2}, "top_p must be less than or equal to 1", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content must be a string or a list of parts",
            "invalid_type",
        ),
        (
            {"messages": [{"role": "user", "content": [image()]}]},
            "messages[0].content[0] is of type 'image_url': the model reads text only",
            "unsupported_value",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "tool message without tool_call_id",
            None,
        ),
        (
            {"tool_choice": "required"},
            "tool_choice: only 'auto' and 'none' are available: a call cannot be forced",
            "unsupported_value",
        ),
    ],
)
def test_errors_say_what_is_wrong(fields: dict[str, Any], message: str, code: str | None) -> None:
    error = guilty({"model": "m", "messages": HELLO, **fields})
    assert (error.message, error.code) == (message, code)


def values(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | st.integers() | numbers | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )


JSON = values(st.floats())
FINITE = values(st.floats(allow_nan=False, allow_infinity=False))
FIELDS = sorted({field for field, _, _ in BAD_FIELDS})
PLAUSIBLE = st.sampled_from([value for _, value, _ in BAD_FIELDS])
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON,
        "content": JSON | st.lists(st.fixed_dictionaries({"type": st.text(), "text": JSON})),
        "reasoning": JSON,
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"id": st.text(), "function": JSON})),
        "tool_call_id": JSON,
    },
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(FIELDS, PLAUSIBLE | JSON),
        "model": st.just("m") | JSON,
        "messages": st.lists(MESSAGE, max_size=3) | JSON,
    },
)


TEXT = st.text() | st.just("\ud83d")
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3)
GOOD_MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user"]), "content": TEXT | PARTS}
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": TEXT | PARTS, "tool_call_id": st.just("c")}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant")},
        optional={
            "content": st.none() | TEXT | PARTS,
            "reasoning": TEXT,
            "tool_calls": st.lists(
                st.builds(call, st.none() | TEXT | st.dictionaries(TEXT, FINITE, max_size=2))
            ),
        },
    ),
)
GOOD_BODY = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(GOOD_MESSAGE, min_size=1, max_size=4)},
    optional={
        "temperature": st.floats(0, 2) | st.none(),
        "stop": TEXT | st.lists(TEXT),
        "tools": st.lists(
            st.fixed_dictionaries(
                {
                    "function": st.fixed_dictionaries(
                        {"name": st.just("f"), "parameters": st.dictionaries(TEXT, FINITE)}
                    )
                }
            )
        ),
    },
)


@given(GOOD_BODY)
def test_any_good_body_is_a_turn_that_can_be_encoded(body: dict[str, Any]) -> None:
    document = asdict(read(body, Defaults()).turn)
    json.dumps(document, ensure_ascii=False).encode()  # no half of a surrogate pair is left


@given(JSON | BODY)
def test_any_json_is_a_request_or_a_request_error(body: object) -> None:
    with suppress(RequestError):
        asked = read(body, Defaults())
        json.dumps(asdict(asked.turn), ensure_ascii=False).encode()
