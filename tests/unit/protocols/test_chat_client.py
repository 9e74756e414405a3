"""Chat Completions as the official client sees them: its models, its accumulator."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Finished,
    FinishReason,
    Kind,
    Opened,
    Started,
    Text,
    Usage,
)
from vllm_mlx_harmony.core.turn import ResponseInfo
from vllm_mlx_harmony.protocols.chat import Emitter
from vllm_mlx_harmony.protocols.events import DONE

pytest.importorskip("openai")

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageCustomToolCall,
)

INFO = ResponseInfo("fedcba9876543210fedcba9876543210", 1_754_352_000, "gpt-oss-20b")


@st.composite
def turns(draw: st.DrawFn) -> list[Delta]:
    """A well-formed turn, in which no message is empty."""
    pieces = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1)
    deltas: list[Delta] = [Started(draw(st.integers(0, 9)))]
    kinds = draw(st.lists(st.sampled_from([*Kind][:4]), max_size=6))
    for index, kind in enumerate(kinds):
        name = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
        deltas.append(Opened(index, kind, name if kind is Kind.CALL else ""))
        deltas.extend(map(Text, draw(pieces)))
        deltas.append(Closed())
    reasons: list[FinishReason] = ["stop", "tool_calls", "length"]
    counts = draw(st.tuples(*[st.integers(0, 99)] * 4))
    return [*deltas, Finished(draw(st.sampled_from(reasons)), None, Usage(*counts))]


def stream_chunks(deltas: Iterable[Delta]) -> list[ChatCompletionChunk]:
    emitter = Emitter(INFO, stream=True, include_usage=True)
    events = [event for delta in deltas for event in emitter.feed(delta)]
    assert events.pop() == DONE
    return [ChatCompletionChunk.model_validate_json(event.data) for event in events]


def collect(deltas: Iterable[Delta]) -> ChatCompletion:
    emitter = Emitter(INFO, stream=False, include_usage=True)
    for delta in deltas:
        emitter.feed(delta)
    return ChatCompletion.model_validate(emitter.result())


def accumulate(chunks: Iterable[ChatCompletionChunk]) -> dict[str, Any]:
    """What the client accumulates, without the fields that only the client adds."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    # Not get_final_completion(): it raises for every answer that was cut.
    final = state.current_completion_snapshot.to_dict(exclude_unset=False, warnings=False)
    message: Any = final["choices"][0]["message"]  # type: ignore[index]
    message.pop("parsed", None)
    for call in message["tool_calls"] or ():
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return final


def as_document(completion: ChatCompletion) -> dict[str, Any]:
    document = completion.to_dict(exclude_unset=False)
    message: Any = document["choices"][0]["message"]  # type: ignore[index]
    message["tool_calls"] = message["tool_calls"] or None
    return document


@given(turns())
def test_accumulated_stream_equals_document(deltas: list[Delta]) -> None:
    """Semantics D2: ids, order, finish reason and usage included."""
    assert accumulate(stream_chunks(deltas)) == as_document(collect(deltas))


@given(turns())
def test_chunks_and_completion_are_valid(deltas: list[Delta]) -> None:
    for chunk in stream_chunks(deltas):
        assert chunk.object == "chat.completion.chunk"
        assert chunk.id == f"chatcmpl-{INFO.id_seed}"
    assert collect(deltas).object == "chat.completion"


def test_client_finds_reasoning_under_both_names() -> None:
    deltas: list[Delta] = [Started(1), Opened(0, Kind.REASONING), Text("Hm"), Closed()]
    message = collect([*deltas, Finished("stop")]).choices[0].message
    assert (message.model_extra or {}) == {"reasoning": "Hm", "reasoning_content": "Hm"}


def test_client_reads_freeform_calls() -> None:
    """The client's stream types know functions only, so chunks are built without validation."""
    deltas: list[Delta] = [Started(1), Opened(0, Kind.CALL, "say"), Text('{"input":"a')]
    deltas += [Text(' b"}'), Closed(), Finished("tool_calls")]
    freeform = frozenset({"say"})
    collecting = Emitter(INFO, stream=False, freeform=freeform)
    for delta in deltas:
        collecting.feed(delta)
    (call,) = ChatCompletion.model_validate(collecting.result()).choices[0].message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert (call.custom.name, call.custom.input) == ("say", "a b")

    streaming = Emitter(INFO, stream=True, freeform=freeform)
    events = [event for delta in deltas for event in streaming.feed(delta) if event != DONE]
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.construct(**json.loads(event.data)))
    (accumulated_call,) = state.current_completion_snapshot.choices[0].message.tool_calls or ()
    document = accumulated_call.to_dict()
    added = {"index": 0, "function": None}  # by the client
    assert document == {**call.to_dict(), **added}
