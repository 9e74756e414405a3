"""Budgets of reasoning and reasoning in circles: ids in, what must or must not come next out."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from rows import ids as ids_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Finished
from vllm_mlx_harmony.core.header import LOOSE_LIMIT
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.reasoning import GRACE, LONGEST_PERIOD, Loop, ReasoningWatch

ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"


def shown(watch: ReasoningWatch, output: str) -> str:
    """``output`` as far as it comes: where ids are forced, they stand in its place."""
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
    shown: str
    """All that stands there when nothing is forced any more."""
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
def test_row(row: Row) -> None:
    watch = ReasoningWatch(row.limit)
    assert shown(watch, row.output) == row.shown
    assert watch.tokens == row.tokens
    assert watch.ended_by == ("budget" if row.shown.endswith(NEXT) else "")
    parser = Parser()
    parser.feed(ids_of(row.shown))
    *_, finished = parser.close("length")
    assert isinstance(finished, Finished)
    assert finished.usage.reasoning_tokens == watch.tokens


def test_no_analysis_after_the_budget() -> None:
    watch = ReasoningWatch(1)
    shown(watch, ANALYSIS + "One. Two")
    assert watch.banned == frozenset()
    watch.consume(vocab.CHANNEL)
    banned = {vocab.token_bytes(token) for token in watch.banned}
    assert {b"analysis", b"an", b"a"} <= banned
    assert not banned & {b"final", b"commentary", b"fin", b"com", b"c", b""}
    watch.consume(ids_of("final")[0])
    assert watch.banned == frozenset()


def test_channels_are_free_before() -> None:
    watch = ReasoningWatch(5)
    watch.consume(vocab.CHANNEL)
    assert watch.banned == frozenset()


def test_what_is_forced_starts_anew_where_something_else_came() -> None:
    watch = ReasoningWatch(1)
    for token in ids_of(ANALYSIS + "One."):
        watch.consume(token)
    assert watch.forced[0] == vocab.END
    watch.consume(ids_of(" Two.")[0])
    assert watch.forced == () or watch.forced[0] == vocab.END


def test_within_an_answer_that_has_begun() -> None:
    watch = ReasoningWatch(0, answering=True)
    for token in ids_of("assistant analysis is one. Two."):
        watch.consume(token)
    assert (watch.forced, watch.tokens) == ((), 0)


LINES = "Wait, the user wants the file.\nLet me think about the file again.\nI should open it.\n"


@pytest.mark.parametrize(
    ("text", "often", "found"),
    [
        (LINES * 3, 3, True),
        (LINES * 2, 3, False),
        ("Hm.\n" + LINES * 4, 4, True),
        (LINES * 12, 12, True),
        (" wait" * 200, 3, True),
        ("a-" * 20, 3, False),
        ("\n".join(f"{n}. Line number {n} of the list." for n in range(200)), 3, False),
        ("|---" * 12 + "|\n| a | b | c |\n", 3, False),
    ],
)
def test_loops(text: str, often: int, found: bool) -> None:
    loop = Loop(often)
    for token in vocab.encode(text):
        loop.consume(token)
    assert loop.found == found


@pytest.mark.parametrize("period", [9, 100, 1000, LONGEST_PERIOD])
@pytest.mark.parametrize("before", [0, 10_000])
def test_loops_of_any_length(period: int, before: int) -> None:
    chance = random.Random(period)
    said = [chance.randrange(1000) for _ in range(before)]
    block = [chance.randrange(1000) for _ in range(period)]
    often = max(3, 40 // period + 2)
    loop = Loop(often)
    for token in said + block * (often - 1):
        loop.consume(token)
    assert not loop.found
    for token in block:
        loop.consume(token)
    assert loop.found


def test_text_that_does_not_repeat_is_no_loop_and_takes_bounded_memory() -> None:
    chance = random.Random(1)
    loop = Loop(3)
    for _ in range(50_000):
        loop.consume(chance.randrange(100_000))
    assert not loop.found
    assert len(loop._ids) <= 4 * LONGEST_PERIOD
    assert len(loop._places) <= 4 * LONGEST_PERIOD


def test_a_loop_is_ended() -> None:
    watch = ReasoningWatch(repetitions=3)
    output = shown(watch, ANALYSIS + LINES * 9)
    assert output.endswith(NEXT)
    assert output.count("Let me think") == 3
    assert watch.ended_by == "repetition"


def test_a_loop_in_an_answer_is_the_models_own() -> None:
    watch = ReasoningWatch(repetitions=3)
    assert shown(watch, "<|channel|>final<|message|>" + LINES * 9).endswith(LINES)
