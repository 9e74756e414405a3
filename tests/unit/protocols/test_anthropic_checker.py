"""The checker itself: it accepts a valid stream and rejects each stream with one error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic_checker import check_stream

Stream = list[tuple[str, dict[str, Any]]]


def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return (kind, {"type": kind, **fields})


def start(index: int, **block: Any) -> tuple[str, dict[str, Any]]:
    return event("content_block_start", index=index, content_block=block)


def delta(index: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    return event("content_block_delta", index=index, delta=fields)


def stop(index: int) -> tuple[str, dict[str, Any]]:
    return event("content_block_stop", index=index)


def message_delta(reason: str = "tool_use", tokens: int = 5) -> tuple[str, dict[str, Any]]:
    usage = {"input_tokens": tokens, "output_tokens": 9}
    return event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=usage)


MESSAGE_START = event(
    "message_start",
    message={
        "id": "msg_1",
        "content": [],
        "stop_reason": None,
        "usage": {"input_tokens": 5, "output_tokens": 0},
    },
)
GOOD: Stream = [
    MESSAGE_START,
    start(0, type="thinking", thinking="", signature=""),
    delta(0, type="thinking_delta", thinking="Hm"),
    delta(0, type="signature_delta", signature="s"),
    stop(0),
    start(1, type="tool_use", id="call_1", name="f", input={}),
    delta(1, type="input_json_delta", partial_json='{"a":'),
    delta(1, type="input_json_delta", partial_json="1}"),
    stop(1),
    message_delta(),
    event("message_stop"),
]


def run(stream: Stream) -> dict[str, Any]:
    return check_stream([(name, json.dumps(document)) for name, document in stream]).message


def without(*places: int) -> Stream:
    return [event for at, event in enumerate(GOOD) if at not in places]


def with_(at: int, *others: tuple[str, dict[str, Any]]) -> Stream:
    """The good stream, with ``others`` in place of the event at ``at``."""
    return [*GOOD[:at], *others, *GOOD[at + 1 :]]


def test_valid_stream_is_one_message() -> None:
    assert run(GOOD)["content"] == [
        {"type": "thinking", "thinking": "Hm", "signature": "s"},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
    ]


BAD: dict[str, Callable[[], Stream]] = {
    "nothing": list,
    "no start": lambda: without(0),
    "two starts": lambda: [MESSAGE_START, *GOOD],
    "no block start": lambda: without(1),
    "no signature": lambda: without(3),
    "a delta behind the signature": lambda: with_(3, GOOD[3], GOOD[2]),
    "no block stop": lambda: without(4),
    "no block stop before the end": lambda: without(8),
    "half of the input": lambda: without(7),
    "no message_delta": lambda: without(9),
    "no message_stop": lambda: without(10),
    "a block behind message_delta": lambda: with_(10, *GOOD[5:9], GOOD[10]),
    "events behind the end": lambda: [*GOOD, event("ping")],
    "an index left out": lambda: with_(1, start(1, type="thinking", thinking="", signature="")),
    "another block's delta": lambda: with_(2, delta(1, type="thinking_delta", thinking="Hm")),
    "another type's delta": lambda: with_(2, delta(0, type="text_delta", text="Hm")),
    "an empty delta": lambda: with_(2, delta(0, type="thinking_delta", thinking="")),
    "a block that is not empty": lambda: with_(5, start(1, type="text", text="x")),
    "no reason": lambda: with_(9, message_delta("because")),
    "tool_use without a tool": lambda: [*GOOD[:5], *GOOD[9:]],
    "another prompt": lambda: with_(9, message_delta(tokens=6)),
    "another name": lambda: with_(10, ("message_delta", {"type": "message_stop"})),
    "an error and more": lambda: with_(
        9,
        event("error", error={"type": "api_error", "message": "x"}, request_id=None),
        message_delta(),
    ),
}


@pytest.mark.parametrize("stream", BAD.values(), ids=BAD)
def test_invalid_stream_is_rejected(stream: Callable[[], Stream]) -> None:
    with pytest.raises((AssertionError, json.JSONDecodeError)):
        run(stream())
