"""Reasoning budgets and loops: which ids are forced or banned after an output."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from harmony_text import ids_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Finished
from vllm_mlx_harmony.core.header import LOOSE_LIMIT
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.reasoning import (
    GRACE,
    MAX_LOOP,
    MAX_PERIOD,
    MIN_LOOP,
    MIN_OCCURRENCES,
    Loop,
    ReasoningWatch,
)
from vllm_mlx_harmony.core.turn import Tool, Turn

ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
NAMES = Names.of(Turn((), (Tool("f"),)))


def output_of(watch: ReasoningWatch, output: str) -> str:
    """``output`` up to the first forced id, and the forced ids."""
    ids: list[int] = []
    for token in ids_of(output):
        if watch.forced:
            break
        ids.append(token)
        watch.consume(token)
    while watch.forced:
        ids.append(watch.forced[0])
        watch.consume(ids[-1])
    return vocab.encoding().decode(ids)


@dataclass(frozen=True)
class Row:
    id: str
    limit: int | None
    output: str
    expected: str
    """All ids, when none are forced any more."""
    tokens: int


ROWS = [
    Row("no limit", None, ANALYSIS + "One, two.", ANALYSIS + "One, two.", 4),
    Row("within it", 4, ANALYSIS + "One two", ANALYSIS + "One two", 2),
    Row("at the end of a sentence", 3,
        ANALYSIS + "One two. Three", ANALYSIS + "One two." + NEXT, 3),
    Row("at the next comma", 2,
        ANALYSIS + "One two three, four", ANALYSIS + "One two three," + NEXT, 4),
    Row("nothing at all", 0, ANALYSIS + "One", ANALYSIS + NEXT, 0),
    Row("no word ends", 2, ANALYSIS + " a" * 99, ANALYSIS + " a" * (2 + GRACE) + NEXT, 2 + GRACE),
    Row("over several messages", 3, ANALYSIS + "One." + NEXT + ANALYSIS + "Two. Three",
        ANALYSIS + "One." + NEXT + ANALYSIS + "Two." + NEXT, 4),
    Row("an answer is no reasoning", 1, "<|channel|>final<|message|>One. Two. Three.",
        "<|channel|>final<|message|>One. Two. Three.", 0),
    Row("a preamble is none", 1, "<|channel|>commentary<|message|>One. Two.",
        "<|channel|>commentary<|message|>One. Two.", 0),
    Row("a call is none", 1, "<|channel|>analysis to=python code<|message|>a; b; c;",
        "<|channel|>analysis to=python code<|message|>a; b; c;", 0),
    Row("a call with a content type is none", 1,
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>a; b;",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>a; b;", 0),
    Row("a call whose recipient is in an earlier channel is none", 1,
        "<|channel|>f<|channel|>analysis json<|message|>a; b;",
        "<|channel|>f<|channel|>analysis json<|message|>a; b;", 0),
    Row("to nobody", 1, "<|channel|>analysis to=assistant<|message|>One. Two",
        "<|channel|>analysis to=assistant<|message|>One." + NEXT, 2),
    Row("a header without marker", 1, "assistant analysis<|message|>One. Two",
        "assistant analysis<|message|>One." + NEXT, 2),
    Row("a header that does not end", 10, "<|channel|>analysis" + " One," * 99,
        "<|channel|>analysis" + " One," * 16 + NEXT, LOOSE_LIMIT),
    Row("a header that does not end, within a word", 10, "<|channel|>analysis" + " a" * 99,
        "<|channel|>analysis" + " a" * (LOOSE_LIMIT + GRACE) + NEXT, LOOSE_LIMIT + GRACE),
    Row("a header that does not end, within the budget", 50, "<|channel|>analysis" + " One," * 99,
        "<|channel|>analysis" + " One," * 25 + NEXT, 50),
    Row("a header of an answer that does not end", 10, "<|channel|>final" + " One," * 99,
        "<|channel|>final" + " One," * 99, 0),
    Row("not within a character", 0 + 1, ANALYSIS + "\N{BRAHMI LETTER A}\N{BRAHMI LETTER A}",
        ANALYSIS + "\N{BRAHMI LETTER A}" * 2, 8),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_budget_ends_reasoning(row: Row) -> None:
    watch = ReasoningWatch(row.limit, names=NAMES)
    assert output_of(watch, row.output) == row.expected
    assert watch.tokens == row.tokens
    assert watch.ended_by == ("budget" if row.expected.endswith(NEXT) else "")
    parser = Parser(NAMES)
    parser.feed(ids_of(row.expected))
    *_, finished = parser.close("length")
    assert isinstance(finished, Finished)
    assert finished.usage.reasoning_tokens == watch.tokens


def test_analysis_is_banned_after_budget() -> None:
    watch = ReasoningWatch(1)
    output_of(watch, ANALYSIS + "One. Two")
    assert watch.banned == frozenset()
    watch.consume(vocab.CHANNEL)
    banned = {vocab.token_bytes(token) for token in watch.banned}
    assert {b"analysis", b"an", b"a"} <= banned
    assert not banned & {b"final", b"commentary", b"fin", b"com", b"c", b""}
    names = (b"analysis", b" analysis")
    texts = {vocab.token_bytes(token) for token in range(vocab.STARTOFTEXT)}
    assert banned == {text for text in texts if any(name.startswith(text) for name in names)}
    watch.consume(ids_of("final")[0])
    assert watch.banned == frozenset()


@pytest.mark.parametrize("before", ["", ANALYSIS + "One", ANALYSIS + "One two"])
def test_reasoning_ends_on_request(before: str) -> None:
    """At the next end of a word, or as soon as reasoning begins."""
    watch = ReasoningWatch(repetitions=1000, names=NAMES)
    for token in ids_of(before):
        watch.consume(token)
    assert watch.forced == () and watch.idle_for(5)
    watch.end()
    rest = " three, four." if before else ANALYSIS + "One"
    assert not watch.idle_for(5) or not before
    assert output_of(watch, rest) == (" three," + NEXT if before else ANALYSIS + NEXT)
    assert watch.ended_by == "request"


def test_answer_is_not_ended_on_request() -> None:
    watch = ReasoningWatch(repetitions=1000)
    watch.end()
    text = "<|channel|>final<|message|>One. Two."
    assert output_of(watch, text) == text
    assert watch.ended_by == ""


def test_no_channel_is_banned_before_budget() -> None:
    watch = ReasoningWatch(5)
    watch.consume(vocab.CHANNEL)
    assert watch.banned == frozenset()


def test_forced_end_restarts_after_another_id() -> None:
    watch = ReasoningWatch(1)
    for token in ids_of(ANALYSIS + "One."):
        watch.consume(token)
    assert watch.forced[0] == vocab.END
    watch.consume(ids_of(" Two.")[0])
    assert watch.forced == () or watch.forced[0] == vocab.END


def test_prefilled_answer_is_no_reasoning() -> None:
    watch = ReasoningWatch(0, answering=True)
    for token in ids_of("assistant analysis is one. Two."):
        watch.consume(token)
    assert (watch.forced, watch.tokens) == ((), 0)


LINES = "Wait, the user wants the file.\nLet me think about the file again.\nI should open it.\n"
REPETITIONS = 32
"""The default of a server."""


def ids_until_loop(ids: Iterable[int], repetitions: int = REPETITIONS) -> int | None:
    """The number of ids after which a loop was found, or ``None``."""
    loop = Loop(repetitions)
    for count, token in enumerate(ids, 1):
        loop.consume(token)
        if loop.found:
            return count
    return None


ROW = "2025-08-05,Oslo,18.5,0.0,NW,1013\n"
STACK = "".join(f'  File "app/{name}.py", line 7, in {name}\n    {name}(job)\n' for name in "abcde")
ITEM = {"id": 0, "name": "", "tags": [], "active": False, "position": {"x": 0, "y": 0}}

TABLES = {
    "a grid of 10 by 10 zeros": ("0 " * 10 + "\n") * 10,
    "a grid of 32 by 32 zeros": ("0 " * 32 + "\n") * 32,
    "the same as Python": repr([[0] * 28 for _ in range(28)]),
    "a dump of 512 zeros": ("00 " * 16 + "\n") * 32,
    "a dump of a page of zeros, with addresses": "".join(
        f"{at:08x}  " + "00 " * 16 + "|" + "." * 16 + "|\n" for at in range(0, 4096, 16)
    ),
    "9 equal rows of CSV": ROW * 9,
    "60 equal rows of CSV": ROW * 60,
    "rows that differ in a number": "".join(f"{n},Oslo,18.5\n" for n in range(2_000)),
    "28 equal objects of JSON": json.dumps([ITEM] * 28, indent=1),
    "the same line of a log": "WARN connection refused, trying again\n" * 200,
    "a log with times": "".join(
        f"12:00:{n % 60:02}.{n:04} WARN connection refused\n" for n in range(800)
    ),
    "a stack of calls again and again": STACK * 12,
    "a rule of a table": "|" + "---|" * 300,
    "a line of dashes": "-" * 4_000,
    "a sequence of bits": "01" * 1_000,
    "an array in C": "0x00, " * 256,
    "a multiplication table": "".join(
        f"{a} × {b} = {a * b}\n" for a in range(40) for b in range(40)
    ),
    "a list": "".join(f"{n}. Line number {n} of the list.\n" for n in range(2_000)),
    "a rhyme": "Row, row, row your boat\nGently down the stream\n" * 30,
}


@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES)
def test_tables_are_no_loops(text: str) -> None:
    ids = vocab.encode(text)
    assert ids_until_loop(ids) is None
    watch = ReasoningWatch(repetitions=REPETITIONS)
    for token in [*ids_of(ANALYSIS), *ids]:
        watch.consume(token)
    assert (watch.forced, watch.ended_by) == ((), "")


SOURCES = sorted(Path(json.__file__).parent.parent.glob("*.py"))


@pytest.mark.nightly
@pytest.mark.once
def test_source_code_is_no_loop() -> None:
    """All files in a row: text that occurs in several of them is no loop, either."""
    ids = (token for path in SOURCES for token in vocab.encode(path.read_text("utf-8", "replace")))
    assert ids_until_loop(ids) is None


LOOPS = {
    "one word": " wait",
    "one character": "-- ",
    "a line": "Wait, what did they ask me?\n",
    "three lines": LINES,
    "a row that is repeated within itself": "0 0 0 0 0 0 0 0\n",
    "a paragraph": "".join(f"Maybe option {n} is what the user means. " for n in range(12)),
    "a page": "".join(f"Option {n}: open file {n * 7} and read it again.\n" for n in range(40)),
}


@pytest.mark.nightly(sample=3)
@pytest.mark.once
@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("before", ["", "Hm. ", ROW * 20 + LINES])
def test_loop_ends_within_3000_tokens(text: str, before: str) -> None:
    endless = vocab.encode(text * (6_000 // len(text) * 5))
    length = ids_until_loop(vocab.encode(before) + endless)
    assert length is not None
    assert MIN_LOOP < length < len(vocab.encode(before)) + 3_000 - GRACE
    output = output_of(ReasoningWatch(repetitions=REPETITIONS), ANALYSIS + text * 3_000)
    assert len(ids_of(output)) < 3_000 + 8


@pytest.mark.parametrize("period", [1, 9, 48, 90, 100, 580, 1000, MAX_PERIOD])
@pytest.mark.parametrize("before", [0, 10_000])
@pytest.mark.parametrize("repetitions", [2, 8, REPETITIONS, 100])
def test_loop_is_found_after_enough_repetitions(period: int, before: int, repetitions: int) -> None:
    """After the set repetitions, or 2,900 ids and five of them; 1,500 repeated ids at least."""
    chance = random.Random(period)
    before_loop = [chance.randrange(1000) for _ in range(before)]
    block = chance.sample(range(1000, 200_000), period)
    enough = min(repetitions, max(math.ceil(MAX_LOOP / period), min(repetitions, MIN_OCCURRENCES)))
    bounds = max(MIN_LOOP + period, min(repetitions * period, max(MAX_LOOP, 5 * period)))
    length = ids_until_loop(before_loop + block * (enough + MIN_LOOP), repetitions)
    assert length is not None
    if repetitions >= MIN_OCCURRENCES:
        assert length - before == bounds
    assert length - before >= max(MIN_LOOP + period, (enough - 1) * period)


def test_repeated_short_reasonings_are_a_loop() -> None:
    watch = ReasoningWatch(repetitions=REPETITIONS)
    output = output_of(watch, (ANALYSIS + "Hm. What now?" + NEXT) * 900)
    assert watch.ended_by == "repetition"
    assert len(ids_of(output)) < 5_000  # with their headers


def test_text_without_repetition_is_no_loop_and_bounded_in_memory() -> None:
    chance = random.Random(1)
    loop = Loop(3)
    for _ in range(50_000):
        loop.consume(chance.randrange(100_000))
    assert not loop.found
    assert len(loop._ids) <= 2 * MAX_PERIOD
    assert len(loop._places) <= 2 * MAX_PERIOD


def test_loop_in_reasoning_is_ended() -> None:
    watch = ReasoningWatch(repetitions=REPETITIONS)
    output = output_of(watch, ANALYSIS + LINES * 200)
    assert output.endswith(NEXT)
    assert watch.ended_by == "repetition"


def test_loop_in_answer_is_not_ended() -> None:
    watch = ReasoningWatch(repetitions=REPETITIONS)
    assert output_of(watch, "<|channel|>final<|message|>" + LINES * 200).endswith(LINES)
