"""Answers of Ollama's API: deltas on the left, lines on the right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Failed,
    Finished,
    Kind,
    Opened,
    Progress,
    Started,
    Text,
    TextLogprob,
    ToolFinished,
    ToolStarted,
    Usage,
)
from vllm_mlx_harmony.core.errors import HostError, OutputError, RequestError
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols.ollama import Emitter, error_body, loaded

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
HEAD = {"model": "gpt-oss-20b", "created_at": "2025-08-05T00:00:00Z"}
USAGE = Usage(prompt_tokens=80, completion_tokens=20, reasoning_tokens=7, cached_tokens=64)
STEP = 10
"""Nanoseconds between two deltas."""

TURN: list[Delta] = [
    Started(80),
    Progress(80),
    Opened(0, Kind.REASONING),
    Text("Ask "),
    Text("it."),
    Closed(),
    Opened(1, Kind.PREAMBLE),
    Text("Wait."),
    Closed(),
    Opened(2, Kind.ANSWER),
    Text("Möglich ☀"),
    Closed(),
    Opened(3, Kind.CALL, "weather"),
    Text('{"city":'),
    Text('"Oslo"}'),
    Closed(),
    Finished("tool_calls", usage=USAGE),
]
CALL = {
    "id": "call_0123456789abcdef01230003",
    "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
}
METRICS = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 170,
    "load_duration": 0,
    "prompt_eval_count": 80,
    "prompt_eval_duration": 20,
    "eval_count": 20,
    "eval_duration": 140,
}


def feed_turn(turn: list[Delta], *, stream: bool, chat: bool) -> tuple[Emitter, list[Any]]:
    emitter = Emitter(INFO, 0, stream=stream, chat=chat)
    events = [
        event for at, delta in enumerate(turn, start=1) for event in emitter.feed(delta, STEP * at)
    ]
    assert not any(event.name or event.comment for event in events)
    return emitter, [json.loads(event.data) for event in events]


def line(**fields: Any) -> dict[str, Any]:
    return {**HEAD, "message": {"role": "assistant", "content": "", **fields}, "done": False}


def test_chat_is_streamed_as_lines() -> None:
    emitter, lines = feed_turn(TURN, stream=True, chat=True)
    assert lines == [
        line(thinking="Ask "),
        line(thinking="it."),
        line(content="Wait."),
        line(content="\nMöglich ☀"),
        line(tool_calls=[CALL]),
        {**HEAD, "message": {"role": "assistant", "content": ""}, **METRICS},
    ]
    with pytest.raises(OutputError):
        emitter.result()


def test_chat_is_collected_as_document() -> None:
    emitter, lines = feed_turn(TURN, stream=False, chat=True)
    assert lines == []
    message = {
        "role": "assistant",
        "content": "Wait.\nMöglich ☀",
        "thinking": "Ask it.",
        "tool_calls": [CALL],
    }
    assert emitter.result() == {**HEAD, "message": message, **METRICS}


def test_generate_sends_response_field() -> None:
    emitter, lines = feed_turn(TURN, stream=True, chat=False)
    text = {"response": "", "done": False}
    assert lines == [
        {**HEAD, **text, "thinking": "Ask "},
        {**HEAD, **text, "thinking": "it."},
        {**HEAD, **text, "response": "Wait."},
        {**HEAD, **text, "response": "\nMöglich ☀"},
        {**HEAD, **text, "tool_calls": [CALL]},
        {**HEAD, "response": "", **METRICS},
    ]
    emitter, _ = feed_turn(TURN, stream=False, chat=False)
    assert emitter.result() == {
        **HEAD,
        "response": "Wait.\nMöglich ☀",
        "thinking": "Ask it.",
        "tool_calls": [CALL],
        **METRICS,
    }


CALLS: dict[str, tuple[list[Delta], object]] = {
    "no arguments": ([Text("{}"), Closed()], {}),
    "no text": ([Closed()], {}),
    "no object": ([Text("[1]"), Closed()], {"INVALID_JSON": "[1]"}),
    "cut": ([Text('{"a": "b'), Closed(False)], {"a": None, "INVALID_JSON": '{"a": "b'}),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_an_object(name: str) -> None:
    texts, expected = CALLS[name]
    turn = [Started(1), Opened(0, Kind.CALL, "f"), *texts, Finished("length")]
    _, (call_line, last) = feed_turn(turn, stream=True, chat=True)
    assert call_line["message"]["tool_calls"][0]["function"]["arguments"] == expected
    assert last["done_reason"] == "length"


def test_server_calls_are_not_shown() -> None:
    turn: list[Delta] = [
        Started(1),
        Opened(0, Kind.SERVER_CALL, "weather.now"),
        Text("{}"),
        Closed(),
        ToolStarted(),
        ToolFinished("Sunny."),
        Opened(1, Kind.ANSWER),
        Text("Sunny."),
        Closed(),
        Finished("stop", reasoning_ended_by="budget"),
    ]
    _, (answer, last) = feed_turn(turn, stream=True, chat=True)
    assert answer == line(content="Sunny.")
    assert last["reasoning_ended_by"] == "budget"


def test_logprobs_are_sent() -> None:
    scores = (TextLogprob("Hi", b"Hi", -0.5, (TextLogprob("<|return|>", None, -1.0),)),)
    turn = [Started(1), Opened(0, Kind.ANSWER), Text("Hi", scores), Closed(), Finished("stop")]
    top = {"token": "<|return|>", "logprob": -1.0, "bytes": None}
    entry = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": [top]}
    _, (first, _) = feed_turn(turn, stream=True, chat=True)
    assert first == {**line(content="Hi"), "logprobs": [entry]}
    emitter, _ = feed_turn(turn, stream=False, chat=True)
    assert emitter.result()["logprobs"] == [entry]


def test_error_ends_stream() -> None:
    failed: list[Delta] = [Started(1), Failed(HostError("full"))]
    assert feed_turn(failed, stream=True, chat=True)[1] == [{"error": "full"}]
    emitter, _ = feed_turn(failed, stream=False, chat=True)
    with pytest.raises(HostError):
        emitter.result()


def test_answer_without_text_has_empty_content() -> None:
    emitter, _ = feed_turn([Started(1), Finished("length")], stream=False, chat=True)
    answer = emitter.result()
    assert answer["message"] == {"role": "assistant", "content": ""}
    assert (answer["prompt_eval_duration"], answer["eval_duration"]) == (10, 0)


@pytest.mark.parametrize("chat", [False, True])
def test_keep_alive_is_an_empty_line(chat: bool) -> None:
    event = Emitter(INFO, 0, stream=True, chat=chat).keep_alive()
    empty = line() if chat else {**HEAD, "response": "", "done": False}
    assert json.loads(event.data) == empty


def test_error_names_field() -> None:
    error = RequestError("must be a number", param="options.seed")
    assert error_body(error) == {"error": "options.seed: must be a number"}
    assert error_body(RequestError("seed is wrong", param="seed")) == {"error": "seed is wrong"}


def test_load_request_has_its_own_response() -> None:
    status = {"done": True, "done_reason": "load"}
    assert loaded("gpt-oss-20b", INFO.created, chat=False) == {**HEAD, "response": "", **status}
    message = {"role": "assistant", "content": ""}
    assert loaded("gpt-oss-20b", INFO.created, chat=True) == {**HEAD, "message": message, **status}
