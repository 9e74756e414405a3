"""What was generated stands in a history as it was; what a client edited, as the client sent it.

An output is written as its spans: (message, Harmony text with control tokens written out).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from rows import ids as ids_of

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


def text_of(ids: Sequence[int]) -> str:
    return vocab.encoding().decode(list(ids))


def output(*parts: Part, before: tuple[Message, ...] = (User("Hi"),)) -> Output:
    """What was generated behind ``before``; the first part's text begins with the opening.

    ``¦`` is where the last message has ended, if it has.
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


def remembering(*outputs: Output, limit: int = LIMIT) -> ReplayScope:
    view = Replay(limit).view("m")
    for each in outputs:
        view.remember(each)
    return view


def starts(rendered: Rendered) -> list[str]:
    """The prompt, cut where messages begin; the system and developer messages are one part."""
    leading = tuple(map(tuple, map(ids_of, ("<|start|>system", "<|start|>developer"))))
    begins = [at for at, token in enumerate(rendered.ids) if token == vocab.START]
    cuts = [at for at in begins if rendered.ids[at : at + 2] not in leading]
    return [text_of(rendered.ids[a:b]) for a, b in pairwise([0, *cuts, len(rendered.ids)])]


def history(rendered: Rendered) -> str:
    """The prompt without system and developer message, and without the opening at its end."""
    return "".join(starts(rendered)[1:-1])


def placed(view: ReplayScope | None, *messages: Message) -> str:
    return history(render(Turn((User("Hi"), *messages), (Tool("x"), Tool("y"))), view))


# What was generated: with marks that rendering anew would not write.

THOUGHT = (Reasoning("Hm."), f"{GO}<|channel|>analysis<|message|>Hm.<|end|>")
TOLD = (Preamble("I look."), f"{GO}<|channel|>commentary <|message|>I look.<|end|>")
CALLED = (
    Call("c1", "x", '{"a": 1}'),
    f'{GO} to=functions.x<|channel|>commentary code<|message|>{{"a": 1}}<|call|>',
)
CALLED_Y = (
    Call("c2", "y", "{}"),
    f"{GO}<|channel|>analysis to=functions.y<|message|>{{}}<|end|>",
)
SAID = (Answer("Yes."), f"{GO}<|channel|>final <|constrain|>text<|message|>Yes.<|return|>")

SAID_IN_HISTORY = SAID[1].replace("<|return|>", "<|end|>")
LOOP = output(THOUGHT, TOLD, CALLED)
LOOP_TEXT = THOUGHT[1] + TOLD[1] + CALLED[1]
LOOP_AS_SENT = (TOLD[0], CALLED[0])
RESULT = Result("c1", "ok")
RESULT_TEXT = "<|start|>functions.x to=assistant<|channel|>commentary<|message|>ok<|end|>"
HI = "<|start|>user<|message|>Hi<|end|>"
MORE = "<|start|>user<|message|>More<|end|>"


def call(arguments: str = '{"a": 1}', key: str = "c1", name: str = "x") -> Call:
    return Call(key, name, arguments)


def is_known(view: ReplayScope, message: Message) -> bool:
    """Whether ``message`` is a turn as it was generated."""
    ((_, found),) = view.history([message])
    return found is not None


# What a client sends back of LOOP -> whether it is the turn that was generated.
ECHOES: dict[str, tuple[tuple[Message, ...], bool]] = {
    "as it was": ((THOUGHT[0], *LOOP_AS_SENT), True),
    "without reasoning": (LOOP_AS_SENT, True),
    "with other reasoning": ((Reasoning("A summary."), *LOOP_AS_SENT), True),
    "with reasoning in two places": ((TOLD[0], Reasoning("x"), CALLED[0], Reasoning("y")), True),
    "the content taken for an answer": ((Answer("I look."), CALLED[0]), True),
    "the content behind the call": ((CALLED[0], TOLD[0]), True),
    "arguments written anew": ((TOLD[0], call('{\n "a":1}')), True),
    "a number as JavaScript writes it": ((TOLD[0], call('{"a":1.0}')), True),
    "other content": ((Preamble("I look!"), CALLED[0]), False),
    "content trimmed": ((Preamble("I look"), CALLED[0]), False),
    "no content": ((CALLED[0],), False),
    "more content": ((TOLD[0], Preamble("Now."), CALLED[0]), False),
    "other arguments": ((TOLD[0], call('{"a": 2}')), False),
    "arguments of another type": ((TOLD[0], call('{"a": true}')), False),
    "arguments as a string": ((TOLD[0], call('{"a": "1"}')), False),
    "arguments that are no JSON": ((TOLD[0], call('{"a": 1')), False),
    "no arguments": ((TOLD[0], call("{}")), False),
    "another tool": ((TOLD[0], call(name="y")), False),
    "another id": ((TOLD[0], call(key="c9")), False),
    "one call more": ((TOLD[0], CALLED[0], call(key="c9")), False),
    "one call before": ((TOLD[0], call(key="c9"), CALLED[0]), False),
    "no call": ((TOLD[0],), False),
}


@pytest.mark.parametrize(("sent", "unchanged"), ECHOES.values(), ids=ECHOES.keys())
def test_unchanged_in_what_the_client_can_see(sent: tuple[Message, ...], unchanged: bool) -> None:
    result = Result(next((m.id for m in sent if isinstance(m, Call)), ""), "ok")
    rest = (result,) if result.call_id else ()
    given = placed(remembering(LOOP), *sent, *rest)
    if unchanged:
        assert given == HI + LOOP_TEXT + RESULT_TEXT
    else:
        assert given == placed(None, *sent, *rest)


# Arguments as they were generated, and as they were sent -> whether that is the same call.
ARGUMENTS: dict[str, tuple[str, str, bool]] = {
    "order": ('{"a":1,"b":[{"c":2,"d":3}]}', '{"b":[{"d":3,"c":2}],"a":1}', True),
    "order in a list": ('{"a":[1,2]}', '{"a":[2,1]}', False),
    "escapes": ('{"a":"\\u00e9/\\ud83d\\ude42"}', '{"a":"é\\/🙂"}', True),
    "exponents": ('{"a":1e2}', '{"a":100}', True),
    "fractions": ('{"a":0.10}', '{"a":0.1}', True),
    "large numbers": ('{"a":12345678901234567890}', '{"a":12345678901234567000}', False),
    "infinite": ('{"a":1e999}', '{"a":2e999}', True),  # neither can be told apart by a client
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
def test_arguments(ours: str, theirs: str, same: bool) -> None:
    generated = output((call(ours), f"{GO} to=x<|message|>…<|call|>"))
    assert is_known(remembering(generated), call(theirs)) is same


PLAIN = output(THOUGHT, SAID)
TWICE = output(THOUGHT, TOLD, SAID)
CHAT_CONTENT = Answer("I look.\nYes.")

# outputs, messages sent behind "Hi" -> the prompt
PLACED: dict[str, tuple[tuple[Output, ...], tuple[Message, ...], str]] = {
    "a loop keeps its reasoning": ((LOOP,), (*LOOP_AS_SENT, RESULT), LOOP_TEXT + RESULT_TEXT),
    "an answer drops its reasoning": ((PLAIN,), (SAID[0], User("More")), SAID_IN_HISTORY + MORE),
    "an answer drops a loop's reasoning": (
        (LOOP, output(SAID, before=(User("Hi"), *LOOP_AS_SENT, RESULT))),
        (*LOOP_AS_SENT, RESULT, SAID[0], User("More")),
        TOLD[1] + CALLED[1] + RESULT_TEXT + SAID_IN_HISTORY + MORE,
    ),
    "joined content is two messages again": (
        (TWICE,),
        (CHAT_CONTENT, User("More")),
        TOLD[1] + SAID_IN_HISTORY + MORE,
    ),
    "a preamble that Chat calls an answer is none": (
        (output(THOUGHT, TOLD),),
        (Answer("I look."), User("More")),
        THOUGHT[1] + TOLD[1] + MORE,
    ),
    "calls of one turn, results in another order": (
        (output(THOUGHT, CALLED_Y, CALLED),),
        (CALLED_Y[0], CALLED[0], RESULT, Result("c2", "no")),
        THOUGHT[1]
        + CALLED_Y[1]
        + CALLED[1]
        + RESULT_TEXT
        + "<|start|>functions.y to=assistant<|channel|>commentary<|message|>no<|end|>",
    ),
    "calls of one turn in another order": (
        (output(CALLED_Y, CALLED),),
        (CALLED[0], CALLED_Y[0]),
        placed(None, CALLED[0], CALLED_Y[0])[len(HI) :],
    ),
    "a loop behind an edited turn": (
        (LOOP, output(CALLED_Y, before=(User("Hi"), *LOOP_AS_SENT, RESULT))),
        (Preamble("Edited."), CALLED[0], RESULT, CALLED_Y[0], Result("c2", "no")),
        placed(None, Preamble("Edited."), CALLED[0], RESULT)[len(HI) :]
        + CALLED_Y[1]
        + "<|start|>functions.y to=assistant<|channel|>commentary<|message|>no<|end|>",
    ),
    "reasoning that nothing followed is not asked for": (
        (output(THOUGHT),),
        (Reasoning("Hm."), User("More")),
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>" + MORE,
    ),
    "junk before, between and behind": (
        (
            output(
                (THOUGHT[0], f"{GO}um<|channel|>analysis<|message|>Hm.<|end|> junk"),
                (CALLED[0], CALLED[1].replace("<|call|>", "<|end|><|start|>assistant<|message|>")),
            ),
        ),
        (CALLED[0], RESULT),
        f"{GO}um<|channel|>analysis<|message|>Hm.<|end|> junk"
        + CALLED[1].replace("<|call|>", "<|end|><|start|>assistant<|message|><|call|>")
        + RESULT_TEXT,
    ),
}


@pytest.mark.parametrize(("outputs", "sent", "expected"), PLACED.values(), ids=PLACED.keys())
def test_placed(outputs: tuple[Output, ...], sent: tuple[Message, ...], expected: str) -> None:
    assert placed(remembering(*outputs), *sent) == HI + expected


# How the model ended an answer -> how it stands in a history.
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
def test_ended_as_in_a_history(generated: str, expected: str) -> None:
    header = f"{GO}<|channel|>final code<|message|>"
    view = remembering(output((Answer("Yes."), header + generated)))
    assert placed(view, Answer("Yes."), User("More")) == HI + header + expected + MORE


@pytest.mark.parametrize(("end", "expected"), [("", "<|call|>"), ("<|end|>", "<|end|>")])
def test_a_call_is_ended_as_one(end: str, expected: str) -> None:
    text = f"{GO} to=x<|message|>{{}}"
    view = remembering(output((call("{}"), text + end + "¦" * bool(end))))
    assert placed(view, call("{}")) == HI + text + expected


BODIES = ["Yes.", " to=user<|channel|>final Yes.", "junk<|channel|>final Yes."]


@pytest.mark.parametrize("text", BODIES)
def test_header_read_as_body_is_preserved(text: str) -> None:
    """An answer without any mark is one: nothing of it is left out."""
    view = remembering(output((Answer("Yes."), GO + text)))
    assert placed(view, Answer("Yes.")) == HI + f"{GO}{text}<|end|>"


def test_a_header_behind_such_a_body_does_not() -> None:
    view = remembering(output((Answer("Yes."), f"{GO}Yes.¦<|start|>assistant")))
    assert placed(view, Answer("Yes.")) == HI + f"{GO}Yes.<|end|>"


# Second messages whose header does not begin with <|start|>: in a row with the reasoning before
# them they stand as they were, without it they would have no beginning.
UNMARKED = [
    "assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>final<|message|>Yes.<|return|>",
    "Yes.<|return|>",
]


@pytest.mark.parametrize("text", UNMARKED)
def test_unusable_span_is_rendered_anew(text: str) -> None:
    view = remembering(output(THOUGHT, (Answer("Yes."), text)))
    assert placed(view, Answer("Yes."), User("More")) == placed(None, Answer("Yes."), User("More"))


@pytest.mark.parametrize("text", UNMARKED)
def test_it_stands_where_nothing_is_dropped(text: str) -> None:
    view = remembering(output(THOUGHT, (Preamble("Yes."), text)))
    expected = THOUGHT[1] + text.replace("<|return|>", "<|end|>")
    assert placed(view, Preamble("Yes."), User("More")) == HI + expected + MORE


def test_turn_with_messages_beyond_its_ids_is_not_recorded() -> None:
    beyond = output(CALLED, CALLED_Y)
    beyond = replace(beyond, ids=beyond.ids[: beyond.begins[1]])
    replay = Replay(LIMIT)
    replay.view("m").remember(beyond)
    assert len(replay._turns) == 0


def test_empty_turn_is_not_recorded() -> None:
    replay = Replay(LIMIT)
    replay.view("m").remember(output(THOUGHT))
    replay.view("m").remember(Output((), (), tuple(ids_of(f"{GO}<|channel|>fin")), (), 2))
    assert (len(replay._turns), replay._turns.size) == (0, 0)


# --- A turn without calls is known by what was said before it.

OTHER = f"{GO}<|channel|>final<|constrain|><|message|>Yes.<|return|>"


def test_the_same_answer_to_something_else_is_another_turn() -> None:
    other = output((Answer("Yes."), OTHER), before=(User("Really?"),))
    view = remembering(PLAIN, other)
    assert placed(view, Answer("Yes.")) == HI + SAID_IN_HISTORY
    asked = render(Turn((User("Really?"), Answer("Yes."))), view)
    assert history(asked) == "<|start|>user<|message|>Really?<|end|>" + OTHER.replace(
        "<|return|>", "<|end|>"
    )
    again = render(Turn((User("Really?"), Answer("Yes."), User("Hi"), Answer("Yes."))), view)
    assert history(again).endswith("<|start|>assistant<|channel|>final<|message|>Yes.<|end|>")


def test_the_same_answer_once_more_replaces_the_first() -> None:
    view = remembering(PLAIN, output((Answer("Yes."), OTHER)))
    assert placed(view, Answer("Yes.")) == HI + OTHER.replace("<|return|>", "<|end|>")


A = (User("a"), Preamble("b"), call(key="c1"), Result("c1", "r", "messages[3]"))
# Two conversations -> whether they are one history_hash.
STORIES: dict[str, tuple[tuple[Message, ...], tuple[Message, ...], bool]] = {
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


@pytest.mark.parametrize(("one", "other", "same"), STORIES.values(), ids=STORIES.keys())
def test_story(one: tuple[Message, ...], other: tuple[Message, ...], same: bool) -> None:
    assert (history_hash(one) == history_hash(other)) is same


# --- Bounds, and who may see what.


def numbered(number: int) -> Output:
    key = f"c{number}"
    return output((call("{}", key), f"{GO} to=x<|message|>{number:04d}<|call|>"))


def test_never_more_than_the_limit_and_the_last_used_stay() -> None:
    one = Replay(LIMIT)
    one.view("m").remember(numbered(0))
    replay = Replay(one._turns.size * 10)
    view = replay.view("m")
    for number in range(10):
        view.remember(numbered(number))
    assert is_known(view, call("{}", "c0"))
    for number in range(10, 14):
        view.remember(numbered(number))
        assert replay._turns.size <= one._turns.size * 10
    known = [number for number in range(14) if is_known(view, call("{}", f"c{number}"))]
    assert known == [0, *range(5, 14)]


def test_a_limit_of_nothing_remembers_nothing() -> None:
    replay = Replay(0)
    replay.view("m").remember(LOOP)
    assert (len(replay._turns), replay._turns.size) == (0, 0)


def test_a_size_is_about_what_it_takes() -> None:
    text = "word " * 20_000
    big = output((Answer(text), f"{GO}<|channel|>final<|message|>{text}<|return|>"))
    replay = Replay(LIMIT)
    replay.view("m").remember(big)
    assert 8 * len(big.ids) + len(text) < replay._turns.size < 9 * len(big.ids) + len(text) + 2_000


def test_no_tenant_sees_another() -> None:
    replay = Replay(LIMIT)
    replay.view("a").remember(LOOP)
    replay.view("a").remember(PLAIN)
    for sent in (LOOP_AS_SENT, (SAID[0],)):
        assert placed(replay.view("b"), *sent) == placed(None, *sent)
        assert placed(replay.view("a"), *sent) != placed(None, *sent)


def test_ids_kept_share_their_objects() -> None:
    one, other = intern_ids([123_456, 300_000]), intern_ids([int("123456")])
    assert (one, other) == ((123_456, 300_000), (123_456,))
    assert one[0] is other[0]


# --- Rendering.


def test_without_replay_nothing_is_different() -> None:
    turn = Turn((User("Hi"), *LOOP_AS_SENT, RESULT), (Tool("x"),))
    assert render(turn, Replay(LIMIT).view("m")) == render(turn)


def test_a_result_without_its_call_is_refused_all_the_same() -> None:
    with pytest.raises(RequestError) as refused:
        placed(remembering(LOOP), *LOOP_AS_SENT, Result("c7", "ok", "messages[3]"))
    assert refused.value.param == "messages[3]"


def test_messages_are_rendered_in_order() -> None:
    turn = Turn((Instructions("Obey"), User("Hi"), *LOOP_AS_SENT, RESULT), (Tool("x"),))
    prefix, *messages = starts(render(turn, remembering(LOOP)))
    assert prefix.startswith("<|start|>system") and prefix.count("<|start|>") == 2
    assert messages == [HI, THOUGHT[1], TOLD[1], CALLED[1], RESULT_TEXT, GO]


def test_a_story_is_the_same_in_every_process() -> None:
    """Turns that outlive a process are found by it: Python's own hash is another in each."""
    program = (
        "from vllm_mlx_harmony.core.replay import history_hash;"
        "from vllm_mlx_harmony.core.turn import Answer, User;"
        "print(history_hash((User('a'), Answer('b \\ud83d'))))"
    )
    requested = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert requested == {b"%d\n" % history_hash((User("a"), Answer("b \ud83d")))}


# --- What memory has not, an archive may have.


class StoredResponse(dict[bytes, GeneratedTurn]):
    """An archive, and the keys that were used."""

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
    [(LOOP, LOOP_AS_SENT, LOOP_TEXT), (PLAIN, (Answer("Yes."),), SAID_IN_HISTORY)],
    ids=["known by its call", "known by its history_hash"],
)
def test_turns_of_another_process_are_found_in_the_archive(
    generated: Output, echoed: tuple[Message, ...], text: str
) -> None:
    archive = StoredResponse()
    Replay(LIMIT, archive).view("m").remember(generated)
    again = Replay(LIMIT, archive)
    assert placed(again.view("m"), *echoed) == HI + text
    assert len(again._turns) == 1 and archive.used == []  # from now on it is in memory
    assert placed(again.view("m"), *echoed) == HI + text
    assert archive.used == list(archive)
    other = placed(Replay(LIMIT, archive).view("another's"), *echoed)
    assert other == placed(None, *echoed) != HI + text


def test_edited_turn_is_not_replayed() -> None:
    archive = StoredResponse()
    Replay(LIMIT, archive).view("m").remember(LOOP)
    again = Replay(LIMIT, archive).view("m")
    edited = (TOLD[0], call('{"a": 2}'))
    assert placed(again, *edited) == placed(None, *edited)
