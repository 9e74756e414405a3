"""Freeform input: the arguments of a call on the left, the text for the tool on the right."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spellings_of_json import respelled

from vllm_mlx_harmony.core.turn import Syntax
from vllm_mlx_harmony.protocols.freeform import INPUT, FreeformInput, freeform_tool, wrap

ROWS = {
    "plain": ('{"input":"abc"}', "abc"),
    "empty": ('{"input":""}', ""),
    "white space": (' {\n "input" :\t"abc" }\n', "abc"),
    "a name with an escape": (r'{"\u0069nput": "abc"}', "abc"),
    "a name of escapes": (r'{"\u0069\u006E\u0070\u0075\u0074":"abc"}', "abc"),
    "a name that is cut in an escape": (r'{"\u0069\u006', r'{"\u0069\u006'),
    "another name with an escape": (r'{"\u006anput":"abc"}', r'{"\u006anput":"abc"}'),
    "a name with another escape": (r'{"inp\ut":"abc"}', r'{"inp\ut":"abc"}'),
    "every escape": (r'{"input":"\"\\\/\b\f\n\r\t\u00e9"}', '"\\/\b\f\n\r\té'),
    "a pair": (r'{"input":"a\ud83d\ude00b"}', "a😀b"),
    "a pair in capitals": (r'{"input":"\uD83D\uDE00"}', "😀"),
    "not escaped": ('{"input":"é😀"}', "é😀"),
    "line breaks that JSON forbids": ('{"input":"a\nb\tc"}', "a\nb\tc"),
    "first half alone": (r'{"input":"a\ud83db"}', "a\ufffdb"),
    "first half before an escape": (r'{"input":"\ud83d\n"}', "\ufffd\n"),
    "first half twice": (r'{"input":"\ud83d\ud83d\ude00"}', "\ufffd😀"),
    "first half at the end": (r'{"input":"\ud83d"}', "\ufffd"),
    "second half alone": (r'{"input":"\ude00!"}', "\ufffd!"),
    "an unknown escape": (r'{"input":"\d+\q"}', r"\d+\q"),
    "too few digits": (r'{"input":"\u12x"}', r"\u12x"),
    "too few digits at the end": (r'{"input":"\u12"}', r"\u12"),
    "more fields": ('{"input":"abc","why":"x"}', "abc"),
    "quotes that were not escaped": ('{"input": "print("hi")"}', 'print("hi")'),
    "JSON that was not escaped": ('{"input":"{"a": "b"}, ["c", "d"]"}', '{"a": "b"}, ["c", "d"]'),
    "what looks like the end": ('{"input":"a"} b"}', 'a"} b'),
    "what looks like a member": ('{"input":"a", "b" c"}', 'a", "b" c'),
    "space before the end": ('{"input":"abc"\n } \n', "abc"),
    "too much space to be the end": ('{"input":"abc"' + " " * 300 + "}", 'abc"' + " " * 300 + "}"),
    "much space after the end": ('{"input":"a"}' + "\n" * 300, "a"),
    "much space after the end, and more": ('{"input":"a" }' + " " * 300 + 'b"}', "a"),
    "some space after what looks like the end": ('{"input":"a"}' + " " * 200 + 'b"}',
                                                 'a"}' + " " * 200 + "b"),
    "a long name of a member": ('{"input":"abc", "' + "k" * 251 + '": 1}', "abc"),
    "too long a name of a member": (
        '{"input":"abc", "' + "k" * 252 + '": 1}', 'abc", "' + "k" * 252 + '": 1}'
    ),
    "cut behind the string": ('{"input":"abc"', "abc"),
    "cut in another member": ('{"input":"abc", "why', "abc"),
    "cut in the string": ('{"input":"ab', "ab"),
    "cut in an escape": ('{"input":"ab\\', "ab"),
    "cut in digits": ('{"input":"ab\\u00', "ab"),
    "cut behind half a pair": ('{"input":"ab\\ud83d', "ab\ufffd"),
    "cut in the opening": ('{"inp', '{"inp'),
    "nothing": ("", ""),
    "only white space": (" \n", " \n"),
    "the text itself": ("*** Begin Patch\n\"\\n\"", "*** Begin Patch\n\"\\n\""),
    "a string": ('"abc"', '"abc"'),
    "another field": ('{"patch":"abc"}', '{"patch":"abc"}'),
    "another field first": ('{"a":1,"input":"abc"}', '{"a":1,"input":"abc"}'),
    "a longer name": ('{"inputs":"abc"}', '{"inputs":"abc"}'),
    "not a string": ('{"input":["abc"]}', '{"input":["abc"]}'),
    "no fields, which is what an empty call is": ("{}", ""),
    "no fields, and space": (" { }\n", ""),
    "no fields, and more": ("{}x", "{}x"),
    "too much space to be an opening": (" " * 300 + '{"input":"a"}', " " * 300 + '{"input":"a"}'),
}  # fmt: skip


def unwrap(*pieces: str) -> str:
    freeform = FreeformInput()
    return "".join([*map(freeform.feed, pieces), freeform.close()])


@pytest.mark.parametrize(("arguments", "expected"), ROWS.values(), ids=ROWS)
def test_arguments_are_unwrapped(arguments: str, expected: str) -> None:
    assert unwrap(arguments) == expected
    for cut in range(len(arguments)):
        assert unwrap(arguments[:cut], arguments[cut:]) == expected
    assert unwrap(*arguments) == expected


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60)))
def test_wrapped_text_survives_any_cuts(text: str, ascii_only: bool, cuts: list[int]) -> None:
    text = text.encode("utf-16", "replace").decode("utf-16")
    arguments = json.dumps({"input": text}) if ascii_only else wrap(text)
    ends = [0, *sorted(cuts), len(arguments)]
    pieces = [arguments[a:b] for a, b in pairwise(ends)]
    assert unwrap(*pieces) == text


@given(st.text(), st.randoms(use_true_random=False), st.lists(st.integers(0, 60)))
def test_wrapped_text_survives_any_spelling(
    text: str, chance: random.Random, cuts: list[int]
) -> None:
    text = text.encode("utf-16", "replace").decode("utf-16")
    arguments = respelled({"input": text}, chance)
    ends = [0, *sorted(cuts), len(arguments)]
    pieces = [arguments[a:b] for a, b in pairwise(ends)]
    assert unwrap(*pieces) == text


@given(st.text('{"input: \\u12d83e\n'), st.lists(st.integers(0, 20)))
def test_cuts_do_not_change_unwrapped_text(text: str, cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(ends)]
    assert unwrap(*pieces) == unwrap(*text) == unwrap(text)


def test_wrapped_text_is_streamed() -> None:
    freeform = FreeformInput()
    shown = [freeform.feed(piece) for piece in ('{"inp', 'ut":"', "ab", "c\\", "n", 'd"', "}")]
    assert shown == ["", "", "ab", "c", "\n", "d", ""]


def test_unwrapped_text_is_streamed() -> None:
    freeform = FreeformInput()
    assert [freeform.feed(piece) for piece in ("*** Be", "gin")] == ["*** Be", "gin"]


@pytest.mark.parametrize(
    ("description", "grammar", "shown", "syntax"),
    [
        ("Says it.", (None, None), "Says it.", None),
        ("Says it.", ("regex", None), "Says it.", None),
        (
            "Says it.",
            ("regex", "[a-z]+ "),
            "Says it.\n\nThe input must match this regex grammar:\n[a-z]+",
            Syntax("regex", "[a-z]+ "),
        ),
        (
            "",
            ("lark", 'start: "a"\n'),
            'The input must match this lark grammar:\nstart: "a"',
            Syntax("lark", 'start: "a"\n'),
        ),
        ("", (None, "a or b"), "The input must match this grammar:\na or b", None),
    ],
)
def test_freeform_tool_shows_its_grammar_and_has_its_syntax(
    description: str, grammar: Any, shown: str, syntax: Syntax | None
) -> None:
    tool = freeform_tool("say", description, "tools[0]", *grammar)
    assert (tool.name, tool.description, tool.where, tool.syntax) == (
        "say",
        shown,
        "tools[0]",
        syntax,
    )
    assert tool.parameters is not None
    assert tool.parameters["required"] == [INPUT]
