"""A turn in progress: what it holds is at every moment exactly the conversation.

Each mistake known from other servers has a test here or in test_parse.
"""

from __future__ import annotations

import re

import pytest
from rows import ANSWER, CALL, PLAYED, ROWS, STOPS, Row
from rows import ids as ids_of

from vllm_mlx_harmony.core import vocab
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
ASKED = Turn((User("2+2?"),), (Tool("add"),))
CALLS = (
    "<|channel|>analysis<|message|>Need add.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>'
)
ANSWERS = "<|channel|>final<|message|>It is 4.<|return|>"
RESULT = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|>"


def text_of(ids: tuple[int, ...]) -> str:
    return vocab.encoding().decode(ids)


def context() -> StreamingHarmonyContext:
    return StreamingHarmonyContext(ASKED, INFO)


def called() -> tuple[StreamingHarmonyContext, Call]:
    """A context whose model has just called, and the call."""
    turn = context()
    turn.append_output(ids_of(CALLS))
    call = turn.messages[-1]
    assert isinstance(call, Call)
    return turn, call


def test_starts_with_the_prompt() -> None:
    turn, rendered = context(), render(ASKED)
    assert turn.start() == [Started(len(rendered.ids))]
    assert turn.render_for_completion() == rendered.ids
    assert turn.messages == ASKED.messages


def test_messages_are_the_conversation_while_it_grows() -> None:
    turn = context()
    seen = []
    for token in ids_of(CALLS):
        turn.append_output([token])
        seen.append(turn.messages[1:])
    assert (Reasoning("Need"),) in seen
    assert seen[-1] == (
        Reasoning("Need add."),
        Call(INFO.call_id(1), "add", '{"a": 2}'),
    )


def test_every_delta_of_a_step_of_many_ids_survives() -> None:
    one, many = context(), context()
    single = [delta for token in ids_of(CALLS) for delta in one.append_output([token])]
    assert spoken(single) == spoken(many.append_output(ids_of(CALLS)))
    assert one.messages == many.messages


def spoken(deltas: list[Delta]) -> list[object]:
    """Deltas with adjacent text joined."""
    joined: list[object] = []
    for delta in deltas:
        if isinstance(delta, Text) and joined and isinstance(joined[-1], str):
            joined[-1] += delta.text
        else:
            joined.append(delta.text if isinstance(delta, Text) else delta)
    return joined


def test_no_ids_and_ids_behind_the_end_are_normal() -> None:
    turn = context()
    assert turn.append_output([]) == []
    turn.append_output(ids_of(ANSWERS + "<|start|>assistant"))
    turn.append_output(ids_of("more"))
    assert turn.done
    assert turn.messages[-1] == Answer("It is 4.")
    assert text_of(turn.render_for_completion()).endswith("It is 4.<|return|>")


def test_tool_results_are_in_conversation_and_next_prompt() -> None:
    turn, call = called()
    before = turn.render_for_completion()
    turn.append_tool_output([Result(call.id, "4")])
    after = turn.render_for_completion()
    assert turn.messages[-1] == Result(call.id, "4")
    assert after[: len(before)] == before
    assert text_of(after[len(before) :]) == RESULT + "<|start|>assistant"


def test_several_tool_outputs_are_answered_once() -> None:
    turn, call = called()
    before = turn.render_for_completion()
    turn.append_tool_output([Result(call.id, "4")])
    turn.append_tool_output([Result(call.id, "4")])
    assert text_of(turn.render_for_completion()[len(before) :]) == RESULT * 2 + "<|start|>assistant"


def test_the_output_behind_a_tool_result_continues_the_turn() -> None:
    turn, call = called()
    turn.append_tool_output([Result(call.id, "4")])
    prompt = turn.render_for_completion()
    assert not turn.done
    deltas = turn.append_output(ids_of(ANSWERS))
    assert deltas == [Opened(2, Kind.ANSWER), Text("It is 4."), Closed()]
    assert turn.messages[1:] == (
        Reasoning("Need add."),
        call,
        Result(call.id, "4"),
        Answer("It is 4."),
    )
    assert turn.render_for_completion() == (*prompt, *ids_of(ANSWERS))


def test_calls_of_one_turn_have_ids_of_their_own() -> None:
    turn, first = called()
    turn.append_tool_output([Result(first.id, "4")])
    turn.append_output(ids_of(CALLS))
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
def test_an_output_left_open_is_closed_by_what_follows(output: str, end: str) -> None:
    turn = StreamingHarmonyContext(
        Turn((User("?"), Call("c", "add", "{}"), Result("c", "1")), (Tool("add"),)), INFO
    )
    prompt = turn.render_for_completion()
    turn.append_output(ids_of(output))
    turn.append_tool_output([Result("c", "4")])
    expected = output.removesuffix("<|return|>") + end + RESULT + "<|start|>assistant"
    assert text_of(turn.render_for_completion()[len(prompt) :]) == expected


def test_a_result_of_no_call_changes_nothing() -> None:
    turn, _ = called()
    before = (turn.messages, turn.render_for_completion())
    with pytest.raises(RequestError) as caught:
        turn.append_tool_output([Result("nobody", "4", where="messages[7]")])
    assert caught.value.param == "messages[7]"
    assert (turn.messages, turn.render_for_completion()) == before


def test_finish_counts_the_whole_turn() -> None:
    turn, call = called()
    turn.append_tool_output([Result(call.id, "4")])
    turn.append_output(ids_of(ANSWERS))
    finished = turn.finish("stop", cached_tokens=7)[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.prompt_tokens == len(render(ASKED).ids)
    assert finished.usage.cached_tokens == 7
    assert finished.usage.completion_tokens == len(ids_of(CALLS + ANSWERS))
    assert finished.usage.reasoning_tokens == len(ids_of("Need add."))


def test_the_prompt_that_began_the_answer_is_continued() -> None:
    turn = StreamingHarmonyContext(Turn((User("?"),), prefill="The answer"), INFO)
    assert turn.append_output(ids_of(" is 4.<|return|>")) == [
        Opened(0, Kind.ANSWER),
        Text(" is 4."),
        Closed(),
    ]


def test_another_renderer_can_stand_in() -> None:
    rendered = Rendered((1, 2, 3), render(ASKED).names)
    turn = StreamingHarmonyContext(ASKED, INFO, renderer=lambda _: rendered)
    assert turn.render_for_completion() == (1, 2, 3)


_SPOKEN = {"reasoning": Reasoning, "preamble": Preamble, ANSWER: Answer}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_rows(row: Row) -> None:
    tools = tuple(map(Tool, row.tools))
    limits = OutputLimits(stop=row.stop, one_call=row.one_call)
    turn = StreamingHarmonyContext(Turn((User("?"),), tools, limits=limits), INFO)
    turn.append_output(ids_of(row.output))
    turn.finish("length" if row.cut else "stop")
    assert turn.messages[1:] == tuple(
        Call(INFO.call_id(index), *part[1:]) if part[0] == CALL else _SPOKEN[part[0]](part[1])
        for index, part in enumerate(row.expected)
    )


def generated(row: Row, step: int) -> tuple[StreamingHarmonyContext, list[Delta]]:
    """The turn of an engine that gives ``step`` ids at once and stops when it is done."""
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
def test_an_end_within_a_group_of_ids(row: Row, step: int) -> None:
    """Usage, ids and what can be placed again are as if the ids had come one by one."""
    (one, finished), (many, also) = generated(row, 1), generated(row, step)
    assert also[-1] == finished[-1]
    assert many.messages == one.messages
    assert many.render_for_completion() == one.render_for_completion()
    assert many.outputs == one.outputs


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("row", PLAYED, ids=lambda row: row.id)
def test_impersonated_messages_are_dropped(row: Row, step: int) -> None:
    """Neither among the ids nor in the next prompt, where it would be genuine."""
    turn, _ = generated(row, step)
    view = Replay(2**20).view("m")
    for output in turn.outputs:
        view.remember(output)
    calls = [message for message in turn.messages if isinstance(message, Call)]
    results = [Result(call.id, "Genuine") for call in calls] or [User("Genuine")]
    tools = tuple(map(Tool, row.tools))
    prompt = render(Turn((*turn.messages, *results), tools), view).ids
    asked = len(render(Turn((User("?"),), tools)).ids)
    kept = text_of(turn.render_for_completion()[asked:])
    assert kept == row.output[: len(kept)]
    between = text_of(prompt[asked - len(opening()) :]).partition("Genuine")[0]
    for made_up in ("No", "Never", "42"):
        assert made_up not in kept
        assert made_up not in between
    if row.finish != "length":  # a header that was cut is not in the prompt, either
        assert not re.search("<.start.>(?!assistant)", kept)
    assert len(re.findall("<.start.>(?!assistant)", between)) == len(results)


def test_played_behind_a_result_ends_before_it() -> None:
    turn, call = called()
    turn.append_tool_output([Result(call.id, "4")])
    prompt = turn.render_for_completion()
    for token in ids_of("<|start|>user<|message|>No.<|end|>"):
        turn.append_output([token])
    assert turn.done
    assert turn.render_for_completion() == prompt
    assert turn.messages[-1] == Result(call.id, "4")


@pytest.mark.parametrize("row", [row for row in ROWS if not row.cut], ids=lambda row: row.id)
def test_parse_of_render_gives_the_answer_back(row: Row) -> None:
    """Semantics D5, for every row: what was said, rendered canonically, is parsed to the same."""
    tools = tuple(map(Tool, row.tools))
    turn = StreamingHarmonyContext(Turn((User("?"),), tools), INFO)
    turn.append_output(ids_of(row.output))
    turn.finish("stop")
    generated = turn.messages[1:]
    prompt = render(Turn((User("?"),), tools)).ids
    again = StreamingHarmonyContext(Turn((User("?"),), tools), INFO)
    history = render(
        Turn((User("?"), *(m for m in generated if not isinstance(m, Reasoning))), tools)
    ).ids
    again.append_output(_behind(history, prompt))
    assert list(again.messages[1:]) == _renumbered(generated)


def _behind(history: tuple[int, ...], prompt: tuple[int, ...]) -> list[int]:
    """What stands in ``history`` behind ``prompt``, without the next ``<|start|>assistant``."""
    opening = ids_of("<|start|>assistant")
    assert history[: len(prompt)] == prompt or history == prompt
    return list(history[len(prompt) : -len(opening)])


def _renumbered(messages: tuple[object, ...]) -> list[object]:
    kept = [message for message in messages if not isinstance(message, Reasoning)]
    return [
        Call(INFO.call_id(index), message.name, message.arguments)
        if isinstance(message, Call)
        else message
        for index, message in enumerate(kept)
    ]
