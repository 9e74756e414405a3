"""Which ids come back with their log probabilities: those whose text is content, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harmony_text import ids_of
from rows import ROWS, Row

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.deltas import Delta, Kind, Opened, Text, TextLogprob, TokenLogprob
from vllm_mlx_harmony.core.header import LOOSE_LIMIT
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import OutputLimits, ResponseInfo, Tool, Turn, User

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1, "m")


def logprobs_of_positions(ids: Sequence[int]) -> list[TokenLogprob]:
    """Log probabilities whose values are the positions of the ids."""
    return [TokenLogprob(token, -float(at)) for at, token in enumerate(ids)]


def parse_row(row: Row, *, with_logprobs: bool) -> list[Delta]:
    names = Names.of(Turn((), tuple(map(Tool, row.tools))))
    parser = Parser(names, row.stop, one_call=row.one_call)
    ids = ids_of(row.output)
    if with_logprobs:
        deltas = [
            delta for logprob in logprobs_of_positions(ids) for delta in parser.feed_one(logprob)
        ]
    else:
        deltas = [delta for token in ids for delta in parser.feed((token,))]
    return [*deltas, *parser.close("length" if row.cut else "stop")]


def collect_messages(deltas: list[Delta]) -> list[tuple[Kind, str, list[TextLogprob]]]:
    messages: list[tuple[Kind, str, list[TextLogprob]]] = []
    for delta in deltas:
        if isinstance(delta, Opened):
            messages.append((delta.kind, "", []))
        elif isinstance(delta, Text):
            kind, text, logprobs = messages.pop()
            messages.append((kind, text + delta.text, [*logprobs, *delta.logprobs]))
    return messages


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_logprobs_cover_content_and_change_no_deltas(row: Row) -> None:
    plain, deltas = parse_row(row, with_logprobs=False), parse_row(row, with_logprobs=True)
    assert [Text(delta.text) if isinstance(delta, Text) else delta for delta in deltas] == plain
    for kind, text, logprobs in collect_messages(deltas):
        places = [-logprob.logprob for logprob in logprobs]
        assert places == sorted(set(places))
        if kind not in (Kind.PREAMBLE, Kind.ANSWER):
            assert not logprobs
            continue
        content = b"".join(logprob.content or b"" for logprob in logprobs)
        shown = content.decode("utf-8", "replace")
        if row.stop:  # the last id may be shown in part
            assert shown.lstrip().startswith(text)
        else:  # the first may have ended the header
            assert shown.endswith(text)
            later = b"".join(logprob.content or b"" for logprob in logprobs[1:])
            assert not later.decode("utf-8", "replace").endswith(text)


FINAL = "<|channel|>final<|message|>"
PILOT = ids_of("🧑🏽‍🚀!")
CLEAN: dict[str, tuple[tuple[int, ...], tuple[str, ...], str, list[int]]] = {
    # name: the body, stop strings, the text, the places of its ids in the body
    "text": (ids_of("Hello there."), (), "Hello there.", [0, 1, 2]),
    "a character of several ids": (
        ids_of("🧑🏽‍🚀!"),
        (),
        "🧑🏽‍🚀!",
        [*range(len(ids_of("🧑🏽‍🚀!")))],
    ),
    "a stop string that is an id": (ids_of("One two three"), (" two",), "One", [0]),
    "a stop string within an id": (ids_of("One two three"), ("wo",), "One t", [0, 1]),
    "what might be one is not": (ids_of("One two three"), (" two!",), "One two three", [0, 1, 2]),
}


@pytest.mark.parametrize(("body", "stop", "text", "places"), CLEAN.values(), ids=CLEAN)
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_logprob_comes_with_its_text(
    body: tuple[int, ...], stop: tuple[str, ...], text: str, places: list[int], at_once: int
) -> None:
    turn = Turn((User("Hi"),), limits=OutputLimits(stop=stop))
    context = StreamingHarmonyContext(turn, INFO)
    header = ids_of(FINAL)
    ids = [*header, *body, vocab.RETURN]
    logprobs = logprobs_of_positions(ids)
    deltas = []
    for at in range(0, len(ids), at_once):
        deltas += context.append_output(ids[at : at + at_once], logprobs[at : at + at_once])
    assert context.done
    ((kind, shown, returned),) = collect_messages(deltas)
    assert (kind, shown) == (Kind.ANSWER, text)
    expected = [(at, body[at]) for at in places]
    assert returned == [
        TextLogprob(vocab.token_text(token), vocab.token_bytes(token), -float(len(header) + at))
        for at, token in expected
    ]
    for delta in deltas:  # none before its text
        if isinstance(delta, Text) and not stop:
            content = b"".join(logprob.content or b"" for logprob in delta.logprobs)
            assert content.decode() == delta.text


HEADERLESS = {
    # output: the first id whose text is content
    "Hi!": 0,
    "word " * 60: 0,
    "🧑🏽‍🚀 and more": 0,
    " 🎉 first": 0,  # the first byte of the character is in an id with the space
    "final I forgot": 1,
    "<|channel|>final 🎉 first": 2,
    'final json{"a":1}': 2,
    "Hi.<|end|>": 0,
    "um<|end|>Hi.": 2,
    "<|channel|>commentary?commentary?<|end|>": 1,
}


@pytest.mark.parametrize(("output", "first"), HEADERLESS.items(), ids=HEADERLESS)
@pytest.mark.parametrize("end", [[], [vocab.RETURN]], ids=["cut", "returned"])
@pytest.mark.parametrize("at_once", [1, 100])
def test_headerless_text_has_logprobs(
    output: str, first: int, end: list[int], at_once: int
) -> None:
    context = StreamingHarmonyContext(Turn((User("Hi"),)), INFO)
    ids = [*ids_of(output), *end]
    logprobs = logprobs_of_positions(ids)
    deltas = []
    for at in range(0, len(ids), at_once):
        deltas += context.append_output(ids[at : at + at_once], logprobs[at : at + at_once])
    deltas += context.finish("stop" if end else "length")
    ((kind, text, returned),) = collect_messages(deltas)
    assert kind is Kind.ANSWER
    texts = [at for at in range(first, len(ids)) if ids[at] not in vocab.CONTROL]
    assert [-logprob.logprob for logprob in returned] == texts
    content = b"".join(logprob.content or b"" for logprob in returned).decode()
    assert content.strip() == text.strip()


def test_logprobs_of_long_header_are_dropped() -> None:
    parser = Parser()
    for logprob in logprobs_of_positions(ids_of("assistant " * 5_000)):
        parser.feed_one(logprob)
    assert len(parser._logprobs) <= LOOSE_LIMIT


def test_control_tokens_have_name_and_no_bytes() -> None:
    (word,) = vocab.encode(" word")
    top = tuple((token, -1.0) for token in (vocab.RETURN, vocab.UNUSED, word))
    context = StreamingHarmonyContext(Turn((User("Hi"),)), INFO)
    ids = [*ids_of(FINAL), word]
    deltas = context.append_output(ids, [TokenLogprob(token, -2.0, top) for token in ids])
    ((_, _, (logprob,)),) = collect_messages(deltas)
    assert (logprob.text, logprob.content, logprob.logprob) == (" word", b" word", -2.0)
    assert [(alternative.text, alternative.content) for alternative in logprob.top] == [
        ("<|return|>", None),
        (f"<|reserved_{vocab.UNUSED}|>", None),
        (" word", b" word"),
    ]
