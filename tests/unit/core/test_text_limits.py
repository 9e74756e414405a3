"""Texts that one call handles are bounded, and errors quote them briefly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_mlx_harmony.core import render, text_limits, vocab
from vllm_mlx_harmony.core.errors import PromptTooLong, RequestError, quoted
from vllm_mlx_harmony.core.text_limits import MAX_JSON_CHARACTERS, MAX_JSON_VALUES
from vllm_mlx_harmony.core.turn import ResponseFormat, Tool, Turn, User


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a'b\x1b", '"a\'b\\x1b"'),
        ("é" * 201, f"'{'é' * 200}'…"),
        (3, "3"),
        (None, "None"),
        ([0] * 3_000_000, "[0, 0, 0, 0, 0, 0, ...]"),
        (dict.fromkeys(range(9, 0, -1), 0), "{5: 0, 6: 0, 7: 0, 8: 0, ...}"),
        ([["a" * 9_000_000]], f"[['{'a' * 12}...{'a' * 13}']]"),
    ],
)
def test_value_is_quoted_briefly(value: object, expected: str) -> None:
    assert quoted(value) == expected


def test_error_message_is_bounded() -> None:
    assert len(RequestError("a" * 10_000_000).message) < 5_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" + "0," * (MAX_JSON_VALUES - 2) + "0]", True),
        ("[" + "[]," * MAX_JSON_VALUES + "0]", False),
        ('"' + "a" * (MAX_JSON_CHARACTERS - 2) + '"', True),
        ('"' + "a" * MAX_JSON_CHARACTERS + '"', False),
    ],
)
def test_json_within_limits_is_quick_to_parse(text: str, expected: bool) -> None:
    assert text_limits.is_quick_to_parse(text) is expected


@pytest.mark.parametrize(
    "value", ["a" * 1_000, ["a" * 100] * 10, {"a" * 500: {"b": ["c" * 500]}}, [[], {}, None, 1.5]]
)
def test_characters_approximate_length_of_json(value: Any) -> None:
    text = json.dumps(value, separators=(",", ":"))
    assert len(text) / 2 - 10 <= text_limits.characters(value) <= len(text) * 2 + 10


LONG = "a" * (MAX_JSON_CHARACTERS + 1)
MESSAGES = (User("Hi"),)

# name: a turn that would take too long to render, and the field that is too large.
TOO_LARGE: dict[str, tuple[Turn, str]] = {
    "what is not shown of a tool": (
        Turn(MESSAGES, tools=(Tool("f", "", {"type": "object", "x": LONG}, where="tools[0]"),)),
        "tools[0]",
    ),
    "a description": (Turn(MESSAGES, tools=(Tool("f", LONG, where="tools[0]"),)), "tools[0]"),
    "the schema of an answer": (
        Turn(MESSAGES, response_format=ResponseFormat({"type": "object", "x": LONG})),
        "response_format",
    ),
}


@pytest.mark.parametrize(("turn", "where"), TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_large_texts_are_rejected(turn: Turn, where: str) -> None:
    with pytest.raises(RequestError) as raised:
        render.render(turn)
    assert raised.value.param == where


@pytest.mark.parametrize(("pieces", "repeated"), [(2_000, 1), (100, 20)])
def test_prompt_beyond_limit_is_rejected(
    monkeypatch: pytest.MonkeyPatch, pieces: int, repeated: int
) -> None:
    turn = Turn((User(f"{pieces} a\n" * pieces),) * repeated)
    monkeypatch.setattr(vocab, "MAX_PROMPT_TOKENS", 1_000)
    monkeypatch.setattr(render, "MAX_PROMPT_TOKENS", 1_000)
    with pytest.raises(PromptTooLong):
        render.render(turn)
