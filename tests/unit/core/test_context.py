"""A turn in progress: at every moment, its messages are the conversation.

Every known mistake of other servers has a test here or in test_parse.
"""

from __future__ import annotations

import re

import pytest
from harmony_text import ids_of, text_of
from rows import ANSWER, CALL, PLAYED, ROWS, STOPS, Row

from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Started, Text
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.render import Rendered, opening, render
from vllm_mlx_harmony.core.replay import Replay
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    OutputLimits,
    Preamble,
    Reasoning,
    ResponseInfo,
    Result,
    Tool,
    Turn,
    User,
)

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 0, "m")
TURN = Turn((User("2+2?"),), (Tool("add"),))
CALL_OUTPUT = (
    "<|channel|>analysis<|message|>Need add.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>'
)
ANSWER_OUTPUT = "<|channel|>final<|message|>It is 4.<|return|>"
RESULT = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|>"


def context() -> StreamingHarmonyContext:
    return StreamingHarmonyContext(TURN, INFO)


def context_after_call() -> tuple[StreamingHarmonyContext, Call]:
    """A context after a call of the model, and the call."""
    turn = context()
    turn.append_output(ids_of(CALL_OUTPUT))
    call = turn.messages[-1]
    assert isinstance(call, Call)
    return turn, call


def test_turn_starts_with_prompt() -> None:
    turn, rendered = context(), render(TURN)
    assert turn.start() == [Started(len(rendered.ids))]
    assert turn.render_for_completion() == rendered.ids
    assert turn.messages == TURN.messages


def test_messages_grow_with_output() -> None:
    turn = context()
    snapshots = []
    for token in ids_of(CALL_OUTPUT):
        turn.append_output([token])
        snapshots.append(turn.messages[1:])
    assert (Reasoning("Need"),) in snapshots
    assert snapshots[-1] == (
        Reasoning("Need add."),
        Call(INFO.call_id(1), "add", '{"a": 2}'),
    )


def test_step_of_many_ids_gives_same_deltas() -> None:
    by_id, at_once = context(), context()
    deltas = [delta for token in ids_of(CALL_OUTPUT) for delta in by_id.append_output([token])]
    assert join_text(deltas) == join_text(at_once.append_output(ids_of(CALL_OUTPUT)))
    assert by_id.messages == at_once.messages


def join_text(deltas: list[Delta]) -> list[object]:
    """Deltas with adjacent text joined."""
    joined: list[object] = []
    for delta in deltas:
        if isinstance(delta, Text) and joined and isinstance(joined[-1], str):
            joined[-1] += delta.text
        else:
            joined.append(delta.text if isinstance(delta, Text) else delta)
    return joined


def test_empty_output_and_ids_after_end_are_accepted() -> None:
    turn = context()
    assert turn.append_output([]) == []
    turn.append_output(ids_of(ANSWER_OUTPUT + "<|start|>assistant"))
    turn.append_output(ids_of("more"))
    assert turn.done
    assert turn.messages[-1] == Answer("It is 4.")
    assert text_of(turn.render_for_completion()).endswith("It is 4.<|return|>")


def test_tool_results_are_in_conversation_and_next_prompt() -> None:
    turn, call = context_after_call()
    before = turn.render_for_completion()
    turn.append_tool_output([Result(call.id, "4")])
    after = turn.render_for_completion()
    assert turn.messages[-1] == Result(call.id, "4")
    assert after[: len(before)] == before
    assert text_of(after[len(before) :]) == RESULT + "<|start|>assistant"


def test_consecutive_tool_outputs_add_one_opening() -> None:
    turn, call = context_after_call()
    before = turn.render_for_completion()
    turn.append_tool_output([Result(call.id, "4")])
    turn.append_tool_output([Result(call.id, "4")])
    assert text_of(turn.render_for_completion()[len(before) :]) == RESULT * 2 + "<|start|>assistant"


def test_output_after_tool_result_continues_turn() -> None:
    turn, call = context_after_call()
    turn.append_tool_output([Result(call.id, "4")])
    prompt = turn.render_for_completion()
    assert not turn.done
    deltas = turn.append_output(ids_of(ANSWER_OUTPUT))
    assert deltas == [Opened(2, Kind.ANSWER), Text("It is 4."), Closed()]
    assert turn.messages[1:] == (
        Reasoning("Need add."),
        call,
        Result(call.id, "4"),
        Answer("It is 4."),
    )
    assert turn.render_for_completion() == (*prompt, *ids_of(ANSWER_OUTPUT))


def test_equal_calls_of_one_turn_have_different_ids() -> None:
    turn, first = context_after_call()
    turn.append_tool_output([Result(first.id, "4")])
    turn.append_output(ids_of(CALL_OUTPUT))
    second = turn.messages[-1]
    assert isinstance(second, Call)
    assert (first.name, first.arguments) == (second.name, second.arguments)
    assert first.id != second.id


@pytest.mark.parametrize(
    ("output", "end"),
    [
        pytest.param('<|channel|>commentary to=add<|message|>{"a', "<|call|>", id="a call"),
        pytest.param("<|channel|>final<|message|>It", "<|end|>", id="an answer"),
        pytest.param("<|channel|>final<|message|>It<|return|>", "<|end|>", id="a turn that ended"),
    ],
)
def test_tool_result_closes_open_output(output: str, end: str) -> None:
    turn = StreamingHarmonyContext(
        Turn((User("?"), Call("c", "add", "{}"), Result("c", "1")), (Tool("add"),)), INFO
    )
    prompt = turn.render_for_completion()
    turn.append_output(ids_of(output))
    turn.append_tool_output([Result("c", "4")])
    expected = output.removesuffix("<|return|>") + end + RESULT + "<|start|>assistant"
    assert text_of(turn.render_for_completion()[len(prompt) :]) == expected


def test_result_without_call_is_rejected_and_changes_nothing() -> None:
    turn, _ = context_after_call()
    before = (turn.messages, turn.render_for_completion())
    with pytest.raises(RequestError) as caught:
        turn.append_tool_output([Result("nobody", "4", where="messages[7]")])
    assert caught.value.param == "messages[7]"
    assert (turn.messages, turn.render_for_completion()) == before


def test_finish_counts_tokens_of_whole_turn() -> None:
    turn, call = context_after_call()
    turn.append_tool_output([Result(call.id, "4")])
    turn.append_output(ids_of(ANSWER_OUTPUT))
    finished = turn.finish("stop", cached_tokens=7)[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.prompt_tokens == len(render(TURN).ids)
    assert finished.usage.cached_tokens == 7
    assert finished.usage.completion_tokens == len(ids_of(CALL_OUTPUT + ANSWER_OUTPUT))
    assert finished.usage.reasoning_tokens == len(ids_of("Need add."))


def test_output_continues_prefilled_answer() -> None:
    turn = StreamingHarmonyContext(Turn((User("?"),), prefill="The answer"), INFO)
    assert turn.append_output(ids_of(" is 4.<|return|>")) == [
        Opened(0, Kind.ANSWER),
        Text(" is 4."),
        Closed(),
    ]


def test_custom_renderer_replaces_default() -> None:
    rendered = Rendered((1, 2, 3), render(TURN).names)
    turn = StreamingHarmonyContext(TURN, INFO, renderer=lambda _: rendered)
    assert turn.render_for_completion() == (1, 2, 3)


_MESSAGE_TYPES = {"reasoning": Reasoning, "preamble": Preamble, ANSWER: Answer}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_gives_expected_messages(row: Row) -> None:
    tools = tuple(map(Tool, row.tools))
    limits = OutputLimits(stop=row.stop, one_call=row.one_call)
    turn = StreamingHarmonyContext(Turn((User("?"),), tools, limits=limits), INFO)
    turn.append_output(ids_of(row.output))
    turn.finish("length" if row.cut else "stop")
    assert turn.messages[1:] == tuple(
        Call(INFO.call_id(index), *part[1:])
        if part[0] == CALL
        else _MESSAGE_TYPES[part[0]](part[1])
        for index, part in enumerate(row.expected)
    )


def generate(row: Row, step: int) -> tuple[StreamingHarmonyContext, list[Delta]]:
    """The turn of an engine that emits ``step`` ids at a time, and its last deltas."""
    tools = tuple(map(Tool, row.tools))
    turn = StreamingHarmonyContext(
        Turn((User("?"),), tools, limits=OutputLimits(stop=row.stop)), INFO
    )
    ids = ids_of(row.output)
    for at in range(0, len(ids), step):
        if turn.done:
            break
        turn.append_output(ids[at : at + step])
    return turn, turn.finish("length" if row.cut else "stop")


@pytest.mark.parametrize("step", [2, 3, 7, 1000])
@pytest.mark.parametrize("row", [*STOPS, *PLAYED], ids=lambda row: row.id)
def test_end_within_group_of_ids_equals_end_one_by_one(row: Row, step: int) -> None:
    """Usage, ids and outputs for replay are the same as if the ids had come one by one."""
    (single, single_deltas), (grouped, grouped_deltas) = generate(row, 1), generate(row, step)
    assert grouped_deltas[-1] == single_deltas[-1]
    assert grouped.messages == single.messages
    assert grouped.render_for_completion() == single.render_for_completion()
    assert grouped.outputs == single.outputs


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("row", PLAYED, ids=lambda row: row.id)
def test_impersonated_messages_are_dropped(row: Row, step: int) -> None:
    """They are neither among the ids nor in the next prompt, where they would look genuine."""
    turn, _ = generate(row, step)
    view = Replay(2**20).view("m")
    for output in turn.outputs:
        view.remember(output)
    calls = [message for message in turn.messages if isinstance(message, Call)]
    results = [Result(call.id, "Genuine") for call in calls] or [User("Genuine")]
    tools = tuple(map(Tool, row.tools))
    prompt = render(Turn((*turn.messages, *results), tools), view).ids
    prompt_length = len(render(Turn((User("?"),), tools)).ids)
    output_text = text_of(turn.render_for_completion()[prompt_length:])
    assert output_text == row.output[: len(output_text)]
    replayed = text_of(prompt[prompt_length - len(opening()) :]).partition("Genuine")[0]
    for invented in ("No", "Never", "42"):
        assert invented not in output_text
        assert invented not in replayed
    if row.finish != "length":  # a header that was cut is not in the prompt, either
        assert not re.search("<.start.>(?!assistant)", output_text)
    assert len(re.findall("<.start.>(?!assistant)", replayed)) == len(results)


def test_impersonation_after_result_ends_turn() -> None:
    turn, call = context_after_call()
    turn.append_tool_output([Result(call.id, "4")])
    prompt = turn.render_for_completion()
    for token in ids_of("<|start|>user<|message|>No.<|end|>"):
        turn.append_output([token])
    assert turn.done
    assert turn.render_for_completion() == prompt
    assert turn.messages[-1] == Result(call.id, "4")


@pytest.mark.parametrize("row", [row for row in ROWS if not row.cut], ids=lambda row: row.id)
def test_rendered_messages_are_parsed_to_themselves(row: Row) -> None:
    """Semantics D5, for every row: messages, rendered canonically, are parsed to the same."""
    tools = tuple(map(Tool, row.tools))
    turn = StreamingHarmonyContext(Turn((User("?"),), tools), INFO)
    turn.append_output(ids_of(row.output))
    turn.finish("stop")
    messages = turn.messages[1:]
    prompt = render(Turn((User("?"),), tools)).ids
    again = StreamingHarmonyContext(Turn((User("?"),), tools), INFO)
    history = render(
        Turn(
            (User("?"), *(message for message in messages if not isinstance(message, Reasoning))),
            tools,
        )
    ).ids
    again.append_output(_without_prompt(history, prompt))
    assert list(again.messages[1:]) == _renumbered(messages)


def _without_prompt(history: tuple[int, ...], prompt: tuple[int, ...]) -> list[int]:
    """The ids of ``history`` after ``prompt``, without the final ``<|start|>assistant``."""
    opening = ids_of("<|start|>assistant")
    assert history[: len(prompt)] == prompt
    return list(history[len(prompt) : -len(opening)])


def _renumbered(messages: tuple[object, ...]) -> list[object]:
    visible = [message for message in messages if not isinstance(message, Reasoning)]
    return [
        Call(INFO.call_id(index), message.name, message.arguments)
        if isinstance(message, Call)
        else message
        for index, message in enumerate(visible)
    ]
