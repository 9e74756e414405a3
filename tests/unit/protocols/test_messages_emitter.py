"""Answers of the Messages API: deltas on the left, the wire format on the right."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from anthropic_checker import check_stream, prompt_tokens
from ciphers import Tagged

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
from vllm_mlx_harmony.core.errors import (
    HarmonyFailure,
    HostError,
    OutputError,
    PromptTooLong,
    RequestError,
)
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo
from vllm_mlx_harmony.protocols.events import Event, frame
from vllm_mlx_harmony.protocols.messages import (
    PING,
    Display,
    Emitter,
    error_body,
    read,
    request_id,
    token_count,
)
from vllm_mlx_harmony.protocols.messages.request import UPDATE

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
USAGE = Usage(prompt_tokens=80, completion_tokens=20, reasoning_tokens=7, cached_tokens=64)
USAGE_BODY = {
    "input_tokens": 16,
    "output_tokens": 20,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 64,
    "output_tokens_details": {"thinking_tokens": 7},
}
SIGNED = {
    "id": f"msg_{INFO.id_seed}",
    "type": "message",
    "role": "assistant",
    "model": "gpt-oss-20b",
}


def turn(*messages: tuple[Kind, str, list[str]], end: Delta, complete: bool = True) -> list[Delta]:
    deltas: list[Delta] = [Started(80, 64)]
    for index, (kind, name, texts) in enumerate(messages):
        last = index == len(messages) - 1
        deltas += [Opened(index, kind, name), *map(Text, texts), Closed(complete or not last)]
    return [*deltas, end]


def reasoning(*texts: str) -> tuple[Kind, str, list[str]]:
    return (Kind.REASONING, "", [*texts])


def preamble(*texts: str) -> tuple[Kind, str, list[str]]:
    return (Kind.PREAMBLE, "", [*texts])


def answer(*texts: str) -> tuple[Kind, str, list[str]]:
    return (Kind.ANSWER, "", [*texts])


def call(name: str, *texts: str) -> tuple[Kind, str, list[str]]:
    return (Kind.CALL, name, [*texts])


def stream_events(deltas: Iterable[Delta], thinking: Display = "shown") -> list[Event]:
    emitter = Emitter(INFO, Tagged(), stream=True, thinking=thinking)
    return [event for delta in deltas for event in emitter.feed(delta)]


def collect(deltas: Iterable[Delta], thinking: Display = "shown") -> dict[str, Any]:
    emitter = Emitter(INFO, Tagged(), stream=False, thinking=thinking)
    assert [event for delta in deltas for event in emitter.feed(delta)] == []
    return emitter.result()


def as_pairs(events: Iterable[Event]) -> list[tuple[str, str]]:
    return [(event.name, event.data) for event in events]


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": f"encrypted:{text}"}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def tool_use(index: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": INFO.call_id(index), "name": name, "input": arguments}


STOP, CALLS, CUT = (Finished(reason, None, USAGE) for reason in ("stop", "tool_calls", "length"))
AT_TWO = Finished("stop", "two", USAGE)

ROWS: dict[str, tuple[list[Delta], list[dict[str, Any]], str]] = {
    # name: deltas, the content blocks, the stop reason
    "a plain answer": (turn(answer("Hel", "lo"), end=STOP), [text("Hello")], "end_turn"),
    "reasoning and answer": (
        turn(reasoning("Hm", "."), answer("Hi"), end=STOP),
        [thought("Hm."), text("Hi")],
        "end_turn",
    ),
    "every message is a block, in the model's order": (
        turn(
            reasoning("a", "b"), preamble("c"), reasoning("d"), preamble("e"), answer("f"), end=STOP
        ),
        [thought("ab"), text("c"), thought("d"), text("e"), text("f")],
        "end_turn",
    ),
    "reasoning, preamble, two identical calls": (
        turn(reasoning("Hm"), preamble("Look"), call("f", "{}"), call("f", "{}"), end=CALLS),
        [thought("Hm"), text("Look"), tool_use(2, "f", {}), tool_use(3, "f", {})],
        "tool_use",
    ),
    "arguments in pieces": (
        turn(call("f", '{"a":', '["x', 'é",1', "]", "}"), end=CALLS),
        [tool_use(0, "f", {"a": ["xé", 1]})],
        "tool_use",
    ),
    "arguments that are no object": (
        turn(call("f", "[1,", "2]"), end=CALLS),
        [tool_use(0, "f", {"INVALID_JSON": "[1,2]"})],
        "tool_use",
    ),
    "text behind the object": (
        turn(call("f", '{"a":1}', " or so"), end=CALLS),
        [tool_use(0, "f", {"a": 1, "INVALID_JSON": '{"a":1} or so'})],
        "tool_use",
    ),
    "cut inside a call": (
        turn(call("f", '{"a":1,"b":"c'), end=CUT, complete=False),
        [tool_use(0, "f", {"a": 1, "b": None, "INVALID_JSON": '{"a":1,"b":"c'})],
        "max_tokens",
    ),
    "cut before the arguments": (
        turn(call("f"), end=CUT, complete=False),
        [tool_use(0, "f", {})],
        "max_tokens",
    ),
    "cut while thinking": (
        turn(reasoning("Hm"), end=CUT, complete=False),
        [thought("Hm")],
        "max_tokens",
    ),
    "stopped by the caller's string": (
        turn(answer("one "), end=AT_TWO),
        [text("one ")],
        "stop_sequence",
    ),
    "nothing at all": (turn(end=STOP), [], "end_turn"),
    "nothing was asked for": (turn(end=CUT), [], "max_tokens"),
    "what JSON must escape": (
        turn(answer('"\\\n\x00\u2028é', "😀</script>"), call('a"b', '{"é":"\\u00e9"}'), end=CALLS),
        [text('"\\\n\x00\u2028é😀</script>'), tool_use(1, 'a"b', {"é": "é"})],
        "tool_use",
    ),
}
EVERY_ROW = pytest.mark.parametrize(("deltas", "content", "reason"), ROWS.values(), ids=ROWS)


def expected_message(content: list[dict[str, Any]], reason: str) -> dict[str, Any]:
    stopped = {
        "stop_reason": reason,
        "stop_sequence": "two" if reason == "stop_sequence" else None,
    }
    return {**SIGNED, "content": content, **stopped, "usage": USAGE_BODY}


@EVERY_ROW
def test_row_is_streamed(deltas: list[Delta], content: list[Any], reason: str) -> None:
    assert check_stream(as_pairs(stream_events(deltas))).message == expected_message(
        content, reason
    )


@EVERY_ROW
def test_row_is_collected(deltas: list[Delta], content: list[Any], reason: str) -> None:
    assert collect(deltas) == expected_message(content, reason)


@EVERY_ROW
def test_event_is_two_ascii_lines(deltas: list[Delta], content: list[Any], reason: str) -> None:
    for event in [*stream_events(deltas), PING]:
        assert event.data.isascii()
        assert len(event.data.splitlines()) == 1
        assert frame(event) == f"event: {event.name}\ndata: {event.data}\n\n"
        assert json.loads(event.data)["type"] == event.name


DISPLAYED: dict[Display, list[dict[str, Any]]] = {
    "shown": [thought("ab"), text("c"), tool_use(2, "f", {})],
    "encrypted": [{**thought("ab"), "thinking": ""}, text("c"), tool_use(2, "f", {})],
    "hidden": [text("c"), tool_use(2, "f", {})],
    "preambles": [
        {"type": "thinking", "thinking": "c", "signature": f"encrypted:{UPDATE}c"},
        tool_use(2, "f", {}),
    ],
}


@pytest.mark.parametrize(("thinking", "content"), DISPLAYED.items())
def test_thinking_is_displayed_as_requested(thinking: Display, content: list[Any]) -> None:
    deltas = turn(reasoning("a", "b"), preamble("c"), call("f", "{}"), end=CALLS)
    assert collect(deltas, thinking)["content"] == content
    assert check_stream(as_pairs(stream_events(deltas, thinking))).message["content"] == content


def test_stream_has_expected_events() -> None:
    deltas = turn(reasoning("H", "m"), call("f", '{"a"', ":1}"), end=CALLS)
    usage = {**USAGE_BODY, "output_tokens": 0}
    del usage["output_tokens_details"]
    stopped = {"stop_reason": None, "stop_sequence": None}
    assert [json.loads(event.data) for event in stream_events(deltas)] == [
        {
            "type": "message_start",
            "message": {**SIGNED, "content": [], **stopped, "usage": usage},
        },
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        *(
            {"type": "content_block_delta", "index": index, "delta": delta}
            for index, delta in [
                (0, {"type": "thinking_delta", "thinking": "H"}),
                (0, {"type": "thinking_delta", "thinking": "m"}),
                (0, {"type": "signature_delta", "signature": "encrypted:Hm"}),
            ]
        ),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": tool_use(1, "f", {})},
        *(
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "input_json_delta", "partial_json": piece},
            }
            for piece in ["{", '"a":1', "}"]
        ),
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": USAGE_BODY,
        },
        {"type": "message_stop"},
    ]


def test_message_start_is_sent_before_generation() -> None:
    (event,) = Emitter(INFO, Tagged(), stream=True).feed(Started(80))
    assert event.name == "message_start"
    assert json.loads(event.data)["message"]["usage"] == {"input_tokens": 80, "output_tokens": 0}


@pytest.mark.parametrize("cached_at_start", [None, 0, 64, 79])
@pytest.mark.parametrize("cached", [0, 64, 79])
def test_prompt_usage_adds_up_to_counted_tokens(cached: int, cached_at_start: int | None) -> None:
    """Also if the number of cached tokens at the start differs from the final one."""
    end = Finished("stop", None, Usage(80, 3, 0, cached))
    deltas: list[Delta] = [Started(80, cached_at_start), *turn(answer("Hi"), end=end)[1:]]
    start = json.loads(stream_events(deltas)[0].data)["message"]["usage"]
    assert start.get("cache_read_input_tokens") == cached_at_start
    for usage in (start, collect(deltas)["usage"]):
        assert prompt_tokens(usage) == token_count(80)["input_tokens"]
    assert collect(deltas)["usage"]["cache_read_input_tokens"] == cached
    assert check_stream(as_pairs(stream_events(deltas))).message == collect(deltas)


@pytest.mark.parametrize("count", [0, 1, 3], ids=["at once", "after the start", "in the answer"])
def test_failure_in_stream_is_error_event(count: int) -> None:
    failure = OutputError("the engine died")
    deltas = turn(answer("Hel"), end=STOP)[:count]
    *before, error = stream_events([*deltas, Failed(failure)])
    assert before == stream_events(deltas)
    assert error.name == "error"
    assert json.loads(error.data) == error_body(failure, request_id(INFO.id_seed))
    assert check_stream(as_pairs([*before, error])).error == error_body(failure)["error"]


def test_failure_without_stream_is_raised() -> None:
    failure = HostError("the engine is gone")
    with pytest.raises(HostError) as caught:
        collect(turn(answer("Hel"), end=Failed(failure)))
    assert caught.value is failure


@pytest.mark.parametrize("stream", [False, True])
def test_result_before_end_or_of_stream_raises(stream: bool) -> None:
    emitter = Emitter(INFO, Tagged(), stream=stream)
    for delta in turn(answer("Hel"), end=STOP)[: None if stream else -1]:
        emitter.feed(delta)
    with pytest.raises(OutputError):
        emitter.result()


DISPLAYS: list[tuple[dict[str, Any] | None, Display]] = [
    (None, "shown"),
    ({"type": "adaptive"}, "shown"),
    ({"type": "enabled", "budget_tokens": 2048}, "shown"),
    ({"type": "adaptive", "display": "summarized"}, "shown"),
    ({"type": "adaptive", "display": "omitted"}, "encrypted"),
    ({"type": "adaptive", "display": "updates"}, "encrypted"),
    ({"type": "disabled"}, "hidden"),
    ({"type": "between_tools"}, "preambles"),
]


@pytest.mark.parametrize(("asked", "display"), DISPLAYS)
@pytest.mark.parametrize("stream", [False, True])
def test_emitter_matches_request(
    stream: bool, asked: dict[str, Any] | None, display: Display
) -> None:
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": stream,
        "thinking": asked,
    }
    emitter = read(body, Defaults(), Tagged()).emitter(INFO)
    deltas = turn(reasoning("Hm"), preamble("Well."), answer("Hello"), end=STOP)
    events = [event for delta in deltas for event in emitter.feed(delta)]
    if stream:
        assert events == stream_events(deltas, display)
    else:
        assert (events, emitter.result()) == ([], collect(deltas, display))


def test_stream_keeps_no_text() -> None:
    emitter = Emitter(INFO, Tagged(), stream=True)
    for delta in turn(reasoning("a"), call("f", "{}"), answer("c"), end=STOP):
        emitter.feed(delta)
        assert not emitter._parts
        assert not emitter._content


ERRORS: list[tuple[HarmonyFailure, str, str]] = [
    (RequestError("no"), "invalid_request_error", "no"),
    (RequestError("no", param="tools[0]"), "invalid_request_error", "tools[0]: no"),
    (RequestError("tools is no", param="tools"), "invalid_request_error", "tools is no"),
    (
        PromptTooLong(9, 8),
        "invalid_request_error",
        "prompt is too long: 9 tokens > 8 maximum",
    ),
    (RequestError("no", status=401), "authentication_error", "no"),
    (RequestError("no", status=403), "permission_error", "no"),
    (RequestError("no", status=404), "not_found_error", "no"),
    (RequestError("no", status=413), "request_too_large", "no"),
    (RequestError("no", status=422), "invalid_request_error", "no"),
    (RequestError("no", status=429), "rate_limit_error", "no"),
    (OutputError("no"), "api_error", "no"),
    (HostError("no", retry_after=3), "overloaded_error", "no"),
    (HostError("no", status=529), "overloaded_error", "no"),
    (HostError("no", status=504), "timeout_error", "no"),
]


@pytest.mark.parametrize(("error", "kind", "message"), ERRORS)
def test_errors_have_anthropic_shape(error: HarmonyFailure, kind: str, message: str) -> None:
    body = {"type": "error", "error": {"type": kind, "message": message}}
    assert error_body(error) == {**body, "request_id": None}
    assert error_body(error, "req_1") == {**body, "request_id": "req_1"}


def test_thread_is_rejected_with_details() -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(RequestError) as caught:
        read({**body, "thread": {"type": "create"}}, Defaults(), Tagged())
    error = error_body(caught.value)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
