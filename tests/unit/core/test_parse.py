"""The state machine against every row of semantics B, cut in every way, and its invariants (D)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from harmony_text import ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import Role, StreamableParser
from rows import ANSWER, CALL, POSITIONS, PREFIXES, REASONING, ROWS, WELL_FORMED, Row, noisy
from sizes import examples

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Text
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import TRANSITIONS, Parser, State
from vllm_mlx_harmony.core.turn import Tool, Turn

Chunks = list[Sequence[int]]


def parser_of(row: Row) -> Parser:
    return Parser(Names.of(Turn((), tuple(map(Tool, row.tools)))), row.stop, one_call=row.one_call)


def deltas_of(parser: Parser, chunks: Chunks, *, cut: bool = False) -> list[Delta]:
    """All deltas, adjacent text joined."""
    parsed = [delta for chunk in chunks for delta in parser.feed(chunk)]
    joined: list[Delta] = []
    for delta in [*parsed, *parser.close("length" if cut else "stop")]:
        if isinstance(delta, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + delta.text)
        else:
            joined.append(delta)
    return joined


def messages_of(deltas: list[Delta]) -> tuple[tuple[str, ...], ...]:
    messages: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, Opened):
            named = [delta.name] if delta.kind is Kind.CALL else []
            messages.append([delta.kind.value, *named, ""])
        elif isinstance(delta, Text):
            messages[-1][-1] += delta.text
    return tuple(map(tuple, messages))


def every_cut(ids: Sequence[int]) -> list[Chunks]:
    """Whole, id by id, with empty chunks, and in two at every place."""
    return [[ids], *id_by_id(ids), *([ids[:at], ids[at:]] for at in range(1, len(ids)))]


def id_by_id(ids: Sequence[int]) -> list[Chunks]:
    """With empty chunks between them, and without."""
    return [[[token] for token in ids], [chunk for token in ids for chunk in ([], [token])]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_is_parsed_to_expected_messages(row: Row) -> None:
    deltas = deltas_of(parser_of(row), [ids_of(row.output)], cut=row.cut)
    finished = deltas[-1]
    assert messages_of(deltas) == row.expected
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.stop_sequence) == (row.finish, row.stopped_by)
    closed = [delta.complete for delta in deltas if isinstance(delta, Closed)]
    assert closed == [True] * (len(row.expected) - 1) + [row.whole] * bool(row.expected)


@pytest.mark.parametrize(
    "cuts", [id_by_id, pytest.param(every_cut, marks=pytest.mark.once)], ids=["ids", "all"]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_chunking_does_not_change_deltas(
    row: Row, cuts: Callable[[Sequence[int]], list[Chunks]]
) -> None:
    ids = ids_of(row.output)
    whole = deltas_of(parser_of(row), [ids], cut=row.cut)
    for chunks in cuts(ids):
        assert deltas_of(parser_of(row), chunks, cut=row.cut) == whole


@pytest.mark.nightly(sample=24)
@pytest.mark.once
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("position", POSITIONS)
def test_noisy_header_is_read(position: str, prefix: str) -> None:
    for row in noisy(position, prefix):
        ids = ids_of(row.output)
        whole = deltas_of(parser_of(row), [ids])
        finished = whole[-1]
        assert isinstance(finished, Finished)
        assert (row.id, *messages_of(whole)) == (row.id, *row.expected)
        assert (row.id, finished.reason) == (row.id, row.finish)
        for chunks in every_cut(ids):
            assert (row.id, deltas_of(parser_of(row), chunks)) == (row.id, whole)


def test_every_state_has_transitions() -> None:
    assert set(TRANSITIONS) == set(State)


EMOJI = "🧑🏽‍🚀".encode()


@pytest.mark.parametrize(
    ("body", "cut", "text"),
    [
        pytest.param([b"a", b"\xf0\x9f", b"\x98\x80", b"b"], False, "a😀b", id="split"),
        pytest.param([b"a", b"\xf0\x9f", b"b"], False, "a\ufffdb", id="invalid in the middle"),
        pytest.param([b"a", b"\xf0\x9f"], False, "a\ufffd", id="invalid at the end"),
        pytest.param([b"b", b"\xf0\x9f"], True, "b", id="half a character, cut"),
        pytest.param([b"\x80", b"ok"], False, "\ufffdok", id="text behind survives"),
    ],
)
@pytest.mark.parametrize("header", ["<|channel|>final<|message|>", ""], ids=["body", "loose"])
def test_split_and_invalid_utf8_is_decoded(
    header: str, body: list[bytes], cut: bool, text: str
) -> None:
    end = [] if cut else [vocab.RETURN]
    ids = [*ids_of(header), *(byte_id for part in body for byte_id in raw_ids(part)), *end]
    for chunks in every_cut(ids):
        deltas = deltas_of(Parser(), chunks, cut=cut)
        assert messages_of(deltas) == ((ANSWER, text),)


def raw_ids(raw: bytes) -> list[int]:
    """Ids of single bytes: how a model spells bytes that are not UTF-8."""
    id_of_byte = {vocab.token_bytes(token): token for token in range(256)}
    return [id_of_byte[bytes([byte])] for byte in raw]


def test_half_character_in_header_does_not_reach_body() -> None:
    ids = [*raw_ids(b"\xf0\x9f"), *ids_of("<|message|>Hi.<|return|>")]
    assert messages_of(deltas_of(Parser(), [ids])) == ((ANSWER, "Hi."),)


def test_longest_name_that_fits_header_is_called() -> None:
    """A longer name has an alias of at most this length (A10)."""
    name = "n" * 242
    parser = Parser(Names.of(Turn((), (Tool(name),))))
    output = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}<|call|>"
    assert messages_of(deltas_of(parser, [ids_of(output)])) == ((CALL, name, "{}"),)


THINKS = "<|channel|>analysis<|message|>One two three.<|end|><|start|>assistant"
CALLS = '<|channel|>commentary to=%s<|constrain|>json<|message|>{"a":1}<|call|>'


@pytest.mark.parametrize(
    ("output", "reasoning", "calls"),
    [
        (f"{THINKS}<|channel|>final<|message|>Hi.<|return|>", "One two three.", ""),
        (f"{THINKS}{CALLS % 'functions.f'}", "One two three.", '{"a":1}'),
        (f"{THINKS}{CALLS % 'python'}", "One two three.", '{"a":1}'),
        ("<|channel|>final<|message|>Hi.<|return|>", "", ""),
    ],
)
def test_usage_counts_body_ids_of_each_kind(output: str, reasoning: str, calls: str) -> None:
    finished = deltas_of(Parser(), [ids_of(output)])[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.reasoning_tokens == len(ids_of(reasoning))
    assert finished.usage.call_tokens == len(ids_of(calls))
    assert finished.usage.completion_tokens == len(ids_of(output))


@pytest.mark.parametrize(
    ("output", "stop", "done"),
    [
        ("<|channel|>final<|message|>Hi.", (), False),
        ("<|channel|>final<|message|>Hi.<|end|>", (), False),
        ("<|channel|>final<|message|>Hi.<|return|>", (), True),
        ("<|channel|>final<|message|>Hi.<|endoftext|>", (), True),
        ("<|channel|>commentary to=x<|message|>{}<|call|>", (), True),
        ("<|channel|>final<|call|>", (), True),
        ("<|channel|>final<|message|>Hi.", ("i",), True),
        ("<|channel|>final<|message|>Hi.<|end|><|start|>user", (), False),
        ("<|channel|>final<|message|>Hi.<|end|><|start|>user<|message|>", (), True),
        ("<|channel|>final<|message|>Hi.<|end|><|start|>user,", (), False),
        ("<|channel|>final<|message|>Hi.<|end|><|start|>user, yes", (), True),
        ("<|start|>user<|message|>", (), True),
        ("user<|message|>", (), True),
        ("<|start|>assist<|message|>", (), False),
        ("<|start|>other<|channel|>", (), False),
        ("<|start|>other to=assistant<|channel|>", (), True),
        ("Hi.<|end|>", (), False),
    ],
)
def test_parser_is_done_when_no_more_ids_are_needed(
    output: str, stop: tuple[str, ...], done: bool
) -> None:
    parser = Parser(stop=stop)
    parser.feed(ids_of(output))
    assert parser.done is done


def test_resumed_parser_continues_turn() -> None:
    parser = Parser()
    first = parser.feed(ids_of('<|channel|>commentary to=x<|message|>{"a":1}<|call|>'))
    between = parser.resume()
    second = parser.feed(ids_of("<|channel|>final<|message|>Hi.<|return|>"))
    assert between == []
    assert messages_of(first) == (("call", "x", '{"a":1}'),)
    assert second == [Opened(1, Kind.ANSWER), Text("Hi."), Closed()]
    assert not parser.feed([1, 2, 3])


def test_resume_closes_open_message() -> None:
    parser = Parser()
    parser.feed(ids_of("<|channel|>commentary to=x<|message|>{}"))
    assert parser.resume() == [Closed()]


def test_prefilled_answer_is_continued() -> None:
    parser = Parser(answering=True)
    deltas = deltas_of(parser, [ids_of(" and so on.<|return|>")])
    assert messages_of(deltas) == ((ANSWER, " and so on."),)


def test_calls_are_opened_and_arguments_streamed_as_they_arrive() -> None:
    parser = Parser()
    assert parser.feed(ids_of("<|channel|>commentary to=functions.x<|message|>")) == [
        Opened(0, Kind.CALL, "x")
    ]
    assert parser.feed(ids_of('{"a":')) == [Text('{"a":')]


SPECIALS = st.sampled_from(
    [
        *(vocab.START, vocab.CHANNEL, vocab.CONSTRAIN, vocab.MESSAGE),
        *(vocab.END, vocab.CALL, vocab.RETURN, vocab.ENDOFTEXT),
        *(200_000, 200_013, 201_088, 201_089, 10**9, -1),
    ]
)
HEADERISH = st.sampled_from(
    [
        token
        for word in (
            "assistant",
            "user",
            "final",
            "analysis",
            "commentary",
            " to=",
            "functions",
            ".x",
            " json",
        )
        for token in ids_of(word)
    ]
)
ANY_IDS = st.lists(
    st.one_of(SPECIALS, HEADERISH, st.integers(0, vocab.STARTOFTEXT - 1)), max_size=60
)


@given(
    ids=ANY_IDS,
    cut=st.booleans(),
    stop=st.sampled_from([(), ("a",), (" the", "he")]),
    data=st.data(),
)
@settings(max_examples=examples(400), deadline=None)
def test_invariants_hold_for_any_ids(
    ids: list[int], cut: bool, stop: tuple[str, ...], data: st.DataObject
) -> None:
    at = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    chunks = [ids[a:b] for a, b in zip([0, *at], [*at, len(ids)], strict=True)]
    whole = deltas_of(Parser(stop=stop), [ids], cut=cut)
    assert deltas_of(Parser(stop=stop), chunks, cut=cut) == whole
    assert deltas_of(Parser(stop=stop), [[token] for token in ids], cut=cut) == whole
    check_nesting(whole)


def check_nesting(deltas: list[Delta]) -> None:
    """(Opened Text* Closed)* Finished, indexes counting, nothing empty but a cut call."""
    opened: Opened | None = None
    count = 0
    for delta in deltas[:-1]:
        if isinstance(delta, Opened):
            assert opened is None and delta.index == count
            opened, count = delta, count + 1
        elif isinstance(delta, Text):
            assert opened is not None and delta.text
        else:
            assert isinstance(delta, Closed) and opened is not None
            opened = None
    assert opened is None and isinstance(deltas[-1], Finished)


CONTROL_TEXT = "<|start|>a<|end|><|message|><|call|><|return|>"
BODIES = st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace").decode())


def body_ids(text: str) -> list[int]:
    return vocab.encode(text)


@st.composite
def transcripts(draw: st.DrawFn) -> list[int]:
    """Well-formed outputs: as openai-harmony's own parser reads them."""
    ids: list[int] = []
    for position in range(draw(st.integers(1, 5))):
        header = draw(
            st.sampled_from(
                [
                    "<|channel|>analysis",
                    "<|channel|>commentary",
                    "<|channel|>final",
                    "<|channel|>commentary to=functions.x <|constrain|>json",
                    " to=functions.x<|channel|>commentary <|constrain|>json",
                    "<|channel|>analysis to=functions.x code",
                ]
            )
        )
        body = draw(BODIES)
        start = "<|start|>assistant" if position else ""
        end = "<|call|>" if "to=" in header else "<|end|>"
        ids += [*ids_of(f"{start}{header}<|message|>"), *body_ids(body), *ids_of(end)]
    return ids


@given(ids=transcripts())
@settings(max_examples=examples(300), deadline=None)
def test_parser_agrees_with_openai_harmony_on_well_formed_output(ids: list[int]) -> None:
    assert messages_of(deltas_of(Parser(), [ids])) == reference(ids)


@pytest.mark.parametrize("row", WELL_FORMED, ids=lambda row: row.id)
def test_reference_agrees_with_rows(row: Row) -> None:
    assert reference(ids_of(row.output)) == row.expected


def reference(ids: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """What openai-harmony's parser makes of ``ids``, in the words of a row."""
    parser = StreamableParser(vocab.encoding(), Role.ASSISTANT)
    for token in ids:
        parser.process(token)
    parser.process_eos()
    rows: list[tuple[str, ...]] = []
    for message in parser.messages:
        text = "".join(part.text for part in message.content)
        if message.author.role is not Role.ASSISTANT:
            continue
        if message.recipient is not None:
            name = message.recipient.removeprefix("functions.")
            rows.append((CALL, name, text or "{}"))
        elif text:
            rows.append(
                (
                    {"analysis": REASONING, "commentary": "preamble"}.get(message.channel, ANSWER),
                    text,
                )
            )
    return tuple(rows)


@given(text=st.text(max_size=40))
def test_spelled_control_tokens_are_text(text: str) -> None:
    """In a body, they are text that the model wrote, and they come back as text."""
    body = CONTROL_TEXT + text
    ids = [*ids_of("<|channel|>final<|message|>"), *body_ids(body), vocab.RETURN]
    shown = body.encode("utf-8", "replace").decode()
    expected = vocab.encoding().decode(body_ids(body))
    assert messages_of(deltas_of(Parser(), [ids])) in (((ANSWER, shown),), ((ANSWER, expected),))


@pytest.mark.nightly(sample=6)
@pytest.mark.once
@pytest.mark.parametrize(
    "repeated",
    [
        "<|channel|>final<|message|>",
        " to=x",
        "assistant ",
        "<|start|>",
        "<|channel|>",
        " ",
        "\n",
        "<|end|>",
        "um<|end|>",
        "<|channel|>commentary to=x",
        "<|channel|>functions.x",
        "<|start|>assistant um",
    ],
    ids=repr,
)
def test_memory_does_not_grow_with_output(repeated: str) -> None:
    parser = Parser()
    chunk = ids_of(repeated) * 500
    for _ in range(3):
        parser.feed(chunk)
    tracemalloc.start()
    for _ in range(20):
        parser.feed(chunk)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert allocated < 20_000
