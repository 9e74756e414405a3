"""The Messages API as the official client sees it, for every row of outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from anthropic_checker import Checker, check_stream
from ciphers import Reverse
from hypothesis import given
from hypothesis import strategies as st
from row_answers import check_message
from rows import ROWS, Row

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Started, Text, Usage
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import ResponseInfo, Tool, Turn
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.messages import Display, Emitter

pytest.importorskip("anthropic")

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
INFO = ResponseInfo("fedcba9876543210fedcba9876543210", 1_754_352_000, "gpt-oss-20b")
DISPLAYS: tuple[Display, ...] = ("shown", "encrypted", "hidden", "preambles")
Chunks = Sequence[Sequence[int]]


def deltas_of(row: Row, chunks: Chunks) -> list[Delta]:
    names = Names.of(Turn((), tuple(map(Tool, row.tools))))
    parser = Parser(names, row.stop, one_call=row.one_call)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return [Started(0), *deltas, *parser.close("length" if row.cut else "stop")]


def stream_events(deltas: Iterable[Delta], thinking: Display = "shown") -> list[Event]:
    emitter = Emitter(INFO, Reverse(), stream=True, thinking=thinking)
    return [event for delta in deltas for event in emitter.feed(delta)]


def collect(deltas: Iterable[Delta], thinking: Display = "shown") -> dict[str, Any]:
    emitter = Emitter(INFO, Reverse(), stream=False, thinking=thinking)
    for delta in deltas:
        emitter.feed(delta)
    return emitter.result()


def accumulate(events: Iterable[Event]) -> Message:
    """The message that the official client accumulates; its models validate every event."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        EVENT.validate_json(event.data)
        document = json.loads(event.data)
        snapshot = accumulate_event(event=document, current_snapshot=snapshot, json_bufs=buffers)
    return Message.model_validate(snapshot.to_dict())


def check(events: Iterable[Event]) -> Checker:
    return check_stream([(event.name, event.data) for event in events])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_is_a_message(row: Row) -> None:
    ids = vocab.encoding().encode(row.output, allowed_special="all")
    message = collect(deltas_of(row, [ids]))
    check_message(row, message)
    for block in message["content"]:
        if block["type"] == "thinking":
            assert Reverse().decrypt(block["signature"]) == block["thinking"]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("thinking", DISPLAYS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_accumulated_stream_equals_message(row: Row, thinking: Display) -> None:
    ids = vocab.encoding().encode(row.output, allowed_special="all")
    for chunks in ([ids], [[token] for token in ids]):
        deltas = deltas_of(row, chunks)
        events, result = stream_events(deltas, thinking), collect(deltas, thinking)
        assert accumulate(events) == Message.model_validate(result)
        assert check(events).message == result
    assert collect(deltas_of(row, [ids]), thinking) == result


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_pings_change_nothing(row: Row) -> None:
    ids = vocab.encoding().encode(row.output, allowed_special="all")
    events = stream_events(deltas_of(row, [ids]))
    pinged = [
        frame
        for event in events
        for frame in (("ping", '{"type":"ping"}'), (event.name, event.data))
    ]
    assert check_stream(pinged).message == check(events).message


@st.composite
def turns(draw: st.DrawFn) -> list[Delta]:
    """A turn of any messages, with any text as arguments."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    nearly = st.sampled_from(['{"a":', '"b', '",', "1", "}", "[", "]", "\\", "true", " ", '"', "{"])
    prompt = draw(st.integers(0, 9))
    deltas: list[Delta] = [Started(prompt, draw(st.none() | st.integers(0, prompt)))]
    kinds = draw(st.lists(st.sampled_from([*Kind][:4]), max_size=6))
    for index, kind in enumerate(kinds):
        called = kind is Kind.CALL
        deltas.append(Opened(index, kind, draw(text) if called else ""))
        pieces = st.lists(text | nearly) if called else st.lists(text, min_size=1)
        deltas.extend(map(Text, draw(pieces)))
        deltas.append(Closed(draw(st.booleans())))
    reason = draw(st.sampled_from(["tool_calls" if Kind.CALL in kinds else "stop", "length"]))
    generated = draw(st.tuples(*[st.integers(0, 99)] * 2))
    usage = Usage(prompt, *generated, cached_tokens=draw(st.integers(0, prompt)))
    return [*deltas, Finished(reason, draw(st.none() | text), usage)]  # type: ignore[arg-type]


@given(turns(), st.sampled_from(DISPLAYS))
def test_any_turn_is_streamed_as_same_message(deltas: list[Delta], thinking: Display) -> None:
    events, result = stream_events(deltas, thinking), collect(deltas, thinking)
    json.dumps(result, allow_nan=False).encode()
    assert check(events).message == result
    assert accumulate(events) == Message.model_validate(result)
