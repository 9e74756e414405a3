"""Conversations through each API, turn by turn: each prompt continues the output before it.

The model generates rows, and the client sends back what the API showed it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ciphers import Tagged
from harmony_text import ids_of, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import ROWS, Row
from sizes import examples

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.deltas import Delta
from vllm_mlx_harmony.core.render import Rendered, opening, render
from vllm_mlx_harmony.core.replay import Output, Replay, ReplayScope, _spans
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Defaults,
    OutputLimits,
    Reasoning,
    ResponseInfo,
    Result,
    Tool,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols import chat, messages, responses

MIB = 2**20
DEFAULTS = Defaults(date="2026-01-01")


# --- Clients: the conversation so far, and what they keep of an answer.


class Client:
    """Uses one API, and keeps the parts of an answer that agents of this API keep."""

    def __init__(self) -> None:
        self.conversation: list[dict[str, Any]] = []
        self.open_calls: list[str] = []

    def request(self) -> Any:
        raise NotImplementedError

    def receive(self, document: dict[str, Any]) -> None:
        raise NotImplementedError

    def speak(self, text: str) -> None:
        """Send ``text`` as the result of every open call or, without one, as the user."""
        results = [self.result(key, text) for key in self.open_calls]
        self.send_results(results) if results else self.conversation.append(
            {"role": "user", "content": text}
        )
        self.open_calls = []

    def send_results(self, results: list[dict[str, Any]]) -> None:
        self.conversation += results

    def result(self, key: str, text: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatClient(Client):
    """Sends back no reasoning, like most clients, and null as the content of calls."""

    def request(self) -> Any:
        tool = {"type": "function", "function": {"name": "x"}}
        return chat.read({"model": "m", "messages": self.conversation, "tools": [tool]}, DEFAULTS)

    def receive(self, document: dict[str, Any]) -> None:
        message = document["choices"][0]["message"]
        echo = {name: message.get(name) for name in ("role", "content", "tool_calls")}
        self.open_calls = [call["id"] for call in message.get("tool_calls") or ()]
        if echo["content"] or self.open_calls:
            self.conversation.append(echo)

    def result(self, key: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": key, "content": text}


class ReasoningChatClient(ChatClient):
    """Sends back reasoning, too, and formats arguments anew."""

    def receive(self, document: dict[str, Any]) -> None:
        super().receive(document)
        message = document["choices"][0]["message"]
        if self.conversation and self.conversation[-1]["role"] == "assistant":
            self.conversation[-1] |= {"reasoning_content": message.get("reasoning_content")}
        for call in message.get("tool_calls") or ():
            try:
                arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            except ValueError:
                continue
            call["function"]["arguments"] = arguments


class SplittingChatClient(ChatClient):
    """Sends each part of an answer back in a message of its own."""

    def receive(self, document: dict[str, Any]) -> None:
        before = len(self.conversation)
        super().receive(document)
        for message in self.conversation[before:]:
            del self.conversation[before:]
            if message["content"]:
                self.conversation.append({"role": "assistant", "content": message["content"]})
            for call in message["tool_calls"] or ():
                self.conversation.append({"role": "assistant", "tool_calls": [call]})


class FreeformChatClient(ChatClient):
    """Declares its tool as freeform."""

    def request(self) -> Any:
        tool = {"type": "custom", "custom": {"name": "x"}}
        return chat.read({"model": "m", "messages": self.conversation, "tools": [tool]}, DEFAULTS)


class MessagesClient(Client):
    def request(self) -> Any:
        tool = {"name": "x", "input_schema": {"type": "object"}}
        body = {"model": "m", "max_tokens": 999, "messages": self.conversation, "tools": [tool]}
        return messages.read(body, DEFAULTS, Tagged())

    def receive(self, document: dict[str, Any]) -> None:
        content = document["content"]
        self.open_calls = [block["id"] for block in content if block["type"] == "tool_use"]
        if any(block["type"] != "thinking" for block in content):
            self.conversation.append({"role": "assistant", "content": content})

    def result(self, key: str, text: str) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": key, "content": text}

    def send_results(self, results: list[dict[str, Any]]) -> None:
        self.conversation.append({"role": "user", "content": results})


class ResponsesClient(Client):
    """Sends the items back without their ids and without reasoning."""

    def request(self) -> Any:
        tool = {"type": "function", "name": "x", "parameters": None, "strict": False}
        body = {"model": "m", "input": self.conversation, "tools": [tool], "store": False}
        return responses.read(body, DEFAULTS, Tagged())

    def receive(self, document: dict[str, Any]) -> None:
        items = [item for item in document["output"] if item["type"] != "reasoning"]
        self.open_calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        self.conversation += [
            {key: value for key, value in item.items() if key != "id"} for item in items
        ]

    def result(self, key: str, text: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": key, "output": text}


CLIENTS = [
    ChatClient,
    ReasoningChatClient,
    SplittingChatClient,
    MessagesClient,
    ResponsesClient,
]


# --- The server's part of a turn.


def run_turn(
    client: Client, row: Row, key: int, view: ReplayScope | None
) -> tuple[StreamingHarmonyContext, dict[str, Any]]:
    """Generate ``row`` for the client's request, and remember it; the context and the document."""
    request = client.request()
    renderer: Callable[[Turn], Rendered] = partial(render, replay=view)
    info = ResponseInfo(f"{key:020x}" + "0" * 12, 0, "m")
    context = StreamingHarmonyContext(request.turn, info, renderer)
    emitter = request.emitter(info)
    deltas: list[Delta] = context.start()
    deltas += context.append_output(ids_of(row.output))
    deltas += context.finish("length" if row.cut else "stop")
    for delta in deltas:
        emitter.feed(delta)
    for output in context.outputs:
        if view is not None:
            echoed = tuple(map(request.as_sent_back, output.messages))
            view.remember(replace(output, messages=echoed))
    return context, emitter.result()


def is_replayable(row: Row) -> bool:
    """Whether all of the output can be replayed."""
    transcript = "<|call|>" in row.output[: -len("<|call|>")]
    behind = any(row.output.find(end) not in (-1, len(row.output) - len(end)) for end in ENDS)
    last = row.output.rpartition("<|end|>")[2]
    header_cut = "<|start|>" in last and "<|message|>" not in last
    nothing = row.cut and not row.whole and not row.expected
    return not (transcript or behind or header_cut or nothing)


ENDS = ("<|return|>", "<|endoftext|>")
PLAIN = [
    row
    for row in ROWS
    if not (row.stop or row.one_call) and row.tools == ("x",) and is_replayable(row)
]
SHOWN = [row for row in PLAIN if any(part[0] != "reasoning" for part in row.expected)]
LOOPS = [row for row in SHOWN if any(part[0] == "call" for part in row.expected) and not row.cut]
CALLS = [row for row in LOOPS if all(part[0] != "answer" for part in row.expected)]


def converse(
    client: Client, rows: Sequence[Row], view: ReplayScope | None
) -> list[tuple[int, ...]]:
    """The ids of prompt and output of each turn, and the last prompt."""
    client.speak("Go.")
    sequences = []
    for key, row in enumerate(rows, 1):
        context, document = run_turn(client, row, key, view)
        sequences.append(context.render_for_completion())
        client.receive(document)
        client.speak(f"Result {key}.")
    return [*sequences, render(client.request().turn, replay=view).ids]


def without_terminator(ids: Sequence[int]) -> tuple[int, ...]:
    terminated = ids[-1] in (vocab.RETURN, vocab.ENDOFTEXT)
    return tuple(ids[:-1] if terminated else ids)


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("client", [*CLIENTS, FreeformChatClient])
@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.id)
def test_loop_continues_after_generated_ids(client: type[Client], row: Row) -> None:
    *turns, last = converse(client(), [row, row, row], Replay(MIB).view("m"))
    for before, after in zip(turns, [*turns[1:], last], strict=True):
        assert text_of(after).startswith(text_of(without_terminator(before)))
        assert after[: len(before) - 1] == before[:-1]


NO_REASONING = [row for row in SHOWN if all(part[0] != "reasoning" for part in row.expected)]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("row", NO_REASONING, ids=lambda row: row.id)
def test_complete_history_is_replayed(client: type[Client], row: Row) -> None:
    first, last = converse(client(), [row], Replay(MIB).view("m"))
    generated = without_terminator(first)
    assert last[: len(generated)] == generated


@settings(max_examples=examples(60))
@given(st.sampled_from(CLIENTS), st.lists(st.sampled_from(CALLS), min_size=1, max_size=6))
def test_prompts_of_any_loop_extend_each_other(client: type[Client], rows: list[Row]) -> None:
    *turns, last = converse(client(), rows, Replay(MIB).view("m"))
    for before, after in zip(turns, [*turns[1:], last], strict=True):
        assert after[: len(before) - 1] == before[:-1]


@settings(max_examples=examples(60))
@given(st.lists(st.sampled_from(SHOWN), min_size=1, max_size=6))
def test_every_api_gives_same_prompts(rows: list[Row]) -> None:
    """With replay, which knows the contents that Chat joins."""
    histories = [converse(client(), rows, Replay(MIB).view("m")) for client in CLIENTS]
    assert all(history == histories[0] for history in histories)


@settings(max_examples=examples(60))
@given(st.sampled_from(CLIENTS), st.lists(st.sampled_from(SHOWN), min_size=1, max_size=6))
def test_answered_turns_lose_their_reasoning(client: type[Client], rows: list[Row]) -> None:
    """A6 for generated turns: reasoning before the last answer is dropped."""
    answer = next(row for row in SHOWN if row.id == "reasoning, answer")
    *_, last = converse(client(), [*rows, answer], Replay(MIB).view("m"))
    assert "<|channel|>analysis<|message|>" not in text_of(last)


CALL_OUTPUT = ' to=functions.x<|channel|>commentary code<|message|>{"a": 1}<|call|>'
REASONING_AND_CALL = Row(
    "reasoning, call in another form",
    f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL_OUTPUT}",
    (("reasoning", "Hm."), ("call", "x", '{"a": 1}')),
)


@pytest.mark.parametrize("client", CLIENTS)
def test_turn_without_reasoning_is_unchanged(client: type[Client]) -> None:
    answer = next(row for row in SHOWN if row.id == "reasoning, answer")
    first, *_, last = converse(client(), [REASONING_AND_CALL, answer], Replay(MIB).view("m"))
    prompt = text_of(first).removesuffix(REASONING_AND_CALL.output)
    assert text_of(last).startswith(f"{prompt}{CALL_OUTPUT}<|start|>functions.x to=assistant")


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row.id)
def test_prompt_without_replay_is_rendered_from_request(client: type[Client], row: Row) -> None:
    instance = client()
    *_, last = converse(instance, [row, row], None)
    assert last == render(instance.request().turn, Replay(MIB).view("m")).ids


# --- Segments, for any output.

CONTROL = [vocab.START, vocab.CHANNEL, vocab.MESSAGE, vocab.END, vocab.CALL, vocab.RETURN]
WORDS = [
    "analysis",
    "final",
    "commentary",
    "assistant",
    " to=functions.x",
    "user",
    "Hm",
    " 🙂",
    "{}",
]
TOKENS = st.one_of(
    st.sampled_from([*CONTROL, vocab.CONSTRAIN, vocab.ENDOFTEXT, vocab.STARTOFTEXT, 201_050]),
    st.sampled_from([token for word in WORDS for token in vocab.encode(word)]),
)
TURN = Turn((User("Go."),), (Tool("x"),))


def generate(ids: Sequence[int], cut: bool, chunks: int = 0) -> StreamingHarmonyContext:
    context = StreamingHarmonyContext(TURN, ResponseInfo("1" * 32, 0, "m"))
    for start in range(0, len(ids), chunks or max(len(ids), 1)):
        context.append_output(ids[start : start + (chunks or len(ids))])
    context.finish("length" if cut else "stop")
    return context


@settings(max_examples=examples(400))
@given(st.lists(TOKENS, max_size=40), st.booleans(), st.integers(1, 3))
def test_segments_concatenate_to_output(ids: list[int], cut: bool, chunks: int) -> None:
    context = generate(ids, cut, chunks)
    whole = context.render_for_completion()
    if not context.messages[1:]:
        assert not context.outputs  # there is nothing to replay
        return
    (output,) = context.outputs
    assert output.messages == context.messages[1:]
    segments = _spans(output)
    if not segments:
        assert not output.messages or output.begins[-1] >= len(output.ids)
        return
    for begin in output.begins[1:]:
        behind_one = output.ids[begin - 1] in (vocab.END, vocab.CALL)
        assert behind_one or output.ids[begin] in (vocab.START, vocab.CHANNEL)
    assert len(segments) == len(output.messages)
    replayed = [token for segment in segments for token in segment]
    body = [*opening(), *without_terminator(whole[len(whole) - len(output.ids) + 2 :])]
    shorter = body[: len(replayed) - (replayed[-1] in (vocab.END, vocab.CALL))]
    omitted = body[len(shorter) :]
    assert replayed[: len(shorter)] == shorter
    assert vocab.MESSAGE not in omitted  # only a header that was cut
    assert replayed[-1] in (vocab.END, vocab.CALL)
    added = body[: len(replayed)] != replayed
    if added and output.ids[-1] not in (vocab.RETURN, vocab.ENDOFTEXT):
        assert replayed[-2] not in (vocab.START, vocab.CHANNEL)  # nothing of a header before it


@settings(max_examples=examples(200))
@given(st.lists(TOKENS, max_size=40), st.booleans(), st.integers(1, 7))
def test_chunking_does_not_change_outputs(ids: list[int], cut: bool, chunks: int) -> None:
    """Up to the end of the turn, so that no chunk continues after it."""
    ends = (at for at, token in enumerate(ids) if token in vocab.TURN_ENDS)
    ids = ids[: next(ends, len(ids)) + 1]
    assert generate(ids, cut, chunks).outputs == generate(ids, cut).outputs


@settings(max_examples=examples(200))
@given(st.lists(TOKENS, max_size=40), st.booleans())
def test_segment_is_parsed_as_its_message(ids: list[int], cut: bool) -> None:
    """Segments that begin with a header are parsed alone, before a ``<|start|>``."""
    for output in generate(ids, cut).outputs:
        for message, segment in zip(output.messages, _spans(output), strict=False):
            if segment[:2] == tuple(opening()):
                conversation = generate([*segment[2:], vocab.START], False).messages[1:]
                assert [type(parsed) for parsed in conversation] == [type(message)]


def test_tool_output_splits_turn_into_outputs() -> None:
    context = StreamingHarmonyContext(TURN, ResponseInfo("1" * 32, 0, "m"))
    context.append_output(ids_of("<|channel|>analysis to=functions.x code<|message|>{}<|call|>"))
    call = context.messages[-1]
    assert isinstance(call, Call)
    context.append_tool_output([Result(call.id, "4")])
    context.append_output(ids_of("<|channel|>final<|message|>Four.<|return|>"))
    context.finish("stop")
    assert [output.messages for output in context.outputs] == [(call,), (Answer("Four."),)]
    view = Replay(MIB).view("m")
    for output in context.outputs:
        view.remember(output)
    prompt = render(Turn((*context.messages, User("Why?")), (Tool("x"),)), replay=view).ids
    assert (
        prompt[: len(context.render_for_completion()) - 1] == context.render_for_completion()[:-1]
    )


def test_turn_with_stop_string_is_not_recorded() -> None:
    turn = Turn((User("Go."),), limits=OutputLimits(stop=("two",)))
    context = StreamingHarmonyContext(turn, ResponseInfo("1" * 32, 0, "m"))
    context.append_output(ids_of("<|channel|>final<|message|>one two three"))
    context.finish("stop")
    assert context.messages[1:] == (Answer("one "),)
    assert context.outputs == ()


def test_prefilled_turn_is_not_recorded() -> None:
    turn = Turn((User("Go."),), prefill="One")
    context = StreamingHarmonyContext(turn, ResponseInfo("1" * 32, 0, "m"))
    context.append_output(ids_of(" two.<|return|>"))
    context.finish("stop")
    assert context.outputs == ()


def test_unfinished_turn_has_no_output() -> None:
    context = StreamingHarmonyContext(TURN, ResponseInfo("1" * 32, 0, "m"))
    context.append_output(ids_of("<|channel|>analysis<|message|>Hm.<|end|>"))
    assert context.outputs == ()
    context.finish("stop")
    ids = (*opening(), *ids_of("<|channel|>analysis<|message|>Hm.<|end|>"))
    assert context.outputs == (
        Output(TURN.messages, (Reasoning("Hm."),), ids, begins=(0,), ended=len(ids)),
    )
