"""The demo's client: events in, an answer out, and an error if the stream ends early."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_mlx_harmony.cli.client import Completion, events
from vllm_mlx_harmony.cli.errors import UsageError


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """A chunk with one choice."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None}


def call(index: int, arguments: str, **first: Any) -> dict[str, Any]:
    """A delta of a call; ``first`` are the fields that only its first delta has."""
    function = {"arguments": arguments, **({"name": first["name"]} if first else {})}
    own = {"id": first["id"], "type": "function"} if first else {}
    return {"tool_calls": [{"index": index, **own, "function": function}]}


CHUNKS = [
    chunk({"role": "assistant", "content": None}),
    chunk({"reasoning": "I ", "reasoning_content": "I "}),
    chunk({"reasoning": "think.", "reasoning_content": "think."}),
    chunk({"content": "Look:"}),
    chunk(call(0, "", id="c0", name="f")),
    chunk(call(0, '{"a":')),
    chunk(call(0, "1}")),
    chunk(call(1, "{}", id="c1", name="g")),
    chunk({}, "tool_calls"),
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}},
]


def test_chunks_make_an_answer() -> None:
    answer = Completion()
    for chunk in CHUNKS:
        answer.add(chunk)
    parts = [(part.key, part.name, part.deltas) for part in answer.parts]
    assert parts == [
        ("reasoning", "", ["I ", "think."]),
        ("content", "", ["Look:"]),
        ("tool_calls", "f", ['{"a":', "1}"]),
        ("tool_calls", "g", ["{}"]),
    ]
    assert answer.finish_reason == "tool_calls"
    assert answer.usage == {"prompt_tokens": 7, "completion_tokens": 5}
    functions = [call["function"] for call in answer.message()["tool_calls"]]
    assert functions == [{"name": "f", "arguments": '{"a":1}'}, {"name": "g", "arguments": "{}"}]
    assert answer.message()["reasoning_content"] == "I think."


def test_plain_answer_has_no_calls() -> None:
    answer = Completion()
    answer.add(chunk({"content": "Hi"}, "stop"))
    assert "tool_calls" not in answer.message()


def test_events_end_at_done() -> None:
    lines = [b": a comment\n", b'data: {"a": 1}\n', b"\n", b"data: [DONE]\n", b'data: {"a": 2}\n']
    assert list(events(lines)) == [{"a": 1}]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([b'data: {"a": 1}\n'], "without [DONE]"),
        ([b"data: " + json.dumps({"error": {"message": "boom"}}).encode()], "boom"),
    ],
)
def test_incomplete_stream_is_an_error(lines: list[bytes], expected: str) -> None:
    with pytest.raises(UsageError, match=expected.replace("[", r"\[")):
        list(events(lines))
