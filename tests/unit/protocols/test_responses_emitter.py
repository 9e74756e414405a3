"""Answers of Responses: outputs of a model on the left, items and events on the right."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from ciphers import Reverse
from event_checker import check, check_documents, from_wire
from hypothesis import given
from hypothesis import strategies as st
from rows import ANSWER, CALL, PREAMBLE, REASONING, ROWS, Row

from vllm_mlx_harmony.core import vocab
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
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError, RequestError
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo, Sampling
from vllm_mlx_harmony.protocols import events
from vllm_mlx_harmony.protocols.events import DONE, Event, frame
from vllm_mlx_harmony.protocols.responses import ResponsesRequest, error_body, output_items, read
from vllm_mlx_harmony.protocols.responses import emitter as emitters

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
KEY = INFO.id_seed[:20]
USAGE = Usage(prompt_tokens=80, completion_tokens=20, reasoning_tokens=7, cached_tokens=64)
STOP, CALLS, CUT = (Finished(reason, None, USAGE) for reason in ("stop", "tool_calls", "length"))


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "x"},
    {"type": "custom", "name": "patch"},
    {"type": "tool_search", "execution": "client"},
    {
        "type": "namespace",
        "name": "crm",
        "tools": [{"type": "function", "name": "find"}, {"type": "custom", "name": "note"}],
    },
]


def read_request(stream: bool, **fields: Any) -> ResponsesRequest:
    body = {"model": "m", "input": "Hi", "tools": TOOLS, "stream": stream, **fields}
    return read(body, Defaults(), Reverse())


def stream_events(deltas: Iterable[Delta], **fields: Any) -> list[Event]:
    emitter = read_request(True, **fields).emitter(INFO, lambda: 1_754_352_009.7)
    return [event for delta in deltas for event in emitter.feed(delta)]


def collect(deltas: Iterable[Delta], **fields: Any) -> dict[str, Any]:
    emitter = read_request(False, **fields).emitter(INFO, lambda: 1_754_352_009.7)
    assert [event for delta in deltas for event in emitter.feed(delta)] == []
    return emitter.result()


def answer_deltas(*messages: list[Delta], end: Delta) -> list[Delta]:
    return [Started(80, 64), *(delta for message in messages for delta in message), end]


def message_deltas(
    index: int, kind: Kind, *texts: str, name: str = "", complete: bool = True
) -> list[Delta]:
    return [Opened(index, kind, name), *map(Text, texts), Closed(complete)]


def documents(events: Iterable[Event]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events if event != DONE]


# --- Every row of semantics B.


def deltas_of(row: Row, chunks: Iterable[Sequence[int]]) -> list[Delta]:
    tools = [{"type": "function", "name": name} for name in row.tools]
    parser = Parser(Names.of(read_request(True, tools=tools).turn), row.stop, one_call=row.one_call)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return [Started(5), *deltas, *parser.close("length" if row.cut else "stop")]


def ids_of(row: Row) -> list[int]:
    return vocab.encoding().encode(row.output, allowed_special="all")


def item_of(index: int, part: tuple[str, ...], status: str) -> dict[str, Any]:
    key = f"{KEY}{index:04x}"
    kind, text = part[0], part[-1]
    if kind == CALL:
        return {
            "id": f"fc_{key}",
            "type": "function_call",
            "status": status,
            "call_id": f"call_{key}",
            "name": part[1],
            "arguments": text,
        }
    if kind == REASONING:
        return {
            "id": f"rs_{key}",
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }
    return {
        "id": f"msg_{key}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "phase": {PREAMBLE: "commentary", ANSWER: "final_answer"}[kind],
        "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": text}],
    }


def items_of(row: Row) -> list[dict[str, Any]]:
    last = len(row.expected) - 1
    return [
        item_of(at, part, "completed" if row.whole or at < last else "incomplete")
        for at, part in enumerate(row.expected)
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_is_collected(row: Row) -> None:
    response = collect(deltas_of(row, [ids_of(row)]))
    cut = row.finish == "length"
    assert response["output"] == items_of(row)
    assert response["status"] == ("incomplete" if cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    assert response["completed_at"] == (None if cut else 1_754_352_009)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_chunking_does_not_change_response(row: Row) -> None:
    ids = ids_of(row)
    expected = collect(deltas_of(row, [ids]))
    at = random.Random(row.id).randint(0, len(ids))
    for chunks in ([ids], [[token] for token in ids], [ids[:at], ids[at:]]):
        assert check(stream_events(deltas_of(row, chunks))) == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_summary_and_encryption_change_only_reasoning(row: Row) -> None:
    deltas = deltas_of(row, [[token] for token in ids_of(row)])
    fields = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    expected = items_of(row)
    for item in expected:
        if item["type"] == "reasoning":
            text = item["content"][0]["text"]
            item["summary"] = [{"type": "summary_text", "text": text}]
            item["content"] = []
            item["encrypted_content"] = text[::-1]
    final = check(stream_events(deltas, **fields))
    assert final["output"] == expected
    assert final == collect(deltas, **fields)


# --- The events, one by one.


@pytest.mark.parametrize("summarized", [True, False])
def test_reasoning_and_answer_have_expected_events(summarized: bool) -> None:
    """Reasoning is in one place: in the summary, if the request asks for one (E4)."""
    deltas = answer_deltas(
        message_deltas(0, Kind.REASONING, "a", "b"), message_deltas(1, Kind.ANSWER, "c"), end=STOP
    )
    options: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}
    if summarized:
        options["reasoning"] = {"summary": "auto"}
    events = documents(stream_events(deltas, **options))
    reasoning, answer = f"rs_{KEY}0000", f"msg_{KEY}0001"
    at = {"item_id": reasoning, "output_index": 0}
    place, kind, part = (
        ("summary", "reasoning_summary_text", "reasoning_summary_part")
        if summarized
        else ("content", "reasoning_text", "content_part")
    )
    within = {**at, f"{place}_index": 0}
    text = {"type": "summary_text" if summarized else "reasoning_text", "text": ""}
    there = {"item_id": answer, "output_index": 1, "content_index": 0}
    empty = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
    first = {"id": reasoning, "type": "reasoning", "summary": [], "content": []}
    second = {"id": answer, "type": "message", "role": "assistant", "phase": "final_answer"}
    final = events[-1]["response"]["output"]
    expected: list[tuple[str, dict[str, Any]]] = [
        ("output_item.added", {"output_index": 0, "item": {
            **first, "status": "in_progress", "encrypted_content": None}}),
        (f"{part}.added", {**within, "part": text}),
        (f"{kind}.delta", {**within, "delta": "a"}),
        (f"{kind}.delta", {**within, "delta": "b"}),
        (f"{kind}.done", {**within, "text": "ab"}),
        (f"{part}.done", {**within, "part": {**text, "text": "ab"}}),
        ("output_item.done", {"output_index": 0, "item": final[0]}),
        ("output_item.added", {"output_index": 1, "item": {
            **second, "status": "in_progress", "content": []}}),
        ("content_part.added", {**there, "part": empty}),
        ("output_text.delta", {**there, "delta": "c", "logprobs": []}),
        ("output_text.done", {**there, "text": "c", "logprobs": []}),
        ("content_part.done", {**there, "part": {**empty, "text": "c"}}),
        ("output_item.done", {"output_index": 1, "item": final[1]}),
    ]  # fmt: skip
    assert events[2:-1] == [
        {"type": f"response.{kind}", "sequence_number": number, **fields}
        for number, (kind, fields) in enumerate(expected, 2)
    ]
    other = "content" if summarized else "summary"
    assert final[0][place] == [{**text, "text": "ab"}] and final[0][other] == []
    assert [event["type"] for event in (*events[:2], events[-1])] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]


def call_deltas(name: str, *texts: str, complete: bool = True) -> list[Delta]:
    return answer_deltas(
        message_deltas(0, Kind.CALL, *texts, name=name, complete=complete), end=CALLS
    )


def test_call_in_namespace_has_expected_events() -> None:
    events = documents(stream_events(call_deltas("crm__find", '{"a"', ":1}")))[2:-1]
    at = {"item_id": f"fc_{KEY}0000", "output_index": 0}
    item = {"id": f"fc_{KEY}0000", "type": "function_call", "call_id": f"call_{KEY}0000",
            "name": "find", "namespace": "crm"}  # fmt: skip
    kind = "response.function_call_arguments"
    assert events == [
        {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0,
         "item": {**item, "status": "in_progress", "arguments": ""}},
        {"type": f"{kind}.delta", "sequence_number": 3, **at, "delta": '{"a"'},
        {"type": f"{kind}.delta", "sequence_number": 4, **at, "delta": ":1}"},
        {"type": f"{kind}.done", "sequence_number": 5, **at, "arguments": '{"a":1}',
         "name": "find"},
        {"type": "response.output_item.done", "sequence_number": 6, "output_index": 0,
         "item": {**item, "status": "completed", "arguments": '{"a":1}'}},
    ]  # fmt: skip


FREEFORM: list[tuple[tuple[str, ...], list[str]]] = [
    (('{"inp', 'ut":"*** Be', "gin\\", 'n\\"\\ud83d', "\\ude00", '"}'),
     ["*** Be", "gin", '\n"', "😀"]),
    (('{"input":""}',), []),
    (("*** Begin", " Patch"), ["*** Begin", " Patch"]),
    (('{"patch":"a"}',), ['{"patch":"a"}']),
    (("{", "}"), []),
    (('{"inp',), ['{"inp']),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "deltas"), FREEFORM)
@pytest.mark.parametrize("name", ["patch", "crm__note"])
def test_freeform_call_is_custom_tool_call(
    name: str, texts: tuple[str, ...], deltas: list[str]
) -> None:
    events = stream_events(call_deltas(name, *texts))
    (item,) = check(events)["output"]
    assert [
        event["delta"] for event in documents(events) if event["type"].endswith(".delta")
    ] == deltas
    addressed = {"name": "patch"} if name == "patch" else {"name": "note", "namespace": "crm"}
    assert item == {
        "id": f"ctc_{KEY}0000",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": f"call_{KEY}0000",
        "input": "".join(deltas),
        **addressed,
    }
    assert collect(call_deltas(name, *texts))["output"] == [item]


SEARCHES: list[tuple[tuple[str, ...], Any]] = [
    (('{"que', 'ry": "\u00e9"}'), {"query": "é"}),
    (("{}",), {}),
    ((), {}),
    (("[1",), "[1"),
    (("NaN",), "NaN"),
    (('{"a": 1e999}',), '{"a": 1e999}'),
    (('"\\ud800"',), "\ufffd"),
    (("[" * 100_000,), "[" * 100_000),
]


@pytest.mark.parametrize(("texts", "arguments"), SEARCHES)
def test_search_call_is_sent_whole(texts: tuple[str, ...], arguments: Any) -> None:
    events = stream_events(call_deltas("tool_search", *texts))
    (item,) = check(events)["output"]
    assert [event["type"] for event in documents(events)[2:-1]] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    assert item == {
        "id": f"tsc_{KEY}0000",
        "type": "tool_search_call",
        "status": "completed",
        "execution": "client",
        "call_id": f"call_{KEY}0000",
        "arguments": arguments,
    }
    assert collect(call_deltas("tool_search", *texts))["output"] == [item]


def test_cut_search_call_is_incomplete() -> None:
    cut = answer_deltas(
        message_deltas(0, Kind.CALL, '{"que', name="tool_search", complete=False), end=CUT
    )
    (item,) = check(stream_events(cut))["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"que')


def test_call_ids_are_those_of_every_api() -> None:
    deltas = answer_deltas(
        message_deltas(0, Kind.REASONING, "a"),
        message_deltas(1, Kind.CALL, "{}", name="x"),
        end=CALLS,
    )
    assert collect(deltas)["output"][1]["call_id"] == INFO.call_id(1)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(st.lists(st.tuples(st.sampled_from([*Kind][:4]), st.lists(TEXT, min_size=1)), max_size=5))
def test_any_messages_make_a_valid_stream(messages: list[tuple[Kind, list[str]]]) -> None:
    names = {Kind.CALL: "patch"}
    turn = answer_deltas(
        *(message_deltas(at, kind, *texts, name=names.get(kind, ""))
          for at, (kind, texts) in enumerate(messages)),
        end=STOP,
    )  # fmt: skip
    fields = {"reasoning": {"summary": "detailed"}}
    events = stream_events(turn, **fields)
    assert check(events) == collect(turn, **fields)
    assert all(event.data.isascii() and len(event.data.splitlines()) == 1 for event in events)
    assert from_wire("".join(map(frame, events))) == events


# --- The response object.


def test_response_has_every_field() -> None:
    assert collect(answer_deltas(message_deltas(0, Kind.ANSWER, "Hi"), end=STOP), tools=None) == {
        "id": f"resp_{INFO.id_seed}",
        "object": "response",
        "created_at": 1_754_352_000,
        "completed_at": 1_754_352_009,
        "status": "completed",
        "model": "gpt-oss-20b",
        "output": [item_of(0, (ANSWER, "Hi"), "completed")],
        "error": None,
        "incomplete_details": None,
        "background": False,
        "conversation": None,
        "frequency_penalty": 0.0,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": {"effort": "medium", "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
        "usage": {
            "input_tokens": 80,
            "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 7},
            "total_tokens": 100,
        },
    }


@pytest.mark.parametrize(
    ("server", "fields", "used"),
    [
        (Sampling(), {}, (1.0, 1.0, 0.0, 0.0)),
        (Sampling(temperature=0.3, top_p=0.8), {}, (0.3, 0.8, 0.0, 0.0)),
        (Sampling(temperature=0.3, presence_penalty=1), {"temperature": 0}, (0.0, 1.0, 1.0, 0.0)),
        (Sampling(top_p=0.8), {"top_p": 1, "frequency_penalty": -2}, (1.0, 1.0, 0.0, -2.0)),
    ],
)
def test_response_reports_sampling(
    server: Sampling, fields: dict[str, Any], used: tuple[float, ...]
) -> None:
    body = {"model": "m", "input": "Hi", **fields}
    emitter = read(body, Defaults(sampling=server), Reverse()).emitter(INFO)
    for delta in answer_deltas(message_deltas(0, Kind.ANSWER, "Hi"), end=STOP):
        emitter.feed(delta)
    answer = emitter.result()
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    assert tuple(answer[name] for name in names) == used


SCHEMA = {"type": "object", "properties": {}}
NAMED = {"type": "json_schema", "name": "n"}

REPEATED: list[tuple[dict[str, Any], str, Any]] = [
    ({"instructions": "Be brief."}, "instructions", "Be brief."),
    ({"max_output_tokens": 7}, "max_output_tokens", 7),
    ({"max_tool_calls": 2}, "max_tool_calls", 2),
    ({"metadata": {"a": "b"}}, "metadata", {"a": "b"}),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
    ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "resp_1"),
    ({"prompt_cache_key": "k"}, "prompt_cache_key", "k"),
    ({"safety_identifier": "s"}, "safety_identifier", "s"),
    ({"service_tier": "flex"}, "service_tier", "default"),
    ({"store": False}, "store", False),
    ({"temperature": 0}, "temperature", 0),
    ({"top_p": 0.5}, "top_p", 0.5),
    ({"top_logprobs": 5}, "top_logprobs", 5),
    ({"truncation": "auto"}, "truncation", "auto"),
    ({"user": "u"}, "user", "u"),
    ({"tool_choice": "none"}, "tool_choice", "none"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice",
        {"type": "allowed_tools", "mode": "auto", "tools": []},
    ),
    (
        {"reasoning": {"effort": "XHigh", "summary": "concise"}},
        "reasoning",
        {"effort": "xhigh", "summary": "concise"},
    ),
    (
        {"reasoning": {"generate_summary": "auto"}},
        "reasoning",
        {"effort": "medium", "summary": "auto"},
    ),
    ({"reasoning": {"summary": "none"}}, "reasoning", {"effort": "medium", "summary": None}),
    (
        {"text": {"verbosity": "low", "format": {"type": "json_object"}}},
        "text",
        {"verbosity": "low", "format": {"type": "json_object"}},
    ),
    (
        {"text": {"format": {**NAMED, "schema": SCHEMA, "strict": True}}},
        "text",
        {
            "verbosity": "medium",
            "format": {**NAMED, "description": None, "schema": SCHEMA, "strict": True},
        },
    ),
    (
        {"tools": [{"type": "function", "name": "f", "x": 1}, {"type": "web_search", "y": 2}]},
        "tools",
        [
            {"type": "function", "name": "f", "x": 1, "description": None, "parameters": None,
             "strict": None},
            {"type": "web_search", "y": 2},
        ],
    ),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}]},
        "tools",
        [{"type": "namespace", "name": "n", "description": "",
          "tools": [{"type": "custom", "name": "f"}]}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name", "expected"), REPEATED)
def test_response_echoes_request(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert collect(answer_deltas(end=STOP), **fields)[name] == expected


def test_completion_time_is_null_without_a_clock() -> None:
    emitter = read_request(False).emitter(INFO)
    for delta in answer_deltas(end=STOP):
        emitter.feed(delta)
    assert emitter.result()["completed_at"] is None


# --- Failures and cancellations.

HALF: list[Delta] = [
    Started(80),
    *message_deltas(0, Kind.REASONING, "Hm"),
    *message_deltas(1, Kind.ANSWER, "Hel")[:-1],
]
FAILURES: list[tuple[HarmonyFailure, str]] = [
    (OutputError("no"), "server_error"),
    (HostError("no"), "server_error"),
    (HostError("no", status=429), "rate_limit_exceeded"),
    (RequestError("no"), "invalid_prompt"),
]


@pytest.mark.parametrize("count", range(len(HALF) + 1))
@pytest.mark.parametrize(("failure", "code"), FAILURES)
def test_failure_closes_open_items(count: int, failure: HarmonyFailure, code: str) -> None:
    events = stream_events([*HALF[:count], Failed(failure)])
    final = check(events)
    assert final["status"] == "failed"
    assert final["error"] == {"code": code, "message": "no"}
    assert final["usage"] is None


def test_empty_message_is_no_item() -> None:
    turn = answer_deltas(
        message_deltas(0, Kind.REASONING),
        message_deltas(1, Kind.ANSWER, "Hi"),
        message_deltas(2, Kind.ANSWER),
        end=STOP,
    )
    final = check(stream_events(turn))
    assert final["output"] == [item_of(1, (ANSWER, "Hi"), "completed")]
    assert final == collect(turn)


def test_failed_item_is_incomplete() -> None:
    final = check(stream_events([*HALF, Failed(OutputError("no"))]))
    assert final["output"] == [
        item_of(0, (REASONING, "Hm"), "completed"),
        item_of(1, (ANSWER, "Hel"), "incomplete"),
    ]


def test_failure_without_stream_is_raised() -> None:
    failure = HostError("the engine is gone")
    with pytest.raises(HostError) as caught:
        collect([*HALF, Failed(failure)])
    assert caught.value is failure


def test_result_before_end_raises() -> None:
    emitter = read_request(False).emitter(INFO)
    for delta in HALF:
        emitter.feed(delta)
        with pytest.raises(OutputError):
            emitter.result()


@pytest.mark.parametrize("count", range(len(HALF) + 1))
def test_cancelled_response_is_complete(count: int) -> None:
    emitter = read_request(True).emitter(INFO)
    events = [event for delta in HALF[:count] for event in emitter.feed(delta)]
    final = check([*events, *emitter.cancel()])
    assert final["status"] == "cancelled"
    assert final == emitter.document()


def test_response_can_be_read_while_generated() -> None:
    emitter = read_request(True, background=True, include=["reasoning.encrypted_content"]).emitter(
        INFO
    )
    snapshots = [emitter.document()]
    for delta in HALF:
        emitter.feed(delta)
        snapshots.append(emitter.document())
    assert [document["status"] for document in snapshots] == ["queued"] + ["in_progress"] * len(
        HALF
    )
    last = snapshots[-1]["output"]
    assert [item["status"] for item in last] == ["completed", "in_progress"]
    assert last[1]["content"][0]["text"] == "Hel"
    assert [item.get("encrypted_content") for item in last] == ["mH", None]
    assert [len(document["output"]) for document in snapshots] == [0, 0, 0, 1, 1, 1, 2]


def test_background_response_is_queued_first() -> None:
    events = documents(
        stream_events(
            answer_deltas(message_deltas(0, Kind.ANSWER, "Hi"), end=STOP), background=True
        )
    )
    first_events = [(event["type"], event["response"]["status"]) for event in events[:3]]
    assert first_events == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]
    assert check_documents(events)["status"] == "completed"


@pytest.mark.parametrize("count", range(len(HALF) + 1))
@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_background_response_is_announced_before_its_turn(count: int, ending: str) -> None:
    emitter = read_request(True, background=True).emitter(INFO)
    events = [*emitter.create(), *emitter.create()]
    assert [event.name for event in events] == ["response.created", "response.queued"]
    assert emitter.document()["status"] == "queued"
    events += [event for delta in HALF[:count] for event in emitter.feed(delta)]
    failed = Failed(OutputError("no"))
    events += emitter.cancel() if ending == "cancelled" else emitter.feed(failed)
    assert events[2].name == "response.in_progress"
    assert check(events)["status"] == ending


@pytest.mark.parametrize("stream", [True, False])
def test_response_of_failed_store_is_marked_at_its_end(stream: bool) -> None:
    emitter = read_request(stream).emitter(INFO)
    deltas = answer_deltas(message_deltas(0, Kind.ANSWER, "Hi"), end=STOP)
    *groups, last = [emitter.feed(delta) for delta in deltas]
    events = [*(event for group in groups for event in group), *emitter.mark_not_stored(last)]
    assert emitter.result()["store"] is False
    if stream:
        assert [event["response"]["store"] for event in documents(events)[:2]] == [True, True]
        assert check(events) == emitter.result()
    else:
        assert events == []


@pytest.mark.parametrize(("stream", "names"), [(True, ["response.created"]), (False, [])])
def test_foreground_response_is_not_queued(stream: bool, names: list[str]) -> None:
    emitter = read_request(stream).emitter(INFO)
    assert [event.name for event in emitter.create()] == names


# --- The cost of a delta.


def test_text_delta_encodes_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(_: object) -> str:
        raise AssertionError("a document is encoded for a text")

    for kind, name in ((Kind.ANSWER, ""), (Kind.REASONING, ""), (Kind.CALL, "x")):
        emitter = read_request(True).emitter(INFO)
        emitter.feed(Started(80))
        emitter.feed(Opened(0, kind, name))
        emitter.feed(Text("0999"))
        with monkeypatch.context() as patch:
            patch.setattr(output_items, "encode", encode)
            sizes = {len(emitter.feed(Text(f"{n:04}"))[0].data) for n in range(1000, 2000)}
        assert max(sizes) - min(sizes) <= len("1000") - len("2")  # the number of the event grows


def test_request_is_not_encoded_for_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tools may be megabytes, which the event loop would write three times."""
    instructions = "Be brief. " * 1_000
    emitter = read_request(True, instructions=instructions).emitter(INFO)
    encoded: list[str] = []

    def encode(document: object) -> str:
        encoded.append(events.encode(document))
        return encoded[-1]

    monkeypatch.setattr(emitters, "encode", encode)
    answer = answer_deltas(message_deltas(0, Kind.ANSWER, "Hi"), end=STOP)
    sent = [event for delta in answer for event in emitter.feed(delta)]
    echoes = [event.name for event in sent if instructions in event.data]
    assert echoes == ["response.created", "response.in_progress", "response.completed"]
    assert encoded
    assert max(map(len, encoded)) < len(instructions)


@pytest.mark.parametrize("stream", [False, True])
def test_events_are_made_for_streams_only(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[object] = []
    monkeypatch.setattr(
        output_items, "Event", lambda *fields: created.append(fields) or Event(*fields)
    )
    emitter = read_request(stream).emitter(INFO)
    for delta in answer_deltas(message_deltas(0, Kind.ANSWER, "Hi"), end=STOP):
        emitter.feed(delta)
    assert bool(created) is stream


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (RequestError("no", param="input[0]"), "invalid_request_error", None),
        (RequestError("no", status=401), "invalid_request_error", "invalid_api_key"),
        (RequestError("no", status=429), "requests", "rate_limit_exceeded"),
        (OutputError("no"), "server_error", "generation_failed"),
        (HostError("no", retry_after=3), "server_error", "server_unavailable"),
    ],
)
def test_errors_have_openai_shape(error: HarmonyFailure, kind: str, code: str | None) -> None:
    assert error_body(error) == {
        "error": {"message": "no", "type": kind, "param": error.param, "code": code}
    }
