"""The tool parser: text in, tool calls and content out."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_mlx")

from vllm_mlx_harmony.host.tool_parser import HarmonyToolParser

ANALYSIS = "<|channel|>analysis<|message|>Thinking.<|end|><|start|>assistant"
PARIS = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Paris"}'
ROME = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}'

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
ODD = {"type": "function", "function": {"name": "my tool!"}}
REQUEST = {"tools": [WEATHER, ODD]}

Calls = list[tuple[str, str]]

ROWS = [
    pytest.param("", [], None, id="nothing"),
    pytest.param("Hello", [], "Hello", id="plain text"),
    pytest.param("<|channel|>final<|message|>Hi 🙂<|return|>", [], "Hi 🙂", id="an answer"),
    pytest.param("<|channel|>final<|message|>Hi", [], "Hi", id="without its end token"),
    pytest.param(ANALYSIS + "<|channel|>final<|message|>Hi", [], "Hi", id="reasoning is left out"),
    pytest.param(ANALYSIS, [], None, id="only reasoning"),
    pytest.param(PARIS + "<|call|>", [("weather", '{"city":"Paris"}')], None, id="a call"),
    pytest.param(PARIS, [("weather", '{"city":"Paris"}')], None, id="a call without its end token"),
    pytest.param(
        ANALYSIS + "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" + PARIS,
        [("weather", '{"city":"Paris"}')],
        "Let me see.",
        id="a preamble and a call",
    ),
    pytest.param(
        " to=functions.weather<|channel|>commentary json<|message|>{}<|call|>",
        [("weather", "{}")],
        None,
        id="the recipient in the role",
    ),
    pytest.param(
        "<|channel|>analysis to=functions.weather<|message|>{}<|call|>",
        [("weather", "{}")],
        None,
        id="a call on the analysis channel",
    ),
    pytest.param(
        f"{PARIS}<|call|><|start|>assistant{ROME}<|call|>",
        [("weather", '{"city":"Paris"}'), ("weather", '{"city":"Rome"}')],
        None,
        id="two calls",
    ),
    pytest.param(
        f"{PARIS}<|call|><|start|>assistant{PARIS}<|call|>",
        [("weather", '{"city":"Paris"}')] * 2,
        None,
        id="the same call twice",
    ),
    pytest.param(
        "<|channel|>commentary to=functions.my_tool<|message|>é not JSON<|call|>",
        [("my tool!", "é not JSON")],
        None,
        id="arguments as they are, the name as declared",
    ),
    pytest.param(
        "<|channel|>commentary to=functions.weather<|message|><|call|>",
        [("weather", "{}")],
        None,
        id="no arguments",
    ),
    pytest.param(
        '<|channel|>final <|constrain|>json<|message|>{"a":1}',
        [],
        '{"a":1}',
        id="json is no tool",
    ),
    pytest.param("a < b <| c <|end", [], "a < b <| c <|end", id="what is no control token"),
]


@pytest.mark.parametrize(("text", "calls", "content"), ROWS)
def test_output_is_split_into_calls_and_content(
    text: str, calls: Calls, content: str | None
) -> None:
    parsed = HarmonyToolParser(None).extract_tool_calls(text, REQUEST)
    assert [(call["name"], call["arguments"]) for call in parsed.tool_calls] == calls
    assert (parsed.content, parsed.tools_called) == (content, bool(calls))
    assert len({call["id"] for call in parsed.tool_calls}) == len(calls)


@pytest.mark.parametrize(
    "request_context",
    [None, {}, {"tools": None}, {"tools": ["x", {"function": None}, {"function": {"name": 1}}]},
     {"tools": [WEATHER, WEATHER]}],
)  # fmt: skip
def test_invalid_request_is_ignored(request_context: Any) -> None:
    parsed = HarmonyToolParser().extract_tool_calls(PARIS, request_context)
    assert [call["name"] for call in parsed.tool_calls] == ["weather"]


def test_tool_messages_stay_structured() -> None:
    assert HarmonyToolParser.supports_native_format()


@pytest.mark.parametrize("text", ["\ud83d", "<|channel|>final<|message|>\ud83d"])
def test_half_a_surrogate_pair_is_replaced(text: str) -> None:
    assert HarmonyToolParser().extract_tool_calls(text).content == "?"
