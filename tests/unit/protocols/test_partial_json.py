"""Arguments of a call on the left, what is sent as ``partial_json`` on the right."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_mlx_harmony.protocols.partial_json import INVALID_JSON, MAX_DEPTH, ObjectText


def send(pieces: Iterable[str]) -> list[str]:
    reader = ObjectText()
    return [*map(reader.feed, pieces), reader.close()]


def invalid(text: str, **members: Any) -> dict[str, Any]:
    return {**members, INVALID_JSON: text}


OBJECTS = [
    "{}",
    '{"a":1}',
    '{"a": "x", "b" : [1, 2.5, -0, 1e3, -1.5E-7], "c": {"d": null, "e": [true, false]}}',
    '{"a":[],"b":{},"c":[[],[{}]]}',
    '{"":"","a\\"b":"\\\\"}',
    '{"a":"\\u00e9 \\ud83d\\ude00 é 😀 \\n"}',
    '{"a":1,"a":2}',
    '{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}",
    '{"a":' + "9" * 300 + "}",
]
SPACED = [' {"a" : "é\\u00e9"}\n', "\n\t{ }\r\n "]

NO_OBJECTS: list[tuple[str, dict[str, Any]]] = [
    # the text; the members that the client receives beside the text itself
    ("hello", {}),
    ("[1,2]", {}),
    ('"text"', {}),
    ("null", {}),
    ("{", {}),
    ('{"a', {}),
    ('{"a"', {}),
    ('{"a":', {}),
    ('{"a":1', {}),  # 1, or the beginning of 12
    ('{"a":tru', {}),
    ('{"a":true', {"a": True}),
    ('{"a":1,', {"a": 1}),
    ('{"a":1,"b', {"a": 1}),
    ('{"a":1,"b":"rm -rf /tm', {"a": 1, "b": None}),  # half a value becomes null
    ('{"a":"x\\', {"a": None}),
    ('{"a":"x\\u00', {"a": None}),
    ('{"a":"\\ud83d', {"a": None}),
    ('{"a":"\\ud83d\\u', {"a": None}),
    ('{"a":{"b":"c', {"a": None}),
    ('{"a":{"b":"c"},"d":[1,[2', {"a": {"b": "c"}, "d": None}),
    ('{"a\\"é":["x', {'a"é': None}),
    ('{"a":1} and more', {"a": 1}),
    ('{"a":1}{"b":2}', {"a": 1}),
    ("{} x", {}),
    ('{"a":1]', {"a": 1}),
    ('{"a":[1}', {"a": None}),
    ('{"a":1,}', {"a": 1}),
    ('{"a":[1,]}', {"a": None}),
    ('{"a" 1}', {}),
    ("{a:1}", {}),
    ('{"a":x}', {}),
    ('{"a":NaN}', {}),
    ('{"a":01}', {}),
    ('{"a":1.}', {}),
    ('{"a":٣}', {}),
    ('{"a":1e999}', {}),
    ('{"a":' + "9" * 5000 + "}", {}),
    ('{"a":0.' + "1" * 400 + "}", {}),
    ('{"a":"two\nlines"}', {"a": None}),
    ('{"a":"\\x"}', {"a": None}),
    ('{"a":"\\ud83d"}', {"a": None}),
    ('{"a":"\\ude00"}', {"a": None}),
    ('{"a":trueish}', {"a": True}),
    ('{"a":' * (MAX_DEPTH + 1), {"a": None}),
]


@pytest.mark.parametrize("text", OBJECTS)
def test_object_is_sent_unchanged(text: str) -> None:
    assert "".join(send([text])) == text
    assert "".join(send(text)) == text


@pytest.mark.parametrize("text", SPACED)
def test_white_space_around_object_is_dropped(text: str) -> None:
    assert "".join(send(text)) == text.strip()


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_empty_text_stays_empty(text: str) -> None:
    assert "".join(send(text)) == ""


@pytest.mark.parametrize(("text", "members"), NO_OBJECTS, ids=[text[:40] for text, _ in NO_OBJECTS])
def test_invalid_object_is_sent_as_text(text: str, members: dict[str, Any]) -> None:
    whole, by_character = "".join(send([text])), "".join(send(text))
    assert whole == by_character
    assert json.loads(whole) == invalid(text, **members)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (['{"a', '":"x', 'y","b":', "1", "2", "}"], ["{", '"a":"x', 'y"', "", "", ',"b":12', "}"]),
        (['{"a":"', "\\", 'n"}'], ['{"a":"', "", '\\n"', "}"]),
        (['{"a":"', "\\ud8", "3d\\ude", '00"}'], ['{"a":"', "", "", '\\ud83d\\ude00"', "}"]),
        (['{"a":t', "rue}"], ["{", '"a":true', "}"]),
        (['{"a":1} ', "x"], ['{"a":1', "", ',"INVALID_JSON":"{\\"a\\":1} x"}']),
        (["oh", " no"], ["", "", '{"INVALID_JSON":"oh no"}']),
    ],
)
def test_text_is_sent_as_it_arrives(pieces: list[str], expected: list[str]) -> None:
    assert send(pieces) == expected


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Without lone surrogates, which clients reject.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    """Pieces of JSON, of JSON that is cut or has junk in it, or of any text."""
    text: str = draw(
        TEXT
        | st.builds(
            json.dumps,
            st.dictionaries(TEXT, JSON, max_size=4),
            ensure_ascii=st.booleans(),
            indent=st.sampled_from([None, 2]),
        )
    )
    at = draw(st.integers(0, len(text)))
    junk = draw(st.sampled_from(["", "", "}", '"', "\\", ",", "\n", "1", "]", "x"]))
    text = draw(st.sampled_from([text, text[:at], text[:at] + junk + text[at:]]))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=5)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parse_strictly(text: str) -> Any:
    """``text`` as parsed by Python; ``None`` if it is not strictly JSON."""

    def no_constant(_: str) -> NoReturn:
        raise ValueError

    def finite(number: str) -> float:
        """Clients reject numbers that do not fit a float."""
        return float(number) if math.isfinite(float(number)) else no_constant(number)

    try:
        return json.loads(text, parse_constant=no_constant, parse_float=finite)
    except ValueError:
        return None


@given(pieces())
@example(['{"\\ud83d', '\\ude00":"\\ud83d"}'])
@example(['{"a": [1', "0e308]}"])
def test_any_pieces_give_valid_json(cut: list[str]) -> None:
    text = "".join(cut)
    whole = "".join(send(cut))
    assert whole == "".join(send([text])) == "".join(send(text))
    read, expected = json.loads(whole or "{}"), parse_strictly(text)
    if isinstance(expected, dict) and "\\ud" not in text:
        assert read == expected
    elif text.strip() and not isinstance(expected, dict):
        assert read[INVALID_JSON] == text


@given(pieces())
@example(['{"a":"x', '\\ud83d"}'])
def test_official_client_can_parse_every_prefix(cut: list[str]) -> None:
    jiter = pytest.importorskip("jiter")
    received = ""
    for piece in send(cut):
        received += piece
        if piece:
            assert isinstance(jiter.from_json(received.encode(), partial_mode=True), dict)
    assert not received or jiter.from_json(received.encode()) == json.loads(received)
