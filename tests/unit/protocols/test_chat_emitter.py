"""Answers of Chat Completions: deltas on the left, the wire format on the right."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from vllm_mlx_harmony.core.deltas import (
    ChoiceDelta,
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
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError, RequestError
from vllm_mlx_harmony.core.turn import Defaults, ReasoningField, ResponseInfo
from vllm_mlx_harmony.protocols.chat import Emitter, error_body, read
from vllm_mlx_harmony.protocols.chat.emitter import ChoicesEmitter
from vllm_mlx_harmony.protocols.events import DONE, Event, frame

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
USAGE = Usage(prompt_tokens=80, completion_tokens=20, reasoning_tokens=7, cached_tokens=64)
USAGE_BODY = {
    "prompt_tokens": 80,
    "completion_tokens": 20,
    "total_tokens": 100,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {"reasoning_tokens": 7},
}
SIGNED = {"id": f"chatcmpl-{INFO.id_seed}", "created": INFO.created, "model": INFO.model}
ROLE = {"role": "assistant", "content": None, "refusal": None}
FIRST, SECOND, THIRD, FOURTH = (f"call_0123456789abcdef0123000{index}" for index in range(4))
"""The ids of calls, by their position among the messages of the answer."""


def message(kind: Kind, *texts: str, name: str = "", complete: bool = True) -> list[Delta]:
    return [Opened(0, kind, name), *map(Text, texts), Closed(complete)]


def reasoning(*texts: str) -> list[Delta]:
    return message(Kind.REASONING, *texts)


def preamble(*texts: str) -> list[Delta]:
    return message(Kind.PREAMBLE, *texts)


def answer(*texts: str) -> list[Delta]:
    return message(Kind.ANSWER, *texts)


def call(name: str, *texts: str, complete: bool = True) -> list[Delta]:
    return message(Kind.CALL, *texts, name=name, complete=complete)


def answer_deltas(*messages: list[Delta], end: Delta) -> list[Delta]:
    numbered = (
        replace(delta, index=index) if isinstance(delta, Opened) else delta
        for index, message in enumerate(messages)
        for delta in message
    )
    return [Started(80, 64), *numbered, end]


def stream_events(deltas: Iterable[Delta], *, include_usage: bool = False) -> list[Event]:
    emitter = Emitter(INFO, stream=True, include_usage=include_usage)
    return [event for delta in deltas for event in emitter.feed(delta)]


def parse_chunks(events: Iterable[Event]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events if event != DONE]


def collect(deltas: Iterable[Delta]) -> dict[str, Any]:
    emitter = Emitter(INFO, stream=False)
    assert [event for delta in deltas for event in emitter.feed(delta)] == []
    return emitter.result()


@pytest.mark.parametrize("field", ReasoningField)
@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_in_configured_fields(field: ReasoningField, stream: bool) -> None:
    names = {"both": {"reasoning", "reasoning_content"}}.get(field.value, {field.value})
    deltas = answer_deltas(reasoning("a", "b"), answer("c"), end=STOP)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    emitter = read(body, Defaults(reasoning_field=field)).emitter(INFO)
    events = [event for delta in deltas for event in emitter.feed(delta)]
    if not stream:
        message = emitter.result()["choices"][0]["message"]
        assert {key: message[key] for key in message if "reason" in key} == dict.fromkeys(
            names, "ab"
        )
        return
    parts = [chunk["choices"][0]["delta"] for chunk in parse_chunks(events) if chunk["choices"]]
    thoughts = [part for part in parts if any("reason" in key for key in part)]
    assert thoughts == [dict.fromkeys(names, "a"), dict.fromkeys(names, "b")]


def thought(text: str) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}


def call_start(index: int, key: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": key, "type": "function", "function": function}]}


def call_arguments(index: int, text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def tool_call(key: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


STOP, CALLS, CUT = (Finished(reason, None, USAGE) for reason in ("stop", "tool_calls", "length"))

ROWS: dict[str, tuple[list[Delta], list[dict[str, Any]], str, dict[str, Any]]] = {
    # name: deltas, the deltas on the wire between role and finish, finish reason, the message
    "a plain answer": (
        answer_deltas(answer("Hel", "lo"), end=STOP),
        [{"content": "Hel"}, {"content": "lo"}, {}],
        "stop",
        {"content": "Hello"},
    ),
    "reasoning and answer": (
        answer_deltas(reasoning("Hm", "."), answer("Hi"), end=STOP),
        [thought("Hm"), thought("."), {"content": "Hi"}, {}],
        "stop",
        {"content": "Hi", **thought("Hm.")},
    ),
    "several of each are joined by line breaks": (
        answer_deltas(
            reasoning("a", "b"), preamble("c"), reasoning("d"), preamble("e"), answer("f"), end=STOP
        ),
        [
            thought("a"),
            thought("b"),
            {"content": "c"},
            thought("\nd"),
            {"content": "\ne"},
            {"content": "\nf"},
            {},
        ],
        "stop",
        {"content": "c\ne\nf", **thought("ab\nd")},
    ),
    "only a call": (
        answer_deltas(call("f", '{"a"', ":1}"), end=CALLS),
        [call_start(0, FIRST, "f"), call_arguments(0, '{"a"'), call_arguments(0, ":1}"), {}],
        "tool_calls",
        {"content": None, "tool_calls": [tool_call(FIRST, "f", '{"a":1}')]},
    ),
    "reasoning, preamble, two identical calls": (
        answer_deltas(
            reasoning("Hm"), preamble("Look"), call("f", "{}"), call("f", "{}"), end=CALLS
        ),
        [
            thought("Hm"),
            {"content": "Look"},
            call_start(0, THIRD, "f"),
            call_arguments(0, "{}"),
            call_start(1, FOURTH, "f"),
            call_arguments(1, "{}"),
            {},
        ],
        "tool_calls",
        {
            "content": "Look",
            **thought("Hm"),
            "tool_calls": [tool_call(THIRD, "f", "{}"), tool_call(FOURTH, "f", "{}")],
        },
    ),
    "the line break waits for the later text, over a call": (
        answer_deltas(preamble("a"), call("f", "{}"), answer("b"), end=CALLS),
        [
            {"content": "a"},
            call_start(0, SECOND, "f"),
            call_arguments(0, "{}"),
            {"content": "\nb"},
            {},
        ],
        "tool_calls",
        {"content": "a\nb", "tool_calls": [tool_call(SECOND, "f", "{}")]},
    ),
    "a call of the server's without a result": (
        answer_deltas(message(Kind.SERVER_CALL, "{}", name="f"), answer("Hi"), end=STOP),
        [{"content": "Hi"}, {}],
        "stop",
        {"content": "Hi"},
    ),
    "cut inside a call": (
        answer_deltas(call("f", '{"a', complete=False), end=CUT),
        [call_start(0, FIRST, "f"), call_arguments(0, '{"a'), {}],
        "length",
        {"content": None, "tool_calls": [tool_call(FIRST, "f", '{"a')]},
    ),
    "cut while thinking": (
        answer_deltas(reasoning("Hm"), end=CUT),
        [thought("Hm"), {"content": ""}],
        "length",
        {"content": "", **thought("Hm")},
    ),
    "nothing at all": (answer_deltas(end=STOP), [{"content": ""}], "stop", {"content": ""}),
    "what JSON must escape": (
        answer_deltas(
            answer('"\\\n\x00\u2028é', "😀</script>"), call('a"b', '{"é":"\\u00e9"}'), end=CALLS
        ),
        [
            {"content": '"\\\n\x00\u2028é'},
            {"content": "😀</script>"},
            call_start(0, SECOND, 'a"b'),
            call_arguments(0, '{"é":"\\u00e9"}'),
            {},
        ],
        "tool_calls",
        {
            "content": '"\\\n\x00\u2028é😀</script>',
            "tool_calls": [tool_call(SECOND, 'a"b', '{"é":"\\u00e9"}')],
        },
    ),
}


@pytest.mark.parametrize(("deltas", "wire", "reason", "_"), ROWS.values(), ids=ROWS)
def test_row_is_streamed(deltas: list[Delta], wire: list[Any], reason: str, _: object) -> None:
    events = stream_events(deltas)
    assert events[-1] == DONE
    assert events.count(DONE) == 1
    expected = [
        {
            **SIGNED,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
        }
        for delta in (ROLE, *wire)
    ]
    expected[-1]["choices"][0]["finish_reason"] = reason
    assert parse_chunks(events) == expected


@pytest.mark.parametrize(("deltas", "_", "reason", "expected"), ROWS.values(), ids=ROWS)
def test_row_is_collected(deltas: list[Delta], _: object, reason: str, expected: Any) -> None:
    assert collect(deltas) == {
        **SIGNED,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "refusal": None, **expected},
                "logprobs": None,
                "finish_reason": reason,
            }
        ],
        "usage": USAGE_BODY,
    }


@pytest.mark.parametrize(("deltas", "wire", "reason", "_"), ROWS.values(), ids=ROWS)
def test_usage_is_in_last_chunk(
    deltas: list[Delta], wire: list[Any], reason: str, _: object
) -> None:
    *others, last = parse_chunks(stream_events(deltas, include_usage=True))
    plain = parse_chunks(stream_events(deltas))
    assert others == [{**chunk, "usage": None} for chunk in plain]
    assert all("usage" not in chunk for chunk in plain)
    assert last == {
        **SIGNED,
        "object": "chat.completion.chunk",
        "choices": [],
        "usage": USAGE_BODY,
    }


@pytest.mark.parametrize(("deltas", "wire", "reason", "_"), ROWS.values(), ids=ROWS)
def test_chunk_is_one_ascii_line(
    deltas: list[Delta], wire: list[Any], reason: str, _: object
) -> None:
    for event in stream_events(deltas, include_usage=True):
        assert event.data.isascii()
        assert len(event.data.splitlines()) == 1
        assert frame(event) == f"data: {event.data}\n\n"


def test_role_is_sent_before_generation() -> None:
    (event,) = Emitter(INFO, stream=True).feed(Started(80))
    assert json.loads(event.data)["choices"][0]["delta"] == ROLE


def input_delta(index: int, text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "custom": {"input": text}}]}


FREEFORM = {
    "as it arrives": (
        answer_deltas(call("say", '{"inp', 'ut":"a', "\\", "n\\u00", 'e9"', "}"), end=CALLS),
        [input_delta(0, "a"), input_delta(0, "\n"), input_delta(0, "é")],
        "a\né",
    ),
    "not wrapped at all": (
        answer_deltas(call("say", "just", " text"), end=CALLS),
        None,
        "just text",
    ),
    "cut": (
        answer_deltas(call("say", '{"input":"a', complete=False), end=CUT),
        [input_delta(0, "a")],
        "a",
    ),
    "nothing": (answer_deltas(call("say", "{}"), end=CALLS), [], ""),
}


@pytest.mark.parametrize(("deltas", "wire", "expected"), FREEFORM.values(), ids=FREEFORM)
def test_freeform_call_is_text(deltas: list[Delta], wire: list[Any] | None, expected: str) -> None:
    streaming = Emitter(INFO, stream=True, freeform=frozenset({"say"}))
    events = [event for delta in deltas for event in streaming.feed(delta)]
    _, opening, *texts, _ = [chunk["choices"][0]["delta"] for chunk in parse_chunks(events)]
    custom = {"name": "say", "input": ""}
    assert opening == {
        "tool_calls": [{"index": 0, "id": FIRST, "type": "custom", "custom": custom}]
    }
    assert "".join(text["tool_calls"][0]["custom"]["input"] for text in texts) == expected
    if wire is not None:
        assert texts == wire

    collecting = Emitter(INFO, stream=False, freeform=frozenset({"say"}))
    for delta in deltas:
        collecting.feed(delta)
    assert collecting.result()["choices"][0]["message"]["tool_calls"] == [
        {"id": FIRST, "type": "custom", "custom": {"name": "say", "input": expected}}
    ]


def test_freeform_and_function_calls_can_be_mixed() -> None:
    emitter = Emitter(INFO, stream=False, freeform=frozenset({"say"}))
    for delta in answer_deltas(call("say", '{"input":"a"}'), call("f", '{"input":"a"}'), end=CALLS):
        emitter.feed(delta)
    assert emitter.result()["choices"][0]["message"]["tool_calls"] == [
        {"id": FIRST, "type": "custom", "custom": {"name": "say", "input": "a"}},
        tool_call(SECOND, "f", '{"input":"a"}'),
    ]


@pytest.mark.parametrize(
    "fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}], ids=str
)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(fields: dict[str, Any], stream: bool) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    emitter = read({**body, **fields}, Defaults()).emitter(INFO)
    deltas = answer_deltas(reasoning("Hm"), preamble("a"), reasoning("So"), answer("b"), end=STOP)
    events = [event for delta in deltas for event in emitter.feed(delta)]
    if stream:
        texts = [chunk["choices"][0]["delta"] for chunk in parse_chunks(events)]
        assert texts == [ROLE, {"content": "a"}, {"content": "\nb"}, {}]
    else:
        message = emitter.result()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "a\nb", "refusal": None}


def test_many_calls_have_different_ids() -> None:
    document = collect(answer_deltas(*(call("f", "{}") for _ in range(300)), end=CALLS))
    ids = [item["id"] for item in document["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 300
    assert {len(key) for key in ids} == {len("call_") + 24}


@pytest.mark.parametrize("count", [0, 1, 3], ids=["at once", "after the role", "in the answer"])
def test_failure_in_stream_is_error_event_and_end(count: int) -> None:
    failure = OutputError("the engine died")
    deltas = answer_deltas(answer("Hel"), end=STOP)[:count]
    *before, error, last = stream_events([*deltas, Failed(failure)], include_usage=True)
    assert before == stream_events(deltas, include_usage=True)
    assert json.loads(error.data) == error_body(failure)
    assert last == DONE


def test_failure_without_stream_is_raised() -> None:
    failure = HostError("the engine is gone")
    with pytest.raises(HostError) as caught:
        collect(answer_deltas(answer("Hel"), end=Failed(failure)))
    assert caught.value is failure


@pytest.mark.parametrize("stream", [False, True])
def test_result_before_end_or_of_stream_raises(stream: bool) -> None:
    emitter = Emitter(INFO, stream=stream)
    for delta in answer_deltas(answer("Hel"), end=STOP)[: None if stream else -1]:
        emitter.feed(delta)
    with pytest.raises(OutputError):
        emitter.result()


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_emitter_matches_request(stream: bool, include_usage: bool) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": stream,
        "stream_options": {"include_usage": include_usage},
    }
    emitter = read(body, Defaults()).emitter(INFO)
    deltas = answer_deltas(answer("Hel"), end=STOP)
    events = [event for delta in deltas for event in emitter.feed(delta)]
    assert events == (stream_events(deltas, include_usage=include_usage) if stream else [])


def test_stream_keeps_no_text() -> None:
    emitter = Emitter(INFO, stream=True)
    for delta in answer_deltas(reasoning("a"), call("f", "b"), answer("c"), end=STOP):
        emitter.feed(delta)
        assert not emitter._parts


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (RequestError("no", param="n"), "invalid_request_error", "n", None),
        (
            RequestError("no", param="messages", code="context_length_exceeded"),
            "invalid_request_error",
            "messages",
            "context_length_exceeded",
        ),
        (RequestError("no", status=401), "invalid_request_error", None, "invalid_api_key"),
        (
            RequestError("no", status=404, param="model", code="model_not_found"),
            "invalid_request_error",
            "model",
            "model_not_found",
        ),
        (RequestError("no", status=429), "requests", None, "rate_limit_exceeded"),
        (OutputError("no"), "server_error", None, "generation_failed"),
        (HostError("no", retry_after=3), "server_error", None, "server_unavailable"),
        (HarmonyFailure("no", status=504), "server_error", None, None),
    ],
)
def test_errors_have_openai_shape(
    error: HarmonyFailure, kind: str, param: str | None, code: str | None
) -> None:
    assert error_body(error) == {
        "error": {"message": "no", "type": kind, "param": param, "code": code}
    }


@pytest.mark.parametrize("include_usage", [False, True])
def test_stream_ends_after_all_choices(include_usage: bool) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 2, "stream": True}
    options = {"stream_options": {"include_usage": include_usage}}
    emitter = read({**body, **options}, Defaults()).emitter(INFO)
    assert isinstance(emitter, ChoicesEmitter)
    deltas: list[Delta | ChoiceDelta] = [
        *(ChoiceDelta(0, delta) for delta in answer_deltas(call("f", "{}"), end=CALLS)),
        *(ChoiceDelta(1, delta) for delta in answer_deltas(call("f", "{}"), end=CALLS)),
        Finished("stop", usage=USAGE),
    ]
    events = [event for delta in deltas for event in emitter.feed(delta)]
    assert events[-1] == DONE
    chunks = parse_chunks(events)
    if include_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], USAGE_BODY)
    sent_deltas = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in chunks]
    second = "call_0123456789abcdef012310000"
    assert sent_deltas == [
        (at, delta)
        for at, key in enumerate((FIRST, second))
        for delta in (ROLE, call_start(0, key, "f"), call_arguments(0, "{}"), {})
    ]


def test_choices_are_one_document_or_one_error() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 2}
    emitter, broken = (read(body, Defaults()).emitter(INFO) for _ in range(2))
    for at, text in enumerate("ab"):
        for delta in answer_deltas(answer(text), end=CUT if at else STOP):
            assert emitter.feed(ChoiceDelta(at, delta)) == []  # type: ignore[arg-type]
    assert emitter.feed(Finished("stop", usage=USAGE)) == []
    document = emitter.result()
    assert document["usage"] == USAGE_BODY
    choices = [
        (choice["index"], choice["message"]["content"], choice["finish_reason"])
        for choice in document["choices"]
    ]
    assert choices == [(0, "a", "stop"), (1, "b", "length")]
    broken.feed(Failed(OutputError("no")))
    with pytest.raises(OutputError, match="no"):
        broken.result()
