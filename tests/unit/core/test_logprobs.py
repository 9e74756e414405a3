"""Which ids come back with their log probabilities: those whose text is content, and no others."""

from __future__ import annotations

import pytest
from rows import ROWS, Row
from rows import ids as ids_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.deltas import Delta, Kind, Opened, Text, TextLogprob, TokenLogprob
from vllm_mlx_harmony.core.header import LOOSE_LIMIT
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.turn import OutputLimits, ResponseInfo, Tool, Turn, User

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1, "m")


def scored(ids: list[int]) -> list[TokenLogprob]:
    """The place of each id as its log probability."""
    return [TokenLogprob(token, -float(at)) for at, token in enumerate(ids)]


def parsed(row: Row, *, with_logprobs: bool) -> list[Delta]:
    names = Names.of(Turn((), tuple(map(Tool, row.tools))))
    parser = Parser(names, row.stop, one_call=row.one_call)
    ids = ids_of(row.output)
    if with_logprobs:
        deltas = [delta for each in scored(ids) for delta in parser.feed_one(each)]
    else:
        deltas = [delta for token in ids for delta in parser.feed((token,))]
    return [*deltas, *parser.close("length" if row.cut else "stop")]


def messages(deltas: list[Delta]) -> list[tuple[Kind, str, list[TextLogprob]]]:
    found: list[tuple[Kind, str, list[TextLogprob]]] = []
    for delta in deltas:
        if isinstance(delta, Opened):
            found.append((delta.kind, "", []))
        elif isinstance(delta, Text):
            kind, text, logprobs = found.pop()
            found.append((kind, text + delta.text, [*logprobs, *delta.logprobs]))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_they_change_nothing_and_are_those_of_content(row: Row) -> None:
    plain, deltas = parsed(row, with_logprobs=False), parsed(row, with_logprobs=True)
    assert [Text(each.text) if isinstance(each, Text) else each for each in deltas] == plain
    for kind, text, logprobs in messages(deltas):
        places = [-each.logprob for each in logprobs]
        assert places == sorted(set(places))
        if kind not in (Kind.PREAMBLE, Kind.ANSWER):
            assert not logprobs
            continue
        written = b"".join(each.content or b"" for each in logprobs)
        shown = written.decode("utf-8", "replace")
        if row.stop:  # the last id may be shown in part
            assert shown.lstrip().startswith(text)
        else:  # the first may have ended the header
            assert shown.endswith(text)
            later = b"".join(each.content or b"" for each in logprobs[1:])
            assert not later.decode("utf-8", "replace").endswith(text)


FINAL = "<|channel|>final<|message|>"
PILOT = ids_of("🧑🏽‍🚀!")
CLEAN: dict[str, tuple[list[int], tuple[str, ...], str, list[int]]] = {
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
def test_id_comes_with_its_text(
    body: list[int], stop: tuple[str, ...], text: str, places: list[int], at_once: int
) -> None:
    turn = Turn((User("Hi"),), limits=OutputLimits(stop=stop))
    context = StreamingHarmonyContext(turn, INFO)
    header = ids_of(FINAL)
    ids = [*header, *body, vocab.RETURN]
    logprobs = scored(ids)
    deltas = []
    for at in range(0, len(ids), at_once):
        deltas += context.append_output(ids[at : at + at_once], logprobs[at : at + at_once])
    assert context.done
    ((kind, shown, found),) = messages(deltas)
    assert (kind, shown) == (Kind.ANSWER, text)
    expected = [(at, body[at]) for at in places]
    assert found == [
        TextLogprob(vocab.token_text(token), vocab.token_bytes(token), -float(len(header) + at))
        for at, token in expected
    ]
    for delta in deltas:  # none before its text
        if isinstance(delta, Text) and not stop:
            content = b"".join(each.content or b"" for each in delta.logprobs)
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
def test_text_without_a_header_has_them(
    output: str, first: int, end: list[int], at_once: int
) -> None:
    context = StreamingHarmonyContext(Turn((User("Hi"),)), INFO)
    ids = [*ids_of(output), *end]
    logprobs = scored(ids)
    deltas = []
    for at in range(0, len(ids), at_once):
        deltas += context.append_output(ids[at : at + at_once], logprobs[at : at + at_once])
    deltas += context.finish("stop" if end else "length")
    ((kind, text, found),) = messages(deltas)
    assert kind is Kind.ANSWER
    texts = [at for at in range(first, len(ids)) if ids[at] not in vocab.CONTROL]
    assert [-each.logprob for each in found] == texts
    written = b"".join(each.content or b"" for each in found).decode()
    assert written.strip() == text.strip()


def test_those_of_a_long_header_are_not_kept() -> None:
    parser = Parser()
    for each in scored(ids_of("assistant " * 5_000)):
        parser.feed_one(each)
    assert len(parser._logprobs) <= LOOSE_LIMIT


def test_control_tokens_have_a_name_and_no_bytes() -> None:
    (word,) = vocab.encode(" word")
    top = tuple((token, -1.0) for token in (vocab.RETURN, vocab.UNUSED, word))
    context = StreamingHarmonyContext(Turn((User("Hi"),)), INFO)
    ids = [*ids_of(FINAL), word]
    deltas = context.append_output(ids, [TokenLogprob(token, -2.0, top) for token in ids])
    ((_, _, (found,)),) = messages(deltas)
    assert (found.text, found.content, found.logprob) == (" word", b" word", -2.0)
    assert [(each.text, each.content) for each in found.top] == [
        ("<|return|>", None),
        (f"<|reserved_{vocab.UNUSED}|>", None),
        (" word", b" word"),
    ]
