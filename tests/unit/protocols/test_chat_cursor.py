"""Bodies as Cursor sends them to Chat Completions, in the forms of Responses and of Anthropic.

https://github.com/BerriAI/litellm/pull/34029, https://github.com/icebear0828/codex-proxy/pull/708
(flat custom tools), https://github.com/router-for-me/CLIProxyAPI/pull/3804 (Anthropic's).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from harmony_text import ids_of

from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import (
    Call,
    Defaults,
    Preamble,
    ResponseInfo,
    Result,
    Tool,
    ToolChoice,
    User,
)
from vllm_mlx_harmony.protocols.chat import ChatRequest, read

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "read_file", "description": "Reads.", "parameters": SCHEMA}
GRAMMAR = {"syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)*/'}
PATCH = {
    "type": "custom",
    "name": "ApplyPatch",
    "description": "Edits files.",
    "format": {"type": "grammar", **GRAMMAR},
}
NESTED = {
    "type": "custom",
    "custom": {**PATCH, "format": {"type": "grammar", "grammar": GRAMMAR}},
}
HELLO = {"role": "user", "content": "Hello"}


def read_request(*tools: Any, messages: Any = (HELLO,), **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [*messages], "tools": [*tools], **fields}
    return read(json.loads(json.dumps(body)), Defaults(date="2025-08-05"))


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", **READ},
        READ,
        {"name": "read_file", "description": "Reads.", "input_schema": SCHEMA, "type": None},
        {"type": "function", **READ, "function": None, "custom": None},
    ],
)
def test_flat_function_is_read_like_nested_one(tool: dict[str, Any]) -> None:
    expected = Tool("read_file", "Reads.", SCHEMA, "tools[0]")
    assert read_request(tool).turn.tools == (expected,)
    assert read_request({"type": "function", "function": READ}).turn.tools == (expected,)


def test_flat_custom_tool_is_read_like_nested_one() -> None:
    read_file = {"type": "function", "function": READ}
    flat, nested = read_request(read_file, PATCH), read_request(read_file, NESTED)
    assert flat.turn == nested.turn
    assert (flat.freeform, flat.flat, nested.flat) == ({"ApplyPatch"}, {"ApplyPatch"}, set())
    bare = {"type": "custom", "name": "ApplyPatch", "format": None}
    assert read_request(bare).turn.tools[0].syntax is None


CHOICES: tuple[tuple[Any, ToolChoice], ...] = (
    ({"type": "any"}, ToolChoice(required=True)),
    ({"type": "tool", "name": "read_file"}, ToolChoice(True, ("read_file",))),
    ({"type": "function", "name": "read_file"}, ToolChoice(True, ("read_file",))),
    ({"type": "custom", "name": "ApplyPatch"}, ToolChoice(True, ("ApplyPatch",))),
)


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_choice_in_other_form_is_read(choice: Any, expected: ToolChoice) -> None:
    assert read_request(READ, PATCH, tool_choice=choice).turn.tool_choice == expected
    with pytest.raises(RequestError) as caught:
        read_request(tool_choice=choice)
    assert caught.value.param == "tool_choice"


def generate(request: ChatRequest, output: str) -> tuple[list[int], Any, Any]:
    context = StreamingHarmonyContext(request.turn, INFO)
    emitter = request.emitter(INFO)
    deltas = [
        *context.start(),
        *(delta for token in ids_of(output) for delta in context.append_output([token])),
        *context.finish("stop"),
    ]
    events = [event for delta in deltas for event in emitter.feed(delta)]
    return list(context.render_for_completion()), events, emitter


TEXT = '*** Begin Patch\n+"é"\n'
CALL = (
    "<|channel|>commentary to=functions.ApplyPatch <|constrain|>json<|message|>"
    f"{json.dumps({'input': TEXT})}<|call|>"
)


def test_input_of_flat_custom_tool_is_sent_as_arguments() -> None:
    """Cursor 3.14 reads ``function.name`` of every call."""
    _, _, emitter = generate(read_request(PATCH), CALL)
    (call,) = emitter.result()["choices"][0]["message"]["tool_calls"]
    function = {"name": "ApplyPatch", "arguments": TEXT}
    assert call == {"id": call["id"], "type": "function", "function": function}
    _, events, _ = generate(read_request(PATCH, stream=True), CALL)
    chunks = [json.loads(event.data) for event in events if event.data != "[DONE]"]
    deltas = [
        delta["function"]
        for chunk in chunks
        for choice in chunk["choices"]
        for delta in choice["delta"].get("tool_calls", ())
    ]
    assert deltas[0] == {"name": "ApplyPatch", "arguments": ""}
    assert "".join(delta["arguments"] for delta in deltas) == TEXT
    _, _, emitter = generate(read_request(NESTED), CALL)
    (call,) = emitter.result()["choices"][0]["message"]["tool_calls"]
    assert call["custom"] == {"name": "ApplyPatch", "input": TEXT}


def test_second_prompt_continues_first() -> None:
    request = read_request(PATCH)
    first, _, emitter = generate(
        request, CALL.replace(json.dumps({"input": TEXT}), '{"input":"a"}')
    )
    message = emitter.result()["choices"][0]["message"]
    key = message["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": key, "content": "Done."}
    again = read_request(PATCH, messages=(HELLO, message, result))
    assert again.turn.messages[1] == Call(key, "ApplyPatch", '{"input":"a"}')
    assert list(render(again.turn).ids)[: len(first)] == first


def test_results_in_user_message_are_read() -> None:
    calls = [
        {"id": f"c{at}", "function": {"name": "read_file", "arguments": "{}"}} for at in (1, 2)
    ]
    image = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    parts: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "one", "is_error": None},
        {
            "type": "tool_result",
            "tool_use_id": "c2",
            "content": [{"type": "text", "text": "two"}, image],
        },
    ]
    assistant = {"role": "assistant", "content": None, "tool_calls": calls}
    for rest, expected in (([], ()), ([{"type": "text", "text": "Go on."}], (User("Go on."),))):
        user = {"role": "user", "content": [*parts, *rest]}
        turn = read_request(READ, messages=(HELLO, assistant, user)).turn
        assert turn.messages[3:] == (
            Result("c1", "one", "messages[2].content[0]"),
            Result(
                "c2",
                "two\n[image left out: this model reads text only]",
                "messages[2].content[1]",
            ),
            *expected,
        )
        render(turn)
    with pytest.raises(RequestError) as caught:
        render(read_request(READ, messages=({"role": "user", "content": parts},)).turn)
    assert caught.value.param == "messages[0].content[0]"


def test_calls_in_assistant_message_are_read() -> None:
    blocks = [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "c1", "name": "read_file", "input": {"path": "é"}},
        {"type": "tool_use", "id": "c2", "name": "read_file", "input": None},
    ]
    results = [{"type": "tool_result", "tool_use_id": key, "content": key} for key in ("c2", "c1")]
    messages = (
        HELLO,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
    )
    turn = read_request(READ, messages=messages).turn
    assert turn.messages[1:] == (
        Preamble("Let me look."),
        Call("c1", "read_file", '{"path":"é"}'),
        Call("c2", "read_file", "{}"),
        Result("c2", "c2", "messages[2].content[0]"),
        Result("c1", "c1", "messages[2].content[1]"),
    )
    render(turn)


PROBLEMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "tool_use", "id": "", "name": "f", "input": {}}, "id"),
    ({"type": "tool_use", "id": "c", "input": {}}, "name"),
    ({"type": "tool_use", "id": "c", "name": "f", "input": [1]}, "input"),
)


@pytest.mark.parametrize(("block", "name"), PROBLEMS)
def test_unreadable_call_is_named(block: dict[str, Any], name: str) -> None:
    text = {"type": "text", "text": "x"}
    with pytest.raises(RequestError) as caught:
        read_request(messages=(HELLO, {"role": "assistant", "content": [text, block]}))
    assert caught.value.param == f"messages[1].content[1].{name}"


def test_message_with_call_cannot_be_continued() -> None:
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    message = {"role": "assistant", "content": [block]}
    with pytest.raises(RequestError) as caught:
        read_request(messages=(HELLO, message), continue_final_message=True)
    assert caught.value.param == "messages[1]"


def test_unknown_part_beside_result_is_named() -> None:
    parts = [{"type": "tool_result", "tool_use_id": "c", "content": "x"}, {"type": "novel"}]
    with pytest.raises(RequestError) as caught:
        read_request(messages=({"role": "user", "content": parts},))
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_result_in_other_message_is_named(role: str) -> None:
    part = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    message = {"role": role, "content": [part], "tool_call_id": "c"}
    if role == "tool":  # of an unknown type: a line
        assert "tool_result" in read_request(messages=(HELLO, message)).turn.messages[-1].text  # type: ignore[union-attr]
        return
    with pytest.raises(RequestError) as caught:
        read_request(messages=(HELLO, message))
    assert caught.value.param == "messages[1].content[0]"
