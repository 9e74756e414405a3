"""Replay: a generated turn keeps its ids in a history, and an edited turn is rendered as sent.

An output is written as its spans: (message, Harmony text with control tokens spelled out).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from harmony_text import ids_of, text_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.render import Rendered, render
from vllm_mlx_harmony.core.replay import (
    GeneratedTurn,
    Output,
    Replay,
    ReplayScope,
    history_hash,
    intern_ids,
)
from vllm_mlx_harmony.core.turn import (
    Answer,
    Call,
    Instructions,
    Message,
    Preamble,
    Reasoning,
    Result,
    Tool,
    Turn,
    User,
)

Part = tuple[Message, str]
LIMIT = 2**20
GO = "<|start|>assistant"


def output_of(*parts: Part, before: tuple[Message, ...] = (User("Hi"),)) -> Output:
    """The output that was generated after ``before``; its first part begins with the opening.

    ``¦`` marks the end of the last message, if it has ended.
    """
    ids: list[int] = []
    begins, ended = [], 0
    for _, text in parts:
        ended = len(ids)
        begins.append(len(ids) or 2)
        for piece in text.split("¦"):
            ended = ended if piece == text else len(ids)
            ids += ids_of(piece)
    messages = tuple(message for message, _ in parts)
    return Output(before, messages, tuple(ids), tuple(begins), ended)


def view_of(*outputs: Output, limit: int = LIMIT) -> ReplayScope:
    view = Replay(limit).view("m")
    for output in outputs:
        view.remember(output)
    return view


def split_messages(rendered: Rendered) -> list[str]:
    """The messages of the prompt; its system and developer messages are one part."""
    leading = tuple(map(ids_of, ("<|start|>system", "<|start|>developer")))
    begins = [at for at, token in enumerate(rendered.ids) if token == vocab.START]
    cuts = [at for at in begins if rendered.ids[at : at + 2] not in leading]
    return [text_of(rendered.ids[a:b]) for a, b in pairwise([0, *cuts, len(rendered.ids)])]


def history(rendered: Rendered) -> str:
    """The prompt without system and developer message, and without the opening at its end."""
    return "".join(split_messages(rendered)[1:-1])


def render_history(view: ReplayScope | None, *messages: Message) -> str:
    return history(render(Turn((User("Hi"), *messages), (Tool("x"), Tool("y"))), view))


# Generated spans, in forms that rendering would not choose.

REASONING = (Reasoning("Hm."), f"{GO}<|channel|>analysis<|message|>Hm.<|end|>")
PREAMBLE = (Preamble("I look."), f"{GO}<|channel|>commentary <|message|>I look.<|end|>")
CALL_X = (
    Call("c1", "x", '{"a": 1}'),
    f'{GO} to=functions.x<|channel|>commentary code<|message|>{{"a": 1}}<|call|>',
)
CALL_Y = (
    Call("c2", "y", "{}"),
    f"{GO}<|channel|>analysis to=functions.y<|message|>{{}}<|end|>",
)
ANSWER = (Answer("Yes."), f"{GO}<|channel|>final <|constrain|>text<|message|>Yes.<|return|>")

ANSWER_IN_HISTORY = ANSWER[1].replace("<|return|>", "<|end|>")
LOOP = output_of(REASONING, PREAMBLE, CALL_X)
LOOP_TEXT = REASONING[1] + PREAMBLE[1] + CALL_X[1]
LOOP_AS_SENT = (PREAMBLE[0], CALL_X[0])
RESULT = Result("c1", "ok")
RESULT_TEXT = "<|start|>functions.x to=assistant<|channel|>commentary<|message|>ok<|end|>"
HI = "<|start|>user<|message|>Hi<|end|>"
MORE = "<|start|>user<|message|>More<|end|>"


def call(arguments: str = '{"a": 1}', key: str = "c1", name: str = "x") -> Call:
    return Call(key, name, arguments)


def is_known(view: ReplayScope, message: Message) -> bool:
    """Whether ``message`` is known as a generated turn."""
    ((_, found),) = view.history([message])
    return found is not None


# name: what a client sends back of LOOP, and whether that is the generated turn.
ECHOES: dict[str, tuple[tuple[Message, ...], bool]] = {
    "as it was": ((REASONING[0], *LOOP_AS_SENT), True),
    "without reasoning": (LOOP_AS_SENT, True),
    "with other reasoning": ((Reasoning("A summary."), *LOOP_AS_SENT), True),
    "with reasoning in two places": (
        (PREAMBLE[0], Reasoning("x"), CALL_X[0], Reasoning("y")),
        True,
    ),
    "the content taken for an answer": ((Answer("I look."), CALL_X[0]), True),
    "the content behind the call": ((CALL_X[0], PREAMBLE[0]), True),
    "arguments written anew": ((PREAMBLE[0], call('{\n "a":1}')), True),
    "a number as JavaScript writes it": ((PREAMBLE[0], call('{"a":1.0}')), True),
    "other content": ((Preamble("I look!"), CALL_X[0]), False),
    "content trimmed": ((Preamble("I look"), CALL_X[0]), False),
    "no content": ((CALL_X[0],), False),
    "more content": ((PREAMBLE[0], Preamble("Now."), CALL_X[0]), False),
    "other arguments": ((PREAMBLE[0], call('{"a": 2}')), False),
    "arguments of another type": ((PREAMBLE[0], call('{"a": true}')), False),
    "arguments as a string": ((PREAMBLE[0], call('{"a": "1"}')), False),
    "arguments that are no JSON": ((PREAMBLE[0], call('{"a": 1')), False),
    "no arguments": ((PREAMBLE[0], call("{}")), False),
    "another tool": ((PREAMBLE[0], call(name="y")), False),
    "another id": ((PREAMBLE[0], call(key="c9")), False),
    "one call more": ((PREAMBLE[0], CALL_X[0], call(key="c9")), False),
    "one call before": ((PREAMBLE[0], call(key="c9"), CALL_X[0]), False),
    "no call": ((PREAMBLE[0],), False),
}


@pytest.mark.parametrize(("sent", "unchanged"), ECHOES.values(), ids=ECHOES.keys())
def test_turn_is_replayed_unless_client_edited_it(
    sent: tuple[Message, ...], unchanged: bool
) -> None:
    result = Result(next((message.id for message in sent if isinstance(message, Call)), ""), "ok")
    rest = (result,) if result.call_id else ()
    prompt = render_history(view_of(LOOP), *sent, *rest)
    if unchanged:
        assert prompt == HI + LOOP_TEXT + RESULT_TEXT
    else:
        assert prompt == render_history(None, *sent, *rest)


# name: generated arguments, sent arguments, and whether they are the same call.
ARGUMENTS: dict[str, tuple[str, str, bool]] = {
    "order": ('{"a":1,"b":[{"c":2,"d":3}]}', '{"b":[{"d":3,"c":2}],"a":1}', True),
    "order in a list": ('{"a":[1,2]}', '{"a":[2,1]}', False),
    "escapes": ('{"a":"\\u00e9/\\ud83d\\ude42"}', '{"a":"é\\/🙂"}', True),
    "exponents": ('{"a":1e2}', '{"a":100}', True),
    "fractions": ('{"a":0.10}', '{"a":0.1}', True),
    "large numbers": ('{"a":12345678901234567890}', '{"a":12345678901234567000}', False),
    "infinite": ('{"a":1e999}', '{"a":2e999}', True),  # a client cannot tell them apart
    "null": ('{"a":null}', "{}", False),
    "no JSON, the same": ("a: 1", "a: 1", True),
    "no JSON, another": ("a: 1", "a:  1", False),
    "nothing": ("", "{}", True),
    "too deep": ("[" * 100_000, "[" * 99_999, False),
    "too long to compare": ("{}", "{" + " " * 2**22 + "}", False),
    "too many values to compare": (f"[{'0,' * 100_000}0]", f"[ {'0,' * 100_000}0]", False),
    "too many digits": ("9" * 5_000, " " + "9" * 5_000, False),
}


@pytest.mark.parametrize(("ours", "theirs", "same"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_equivalent_arguments_are_same_call(ours: str, theirs: str, same: bool) -> None:
    generated = output_of((call(ours), f"{GO} to=x<|message|>…<|call|>"))
    assert is_known(view_of(generated), call(theirs)) is same


PLAIN = output_of(REASONING, ANSWER)
TWICE = output_of(REASONING, PREAMBLE, ANSWER)
CHAT_CONTENT = Answer("I look.\nYes.")

# name: outputs, the messages sent after "Hi", and the history in the prompt.
HISTORIES: dict[str, tuple[tuple[Output, ...], tuple[Message, ...], str]] = {
    "a loop keeps its reasoning": ((LOOP,), (*LOOP_AS_SENT, RESULT), LOOP_TEXT + RESULT_TEXT),
    "an answer drops its reasoning": (
        (PLAIN,),
        (ANSWER[0], User("More")),
        ANSWER_IN_HISTORY + MORE,
    ),
    "an answer drops a loop's reasoning": (
        (LOOP, output_of(ANSWER, before=(User("Hi"), *LOOP_AS_SENT, RESULT))),
        (*LOOP_AS_SENT, RESULT, ANSWER[0], User("More")),
        PREAMBLE[1] + CALL_X[1] + RESULT_TEXT + ANSWER_IN_HISTORY + MORE,
    ),
    "joined content is two messages again": (
        (TWICE,),
        (CHAT_CONTENT, User("More")),
        PREAMBLE[1] + ANSWER_IN_HISTORY + MORE,
    ),
    "a preamble that Chat calls an answer is none": (
        (output_of(REASONING, PREAMBLE),),
        (Answer("I look."), User("More")),
        REASONING[1] + PREAMBLE[1] + MORE,
    ),
    "calls of one turn, results in another order": (
        (output_of(REASONING, CALL_Y, CALL_X),),
        (CALL_Y[0], CALL_X[0], RESULT, Result("c2", "no")),
        REASONING[1]
        + CALL_Y[1]
        + CALL_X[1]
        + RESULT_TEXT
        + "<|start|>functions.y to=assistant<|channel|>commentary<|message|>no<|end|>",
    ),
    "calls of one turn in another order": (
        (output_of(CALL_Y, CALL_X),),
        (CALL_X[0], CALL_Y[0]),
        render_history(None, CALL_X[0], CALL_Y[0])[len(HI) :],
    ),
    "a loop behind an edited turn": (
        (LOOP, output_of(CALL_Y, before=(User("Hi"), *LOOP_AS_SENT, RESULT))),
        (Preamble("Edited."), CALL_X[0], RESULT, CALL_Y[0], Result("c2", "no")),
        render_history(None, Preamble("Edited."), CALL_X[0], RESULT)[len(HI) :]
        + CALL_Y[1]
        + "<|start|>functions.y to=assistant<|channel|>commentary<|message|>no<|end|>",
    ),
    "reasoning that nothing followed is not asked for": (
        (output_of(REASONING),),
        (Reasoning("Hm."), User("More")),
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>" + MORE,
    ),
    "junk before, between and behind": (
        (
            output_of(
                (REASONING[0], f"{GO}um<|channel|>analysis<|message|>Hm.<|end|> junk"),
                (CALL_X[0], CALL_X[1].replace("<|call|>", "<|end|><|start|>assistant<|message|>")),
            ),
        ),
        (CALL_X[0], RESULT),
        f"{GO}um<|channel|>analysis<|message|>Hm.<|end|> junk"
        + CALL_X[1].replace("<|call|>", "<|end|><|start|>assistant<|message|><|call|>")
        + RESULT_TEXT,
    ),
}


@pytest.mark.parametrize(("outputs", "sent", "expected"), HISTORIES.values(), ids=HISTORIES.keys())
def test_history_is_rendered_from_outputs(
    outputs: tuple[Output, ...], sent: tuple[Message, ...], expected: str
) -> None:
    assert render_history(view_of(*outputs), *sent) == HI + expected


# name: the end of a generated answer, and its end in a history.
ENDS: dict[str, tuple[str, str]] = {
    "return": ("Yes.<|return|>¦", "Yes.<|end|>"),
    "end of text": ("Yes.<|endoftext|>¦", "Yes.<|end|>"),
    "end": ("Yes.<|end|>¦", "Yes.<|end|>"),
    "cut in the body": ("Yes.", "Yes.<|end|>"),
    "cut in the next header": ("Yes.<|end|>¦<|start|>assistant<|channel|>fin", "Yes.<|end|>"),
    "cut behind the next header's channel": ("Yes.<|end|>¦assistant<|channel|>", "Yes.<|end|>"),
    "cut in a header that ended the body": ("Yes.¦<|channel|>analysis", "Yes.<|end|>"),
    "cut at the next start": ("Yes.¦<|start|>", "Yes.<|end|>"),
    "cut in a header behind junk": ("Yes.<|end|>¦junk<|start|>assistant", "Yes.<|end|>"),
    "cut in the second of two": ("Yes.¦<|start|>junk<|start|>assistant", "Yes.<|end|>"),
    "junk alone, cut": ("Yes.<|end|>¦ jun", "Yes.<|end|>"),
    "returned in a header": (
        "Yes.<|end|>¦<|start|>assistant<|return|>",
        "Yes.<|end|><|start|>assistant<|end|>",
    ),
    "cut in what is not shown": (
        "Yes.<|end|>¦<|start|>assistant<|message|>",
        "Yes.<|end|><|start|>assistant<|message|><|end|>",
    ),
}


@pytest.mark.parametrize(("generated", "expected"), ENDS.values(), ids=ENDS.keys())
def test_answer_ends_as_in_history(generated: str, expected: str) -> None:
    header = f"{GO}<|channel|>final code<|message|>"
    view = view_of(output_of((Answer("Yes."), header + generated)))
    assert render_history(view, Answer("Yes."), User("More")) == HI + header + expected + MORE


@pytest.mark.parametrize(("end", "expected"), [("", "<|call|>"), ("<|end|>", "<|end|>")])
def test_open_call_is_closed(end: str, expected: str) -> None:
    text = f"{GO} to=x<|message|>{{}}"
    view = view_of(output_of((call("{}"), text + end + "¦" * bool(end))))
    assert render_history(view, call("{}")) == HI + text + expected


BODIES = ["Yes.", " to=user<|channel|>final Yes.", "junk<|channel|>final Yes."]


@pytest.mark.parametrize("text", BODIES)
def test_header_read_as_body_is_preserved(text: str) -> None:
    """Output without a header is an answer, and all of it is kept."""
    view = view_of(output_of((Answer("Yes."), GO + text)))
    assert render_history(view, Answer("Yes.")) == HI + f"{GO}{text}<|end|>"


def test_cut_header_after_headerless_body_is_dropped() -> None:
    view = view_of(output_of((Answer("Yes."), f"{GO}Yes.¦<|start|>assistant")))
    assert render_history(view, Answer("Yes.")) == HI + f"{GO}Yes.<|end|>"


# Second messages whose header does not begin with <|start|>: after their reasoning they can be
# replayed; without it they would have no beginning.
UNMARKED = [
    "assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>final<|message|>Yes.<|return|>",
    "Yes.<|return|>",
]


@pytest.mark.parametrize("text", UNMARKED)
def test_unusable_span_is_rendered_anew(text: str) -> None:
    view = view_of(output_of(REASONING, (Answer("Yes."), text)))
    assert render_history(view, Answer("Yes."), User("More")) == render_history(
        None, Answer("Yes."), User("More")
    )


@pytest.mark.parametrize("text", UNMARKED)
def test_unmarked_span_is_replayed_after_its_reasoning(text: str) -> None:
    view = view_of(output_of(REASONING, (Preamble("Yes."), text)))
    expected = REASONING[1] + text.replace("<|return|>", "<|end|>")
    assert render_history(view, Preamble("Yes."), User("More")) == HI + expected + MORE


def test_turn_with_messages_beyond_its_ids_is_not_recorded() -> None:
    beyond = output_of(CALL_X, CALL_Y)
    beyond = replace(beyond, ids=beyond.ids[: beyond.begins[1]])
    replay = Replay(LIMIT)
    replay.view("m").remember(beyond)
    assert len(replay._turns) == 0


def test_empty_turn_is_not_recorded() -> None:
    replay = Replay(LIMIT)
    replay.view("m").remember(output_of(REASONING))
    replay.view("m").remember(Output((), (), ids_of(f"{GO}<|channel|>fin"), (), 2))
    assert (len(replay._turns), replay._turns.size) == (0, 0)


# --- A turn without calls is identified by the history before it.

OTHER = f"{GO}<|channel|>final<|constrain|><|message|>Yes.<|return|>"


def test_same_answer_after_other_history_is_another_turn() -> None:
    other = output_of((Answer("Yes."), OTHER), before=(User("Really?"),))
    view = view_of(PLAIN, other)
    assert render_history(view, Answer("Yes.")) == HI + ANSWER_IN_HISTORY
    prompt = render(Turn((User("Really?"), Answer("Yes."))), view)
    assert history(prompt) == "<|start|>user<|message|>Really?<|end|>" + OTHER.replace(
        "<|return|>", "<|end|>"
    )
    again = render(Turn((User("Really?"), Answer("Yes."), User("Hi"), Answer("Yes."))), view)
    assert history(again).endswith("<|start|>assistant<|channel|>final<|message|>Yes.<|end|>")


def test_repeated_answer_replaces_first() -> None:
    view = view_of(PLAIN, output_of((Answer("Yes."), OTHER)))
    assert render_history(view, Answer("Yes.")) == HI + OTHER.replace("<|return|>", "<|end|>")


A = (User("a"), Preamble("b"), call(key="c1"), Result("c1", "r", "messages[3]"))
# name: two conversations, and whether they have the same history_hash.
HISTORY_PAIRS: dict[str, tuple[tuple[Message, ...], tuple[Message, ...], bool]] = {
    "reasoning": ((User("a"), Reasoning("t"), Answer("b")), (User("a"), Answer("b")), True),
    "joined content": (
        (User("a"), Preamble("b"), Answer("c")),
        (User("a"), Answer("b\nc")),
        True,
    ),
    "instructions": ((Instructions("i"), *A), A, True),
    "instructions alone": ((Instructions("i"),), (), True),
    "ids, arguments and places": (
        A,
        (User("a"), Answer("b"), call("{}", "c7"), Result("c7", "r")),
        True,
    ),
    "another user": ((User("a"),), (User("b"),), False),
    "a result is no user": ((User("a"), User("r")), (User("a"), Result("c", "r")), False),
    "an assistant is no user": ((User("a"),), (Answer("a"),), False),
    "another result": (A, (*A[:-1], Result("c1", "s")), False),
    "another tool": (A, (*A[:2], call(name="y"), A[3]), False),
    "one more": (A, (*A, User("c")), False),
    "order": ((User("a"), User("b")), (User("b"), User("a")), False),
}


@pytest.mark.parametrize(
    ("first", "second", "same"), HISTORY_PAIRS.values(), ids=HISTORY_PAIRS.keys()
)
def test_history_hash_covers_what_client_sees(
    first: tuple[Message, ...], second: tuple[Message, ...], same: bool
) -> None:
    assert (history_hash(first) == history_hash(second)) is same


# --- Bounds and tenants.


def numbered(number: int) -> Output:
    key = f"c{number}"
    return output_of((call("{}", key), f"{GO} to=x<|message|>{number:04d}<|call|>"))


def test_least_recently_used_turns_are_evicted() -> None:
    single = Replay(LIMIT)
    single.view("m").remember(numbered(0))
    replay = Replay(single._turns.size * 10)
    view = replay.view("m")
    for number in range(10):
        view.remember(numbered(number))
    assert is_known(view, call("{}", "c0"))
    for number in range(10, 14):
        view.remember(numbered(number))
        assert replay._turns.size <= single._turns.size * 10
    remembered = [number for number in range(14) if is_known(view, call("{}", f"c{number}"))]
    assert remembered == [0, *range(5, 14)]


def test_limit_of_zero_remembers_nothing() -> None:
    replay = Replay(0)
    replay.view("m").remember(LOOP)
    assert (len(replay._turns), replay._turns.size) == (0, 0)


def test_counted_size_is_close_to_memory_size() -> None:
    text = "word " * 20_000
    big = output_of((Answer(text), f"{GO}<|channel|>final<|message|>{text}<|return|>"))
    replay = Replay(LIMIT)
    replay.view("m").remember(big)
    assert 8 * len(big.ids) + len(text) < replay._turns.size < 9 * len(big.ids) + len(text) + 2_000


def test_tenants_do_not_share_turns() -> None:
    replay = Replay(LIMIT)
    replay.view("a").remember(LOOP)
    replay.view("a").remember(PLAIN)
    for sent in (LOOP_AS_SENT, (ANSWER[0],)):
        assert render_history(replay.view("b"), *sent) == render_history(None, *sent)
        assert render_history(replay.view("a"), *sent) != render_history(None, *sent)


def test_interned_ids_share_objects() -> None:
    first, second = intern_ids([123_456, 300_000]), intern_ids([int("123456")])
    assert (first, second) == ((123_456, 300_000), (123_456,))
    assert first[0] is second[0]


# --- Rendering.


def test_empty_replay_changes_nothing() -> None:
    turn = Turn((User("Hi"), *LOOP_AS_SENT, RESULT), (Tool("x"),))
    assert render(turn, Replay(LIMIT).view("m")) == render(turn)


def test_result_without_call_is_rejected() -> None:
    with pytest.raises(RequestError) as caught:
        render_history(view_of(LOOP), *LOOP_AS_SENT, Result("c7", "ok", "messages[3]"))
    assert caught.value.param == "messages[3]"


def test_messages_are_rendered_in_order() -> None:
    turn = Turn((Instructions("Obey"), User("Hi"), *LOOP_AS_SENT, RESULT), (Tool("x"),))
    prefix, *messages = split_messages(render(turn, view_of(LOOP)))
    assert prefix.startswith("<|start|>system") and prefix.count("<|start|>") == 2
    assert messages == [HI, REASONING[1], PREAMBLE[1], CALL_X[1], RESULT_TEXT, GO]


def test_history_hash_is_same_in_every_process() -> None:
    """Stored turns outlive the process, and Python's own ``hash`` differs between processes."""
    program = (
        "from vllm_mlx_harmony.core.replay import history_hash;"
        "from vllm_mlx_harmony.core.turn import Answer, User;"
        "print(history_hash((User('a'), Answer('b \\ud83d'))))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert hashes == {b"%d\n" % history_hash((User("a"), Answer("b \ud83d")))}


# --- Turns that only an archive has.


class Archive(dict[bytes, GeneratedTurn]):
    """An archive that records the keys of used turns."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[bytes] = []

    blocks = False

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        self[key] = turn

    def find(self, keys: Sequence[bytes]) -> list[GeneratedTurn | None]:
        return [self.get(key) for key in keys]

    def use(self, key: bytes) -> None:
        self.used.append(key)


@pytest.mark.parametrize(
    ("generated", "echoed", "text"),
    [(LOOP, LOOP_AS_SENT, LOOP_TEXT), (PLAIN, (Answer("Yes."),), ANSWER_IN_HISTORY)],
    ids=["known by its call", "known by its history_hash"],
)
def test_turns_of_another_process_are_found_in_archive(
    generated: Output, echoed: tuple[Message, ...], text: str
) -> None:
    archive = Archive()
    Replay(LIMIT, archive).view("m").remember(generated)
    again = Replay(LIMIT, archive)
    assert render_history(again.view("m"), *echoed) == HI + text
    assert len(again._turns) == 1 and archive.used == []  # from now on it is in memory
    assert render_history(again.view("m"), *echoed) == HI + text
    assert archive.used == list(archive)
    other = render_history(Replay(LIMIT, archive).view("another's"), *echoed)
    assert other == render_history(None, *echoed) != HI + text


def test_edited_turn_is_not_replayed() -> None:
    archive = Archive()
    Replay(LIMIT, archive).view("m").remember(LOOP)
    again = Replay(LIMIT, archive).view("m")
    edited = (PREAMBLE[0], call('{"a": 2}'))
    assert render_history(again, *edited) == render_history(None, *edited)
