"""Requests of Ollama's API: a body on the left, its turn on the right."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Defaults,
    Effort,
    Instructions,
    Message,
    Preamble,
    Reasoning,
    ResponseFormat,
    Result,
    Sampling,
    Tool,
    User,
)
from vllm_mlx_harmony.protocols.ollama import (
    OllamaRequest,
    loads_only,
    model_in,
    read_chat,
    read_generate,
)

LINE = "[image left out: this model reads text only]"


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **fields}


def assistant(text: str, *calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": [*calls], **fields}


def call(name: str, arguments: object, **fields: Any) -> dict[str, Any]:
    return {**fields, "function": {"name": name, "arguments": arguments}}


def result(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **fields}


def chat(*messages: Any, **fields: Any) -> OllamaRequest:
    return read_chat({"model": "m", "messages": [*messages], **fields}, Defaults())


F, G = call("f", {"a": 1}), call("g", {})
CALLS = (Call("call_1_0", "f", '{"a":1}'), Call("call_1_1", "g", "{}"))
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Message]]] = {
    "text": ([SYSTEM, user("Hi.")], [Instructions("Be brief."), User("Hi.")]),
    "an empty system message": ([{"role": "system", "content": ""}, user("Hi.")], [User("Hi.")]),
    "a picture": ([user("Look:", images=["AA", "AA"])], [User(f"Look:\n{LINE}\n{LINE}")]),
    "a picture alone": ([{"role": "user", "images": ["AA"]}], [User(LINE)]),
    "an answer": (
        [user("Hi."), assistant("Hello.", thinking="Hm."), user("Bye.")],
        [User("Hi."), Reasoning("Hm."), Answer("Hello."), User("Bye.")],
    ),
    "a call with a text before it": (
        [user("Hi."), assistant("Wait.", F, thinking="Hm."), result("1")],
        [User("Hi."), Reasoning("Hm."), Preamble("Wait."), CALLS[0], Result("call_1_0", "1")],
    ),
    "text after a call is before it": (
        [user("Hi."), assistant("", F), assistant("Wait."), result("1")],
        [User("Hi."), Preamble("Wait."), CALLS[0], Result("call_1_0", "1")],
    ),
    "results in their order": (
        [user("Hi."), assistant("", F, G), result("1"), result("2")],
        [User("Hi."), *CALLS, Result("call_1_0", "1"), Result("call_1_1", "2")],
    ),
    "results by the tool's name": (
        [user("Hi."), assistant("", F, G), result("2", tool_name="g"), result("1", name="f")],
        [User("Hi."), *CALLS, Result("call_1_1", "2"), Result("call_1_0", "1")],
    ),
    "two calls of a tool": (
        [user("Hi."), assistant("", F, F), result("1", tool_name="f"), result("2", tool_name="f")],
        [
            User("Hi."),
            CALLS[0],
            Call("call_1_1", "f", '{"a":1}'),
            Result("call_1_0", "1"),
            Result("call_1_1", "2"),
        ],
    ),
    "results by id": (
        [
            user("Hi."),
            assistant("", call("f", {}, id="x"), call("f", {}, id="y")),
            result("2", tool_call_id="y"),
            result("1"),
        ],
        [
            User("Hi."),
            Call("x", "f", "{}"),
            Call("y", "f", "{}"),
            Result("y", "2"),
            Result("x", "1"),
        ],
    ),
    "arguments as text": (
        [user("Hi."), assistant("", call("f", '{"a": 1}')), result("1")],
        [User("Hi."), Call("call_1_0", "f", '{"a": 1}'), Result("call_1_0", "1")],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversation_is_read(name: str) -> None:
    messages, expected = CONVERSATIONS[name]
    turn_messages = [
        Result(message.call_id, message.text) if isinstance(message, Result) else message
        for message in chat(*messages).turn.messages
    ]
    assert turn_messages == expected


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "nobody", "content": "x"}], "messages[0].role"),
        ([user("Hi."), result("1")], "messages[1]"),
        ([user("Hi."), assistant("", F), result("1", tool_name="g")], "messages[2]"),
        ([user("Hi."), assistant("", F), result("1"), result("2")], "messages[3]"),
        ([assistant("", call("f", [1]))], "messages[0].tool_calls[0].function.arguments"),
        ([assistant("", call("", {}))], "messages[0].tool_calls[0].function.name"),
        ([user("Hi.", images="AA")], "messages[0].images"),
    ],
)
def test_error_names_field(messages: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(*messages)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_generate_request_is_read() -> None:
    body = {"model": "m", "prompt": "Hi.", "system": "Be brief.", "images": ["AA"]}
    request = read_generate(body, Defaults())
    assert request.turn.messages == (Instructions("Be brief."), User(f"Hi.\n{LINE}"))
    assert not request.chat


def test_tools_and_options_are_read() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    options = {
        "num_ctx": 8192,
        "num_predict": 5,
        "temperature": 0,
        "top_k": -1,
        "seed": 3,
        "repeat_penalty": 1.1,
        "stop": ["a", ""],
    }
    function = {"name": "f", "description": "Does.", "parameters": schema}
    request = chat(user("Hi."), tools=[{"type": "function", "function": function}], options=options)
    turn = request.turn
    assert turn.tools == (Tool("f", "Does.", schema, "tools[0]"),)
    assert turn.sampling == Sampling(temperature=0, top_k=0, seed=3, repetition_penalty=1.1)
    assert (turn.limits.max_tokens, turn.limits.stop) == (5, ("a",))
    assert request.stream


THINK: list[tuple[object, Effort, bool]] = [
    (None, Effort.MEDIUM, True),
    (True, Effort.MEDIUM, True),
    (False, Effort.LOW, False),
    ("low", Effort.LOW, True),
    ("high", Effort.HIGH, True),
    ("max", Effort.HIGH, True),
]


@pytest.mark.parametrize(("think", "effort", "thinking"), THINK)
def test_think_sets_effort_and_thinking(think: object, effort: Effort, thinking: bool) -> None:
    turn = chat(user("Hi."), think=think).turn
    assert (turn.effort, turn.thinking) == (effort, thinking)


def test_think_overrides_server_default() -> None:
    body = {"model": "m", "messages": [user("Hi.")], "think": True}
    assert read_chat(body, Defaults(thinking=False)).turn.thinking


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (None, None),
        ("", None),
        ("json", ResponseFormat()),
        ({"type": "object"}, ResponseFormat({"type": "object"})),
    ],
)
def test_format_is_read(requested: object, expected: ResponseFormat | None) -> None:
    assert chat(user("Hi."), format=requested).turn.response_format == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "m"}, True),
        ({"model": "m", "messages": []}, True),
        ({"model": "m", "prompt": ""}, True),
        ({"model": "m", "prompt": "Hi."}, False),
        ({"model": "m", "messages": [user("Hi.")]}, False),
        ([], False),
        (None, False),
    ],
)
def test_request_without_prompt_only_loads(body: object, expected: bool) -> None:
    assert loads_only(body) is expected


@pytest.mark.parametrize("body", [{"model": "m"}, {"name": "m"}, {"model": "m", "name": "n"}])
def test_model_to_show_is_read(body: object) -> None:
    assert model_in(body) == "m"


@pytest.mark.parametrize("body", [{}, {"model": 1}, [], None])
def test_missing_model_to_show_is_rejected(body: object) -> None:
    with pytest.raises(RequestError, match="model must be a string"):
        model_in(body)
