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
    """A well-formed turn: no message is empty except, before the parser's ``{}``, none at all."""
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


def streamed(deltas: Iterable[Delta]) -> list[ChatCompletionChunk]:
    emitter = Emitter(INFO, stream=True, include_usage=True)
    events = [event for delta in deltas for event in emitter.feed(delta)]
    assert events.pop() == DONE
    return [ChatCompletionChunk.model_validate_json(event.data) for event in events]


def whole(deltas: Iterable[Delta]) -> ChatCompletion:
    emitter = Emitter(INFO, stream=False, include_usage=True)
    for delta in deltas:
        emitter.feed(delta)
    return ChatCompletion.model_validate(emitter.result())


def accumulated(chunks: Iterable[ChatCompletionChunk]) -> dict[str, Any]:
    """What the client has put together, without what only it adds."""
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


def plain(completion: ChatCompletion) -> dict[str, Any]:
    document = completion.to_dict(exclude_unset=False)
    message: Any = document["choices"][0]["message"]  # type: ignore[index]
    message["tool_calls"] = message["tool_calls"] or None
    return document


@given(turns())
def test_streamed_and_accumulated_is_not_streamed(deltas: list[Delta]) -> None:
    """Semantics D2: ids, order, finish reason and usage included."""
    assert accumulated(streamed(deltas)) == plain(whole(deltas))


@given(turns())
def test_every_shape_is_the_clients_own(deltas: list[Delta]) -> None:
    for chunk in streamed(deltas):
        assert chunk.object == "chat.completion.chunk"
        assert chunk.id == f"chatcmpl-{INFO.id_seed}"
    assert whole(deltas).object == "chat.completion"


def test_the_client_finds_the_reasoning_where_others_put_it() -> None:
    deltas: list[Delta] = [Started(1), Opened(0, Kind.REASONING), Text("Hm"), Closed()]
    message = whole([*deltas, Finished("stop")]).choices[0].message
    assert (message.model_extra or {}) == {"reasoning": "Hm", "reasoning_content": "Hm"}


def test_freeform_calls_are_the_clients_own() -> None:
    """The client's types of a stream know functions only; like the client, build them unchecked."""
    deltas: list[Delta] = [Started(1), Opened(0, Kind.CALL, "say"), Text('{"input":"a')]
    deltas += [Text(' b"}'), Closed(), Finished("tool_calls")]
    freeform = frozenset({"say"})
    one = Emitter(INFO, stream=False, freeform=freeform)
    for delta in deltas:
        one.feed(delta)
    (call,) = ChatCompletion.model_validate(one.result()).choices[0].message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert (call.custom.name, call.custom.input) == ("say", "a b")

    many = Emitter(INFO, stream=True, freeform=freeform)
    events = [event for delta in deltas for event in many.feed(delta) if event != DONE]
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.construct(**json.loads(event.data)))
    (put,) = state.current_completion_snapshot.choices[0].message.tool_calls or ()
    document = put.to_dict()
    added = {"index": 0, "function": None}  # by the client
    assert document == {**call.to_dict(), **added}
