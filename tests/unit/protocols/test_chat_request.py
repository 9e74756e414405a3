"""Requests of Chat Completions: bodies on the left, turns (or the invalid field) on the right."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import Policy, compile_grammar, grammar_of
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.text_limits import CONTEXT_TOKENS
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Defaults,
    Effort,
    Instructions,
    OutputLimits,
    Preamble,
    Reasoning,
    ResponseFormat,
    Result,
    Sampling,
    Syntax,
    Tool,
    ToolChoice,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.chat import ChatRequest, read
from vllm_mlx_harmony.protocols.chat.schema import UNSUPPORTED_FIELDS, ChatBody

DATA = Path(__file__).parents[2] / "support" / "recorded"
HELLO = [{"role": "user", "content": "Hello"}]
CITY = {"type": "function", "function": {"name": "weather"}}
SAY = {"type": "custom", "custom": {"name": "say", "description": "Says it."}}
SERVER = Defaults(
    effort=Effort.HIGH, identity="You are Ada.", date="2025-08-05", builtin_tools=("python",)
)


def read_request(defaults: Defaults | None = None, **fields: Any) -> ChatRequest:
    return read({"model": "m", "messages": HELLO, **fields}, defaults or Defaults())


def read_turn(**fields: Any) -> Turn:
    return read_request(**fields).turn


def error_of(body: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body, Defaults())
    assert caught.value.status == 400
    return caught.value


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content} for content in texts]


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
    "assistant, refusal beside content": (
        assistant(content="Sorry. ", refusal="No."),
        [Answer("Sorry. No.")],
    ),
    "assistant, refusal part": (
        assistant(content=[{"type": "refusal", "refusal": "No."}]),
        [Answer("No.")],
    ),
    **{
        f"assistant, reasoning in a part: {part}": (
            assistant(content=[part, {"type": "text", "text": "b"}]),
            [Reasoning("a"), Answer("b")],
        )
        for part in (
            {"type": "thinking", "thinking": "a", "signature": "x"},  # Anthropic
            {"type": "thinking", "thinking": [{"type": "text", "text": "a"}]},  # Mistral
            {"type": "reasoning", "text": "a"},  # Vercel
            {"type": "reasoning", "reasoning": "a"},  # LangChain
        )
    },
    "assistant, reasoning that only its server reads": (
        assistant(content=[{"type": "redacted_thinking", "data": "x"}]),
        [],
    ),
    "assistant, reasoning in a field and in a part": (
        assistant(reasoning_content="a", content=[{"type": "thinking", "thinking": "a"}]),
        [Reasoning("a")],
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
        [Result("c1", "[image left out: this model reads text only]", "messages[0]")],
    ),
    "result, pictures stand on their own lines": (
        tool([*text("a"), image(), image(), *text("b\n"), image(), *text("c")]),
        [
            Result(
                "c1",
                "a\n[image left out: this model reads text only]\n"
                "[image left out: this model reads text only]\nb\n"
                "[image left out: this model reads text only]\nc",
                "messages[0]",
            )
        ],
    ),
    "result, other kinds": (
        tool([{"type": "input_audio"}, {"type": "file"}, {"type": "hologram"}]),
        [
            Result(
                "c1",
                "[audio left out: this model reads text only]\n"
                "[file left out: this model reads text only]\n"
                "[part of type 'hologram' left out: this model reads text only]",
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
def test_message_is_read(message: dict[str, Any], expected: list[Any]) -> None:
    assert read_turn(messages=[message]).messages == tuple(expected)


def test_result_names_its_message() -> None:
    messages = [*HELLO, assistant(tool_calls=[call("{}")]), tool("42")]
    assert read_turn(messages=messages).messages[-1] == Result("c1", "42", "messages[2]")


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}

SETS_REASONING = OutputLimits(sets_reasoning=True)

TURNS = {
    "nothing else": ({}, Turn((User("Hello"),))),
    "every field null": (
        dict.fromkeys(
            {*ChatBody.model_fields, *(name for name, *_ in UNSUPPORTED_FIELDS)}
            - {"model", "messages"}
        ),
        Turn((User("Hello"),)),
    ),
    "what changes nothing": (
        {
            "n": 1,
            "logprobs": False,
            "top_logprobs": 0,
            "modalities": ["text"],
            "functions": [],
            "user": "u",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "prediction": {"type": "content", "content": ""},
            "enable_thinking": True,
            "response_format": {"type": "text"},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "add_generation_prompt": True,
            "continue_final_message": False,
            "thinking_token_budget": -1,
            "min_tokens": 0,
            "structured_outputs": {"json_object": False, "whitespace_pattern": " "},
            "guided_decoding_backend": "outlines",
            "include_reasoning": True,
            "stop_token_ids": [],
            "bad_words": [],
            "echo": False,
            "whatever": [{"a": 1}],
        },
        Turn((User("Hello"),), limits=SETS_REASONING),
    ),
    "log probabilities": (
        {"logprobs": True, "top_logprobs": 20},
        Turn((User("Hello"),), sampling=Sampling(top_logprobs=20)),
    ),
    "log probabilities of what was generated": (
        {"logprobs": True},
        Turn((User("Hello"),), sampling=Sampling(top_logprobs=0)),
    ),
    "several answers": ({"n": 8}, Turn((User("Hello"),), choices=8)),
    "a prediction": (
        {"prediction": {"type": "content", "content": "x = 1"}},
        Turn((User("Hello"),), prediction="x = 1"),
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
            "frequency_penalty": 0.5,
            "seed": -(2**63),
        },
        Turn(
            (User("Hello"),),
            sampling=Sampling(
                1.0, 0.5, 40, 0.05, -2.0, 1.1, ((0, 1.0), (201087, -100.0)), 0.5, -(2**63)
            ),
        ),
    ),
    "one id of a bias written in two ways, of which the last counts": (
        {"logit_bias": {"7": 1, "007": 2}},
        Turn((User("Hello"),), sampling=Sampling(logit_bias=((7, 2.0),))),
    ),
    "one call": (
        {"parallel_tool_calls": False},
        Turn((User("Hello"),), limits=OutputLimits(one_call=True)),
    ),
    "top_k of all": ({"top_k": -1}, Turn((User("Hello"),), sampling=Sampling(top_k=0))),
    "limits": (
        {"max_tokens": 5, "timeout": 2.5, "stop": ["a", "b", "c", "d", "e"]},
        Turn((User("Hello"),), limits=OutputLimits(5, ("a", "b", "c", "d", "e"))),
    ),
    "max_completion_tokens wins": (
        {"max_tokens": 5, "max_completion_tokens": 7},
        Turn((User("Hello"),), limits=OutputLimits(7, where="max_completion_tokens")),
    ),
    "no end before the limit": (
        {"ignore_eos": True, "min_tokens": 5, "max_tokens": 9},
        Turn((User("Hello"),), limits=OutputLimits(9, min_tokens=CONTEXT_TOKENS)),
    ),
    "no limit": (
        {"max_tokens": 5, "max_completion_tokens": -1},
        Turn((User("Hello"),), limits=OutputLimits(5)),
    ),
    "one stop string": ({"stop": "\n"}, Turn((User("Hello"),), limits=OutputLimits(stop=("\n",)))),
    "empty stop strings": (
        {"stop": ["", "x"]},
        Turn((User("Hello"),), limits=OutputLimits(stop=("x",))),
    ),
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
                Tool("now", "", None, "tools[1]", strict=True),
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
        Turn(
            (User("Hello"),),
            response_format=ResponseFormat(SCHEMA, "place", "Where.", strict=True),
        ),
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
        Turn(
            (User("Hello"),),
            identity="You are Bo.",
            builtin_tools=("browser", "python"),
            limits=SETS_REASONING,
        ),
    ),
}


@pytest.mark.parametrize(("fields", "expected"), TURNS.values(), ids=TURNS)
def test_fields_are_read_into_turn(fields: dict[str, Any], expected: Turn) -> None:
    assert read_turn(**fields) == expected


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
        Turn(
            (User("Hello"),),
            (),
            Effort.LOW,
            None,
            "You are Bo.",
            "2025-08-05",
            (),
            limits=SETS_REASONING,
        ),
    ),
}


@pytest.mark.parametrize(("fields", "expected"), DEFAULTS.values(), ids=DEFAULTS)
def test_request_overrides_server_defaults(fields: dict[str, Any], expected: Turn) -> None:
    assert read_request(SERVER, **fields).turn == expected


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, Effort.HIGH),
        ({"reasoning_effort": "minimal"}, Effort.LOW),
        ({"reasoning_effort": "xhigh"}, Effort.HIGH),
        ({"reasoning_effort": "ultra"}, Effort.HIGH),
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
def test_first_effort_field_applies(fields: dict[str, Any], effort: Effort) -> None:
    assert read_request(SERVER, **fields).turn.effort is effort


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
        (SILENT, {"enable_thinking": True}, (LOW, True)),
        (SILENT, {"chat_template_kwargs": {"enable_thinking": True}}, (LOW, True)),
        (SILENT, {"thinking": {"type": "enabled", "budget_tokens": 99}}, (LOW, True)),
        (SILENT, {"thinking": {"type": "enabled", "budget_tokens": 0}}, (LOW, False)),
        (SILENT, {"thinking": {"budget_tokens": 99}}, (LOW, False)),
        (SILENT, {"reasoning": {"enabled": True}}, (LOW, True)),
        (SILENT, {"reasoning": {"enabled": True, "effort": "none"}}, (LOW, False)),
        (SILENT, {"enable_thinking": True, "reasoning": {"enabled": False}}, (LOW, False)),
        (
            SILENT,
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            (LOW, False),
        ),
        (Defaults(), {"reasoning": {"effort": "high", "enabled": False}}, (LOW, False)),
        (
            Defaults(),
            {"reasoning_effort": "high", "thinking": {"type": "disabled"}},
            (LOW, False),
        ),
        (
            Defaults(none_effort=MEDIUM),
            {"reasoning_effort": "high", "thinking": {"type": "disabled"}},
            (MEDIUM, True),
        ),
        (
            Defaults(),
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            (HIGH, True),
        ),
    ],
)
def test_thinking_can_be_turned_off(
    server: Defaults, fields: dict[str, Any], expected: tuple[Effort, bool]
) -> None:
    turn = read_request(server, **fields).turn
    assert (turn.effort, turn.thinking) == expected


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
def test_stream_options_are_read(fields: dict[str, Any], stream: bool, include_usage: bool) -> None:
    request = read_request(**fields)
    assert (request.model, request.stream, request.include_usage) == ("m", stream, include_usage)


# --- Several messages of the assistant may be one turn.

R1, R2 = {"reasoning_content": "Hm."}, {"reasoning_content": "So."}
RESULT = tool("42")
RUNS: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "text, then a call": (
        [assistant(content="Let me look.", **R1), assistant(tool_calls=[call("{}")]), RESULT],
        [Reasoning("Hm."), Preamble("Let me look."), Call("c1", "f", "{}")],
    ),
    "reasoning of its own": (
        [
            assistant(**R1),
            assistant(content="Let me look."),
            assistant(tool_calls=[call("{}")], **R2),
            RESULT,
        ],
        [Reasoning("Hm."), Preamble("Let me look."), Reasoning("So."), Call("c1", "f", "{}")],
    ),
    "each call in a message": (
        [
            assistant(tool_calls=[call("{}")]),
            assistant(tool_calls=[call("{}", key="c2")]),
            RESULT,
        ],
        [Call("c1", "f", "{}"), Call("c2", "f", "{}")],
    ),
    "text behind a call": (
        [assistant(tool_calls=[call("{}")]), assistant(content="Looking.", **R1), RESULT],
        [Reasoning("Hm."), Preamble("Looking."), Call("c1", "f", "{}")],
    ),
    "answers": (
        [
            assistant(content="One.", **R1),
            assistant(content="Two."),
            {"role": "user", "content": "?"},
        ],
        [Reasoning("Hm."), Answer("One."), Answer("Two.")],
    ),
    "a result stands between": (
        [
            assistant(tool_calls=[call("{}")]),
            RESULT,
            assistant(content="It is 42."),
            {"role": "user", "content": "?"},
        ],
        [Call("c1", "f", "{}"), Result("c1", "42", "messages[2]"), Answer("It is 42.")],
    ),
}


@pytest.mark.parametrize(("history", "expected"), RUNS.values(), ids=RUNS)
def test_consecutive_assistant_messages_are_one_turn(history: list[Any], expected: Any) -> None:
    *before, _ = read_turn(messages=[*HELLO, *history]).messages
    assert before == [User("Hello"), *expected]


CONTINUED: dict[str, tuple[list[dict[str, Any]], list[Any], str | None]] = {
    "behind reasoning in a part": (
        [
            assistant(
                content=[
                    {"type": "thinking", "thinking": "Hm."},
                    {"type": "text", "text": "It is"},
                ]
            )
        ],
        [Reasoning("Hm.")],
        "It is",
    ),
    "an answer": ([assistant(content="It is")], [], "It is"),
    "white space at its end": ([assistant(content="It is ")], [], "It is "),
    "parts": ([assistant(content=text("It ", "is"))], [], "It is"),
    "a refusal beside it": ([assistant(content="It is ", refusal="not")], [], "It is not"),
    "reasoning before it": ([assistant(content="It is", **R1)], [Reasoning("Hm.")], "It is"),
    "text before it": (
        [assistant(content="Well."), assistant(content="It is")],
        [Preamble("Well.")],
        "It is",
    ),
    "only reasoning": ([assistant(**R1)], [Reasoning("Hm.")], None),
    "nothing": ([assistant(content="")], [], None),
}


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
    ],
    ids=["continue", "both", "no prompt"],
)
@pytest.mark.parametrize(("history", "expected", "prefill"), CONTINUED.values(), ids=CONTINUED)
def test_last_message_is_continued(
    history: list[Any], expected: list[Any], prefill: str | None, fields: dict[str, Any]
) -> None:
    turn = read_turn(messages=[*HELLO, *history], **fields)
    assert list(turn.messages) == [User("Hello"), *expected]
    assert turn.prefill == prefill


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"continue_final_message": False},
        {"continue_final_message": False, "add_generation_prompt": False},
        {"add_generation_prompt": True},
    ],
)
def test_last_message_is_an_answer_by_default(fields: dict[str, Any]) -> None:
    turn = read_turn(messages=[*HELLO, assistant(content="It is")], **fields)
    assert turn.messages[-1] == Answer("It is")
    assert turn.prefill is None


@pytest.mark.parametrize(
    ("fields", "last", "param"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            assistant(content="It is"),
            "add_generation_prompt",
        ),
        ({"continue_final_message": True}, assistant(tool_calls=[call("{}")]), "messages[1]"),
        (
            {"continue_final_message": True, "tools": [CITY], "tool_choice": "required"},
            assistant(content="It is"),
            "tool_choice",
        ),
    ],
)
def test_unsupported_continuation_is_rejected(
    fields: dict[str, Any], last: Any, param: str
) -> None:
    assert error_of({"model": "m", "messages": [*HELLO, last], **fields}).param == param


def test_legacy_calls_are_answered_by_name() -> None:
    messages = [
        *HELLO,
        assistant(content="One.", function_call={"name": "f", "arguments": "{}"}),
        {"role": "function", "name": "f", "content": "1"},
        assistant(function_call={"name": "f", "arguments": {"a": 1}}),
        {"role": "function", "name": "f", "content": [{"type": "image_url"}]},
    ]
    assert read_turn(messages=messages).messages == (
        User("Hello"),
        Preamble("One."),
        Call("function_call_1", "f", "{}"),
        Result("function_call_1", "1", "messages[2]"),
        Call("function_call_3", "f", '{"a":1}'),
        Result("function_call_3", "[image left out: this model reads text only]", "messages[4]"),
    )


def test_picture_in_earlier_message_is_left_out() -> None:
    look = {"role": "user", "content": [*text("Look:"), image(), *text("Well?")]}
    turn = read_turn(messages=[look, assistant(content="No."), *HELLO, assistant(content="Hi.")])
    assert turn.messages[0] == User("Look:\n[image left out: this model reads text only]\nWell?")


# --- Tool choices and response formats.

TOOLS = [{"type": "function", "function": WEATHER}, SAY]
SAY_CHOICE = {"type": "custom", "custom": {"name": "say"}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("required", ToolChoice(required=True)),
        (CITY, ToolChoice(True, ("weather",))),
        ({"function": {"name": "weather"}}, ToolChoice(True, ("weather",))),
        (SAY_CHOICE, ToolChoice(True, ("say",))),
        (allowed("auto", CITY), ToolChoice(names=("weather",))),
        (allowed("required", SAY_CHOICE, CITY, SAY_CHOICE), ToolChoice(True, ("say", "weather"))),
        # as in Responses
        ({"type": "function", "name": "weather"}, ToolChoice(True, ("weather",))),
        ({"type": "custom", "name": "say"}, ToolChoice(True, ("say",))),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "say"}, CITY],
            },
            ToolChoice(True, ("say", "weather")),
        ),
    ],
)
def test_tool_choice_keeps_all_tools_in_prompt(choice: Any, expected: ToolChoice) -> None:
    turn = read_turn(tools=TOOLS, tool_choice=choice)
    assert turn.tool_choice == expected
    assert [tool.name for tool in turn.tools] == ["weather", "say"]


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_tool_choice_of_other_kind_is_rejected(kind: str) -> None:
    name = "say" if kind == "function" else "weather"
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": {"type": kind, kind: {"name": name}}}
    assert error_of({"model": "m", **body}).param == "tool_choice"


def test_freeform_tool_has_its_grammar() -> None:
    grammar = {"syntax": "regex", "definition": "[a-z]+"}
    form = {"type": "grammar", "grammar": grammar}
    (constrained,) = read_turn(
        tools=[{"type": "custom", "custom": {"name": "say", "format": form}}]
    ).tools
    assert constrained.syntax == Syntax("regex", "[a-z]+")
    (free,) = read_turn(
        tools=[{"type": "custom", "custom": {"name": "say", "format": {"type": "text"}}}]
    ).tools
    assert free.syntax is None
    assert free.parameters == constrained.parameters


def test_freeform_calls_are_read_back() -> None:
    freeform_call = {"id": "c1", "type": "custom", "custom": {"name": "say", "input": 'a "b"'}}
    turn = read_turn(messages=[*HELLO, assistant(tool_calls=[freeform_call]), RESULT], tools=[SAY])
    assert turn.messages[1] == Call("c1", "say", '{"input":"a \\"b\\""}')


REGEX = ResponseFormat(strict=True, syntax=Syntax("regex", "a+"))
FORMATS: list[tuple[dict[str, Any], ResponseFormat]] = [
    ({"guided_json": SCHEMA}, ResponseFormat(SCHEMA, strict=True)),
    ({"guided_json": json.dumps(SCHEMA)}, ResponseFormat(SCHEMA, strict=True)),
    ({"structured_outputs": {"json": SCHEMA}}, ResponseFormat(SCHEMA, strict=True)),
    (
        {"structured_outputs": {"json": '{"x":"\\ud83d"}'}},
        ResponseFormat({"x": "\ufffd"}, strict=True),
    ),
    ({"guided_json_object": True}, ResponseFormat()),
    ({"structured_outputs": {"json_object": True}}, ResponseFormat()),
    ({"guided_regex": "a+"}, REGEX),
    ({"structured_outputs": {"regex": "a+"}}, REGEX),
    (
        {"guided_choice": ["a+b", "c|d"]},
        ResponseFormat(strict=True, syntax=Syntax("regex", r"(?:a\+b|c\|d)")),
    ),
    (
        {"structured_outputs": {"choice": ["yes"]}},
        ResponseFormat(strict=True, syntax=Syntax("regex", "(?:yes)")),
    ),
    (
        {"guided_grammar": 'start: "a"'},
        ResponseFormat(strict=True, syntax=Syntax("lark", 'start: "a"')),
    ),
    (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        ResponseFormat(strict=True, syntax=Syntax("lark", 'start: "a"')),
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ResponseFormat(SCHEMA)),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, ResponseFormat(SCHEMA)),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, REGEX),
    ({"json_schema": SCHEMA}, ResponseFormat(SCHEMA, strict=True)),
    ({"json_schema": json.dumps(SCHEMA)}, ResponseFormat(SCHEMA, strict=True)),
    ({"regex": "a+", "json_schema": {}, "grammar": ""}, REGEX),
    (
        {"grammar": 'start: "a"'},
        ResponseFormat(strict=True, syntax=Syntax("lark", 'start: "a"')),
    ),
    ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, ResponseFormat(SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "description": "d"}}},
        ResponseFormat({**SCHEMA, "description": "d"}),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}},
        ResponseFormat({}),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), FORMATS)
def test_response_format_is_read(fields: dict[str, Any], expected: ResponseFormat) -> None:
    assert read_turn(**fields).response_format == expected


def accepts(turn: Turn, text: str, policy: Policy = Policy.AUTO) -> bool:
    grammar = grammar_of(turn, Names.of(turn), policy)
    assert grammar is not None
    matcher = compile_grammar(grammar).matcher()
    header = vocab.encoding().encode("<|channel|>final<|message|>", allowed_special="all")
    return all(map(matcher.consume, [*header, *vocab.encode(text), vocab.RETURN]))


CHOSEN = ["a\nb", "a\tb", "a\r\nb", "a\\nb", "a\\", "a/b", "\\/", "(", "#a b", "\x00", "é\u2028"]


@pytest.mark.parametrize("chosen", CHOSEN)
def test_guided_choice_may_be_any_text(chosen: str) -> None:
    for fields in ({"guided_choice": [chosen, "z"]}, {"structured_outputs": {"choice": [chosen]}}):
        assert accepts(read_turn(**fields), chosen)
        assert not accepts(read_turn(**fields), "b")


@pytest.mark.parametrize("regex", ["a\nb", "a\\\nb", r"a\nb", "a[\n]b"])
def test_regex_may_contain_line_feed(regex: str) -> None:
    assert accepts(read_turn(guided_regex=regex), "a\nb")


LOOK_AHEAD = {"type": "string", "pattern": "^(?!x)"}
LOOK_AHEAD_OBJECT = {"type": "object", "properties": {"a": LOOK_AHEAD}}


@pytest.mark.parametrize(
    ("fields", "policy", "hint"),
    [
        ({"guided_regex": "(?!x)"}, Policy.AUTO, False),
        ({"guided_grammar": "start: (\"a\""}, Policy.AUTO, False),
        ({"guided_json": LOOK_AHEAD}, Policy.AUTO, False),
        ({"structured_outputs": {"json": LOOK_AHEAD}}, Policy.AUTO, False),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOK_AHEAD}}},
            Policy.STRICT,
            False,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": LOOK_AHEAD, "strict": True},
                }
            },
            Policy.AUTO,
            True,
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True,
                                                         "parameters": LOOK_AHEAD_OBJECT}}]},
            Policy.AUTO,
            True,
        ),
    ],
)  # fmt: skip
def test_strict_false_is_advised_only_where_strict_was_set(
    fields: dict[str, Any], policy: Policy, hint: bool
) -> None:
    with pytest.raises(RequestError) as caught:
        accepts(read_turn(**fields), "", policy)
    assert ("set strict to false" in caught.value.message) == hint


@pytest.mark.parametrize("field", ["response_format", "guided_regex", "structured_outputs"])
def test_second_format_is_rejected(field: str) -> None:
    others = {
        "response_format": {"type": "json_object"},
        "guided_regex": "a",
        "structured_outputs": {"choice": ["a"]},
    }
    del others[field]
    assert error_of({"model": "m", "messages": HELLO, **others}).code == "invalid_value"


@pytest.mark.parametrize(
    ("fields", "budget", "thinking"),
    [
        ({"thinking_token_budget": 100}, 100, True),
        ({"thinking_budget_tokens": 100}, 100, True),
        ({"thinking_budget": 100}, 100, True),
        ({"reasoning": {"max_tokens": 100}}, 100, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, 100, True),
        ({"thinking_token_budget": 100, "thinking_budget": 7}, 100, True),
        ({"thinking_token_budget": -1, "thinking_budget": 7}, None, True),
        ({"thinking_token_budget": 0}, 0, False),
        ({"thinking": {"type": "disabled"}}, None, False),
        ({"reasoning": {"enabled": False}}, None, False),
    ],
)
def test_reasoning_budget_is_read(
    fields: dict[str, Any], budget: int | None, thinking: bool
) -> None:
    turn = read_turn(**fields)
    assert (turn.limits.reasoning_tokens, turn.thinking) == (budget, thinking)


def test_min_tokens_is_read() -> None:
    assert read_turn(min_tokens=7).limits == OutputLimits(min_tokens=7)


@pytest.mark.parametrize("turns", [1, 2])
def test_requests_of_opencode_are_read(turns: int) -> None:
    recorded = json.loads((DATA / f"opencode-chat-turn{turns}.json").read_text())["body"]
    request = read(recorded, Defaults())
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
    assert request.turn.messages == (start if turns == 1 else start + loop)
    assert request.turn.limits == OutputLimits(8192)
    assert [tool.name for tool in request.turn.tools][:2] == ["bash", "edit"]
    assert len(request.turn.tools) == 10
    assert request.stream
    assert request.include_usage


INFINITE = float("1e999")  # as JSON is parsed

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
    ("max_completion_tokens", -2, "max_completion_tokens"),
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
    ("stop", ["a"] * 65, "stop"),
    ("stop", ["a", "b" * 513], "stop[1]"),
    ("tools", {}, "tools"),
    ("tools", [{"type": "web_search"}], "tools[0].type"),
    ("tools", [{"type": "custom", "function": {"name": "x"}}], "tools[0].custom"),
    ("tools", [{"type": "custom", "custom": {"name": ""}}], "tools[0].custom.name"),
    (
        "tools",
        [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}],
        "tools[0].custom.format.grammar",
    ),
    (
        "tools",
        [
            {
                "type": "custom",
                "custom": {
                    "name": "x",
                    "format": {
                        "type": "grammar",
                        "grammar": {"syntax": "gbnf", "definition": "x"},
                    },
                },
            }
        ],
        "tools[0].custom.format.grammar.syntax",
    ),
    ("tools", [{"type": "function", "x": "x"}], "tools[0].function"),
    ("tools", [{"name": "x", "input_schema": 5}], "tools[0].function.parameters"),
    ("tools", [{"function": WEATHER}, {"function": {}}], "tools[1].function.name"),
    ("tools", [{"function": {"name": "x", "strict": "yes"}}], "tools[0].function.strict"),
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
    ("tool_choice", "any", "tool_choice"),
    ("tool_choice", {"type": "function"}, "tool_choice.function"),
    ("tool_choice", {"type": "custom", "function": {"name": "x"}}, "tool_choice.custom"),
    ("tool_choice", {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
    (
        "tool_choice",
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        "tool_choice.allowed_tools.tools",
    ),
    (
        "tool_choice",
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [CITY]}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        "tool_choice",
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CITY]}},
        "tool_choice",
    ),
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
    ("guided_json", "{", "guided_json"),
    ("guided_json", "[]", "guided_json"),
    ("guided_json", "{" + " " * 2**22 + "}", "guided_json"),
    ("guided_json", '{"maximum": NaN}', "guided_json"),
    ("guided_json", [], "guided_json"),
    ("guided_choice", [], "guided_choice"),
    ("guided_choice", ["a", 1], "guided_choice[1]"),
    ("guided_grammar", 'root ::= "a"', "guided_grammar"),
    ("grammar", 'root ::= "a"', "grammar"),
    ("ebnf", 'root ::= "a"', "ebnf"),
    ("json_schema", "{", "json_schema"),
    ("json_schema", [1], "json_schema"),
    ("regex", 3, "regex"),
    ("structured_outputs", "json", "structured_outputs"),
    ("structured_outputs", {"json": "{"}, "structured_outputs.json"),
    ("structured_outputs", {"grammar": 'root ::= "a"'}, "structured_outputs.grammar"),
    ("structured_outputs", {"structural_tag": "{}"}, "structured_outputs.structural_tag"),
    (
        "structured_outputs",
        {"json": {}, "disable_additional_properties": True},
        "structured_outputs.disable_additional_properties",
    ),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs.choice"),
    ("thinking_token_budget", -2, "thinking_token_budget"),
    ("thinking_token_budget", 1.5, "thinking_token_budget"),
    ("thinking", {"budget_tokens": -1}, "thinking.budget_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("continue_final_message", True, "continue_final_message"),
    ("add_generation_prompt", False, "add_generation_prompt"),
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
    ("n", 9, "n"),
    ("n", 0, "n"),
    ("n", "2", "n"),
    ("n", 2.0, "n"),
    ("logprobs", 1, "logprobs"),
    ("top_logprobs", 5, "top_logprobs"),
    ("top_logprobs", -1, "top_logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("frequency_penalty", 2.5, "frequency_penalty"),
    ("frequency_penalty", "1", "frequency_penalty"),
    ("seed", 2**63, "seed"),
    ("seed", -(2**63) - 1, "seed"),
    ("seed", 1.5, "seed"),
    ("seed", "7", "seed"),
    ("seed", True, "seed"),
    ("modalities", ["text", "audio"], "modalities"),
    ("audio", {"voice": "x"}, "audio"),
    ("functions", [WEATHER], "functions"),
    ("function_call", "auto", "function_call"),
    ("web_search_options", {}, "web_search_options"),
    ("moderation", {"model": "x"}, "moderation"),
    ("echo", True, "echo"),
    ("use_beam_search", True, "use_beam_search"),
    ("prompt_logprobs", 0, "prompt_logprobs"),
    ("logprob_token_ids", [1], "logprob_token_ids"),
    ("stop_token_ids", [1], "stop_token_ids"),
    ("include_stop_str_in_output", True, "include_stop_str_in_output"),
    ("ignore_eos", "yes", "ignore_eos"),
    ("truncate_prompt_tokens", 5, "truncate_prompt_tokens"),
    ("allowed_token_ids", [1], "allowed_token_ids"),
    ("bad_words", ["no"], "bad_words"),
    ("repetition_detection", {}, "repetition_detection"),
    ("chat_template", "{{ messages }}", "chat_template"),
    ("documents", [{"text": "x"}], "documents"),
    ("return_token_ids", True, "return_token_ids"),
    ("return_tokens_as_token_ids", True, "return_tokens_as_token_ids"),
    ("return_prompt_text", True, "return_prompt_text"),
]


@pytest.mark.parametrize(("field", "value", "param"), BAD_FIELDS)
def test_invalid_field_is_named(field: str, value: Any, param: str) -> None:
    error = error_of({"model": "m", "messages": HELLO, field: value})
    assert error.param == param


BAD_MESSAGES = {
    "no role": ({"content": "a"}, "messages[1].role"),
    "unknown role": ({"role": "critic", "content": "a"}, "messages[1].role"),
    "a legacy result without its call": (
        {"role": "function", "name": "f", "content": "a"},
        "messages[1]",
    ),
    "a legacy result without name": ({"role": "function", "content": "a"}, "messages[1]"),
    "a legacy result of a list's name": (
        {"role": "function", "name": ["f"], "content": "a"},
        "messages[1]",
    ),
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
    "a part that nobody knows": (
        {"role": "user", "content": [*text("a"), {"type": "hologram"}]},
        "messages[1].content[1]",
    ),
    "a part that nobody knows, in the instructions": (
        {"role": "system", "content": [{"type": "hologram"}]},
        "messages[1].content[0]",
    ),
    "a legacy call without name": (
        assistant(function_call={"arguments": "{}"}),
        "messages[1].function_call.name",
    ),
    "a legacy call's arguments of a number": (
        assistant(function_call={"name": "f", "arguments": 3}),
        "messages[1].function_call.arguments",
    ),
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
        assistant(tool_calls=[{"id": "c", "type": "shell", "shell": {}}]),
        "messages[1].tool_calls[0].type",
    ),
    "a call without function": (
        assistant(tool_calls=[{"id": "c", "type": "function"}]),
        "messages[1].tool_calls[0].function",
    ),
    "a freeform call without custom": (
        assistant(tool_calls=[{"id": "c", "type": "custom"}]),
        "messages[1].tool_calls[0].custom",
    ),
    "a freeform call without input": (
        assistant(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "x"}}]),
        "messages[1].tool_calls[0].custom.input",
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
def test_invalid_message_is_named(message: dict[str, Any], param: str) -> None:
    error = error_of({"model": "m", "messages": [*HELLO, message]})
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
def test_body_of_another_type_is_rejected(body: object) -> None:
    error_of(body)


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
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0] is of type 'hologram', which is not supported",
            "unsupported_value",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "tool_call_id is required for a message with the role 'tool'",
            None,
        ),
        ({"stop": ["a"] * 65}, "stop must have at most 64 items", "invalid_value"),
        ({"stop": ["b" * 513]}, "stop[0] must have at most 512 characters", "invalid_value"),
        ({"user": 1, "n": "{x}"}, "n must be a valid integer", "invalid_type"),
        (
            {"tool_choice": "required"},
            "tool_choice: there are no tools",
            "invalid_value",
        ),
        (
            {"tool_choice": CITY, "tools": [SAY]},
            "tool_choice: 'weather' is not among the tools",
            "invalid_value",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex cannot be combined with response_format: "
            "specify only one response format",
            "invalid_value",
        ),
    ],
)
def test_errors_say_what_is_wrong(fields: dict[str, Any], message: str, code: str | None) -> None:
    error = error_of({"model": "m", "messages": HELLO, **fields})
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
        "role": st.sampled_from(["system", "user", "assistant", "tool", "function"]) | JSON,
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
def test_any_valid_body_is_an_encodable_turn(body: dict[str, Any]) -> None:
    document = asdict(read(body, Defaults()).turn)
    json.dumps(document, ensure_ascii=False).encode()  # no lone surrogate is left


@given(JSON | BODY)
def test_any_json_is_request_or_request_error(body: object) -> None:
    with suppress(RequestError):
        request = read(body, Defaults())
        json.dumps(asdict(request.turn), ensure_ascii=False).encode()
