"""Requests of the Messages API: bodies on the left, turns (or the invalid field) on the right."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ciphers import Tagged
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import grammar_of
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import (
    AdditionalTools,
    Answer,
    Call,
    Defaults,
    Effort,
    EffortUpdate,
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
    Tool,
    ToolChoice,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.messages import MessagesRequest, read
from vllm_mlx_harmony.protocols.messages.request import UPDATE
from vllm_mlx_harmony.protocols.server_calls import NOT_RUN
from vllm_mlx_harmony.protocols.unavailable import notice

DATA = Path(__file__).parents[2] / "support" / "recorded"
INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
HELLO = [{"role": "user", "content": "Hello"}]
SERVER = Defaults(
    effort=Effort.HIGH, identity="You are Ada.", date="2025-08-05", builtin_tools=("python",)
)


def read_request(**fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 99, "messages": HELLO, **fields}
    return read(json.loads(json.dumps(body)), Defaults(), Tagged())


def read_turn(**fields: Any) -> Turn:
    return read_request(**fields).turn


def error_of(body: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body, Defaults(), Tagged())
    assert caught.value.status == 400
    return caught.value


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def thinking(shown: str, signature: str = "c2ln") -> dict[str, Any]:
    return {"type": "thinking", "thinking": shown, "signature": signature}


def addition(definition: dict[str, Any]) -> dict[str, Any]:
    tool = {"type": "tool_definition", "definition": definition}
    return {"type": "tool_addition", "tool": tool}


def use(arguments: Any, name: str = "f", key: str = "c1") -> dict[str, Any]:
    return {"type": "tool_use", "id": key, "name": name, "input": arguments}


def result(content: Any, key: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": key, "content": content, **more}


def mcp_use(key: str, server: str, name: str, arguments: Any) -> dict[str, Any]:
    block = {"type": "mcp_tool_use", "id": key, "name": name, "server_name": server}
    return {**block, "input": arguments}


def mcp_result(key: str, *content: Any) -> dict[str, Any]:
    blocks = content[0] if isinstance(content[0], str) else [*content]
    return {"type": "mcp_tool_result", "tool_use_id": key, "content": blocks}


def server_use(key: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "server_tool_use", "id": key, "name": name, "input": arguments}


def nested_list(depth: int) -> Any:
    """A result that is nested too deeply to be read recursively."""
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


def image() -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    return {"type": "image", "source": source, "content": 3}


def search_result(*blocks: Any) -> dict[str, Any]:
    return {"type": "search_result", "source": "https://a", "title": "A", "content": [*blocks]}


def plain(data: Any, **more: Any) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": data}
    return {"type": "document", "title": "A", "source": source, **more}


def parts(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "content", "content": content}, **more}


def pdf(**more: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    return {"type": "document", "source": source, **more}


CACHED = {"cache_control": {"type": "ephemeral"}}

MESSAGES: dict[str, tuple[dict[str, Any], list[Message]]] = {
    "user": ({"role": "user", "content": "Hi"}, [User("Hi")]),
    "user, nothing typed": ({"role": "user", "content": ""}, [User("")]),
    "user, blocks are lines": (user(text("a"), text("b\n"), text("c")), [User("a\nb\nc")]),
    "user, cache_control": (user(text("a", **CACHED)), [User("a")]),
    "user, an empty block": (user(text(""), text("a")), [User("a")]),
    "user, control token is text": (user(text("<|start|>")), [User("<|start|>")]),
    "system": ({"role": "system", "content": "Be brief."}, [Instructions("Be brief.")]),
    "system, blocks": (
        {"role": "system", "content": [text("a"), text("b")]},
        [Instructions("a\nb")],
    ),
    "system, empty": ({"role": "system", "content": ""}, []),
    "result": (user(result("42")), [Result("c1", "42", "messages[0].content[0]")]),
    "result, nothing": (user(result(None)), [Result("c1", "", "messages[0].content[0]")]),
    "result, blocks are lines": (
        user(result([text("a"), text("b")])),
        [Result("c1", "a\nb", "messages[0].content[0]")],
    ),
    "result, with an image": (
        user(result([text("Look:"), image(), text("nice")])),
        [
            Result(
                "c1",
                "Look:\n[image left out: this model reads text only]\nnice",
                "messages[0].content[0]",
            )
        ],
    ),
    "result, with others": (
        user(result([{"type": "document", "source": {}}, {"type": "browser_state"}])),
        [
            Result(
                "c1",
                "[file left out: this model reads text only]\n"
                "[part of type 'browser_state' left out: this model reads text only]",
                "messages[0].content[0]",
            )
        ],
    ),
    "result, failed": (
        user(result("no such file", is_error=True)),
        [Result("c1", "Error: no such file", "messages[0].content[0]")],
    ),
    "result, failed and says so": (
        user(result("error 3", is_error=True)),
        [Result("c1", "error 3", "messages[0].content[0]")],
    ),
    "result, failed without a word": (
        user(result("", is_error=True)),
        [Result("c1", "Error", "messages[0].content[0]")],
    ),
    "result, did not fail": (
        user(result("fine", is_error=False)),
        [Result("c1", "fine", "messages[0].content[0]")],
    ),
    "result, what a search found": (
        user(
            result([text("Two:"), search_result(text("a"), text("b")), search_result(plain("c"))])
        ),
        [
            Result(
                "c1",
                "Two:\nTitle: A\nSource: https://a\na\nb\n"
                "Title: A\nSource: https://a\n[file left out: this model reads text only]",
                "messages[0].content[0]",
            )
        ],
    ),
    "result, a document of plain text": (
        user(result([plain("a\n"), text("b")])),
        [Result("c1", "Title: A\na\nb", "messages[0].content[0]")],
    ),
    "result, a document of parts": (
        user(result([parts([text("a"), image(), text("b")], title="A", context="C")])),
        [
            Result(
                "c1",
                "Title: A\nContext: C\na\n[image left out: this model reads text only]\nb",
                "messages[0].content[0]",
            )
        ],
    ),
    "result, a file with a title": (
        user(result([pdf(title="Report")])),
        [
            Result(
                "c1",
                "Title: Report\n[file left out: this model reads text only]",
                "messages[0].content[0]",
            )
        ],
    ),
    "user, a document of plain text": (
        user(text("Read:"), plain("a\nb", citations={"enabled": True}, **CACHED), text("Well?")),
        [User("Read:\nTitle: A\na\nb\nWell?")],
    ),
    "user, a document without a title": (user(plain("a", title=None)), [User("a")]),
    "user, a document of one string": (
        user(parts("a", title="", context="From a mail.")),
        [User("Context: From a mail.\na")],
    ),
    "user, a document of parts": (user(parts([text("a"), text("b")])), [User("a\nb")]),
    "user, what a search found": (
        user(search_result(text("a"), text("b")), search_result(text("c")), text("Well?")),
        [User("Title: A\nSource: https://a\na\nb\nTitle: A\nSource: https://a\nc\nWell?")],
    ),
    "user, control tokens in a title are text": (
        user(plain("a", title="<|end|>")),
        [User("Title: <|end|>\na")],
    ),
    "results come first, then what the user says": (
        user(text("And"), result("1"), text("then?"), result("2", "c2")),
        [
            Result("c1", "1", "messages[0].content[1]"),
            Result("c2", "2", "messages[0].content[3]"),
            User("And\nthen?"),
        ],
    ),
    "assistant, answer": ({"role": "assistant", "content": "Hi"}, [Answer("Hi")]),
    "assistant, nothing": (assistant(), []),
    "assistant, reasoning and answer": (
        assistant(thinking("Hm"), text("Hi")),
        [Reasoning("Hm"), Answer("Hi")],
    ),
    "assistant, preamble and answer": (
        assistant(text("Well,"), thinking("Hm"), text("Hi")),
        [Preamble("Well,"), Reasoning("Hm"), Answer("Hi")],
    ),
    "assistant, call": (assistant(use({"a": 1})), [Call("c1", "f", '{"a":1}')]),
    "assistant, calls come last and text beside them is a preamble": (
        assistant(text("Look"), use({}), thinking("Hm"), use({}, key="c2"), text("So.")),
        [
            Preamble("Look"),
            Reasoning("Hm"),
            Preamble("So."),
            Call("c1", "f", "{}"),
            Call("c2", "f", "{}"),
        ],
    ),
    "assistant, input compact, non-ASCII kept": (
        assistant(use({"a": [1, 2.5, None], "é": "\u2028😀"})),
        [Call("c1", "f", '{"a":[1,2.5,null],"é":"\u2028😀"}')],
    ),
    "assistant, what was no JSON is itself again": (
        assistant(use({"a": None, "INVALID_JSON": '{"a":"x'})),
        [Call("c1", "f", '{"a":"x')],
    ),
    "assistant, INVALID_JSON of the tool's own": (
        assistant(use({"INVALID_JSON": 3})),
        [Call("c1", "f", '{"INVALID_JSON":3}')],
    ),
    "thinking, encrypted text wins": (
        assistant(thinking("H…", "encrypted:Hm, hm."), text("a")),
        [Reasoning("Hm, hm."), Answer("a")],
    ),
    "thinking, dropped and restored": (
        assistant(thinking("", "encrypted:Hm"), text("a")),
        [Reasoning("Hm"), Answer("a")],
    ),
    "thinking, gone and restored": (
        assistant({"type": "thinking", "signature": "encrypted:Hm"}, text("a")),
        [Reasoning("Hm"), Answer("a")],
    ),
    "thinking, null and restored": (
        assistant({"type": "thinking", "thinking": None, "signature": "encrypted:Hm"}, text("a")),
        [Reasoning("Hm"), Answer("a")],
    ),
    "thinking, foreign": (assistant(thinking("Hm"), text("a")), [Reasoning("Hm"), Answer("a")]),
    "thinking, no signature": (
        assistant({"type": "thinking", "thinking": "Hm"}, text("a")),
        [Reasoning("Hm"), Answer("a")],
    ),
    "thinking, dropped and foreign": (assistant(thinking(""), text("a")), [Answer("a")]),
    "redacted_thinking, ours": (
        assistant({"type": "redacted_thinking", "data": "encrypted:Hm"}, text("a")),
        [Reasoning("Hm"), Answer("a")],
    ),
    "redacted_thinking, foreign": (
        assistant({"type": "redacted_thinking", "data": "EuY="}, text("a")),
        [Answer("a")],
    ),
    "what Anthropic's servers tell beside an answer": (
        assistant(
            {"type": "mcp_tool_listing", "mcp_server_name": "x", "tools": []},
            {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
            text("a"),
        ),
        [Answer("a")],
    ),
    "what an MCP server's tool did": (
        assistant(
            thinking("t"),
            mcp_use("m1", "weather", "now", {"city": "Rom"}),
            mcp_result("m1", text("20"), text("°C")),
            text("a"),
        ),
        [
            Reasoning("t"),
            ServerCall("m1", "weather.now", '{"city":"Rom"}'),
            ServerResult("m1", "weather.now", "20\n°C"),
            Answer("a"),
        ],
    ),
    "a result that says that it is an error": (
        assistant(mcp_use("m1", "w", "t", {}), {**mcp_result("m1", "broken"), "is_error": True}),
        [ServerCall("m1", "w.t", "{}"), ServerResult("m1", "w.t", "broken")],
    ),
    "code": (
        assistant(mcp_use("m1", "python", "python", {"code": "1 +\n1"}), mcp_result("m1", "2")),
        [ServerCall("m1", "python", "1 +\n1"), ServerResult("m1", "python", "2")],
    ),
    "a call that has no result, one to no call, a text before a call": (
        assistant(
            mcp_result("m0", "?"),
            text("a"),
            mcp_use("m1", "w", "t", {}),
            mcp_use("m2", "w", "u", {}),
            mcp_result("m2", "2"),
        ),
        [
            Preamble("a"),
            ServerCall("m1", "w.t", "{}"),
            ServerResult("m1", "w.t", NOT_RUN),
            ServerCall("m2", "w.u", "{}"),
            ServerResult("m2", "w.u", "2"),
        ],
    ),
    "a search of Anthropic's": (
        assistant(
            server_use("s1", "web_search", {"query": "Rom"}),
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s1",
                "content": [
                    {
                        "type": "web_search_result",
                        "title": "A",
                        "url": "https://a",
                        "encrypted_content": "x",
                    },
                    {
                        "type": "web_search_result",
                        "title": "B",
                        "url": "https://b",
                        "page_age": "1 day",
                    },
                ],
            },
            text("a"),
        ),
        [
            ServerCall("s1", "browser.search", '{"query":"Rom"}'),
            ServerResult(
                "s1", "browser.search", "Title: A\nSource: https://a\nTitle: B\nSource: https://b"
            ),
            Answer("a"),
        ],
    ),
    "a page that Anthropic's fetched, and one that it did not": (
        assistant(
            server_use("s1", "web_fetch", {"url": "https://a"}),
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "s1",
                "content": {
                    "type": "web_fetch_result",
                    "url": "https://a",
                    "content": {
                        "type": "document",
                        "title": "A",
                        "source": {"type": "text", "media_type": "text/plain", "data": "The page."},
                    },
                },
            },
            server_use("s2", "web_fetch", {"url": "https://b"}),
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "s2",
                "content": {
                    "type": "web_fetch_tool_result_error",
                    "error_code": "url_not_accessible",
                },
            },
        ),
        [
            ServerCall("s1", "browser.open", '{"id":"https://a"}'),
            ServerResult("s1", "browser.open", "Source: https://a\nTitle: A\nThe page."),
            ServerCall("s2", "browser.open", '{"id":"https://b"}'),
            ServerResult("s2", "browser.open", "Error: url_not_accessible"),
        ],
    ),
    "code and commands that Anthropic's ran": (
        assistant(
            server_use("s1", "code_execution", {"code": "1"}),
            {
                "type": "code_execution_tool_result",
                "tool_use_id": "s1",
                "content": {
                    "type": "code_execution_result",
                    "stdout": "1",
                    "stderr": "w",
                    "return_code": 0,
                    "content": [],
                },
            },
            server_use("s2", "bash_code_execution", {"command": "ls"}),
            {
                "type": "bash_code_execution_tool_result",
                "tool_use_id": "s2",
                "content": nested_list(300),
            },
            server_use("s3", "tool_search_tool_regex", {"query": "x"}),
            {"type": "tool_search_tool_result", "tool_use_id": "s3", "content": {"type": "y"}},
        ),
        [
            ServerCall("s1", "python", "1"),
            ServerResult("s1", "python", "1\nw"),
            ServerCall("s2", "bash_code_execution", '{"command":"ls"}'),
            ServerResult("s2", "bash_code_execution", ""),
        ],
    ),
}


@pytest.mark.parametrize(("message", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_message_is_read(message: dict[str, Any], expected: list[Message]) -> None:
    # Not alone: a last message of the assistant would be a prefill.
    assert read_turn(messages=[message, *HELLO]).messages == (*expected, User("Hello"))


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Message], str | None]] = {
    "a call in the assistant's next message": (
        [assistant(thinking("a"), text("b")), assistant(use({})), user(result("1"))],
        [
            Reasoning("a"),
            Preamble("b"),
            Call("c1", "f", "{}"),
            Result("c1", "1", "messages[2].content[0]"),
        ],
        None,
    ),
    "what is said after a call, in the assistant's next message": (
        [assistant(use({})), assistant(text("b")), user(result("1"))],
        [
            Preamble("b"),
            Call("c1", "f", "{}"),
            Result("c1", "1", "messages[2].content[0]"),
        ],
        None,
    ),
    "two answers": (
        [assistant(text("a")), assistant(text("b")), *HELLO],
        [Answer("a"), Answer("b"), User("Hello")],
        None,
    ),
    "system behind the user": (
        [*HELLO, {"role": "system", "content": "Now."}],
        [User("Hello"), Instructions("Now.")],
        None,
    ),
    "prefill": ([*HELLO, {"role": "assistant", "content": "It is"}], [User("Hello")], "It is"),
    "prefill behind its reasoning": (
        [*HELLO, assistant(thinking("Hm"), text("It is"))],
        [User("Hello"), Reasoning("Hm")],
        "It is",
    ),
    "prefill behind a preamble": (
        [*HELLO, assistant(text("Well."), text("It is"))],
        [User("Hello"), Preamble("Well.")],
        "It is",
    ),
    "prefill in two messages": (
        [*HELLO, assistant(text("Well.")), assistant(text("It is")), assistant()],
        [User("Hello"), Preamble("Well.")],
        "It is",
    ),
    "an empty message of the assistant": (
        [*HELLO, {"role": "assistant", "content": ""}],
        [User("Hello")],
        None,
    ),
    "a picture that was answered": (
        [user(text("Look:"), image()), assistant(text("Nice.")), *HELLO],
        [
            User("Look:\n[image left out: this model reads text only]"),
            Answer("Nice."),
            User("Hello"),
        ],
        None,
    ),
    "a picture in front of a tool loop": (
        [user(text("Look:"), image()), assistant(use({})), user(result("1"))],
        [
            User("Look:\n[image left out: this model reads text only]"),
            Call("c1", "f", "{}"),
            Result("c1", "1", "messages[2].content[0]"),
        ],
        None,
    ),
    "a file, a picture in a document and an upload that were answered": (
        [
            user(pdf(title="Report"), parts([image()]), {"type": "container_upload"}),
            assistant(text("Nice.")),
            *HELLO,
        ],
        [
            User(
                "Title: Report\n[file left out: this model reads text only]\n"
                "[image left out: this model reads text only]\n"
                "[file left out: this model reads text only]"
            ),
            Answer("Nice."),
            User("Hello"),
        ],
        None,
    ),
    "a system message until the user speaks again": (
        [
            *HELLO,
            {"role": "system", "content": "Once.", "clear_at": "next_user_message"},
            {"role": "system", "content": "Always.", "clear_at": "never"},
            assistant(text("a")),
            *HELLO,
            {"role": "system", "content": "Now.", "clear_at": "next_user_message"},
        ],
        [User("Hello"), Instructions("Always."), Answer("a"), User("Hello"), Instructions("Now.")],
        None,
    ),
    "an effort from here on": (
        [
            *HELLO,
            {"role": "system", "output_config": {"effort": "low"}},
            {"role": "system", "content": "Go.", "output_config": {"effort": "max"}},
            {"role": "system", "content": "Once.", "output_config": {}},
        ],
        [
            User("Hello"),
            EffortUpdate(Effort.LOW),
            Instructions("Go."),
            EffortUpdate(Effort.HIGH),
            Instructions("Once."),
        ],
        None,
    ),
    "an effort stays when the text goes": (
        [
            *HELLO,
            {
                "role": "system",
                "content": "Once.",
                "clear_at": "next_user_message",
                "output_config": {"effort": "low"},
            },
            assistant(text("a")),
            *HELLO,
        ],
        [User("Hello"), EffortUpdate(Effort.LOW), Answer("a"), User("Hello")],
        None,
    ),
    "tools from here on": (
        [
            *HELLO,
            {
                "role": "system",
                "content": [
                    text("Before."),
                    addition({"name": "g", "description": "G", "input_schema": {}}),
                    addition({"type": "code_execution_20250825", "name": "code_execution"}),
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
                    text("After."),
                ],
            },
        ],
        [
            User("Hello"),
            Instructions("Before."),
            AdditionalTools((Tool("g", "G", {}, "messages[1].content[1].tool.definition"),)),
            notice(["code_execution"]),
            Instructions("After."),
        ],
        None,
    ),
    "a preamble that was shown as thinking": (
        [assistant(thinking("Look", f"encrypted:{UPDATE}Look"), use({})), user(result("1"))],
        [Preamble("Look"), Call("c1", "f", "{}"), Result("c1", "1", "messages[1].content[0]")],
        None,
    ),
    "a text that looks like such a preamble": (
        [*HELLO, assistant(thinking(f"{UPDATE}Look"))],
        [User("Hello"), Reasoning(f"{UPDATE}Look")],
        None,
    ),
    "only reasoning": ([*HELLO, assistant(thinking("Hm"))], [User("Hello"), Reasoning("Hm")], None),
    "a preamble and reasoning": (
        [*HELLO, assistant(text("a"), thinking("Hm"))],
        [User("Hello"), Preamble("a"), Reasoning("Hm")],
        None,
    ),
}


@pytest.mark.parametrize(
    ("messages", "expected", "prefill"), CONVERSATIONS.values(), ids=CONVERSATIONS
)
def test_conversation_is_read(
    messages: list[Any], expected: list[Message], prefill: str | None
) -> None:
    turn = read_turn(messages=messages)
    assert (turn.messages, turn.prefill) == (tuple(expected), prefill)


def test_last_effort_decides_whether_model_thinks() -> None:
    messages = [{"role": "system", "output_config": {"effort": "low"}}, *HELLO]
    off = read_turn(messages=messages, thinking={"type": "disabled"})
    assert (off.thinking, off.messages[0]) == (False, EffortUpdate(Effort.LOW, thinking=False))
    none = [{"role": "system", "output_config": {"effort": "none"}}, *messages]
    assert read_turn(messages=none).thinking
    assert not read_turn(messages=none[:1] + HELLO).thinking


def test_added_tool_may_be_chosen_and_none_removes_all() -> None:
    added = {"role": "system", "content": [addition({"name": "g", "input_schema": {}})]}
    chosen = read_turn(messages=[*HELLO, added], tool_choice={"type": "tool", "name": "g"})
    assert chosen.tool_choice == ToolChoice(required=True, names=("g",))
    assert read_turn(messages=[*HELLO, added], tool_choice={"type": "none"}).messages == (
        User("Hello"),
    )


def test_prefill_is_continued_in_final_channel() -> None:
    turn = read_turn(messages=[*HELLO, assistant(text("It is"))])
    prompt = vocab.encoding().decode_utf8(render(turn).ids)
    assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>It is")


UNSUITABLE_PREFILLS: dict[str, tuple[dict[str, Any], dict[str, Any], list[Message]]] = {
    "a call of any tool": (
        assistant(text("It is 18 °C.")),
        {"tool_choice": {"type": "any"}},
        [Answer("It is 18 °C.")],
    ),
    "a call of a tool": (
        assistant(text("It is 18 °C.")),
        {"tool_choice": {"type": "tool", "name": "f"}},
        [Answer("It is 18 °C.")],
    ),
    "white space at the end": (
        assistant(text("It is 18 °C.\n")),
        {"tool_choice": {"type": "any"}},
        [Answer("It is 18 °C.\n")],
    ),
    "several texts": (
        assistant(thinking("Hm."), text("Well."), text("It is 18 °C.")),
        {"tool_choice": {"type": "any"}},
        [Reasoning("Hm."), Preamble("Well."), Answer("It is 18 °C.")],
    ),
    "JSON that no text begins": (
        assistant(text("It is 18 °C.")),
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        [Answer("It is 18 °C.")],
    ),
}


@pytest.mark.parametrize(
    ("last", "fields", "expected"), UNSUITABLE_PREFILLS.values(), ids=UNSUITABLE_PREFILLS
)
def test_unsuitable_prefill_becomes_finished_message(
    last: dict[str, Any], fields: dict[str, Any], expected: list[Message]
) -> None:
    """LangGraph requests the typed answer of an agent like this, after its answer."""
    messages = [*HELLO, assistant(use({})), user(result("18 °C")), last]
    turn = read_turn(messages=messages, tools=[{"name": "f", "input_schema": {}}], **fields)
    assert turn.prefill is None
    assert turn.messages[3:] == tuple(expected)
    assert grammar_of(turn, Names.of(turn)) is not None
    prompt = vocab.encoding().decode_utf8(render(turn).ids)
    assert prompt.endswith("<|end|><|start|>assistant")
    assert "Hm." not in prompt  # dropped before an answer (A6)


def test_json_prefill_is_continued() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    for prefill in ('{"city":', '{\n  "city"'):
        turn = read_turn(messages=[*HELLO, assistant(text(prefill))], output_config=form)
        assert turn.prefill == prefill


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", ["Be brief."]),
        ("", []),
        (None, []),
        ([], []),
        ([text("a"), text("b", **CACHED), text("")], ["a", "b"]),
        ([text("x-anthropic-billing-header: cc_version=2; cch=1;"), text("a")], ["a"]),
        ("x-anthropic-billing-header: cc_version=2; cch=1;\nBe brief.", ["Be brief."]),
        ("No x-anthropic-billing-header: here", ["No x-anthropic-billing-header: here"]),
    ],
)
def test_system_is_read_as_instructions(system: Any, expected: list[str]) -> None:
    assert read_turn(system=system).messages == (*map(Instructions, expected), User("Hello"))


SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "additionalProperties": False,
}
BARE = {"name": "f", "input_schema": SCHEMA}

FIELDS: dict[str, tuple[dict[str, Any], str, object]] = {
    # name: fields of the body, field of the turn, its value
    "no tools": ({}, "tools", ()),
    "tools": (
        {"tools": [{**BARE, "description": "Does.", **CACHED, "strict": True}]},
        "tools",
        (Tool("f", "Does.", SCHEMA, "tools[0]", strict=True),),
    ),
    "tool that is not strict": (
        {"tools": [{**BARE, "strict": False}]},
        "tools",
        (Tool("f", "", SCHEMA, "tools[0]"),),
    ),
    "custom tool": (
        {"tools": [{**BARE, "type": "custom"}]},
        "tools",
        (Tool("f", "", SCHEMA, "tools[0]"),),
    ),
    "typed tool with a schema": (
        {"tools": [{**BARE, "type": "web_search_20250305"}]},
        "tools",
        (Tool("f", "", SCHEMA, "tools[0]"),),
    ),
    "tool without parameters": (
        {"tools": [{"name": "f", "input_schema": {}}]},
        "tools",
        (Tool("f", "", {}, "tools[0]"),),
    ),
    "tools of Anthropic's servers": (
        {
            "tools": [
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
                {"type": "mcp_toolset", "mcp_server_name": "x", "name": 3, "description": {}},
                BARE,
            ]
        },
        "tools",
        (Tool("f", "", SCHEMA, "tools[2]"),),
    ),
    "tool_choice auto": (
        {"tools": [BARE], "tool_choice": {"type": "auto"}},
        "tools",
        (Tool("f", "", SCHEMA, "tools[0]"),),
    ),
    "one call": (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "limits",
        OutputLimits(max_tokens=99, one_call=True),
    ),
    "any number of calls": (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}},
        "limits",
        OutputLimits(max_tokens=99),
    ),
    "one forced call": (
        {"tools": [BARE], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        "limits",
        OutputLimits(max_tokens=99, one_call=True),
    ),
    "one call of one tool": (
        {
            "tools": [BARE],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        },
        "limits",
        OutputLimits(max_tokens=99, one_call=True),
    ),
    "no choice": ({"tools": [BARE]}, "tool_choice", ToolChoice()),
    "a free choice": (
        {"tools": [BARE], "tool_choice": {"type": "auto"}},
        "tool_choice",
        ToolChoice(),
    ),
    "any tool": (
        {"tools": [BARE], "tool_choice": {"type": "any"}},
        "tool_choice",
        ToolChoice(required=True),
    ),
    "one tool": (
        {"tools": [BARE, {**BARE, "name": "g"}], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice",
        ToolChoice(required=True, names=("g",)),
    ),
    "one tool, while thinking": (
        {
            "tools": [BARE],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "adaptive"},
        },
        "tool_choice",
        ToolChoice(required=True, names=("f",)),
    ),
    "nothing to say": ({"max_tokens": 0}, "limits", OutputLimits(max_tokens=0)),
    "a budget of thinking": (
        {"thinking": {"type": "enabled", "budget_tokens": 2048}},
        "limits",
        OutputLimits(max_tokens=99, reasoning_tokens=2048, sets_reasoning=True),
    ),
    "no budget for no thinking": (
        {"thinking": {"type": "disabled", "budget_tokens": 2048}},
        "limits",
        OutputLimits(max_tokens=99, sets_reasoning=True),
    ),
    "tool_choice none": ({"tools": [BARE], "tool_choice": {"type": "none"}}, "tools", ()),
    "max_tokens, stop_sequences": (
        {"max_tokens": 7, "stop_sequences": ["a", "", "\n"]},
        "limits",
        OutputLimits(max_tokens=7, stop=("a", "\n")),
    ),
    "sampling": (
        {"temperature": 0, "top_p": 0.9, "top_k": 40},
        "sampling",
        Sampling(temperature=0, top_p=0.9, top_k=40),
    ),
    "sampling, nulls": (
        {"temperature": None, "top_p": None, "top_k": None},
        "sampling",
        Sampling(),
    ),
    "top_p of none": ({"top_p": 0}, "sampling", Sampling(top_p=0)),
    "top_k of all": ({"top_k": -1}, "sampling", Sampling(top_k=0)),
    "format": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "response_format",
        ResponseFormat(SCHEMA, strict=True),
    ),
    "format, as it was called": (
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        "response_format",
        ResponseFormat(SCHEMA, strict=True),
    ),
    "no format": ({"output_config": {"format": None}}, "response_format", None),
    "effort": ({"output_config": {"effort": "xhigh"}}, "effort", Effort.HIGH),
    "no effort": ({"output_config": {"effort": None}}, "effort", Effort.MEDIUM),
    "adaptive": ({"thinking": {"type": "adaptive"}}, "effort", Effort.MEDIUM),
    "enabled": ({"thinking": {"type": "enabled", "budget_tokens": 60000}}, "effort", Effort.MEDIUM),
    "disabled": ({"thinking": {"type": "disabled"}}, "effort", Effort.LOW),
    "disabled, with an effort": (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
        "effort",
        Effort.LOW,
    ),
    "between tools": ({"thinking": {"type": "between_tools"}}, "effort", Effort.LOW),
    "thinks": ({}, "thinking", True),
    "adaptive, thinks": ({"thinking": {"type": "adaptive"}}, "thinking", True),
    "enabled, thinks": ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking", True),
    "disabled, does not": ({"thinking": {"type": "disabled"}}, "thinking", False),
    "between tools, does not": ({"thinking": {"type": "between_tools"}}, "thinking", False),
    "disabled over an effort": (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
        "thinking",
        False,
    ),
    "effort none, does not": ({"output_config": {"effort": "none"}}, "thinking", False),
    "effort none over adaptive": (
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "none"}},
        "thinking",
        False,
    ),
    "what changes nothing": (
        {
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "betas": ["x"],
            "container": None,
            "thread": None,
            "compaction": None,
            "cache_control": {"type": "ephemeral"},
            "anything": [1],
        },
        "messages",
        (User("Hello"),),
    ),
}


@pytest.mark.parametrize(("fields", "name", "expected"), FIELDS.values(), ids=FIELDS)
def test_fields_are_read_into_turn(fields: dict[str, Any], name: str, expected: object) -> None:
    assert getattr(read_turn(**fields), name) == expected


def test_unavailable_tools_are_noted() -> None:
    request = read_request(tools=[BARE, {"type": "web_search_20250305", "name": "web_search"}])
    assert request.notes == ("tools that are not available: 'web_search'",)
    assert read_request(tools=[BARE]).notes == ()
    elsewhere = {"type": "url", "url": "https://a", "name": "x"}
    assert read_request(mcp_servers=[elsewhere]).notes == ("tools that are not available: 'x'",)
    assert read_request(mcp_servers=[]).notes == ()


def test_thinking_of_request_overrides_server() -> None:
    body = {"model": "m", "max_tokens": 9, "messages": HELLO}
    quiet = Defaults(effort=Effort.LOW, thinking=False)
    assert read(body, quiet, Tagged()).turn.thinking is False
    assert read({**body, "thinking": {"type": "adaptive"}}, quiet, Tagged()).turn.thinking is True
    patient = Defaults(none_effort=Effort.LOW)
    assert read({**body, "thinking": {"type": "disabled"}}, patient, Tagged()).turn.thinking is True


def test_server_defaults_apply_to_absent_fields() -> None:
    body = {"model": "m", "max_tokens": 9, "messages": HELLO}
    turn = read(body, SERVER, Tagged()).turn
    assert (turn.effort, turn.identity, turn.date) == (Effort.HIGH, "You are Ada.", "2025-08-05")
    assert turn.builtin_tools == ("python",)


@pytest.mark.parametrize(("sent", "expected"), [(None, False), (False, False), (True, True)])
def test_stream_and_model_are_read(sent: bool | None, expected: bool) -> None:
    request = read_request(stream=sent, model="gpt-oss")
    assert (request.stream, request.model) == (expected, "gpt-oss")


def test_counting_needs_no_max_tokens_and_gives_same_prompt() -> None:
    body = {"model": "m", "messages": HELLO, "system": "Be brief.", "tools": [BARE]}
    counted = read(body, SERVER, Tagged(), counting=True).turn
    turn = read({**body, "max_tokens": 9, "stream": True}, SERVER, Tagged()).turn
    assert render(counted).ids == render(turn).ids
    assert error_of(body).param == "max_tokens"


def test_count_accepts_compaction_but_no_thread() -> None:
    body = {"model": "m", "messages": HELLO}
    summarize = {**body, "compaction": {"type": "summarize"}}
    assert read(summarize, SERVER, Tagged(), counting=True).turn.messages == (User("Hello"),)
    with pytest.raises(RequestError, match="thread"):
        read({**body, "thread": {"type": "create"}}, SERVER, Tagged(), counting=True)


def test_invalid_effort_is_named_with_thinking_disabled() -> None:
    fields = {"thinking": {"type": "disabled"}, "output_config": {"effort": "huge"}}
    error = error_of({"model": "m", "max_tokens": 9, "messages": HELLO, **fields})
    assert error.param == "output_config.effort"


BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"role": "developer", "content": "a"}, ".role"),
    ({"role": "user"}, ".content"),
    ({"role": "user", "content": None}, ".content"),
    ({"role": "user", "content": 3}, ".content"),
    (user("a"), ".content[0]"),
    (user({}), ".content[0].type"),
    (user({"type": None}), ".content[0].type"),
    (user({"type": {}}), ".content[0].type"),
    (user({"type": "text"}), ".content[0].text"),
    (user(text("a"), {"type": "text", "text": 3}), ".content[1].text"),
    (user({"type": "document", "source": 3}), ".content[0].source"),
    (user(plain("a", title=3)), ".content[0].title"),
    (user(plain(None)), ".content[0].source.data"),
    (user(parts(None)), ".content[0].source.content"),
    (user({"type": "search_result"}), ".content[0].content"),
    (user(search_result({"type": "whatever"})), ".content[0].content[0]"),
    ({"role": "system", "content": [use({})]}, ".content[0]"),
    (user({"type": "whatever"}), ".content[0]"),
    (user(thinking("a")), ".content[0]"),
    (user(use({})), ".content[0]"),
    (user({"type": "tool_result", "content": "a"}), ".content[0].tool_use_id"),
    (user(result("a", "")), ".content[0].tool_use_id"),
    (user(result(3)), ".content[0].content"),
    (user(result(["a"])), ".content[0].content[0]"),
    (user(result([{"type": "search_result"}])), ".content[0].content[0].content"),
    (user(result([{"type": "tool_reference"}])), ".content[0].content[0].tool_name"),
    (
        user(result([{"type": "tool_reference", "tool_name": 3}])),
        ".content[0].content[0].tool_name",
    ),
    (user(result([search_result({"type": "text"})])), ".content[0].content[0].content[0].text"),
    (user(result([plain(None)])), ".content[0].content[0].source.data"),
    (user(result([plain(3)])), ".content[0].content[0].source.data"),
    (user(result([{"type": "text"}])), ".content[0].content[0].text"),
    (user(result("a", is_error="yes")), ".content[0].is_error"),
    ({"role": "system"}, ".content"),
    ({"role": "system", "output_config": {"effort": "much"}}, ".output_config.effort"),
    ({"role": "system", "content": [{"type": "tool_addition"}]}, ".content[0].tool"),
    (
        {
            "role": "system",
            "content": [{"type": "tool_addition", "tool": {"type": "tool_definition"}}],
        },
        ".content[0].tool.definition",
    ),
    (
        {"role": "system", "content": [addition({"name": "g"})]},
        ".content[0].tool.definition.input_schema",
    ),
    ({"role": "system", "content": [{"type": "tool_removal"}]}, ".content[0]"),
    (user(addition({"name": "g", "input_schema": {}})), ".content[0]"),
    (assistant(result("a")), ".content[0]"),
    (assistant({"type": "thinking", "signature": "a"}), ".content[0].thinking"),
    (assistant({"type": "redacted_thinking"}), ".content[0].data"),
    (assistant({**use({}), "id": ""}), ".content[0].id"),
    (assistant({"type": "tool_use", "name": "f", "input": {}}), ".content[0].id"),
    (assistant({"type": "tool_use", "id": "c", "input": {}}), ".content[0].name"),
    (assistant({"type": "tool_use", "id": "c", "name": "f"}), ".content[0].input"),
    (assistant(use("{}")), ".content[0].input"),
    (assistant(use([])), ".content[0].input"),
]


@pytest.mark.parametrize(("message", "where"), BAD_MESSAGES)
def test_error_of_message_names_block(message: dict[str, Any], where: str) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [*HELLO, message, *HELLO]}
    error = error_of(body)
    assert error.param == f"messages[1]{where}"
    assert error.param in error.message


WHY: list[tuple[dict[str, Any], str]] = [
    (user({"type": "tool_reference"}), "which is not supported"),
    (assistant({"type": "whatever"}), "which is not supported"),
    (user(use({})), "which is not allowed here"),
    (assistant(result("a")), "which is not allowed here"),
]


@pytest.mark.parametrize(("message", "why"), WHY)
def test_error_of_block_says_why(message: dict[str, Any], why: str) -> None:
    error = error_of({"model": "m", "max_tokens": 9, "messages": [message]})
    kind = message["content"][0]["type"]
    assert error.message == f"messages[0].content[0] is of type {kind!r}, {why}"


def test_misplaced_tool_use_is_rejected() -> None:
    messages = [user(use({})), assistant(text("a")), *HELLO]
    error = error_of({"model": "m", "max_tokens": 9, "messages": messages})
    assert error.param == "messages[0].content[0]"


LAST = [
    (assistant(text("It is ")), "messages[1].content[0]"),
    (assistant(text("It is"), text("\n")), "messages[1].content[1]"),
    (assistant(text("a"), use({})), "messages[1].content[1]"),
]


@pytest.mark.parametrize(("message", "where"), LAST)
def test_unsupported_continuation_is_rejected(message: dict[str, Any], where: str) -> None:
    error = error_of({"model": "m", "max_tokens": 9, "messages": [*HELLO, message]})
    assert error.param == where
    assert where in error.message


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("model", None, "model"),
    ("model", "", "model"),
    ("messages", [], "messages"),
    ("messages", "Hello", "messages"),
    ("messages", [3], "messages[0]"),
    ("max_tokens", None, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", "9", "max_tokens"),
    ("system", 3, "system"),
    ("system", [3], "system[0]"),
    ("system", [{"type": "text"}], "system[0].text"),
    ("system", [{"type": "hologram"}], "system[0]"),
    ("stream", "yes", "stream"),
    ("stop_sequences", "a", "stop_sequences"),
    ("stop_sequences", [3], "stop_sequences[0]"),
    ("stop_sequences", ["a"] * 65, "stop_sequences"),
    ("stop_sequences", ["a" * 513], "stop_sequences[0]"),
    ("temperature", -1, "temperature"),
    ("temperature", float("nan"), "temperature"),
    ("top_p", 2, "top_p"),
    ("top_p", -0.1, "top_p"),
    ("top_k", 1.5, "top_k"),
    ("tools", {}, "tools"),
    ("tools", [3], "tools[0]"),
    ("tools", [{"input_schema": {}}], "tools[0].name"),
    ("tools", [{"name": "f"}], "tools[0].input_schema"),
    ("tools", [{"name": "f", "type": "custom"}], "tools[0].input_schema"),
    ("tools", [{"name": "f", "input_schema": []}], "tools[0].input_schema"),
    ("tools", [{"name": "f", "type": 3}], "tools[0].type"),
    ("tool_choice", "auto", "tool_choice"),
    ("tool_choice", {}, "tool_choice.type"),
    ("tool_choice", {"type": "any"}, "tool_choice"),
    ("tool_choice", {"type": "tool"}, "tool_choice.name"),
    ("tool_choice", {"type": "tool", "name": "f"}, "tool_choice.name"),
    ("tool_choice", {"type": "required"}, "tool_choice.type"),
    ("thread", {"type": "create"}, "thread"),
    ("thread", {"type": "continue", "previous_message_id": "msg_1"}, "thread"),
    ("compaction", {"type": "summarize"}, "compaction"),
    ("thinking", True, "thinking"),
    ("thinking", {"type": "always"}, "thinking.type"),
    ("thinking", {"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens"),
    ("output_config", [], "output_config"),
    ("output_config", {"effort": "huge"}, "output_config.effort"),
    ("output_config", {"effort": 3}, "output_config.effort"),
    ("output_config", {"format": {"type": "xml"}}, "output_config.format.type"),
    ("output_config", {"format": {"type": "json_schema"}}, "output_config.format.schema"),
    ("output_format", {"type": "json_schema", "schema": 3}, "output_format.schema"),
]


@pytest.mark.parametrize(("field", "value", "param"), BAD_FIELDS)
def test_invalid_field_is_named(field: str, value: Any, param: str) -> None:
    error = error_of({"model": "m", "max_tokens": 9, "messages": HELLO, field: value})
    assert error.param == param
    assert field in error.message


def nested_body(depth: int) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for _ in range(depth):
        document = {"content": [document], "type": "tool_result"}
    return document


@pytest.mark.parametrize(
    "body",
    [None, True, 3, "text", [], [{}], {}, nested_body(100_000)],
    ids=["null", "true", "int", "str", "list", "nested list", "empty", "deep"],
)
def test_body_of_another_type_is_rejected(body: object) -> None:
    error_of(body)


# --- Requests as real clients send them.


def recorded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())["body"]
    return body


def test_request_of_claude_code_is_read() -> None:
    request = read(recorded("claude-code-turn2"), Defaults(), Tagged())
    assert (request.model, request.stream, request.thinking, request.notes) == (
        "m",
        True,
        "shown",
        (),
    )
    assert request.turn.messages == (
        Instructions("You are a Claude agent, built on Anthropic's Claude Agent SDK."),
        Instructions("(5615 characters of text)"),
        User("(306 characters of text)\nPlease run it"),
        Instructions("(6062 characters of text)"),
        Reasoning("I should run the shell."),
        Preamble("Running the command."),
        Call(
            "toolu_34e6805cb8d142b09fd6547c",
            "Bash",
            '{"command":"echo marker-$((40+2))","description":"(13 characters of text)"}',
        ),
        Result("toolu_34e6805cb8d142b09fd6547c", "marker-42", "messages[3].content[0]"),
    )
    assert len(request.turn.tools) == 24
    assert request.turn.effort is Effort.HIGH
    assert request.turn.limits == OutputLimits(max_tokens=32000, sets_reasoning=True)


def test_request_of_opencode_is_read() -> None:
    request = read(recorded("opencode-messages-turn2"), Defaults(), Tagged())
    assert (request.stream, len(request.turn.tools), request.turn.prefill) == (True, 10, None)
    assert [type(message) for message in request.turn.messages] == [
        Instructions, User, Reasoning, Preamble, Call, Result,
    ]  # fmt: skip


LOOP = (
    "<|channel|>analysis<|message|>I should run the shell.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>Running the command.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.Bash <|constrain|>json<|message|>"
    '{"command":"echo é","description":"(13 characters of text)"}<|call|>'
)
RESULT_TEXT = "<|start|>functions.Bash to=assistant<|channel|>commentary<|message|>marker-42<|end|>"


@pytest.mark.parametrize("dropped", ["kept", "shortened", "dropped", "omitted by the server"])
def test_tool_loop_continues_turn(dropped: str) -> None:
    """The second prompt is the first, the output, the result, and the opening of a message."""
    first = recorded("claude-code-turn1")
    if dropped == "omitted by the server":
        first["thinking"]["display"] = "omitted"
    request = read({**first, "stream": False}, Defaults(), Tagged())
    context, emitter = StreamingHarmonyContext(request.turn, INFO), request.emitter(INFO)
    prompt = context.render_for_completion()
    output = vocab.encoding().encode(LOOP, allowed_special="all")
    for delta in [*context.start(), *context.append_output(output), *context.finish("stop")]:
        emitter.feed(delta)
    content = emitter.result()["content"]
    if dropped == "omitted by the server":
        assert content[0]["thinking"] == ""
    content[0]["thinking"] = {"shortened": "I sh…", "dropped": ""}.get(
        dropped, content[0]["thinking"]
    )
    result_message = user(result("marker-42", content[2]["id"], **CACHED))
    messages = [*first["messages"], assistant(*content), result_message]
    messages[0]["content"][1].pop("cache_control")  # Claude Code moves the breakpoint
    second = read({**first, "messages": messages}, Defaults(), Tagged())
    tail = vocab.encoding().encode(RESULT_TEXT + "<|start|>assistant", allowed_special="all")
    assert render(second.turn).ids == (*prompt, *output, *tail)


def test_preamble_shown_as_thinking_is_restored() -> None:
    body = {**recorded("claude-code-turn1"), "stream": False, "thinking": {"type": "between_tools"}}
    request = read(body, Defaults(), Tagged())
    context, emitter = StreamingHarmonyContext(request.turn, INFO), request.emitter(INFO)
    prompt = context.render_for_completion()
    raw = LOOP[LOOP.index("<|channel|>commentary") :]  # the output of a model that may not think
    output = vocab.encoding().encode(raw, allowed_special="all")
    for delta in [*context.start(), *context.append_output(output), *context.finish("stop")]:
        emitter.feed(delta)
    content = emitter.result()["content"]
    assert [block["type"] for block in content] == ["thinking", "tool_use"]
    result_message = user(result("marker-42", content[1]["id"]))
    messages = [*body["messages"], assistant(*content), result_message]
    second = read({**body, "messages": messages}, Defaults(), Tagged())
    tail = vocab.encoding().encode(RESULT_TEXT + "<|start|>assistant", allowed_special="all")
    assert render(second.turn).ids == (*prompt, *output, *tail)


# --- Any JSON.


def values(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | st.integers() | numbers | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )


JSON = values(st.floats())
FINITE = values(st.floats(allow_nan=False, allow_infinity=False))
TEXT = st.text() | st.just("\ud83d")
KINDS = st.sampled_from(
    [
        *("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "x_tool_result"),
        *("image", "document", "search_result"),
    ]
)
TEXTS = st.lists(st.fixed_dictionaries({"type": KINDS}, optional={"text": TEXT}), max_size=3)
SOURCE = (
    TEXT
    | JSON
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "content", "url"])},
        optional={"data": TEXT | JSON, "content": TEXT | TEXTS | JSON, "url": TEXT | JSON},
    )
)
ANY_PART = st.fixed_dictionaries(
    {"type": KINDS},
    optional={
        "text": TEXT,
        "content": TEXTS | JSON,
        **dict.fromkeys(("title", "context"), TEXT | JSON),
        "source": SOURCE,
    },
)
ANY_BLOCK = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS | JSON,
        **dict.fromkeys(("text", "thinking", "signature", "data", "id", "name"), TEXT | JSON),
        "input": st.dictionaries(TEXT, JSON) | JSON,
        "tool_use_id": TEXT | JSON,
        "content": JSON | st.lists(ANY_PART, max_size=3),
        "is_error": st.booleans() | JSON,
        **dict.fromkeys(("title", "context"), TEXT | JSON),
        "source": SOURCE,
    },
)
ROLE = st.sampled_from(["user", "assistant", "system"])
ANY_MESSAGE = st.fixed_dictionaries(
    {"role": ROLE | JSON, "content": TEXT | st.lists(ANY_BLOCK, max_size=3) | JSON}
)
PLAUSIBLE = st.sampled_from([value for _, value, _ in BAD_FIELDS])
BODY = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(sorted({field for field, _, _ in BAD_FIELDS}), PLAUSIBLE | JSON),
        "model": st.just("m") | JSON,
        "max_tokens": st.just(9) | JSON,
        "messages": st.lists(ANY_MESSAGE, max_size=3) | JSON,
    },
)
ONE = {"model": st.just("m"), "max_tokens": st.just(9)}
NEARLY = st.fixed_dictionaries({**ONE, "messages": st.lists(ANY_MESSAGE, min_size=1, max_size=3)})


@given(JSON | BODY | NEARLY)
def test_any_json_is_request_or_request_error(body: object) -> None:
    with suppress(RequestError):
        request = read(body, Defaults(), Tagged())
        json.dumps(asdict(request.turn), ensure_ascii=False).encode()


TEXT_BLOCK = st.builds(text, TEXT)
GOOD_MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXT}),
    st.builds(
        user, TEXT_BLOCK, st.builds(result, TEXT | st.lists(TEXT_BLOCK), is_error=st.booleans())
    ),
    st.builds(
        assistant,
        st.builds(thinking, TEXT, TEXT),
        TEXT_BLOCK,
        st.builds(use, st.dictionaries(TEXT, FINITE, max_size=2)),
    ),
)


@given(st.lists(GOOD_MESSAGE, max_size=4))
def test_any_valid_body_is_an_encodable_turn(messages: list[dict[str, Any]]) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [*messages, *HELLO]}
    document = asdict(read(body, Defaults(), Tagged()).turn)
    json.dumps(document, ensure_ascii=False).encode()  # no lone surrogate is left
