"""Encoding: the library's ids, computed in pieces of bounded work."""

from __future__ import annotations

import random
import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle, pairwise
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sizes import examples

from vllm_mlx_harmony.core import pretokens, vocab
from vllm_mlx_harmony.core.errors import PromptTooLong
from vllm_mlx_harmony.core.pretokens import MAX_PIECE, MAX_SPAN, MAX_WORK, pieces


def encode_with_library(text: str) -> list[int]:
    return vocab.encoding().encode(text, disallowed_special=())


KINDS_OF_INTEREST = " \n\r\t/'!aAsStTrReElLvVmMdD019.,ſ\u0301ก\u0e34\x1c\x85\u3000\xa0É你ー，"
"""Characters that the expression treats differently, and some that it treats alike."""

TEXTS = st.one_of(
    st.text(st.sampled_from(KINDS_OF_INTEREST), max_size=60),
    # Without unassigned characters: a newer library may know letters that this Python does not.
    st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=200),
)


@pytest.mark.nightly
@given(text=st.text(max_size=200))
def test_short_text_matches_library(text: str) -> None:
    assert vocab.encode(text) == encode_with_library(text)


@given(text=TEXTS)
@example(text="don't  A1\r\n/\n\n  !")
def test_cuts_at_boundaries_do_not_change_ids(text: str) -> None:
    bounds = [0, *(boundary.end() for boundary in pretokens._BOUNDARY.finditer(text)), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    assert [token for part in parts for token in encode_with_library(part)] == encode_with_library(
        text
    )


LONG = {
    "minified": '{"key": [1, 2, "three"]},' * 2000,
    "digits": "0123456789" * 5000,
    "code": "def f():\n        return 1\n" * 2000,
    "lines of signs": " !\n" * 20_000,
    "Chinese": "今天天气很好，我们去公园吧。" * 2000,
    "Russian": "Съешь ещё этих мягких французских булок. " * 1000,
    "Thai": "ภาษาไทยเป็นภาษาที่เขียนโดยไม่เว้นวรรคระหว่างคำ " * 1000,
    "Hindi": "हिन्दी विश्व की प्रमुख भाषाओं में से एक है। " * 1000,
    "Korean": "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. " * 1000,
    "Arabic": "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر " * 1000,
    "a blob": "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo0x3f9Kd2" * 1000,
    "letters and no spaces": "Aa" * 20_000,
    "runs of just the limit": ("a" * (MAX_SPAN - 1) + " ") * 20,
    "nearly a run of white space": (" " * (MAX_SPAN - 2) + "!") * 20,
    "control tokens as text": "<|start|><|end|>" * 3000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
def test_long_text_matches_library(text: str) -> None:
    assert vocab.encode(text) == encode_with_library(text)


@pytest.mark.parametrize("text", ["a\ud83d\udc00b " * 500, "\ud83d" * 500], ids=["pairs", "halves"])
def test_surrogates_in_long_text_match_library(text: str) -> None:
    assert vocab.encode(text) == encode_with_library(text)


# --- The work of one piece is bounded, whatever characters it contains


_SPACE = frozenset(map(ord, "\t\v\f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"))
_SPACE |= frozenset(range(0x2000, 0x200B))  # as Unicode has it; to `str.isspace` \x1c is one, too
_KIND = {"Lu": "A", "Lt": "A", "Ll": "a", "Lm": "@", "Lo": "@"}
_ITSELF = frozenset(map(ord, " \n/'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))


class _Kinds(dict[int, str]):
    """The kind of each character, as ``_PRETOKEN`` denotes it: a table for ``str.translate``.

    ``A`` and ``a`` are letters with case, ``@`` those without, ``^`` marks, ``0`` numbers, ``!``
    signs, and a tab is white space. Characters that occur in the expression denote themselves.
    Only ASCII is stored, since there are a million characters.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        kind = _KIND.get(category) or {"M": "^", "N": "0"}.get(category[0], "!")
        if code in _ITSELF:
            kind = character
        elif code in _SPACE:
            kind = "\t"
        elif character == "\r":
            kind = "\n"
        elif character == "ſ":  # an `s` where case is ignored
            kind = "s"
        if code < 128:
            self[code] = kind
        return kind


_KINDS = _Kinds()

_BEHIND = "(?:'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL]))?"
_PRETOKEN = re.compile(
    rf"[\^ \t/'!]?[A-Z@^]*[a-z@^]+{_BEHIND}"
    rf"|[\^ \t/'!]?[A-Z@^]+[a-z@^]*{_BEHIND}"
    r"|0{1,3}"
    r"| ?[\^/'!]+[\n/]*"
    r"|[ \t\n]*\n+"
    r"|[ \t\n]+(?![^ \t\n])"
    r"|[ \t\n]+"
)
"""o200k's own expression, over kinds of characters."""


def work(piece: str) -> int:
    kinds = piece.translate(_KINDS)
    return sum(
        len(piece[match.start() : match.end()].encode("utf-8", "surrogatepass")) ** 2
        for match in _PRETOKEN.finditer(kinds)
    )


class CountingExpression:
    """An expression that counts the characters it looks at."""

    def __init__(self, expression: re.Pattern[str]) -> None:
        self._expression = expression
        self.characters = 0

    def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
        match = self._expression.search(text, start, end)
        self.characters += (min(end, len(text)) if match is None else match.end()) - start
        return match


def check(text: str) -> None:
    """``text`` is linear work: the number of its pieces and the work of each are bounded."""
    boundaries = CountingExpression(pretokens._BOUNDARY)
    with patch.object(pretokens, "_BOUNDARY", boundaries):
        parts = list(pieces(text))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= MAX_PIECE + 2 * MAX_SPAN
    assert max(map(work, parts)) <= 2 * MAX_WORK
    assert len(parts) <= 4 + 3 * len(text) // MAX_SPAN
    assert boundaries.characters <= len(text)


@lru_cache
def by_category() -> dict[str, list[str]]:
    categories: dict[str, list[str]] = {}
    for code in range(sys.maxunicode + 1):
        categories.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    return categories


SIZE = 50_000
CATEGORIES = sorted(by_category())


@pytest.mark.nightly(sample=3)
@pytest.mark.once
@pytest.mark.parametrize("category", CATEGORIES)
def test_long_runs_of_one_category_are_bounded_work(category: str) -> None:
    characters = by_category()[category]
    check(characters[0] * SIZE)
    check("".join(random.Random(category).choices(characters, k=SIZE)))


RUNS = (1, 2, 7, 300, MAX_SPAN - 1, MAX_SPAN, 5_000)


@st.composite
def mixed(draw: st.DrawFn, size: int, runs: Sequence[int] = RUNS) -> str:
    """Runs of several categories, each of one character or of many."""
    chosen = draw(st.lists(st.sampled_from(CATEGORIES), min_size=2, max_size=6, unique=True))
    lengths = draw(st.lists(st.sampled_from(runs), min_size=1, max_size=6))
    chance = random.Random(draw(st.integers(0, 2**32)))
    parts = []
    missing = size
    for category, length in zip(cycle(chosen), cycle(lengths)):
        alphabet = by_category()[category]
        if chance.random() < 0.5:
            alphabet = [chance.choice(alphabet)]
        parts.append("".join(chance.choices(alphabet, k=min(length, missing))))
        missing -= length
        if missing <= 0:
            return "".join(parts)
    raise AssertionError("there is no end of runs")


@pytest.mark.once
@settings(max_examples=examples(25))
@given(text=mixed(SIZE))
def test_long_runs_of_several_categories_are_bounded_work(text: str) -> None:
    check(text)


@settings(max_examples=examples(50))
@given(text=mixed(10_000, runs=RUNS[:-3]))
def test_runs_of_several_categories_match_library(text: str) -> None:
    ids = vocab.encode(text)
    boundaries = (boundary.end() for boundary in pretokens._BOUNDARY.finditer(text))
    if max(b - a for a, b in pairwise([0, *boundaries, len(text)])) < MAX_SPAN // 2:
        assert ids == encode_with_library(text)
    assert vocab.encoding().decode(ids) == vocab.clean(text)


ATTACKS = {
    "letters": "a" * 150_000,
    "marks": "กิ" * 40_000,
    "signs and line ends": "/\n" * 40_000,
    "white space that ends": (" " * (MAX_SPAN - 2) + "!") * 2000,
    "white space and line ends": " \n" * 80_000,
    "line ends and white space": ("\n" + " " * 5000) * 30,
    "signs": "=" * 150_000,
    "underscores": "_" * 150_000,
    "upper case behind none": "あ" * 2000 + "A" * 150_000,
    "no case, upper case": ("あ" + "A" * 3000) * 50,
    "apostrophes": "a'" * 80_000,
    "four bytes each": "\U00020000" * 60_000,
    "emoji": "👩‍👩‍👧" * 30_000,
    "halves of pairs": "\ud800" * 150_000,
}


@pytest.mark.nightly(sample=5)
@pytest.mark.once
@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS.keys())
def test_adversarial_text_is_bounded_work(text: str) -> None:
    check(text)
    ids = vocab.encode(text)
    assert vocab.encoding().decode(ids) == vocab.clean(text)
    assert not any(token in vocab.CONTROL for token in ids)


def test_text_beyond_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the model's window, not the limit, and a lower bound of the length."""
    monkeypatch.setattr(vocab, "MAX_PROMPT_TOKENS", 10_000)
    assert len(vocab.encode(" word" * 10_000)) == 10_000
    with pytest.raises(PromptTooLong) as raised:
        vocab.encode(" word" * 30_000)
    error = raised.value
    assert (error.window, error.code, error.param) == (
        131_072,
        "context_length_exceeded",
        "messages",
    )
    assert 10_000 < error.prompt_tokens <= 30_000
    assert "maximum context length is 131072 tokens" in error.message
    assert f"at least {error.prompt_tokens} tokens" in error.message
