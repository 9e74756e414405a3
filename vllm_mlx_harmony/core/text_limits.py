"""Limits on a client's text that is processed in one call.

Parsing and writing JSON holds the GIL throughout: for a few tenths of a microsecond per value, and
4 ms per megabyte of a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

MAX_JSON_CHARACTERS = 4 * 2**20
"""Characters that may be written as JSON in one call: 16 ms."""

MAX_JSON_VALUES = 100_000
"""JSON values that may be parsed or written in one call: 30 ms."""

CONTEXT_TOKENS = 131_072
"""Tokens of the context of gpt-oss. An engine with little memory has a shorter one."""

MAX_PROMPT_TOKENS = 2 * CONTEXT_TOKENS
"""Tokens of a prompt up to which they are counted: no model accepts as many. All threads wait while
they are freed, 10 ms on a slow machine, and a second of a processor is spent on encoding them."""


def is_quick_to_parse(text: str) -> bool:
    """Whether ``text`` is small enough to be parsed and written as JSON in one call. Characters
    that may begin a value count inside strings, too."""
    return len(text) <= MAX_JSON_CHARACTERS and sum(map(text.count, ",[{")) <= MAX_JSON_VALUES


def is_quick_to_write(value: object) -> bool:
    """Whether ``value``, JSON as Python has it, may be written in one call."""
    values, length = _size(value)
    return values <= MAX_JSON_VALUES and length <= MAX_JSON_CHARACTERS


def levels(value: object) -> Iterator[list[object]]:
    """All values in ``value``, JSON as Python has it, and the keys: ``value`` itself, then what is
    in it, level by level. Other threads can run meanwhile, since this is pure Python."""
    level = [value]
    while level:
        yield level
        inner: list[object] = []
        for outer in level:
            if isinstance(outer, dict):
                inner += outer
                inner += outer.values()
            elif isinstance(outer, (list, tuple)):
                inner += outer
        level = inner


def characters(value: object) -> int:
    """The approximate length of ``value``, JSON as Python has it, when written."""
    return _size(value)[1]


def _size(value: object) -> tuple[int, int]:
    """The number of values in ``value``, keys included, and its approximate length."""
    values = length = 0
    for inner in chain.from_iterable(levels(value)):
        values += 1
        if isinstance(inner, str):
            length += len(inner) + 3
        elif not isinstance(inner, (dict, list, tuple)):
            length += 8
    return values, length


def encodable(text: str) -> bool:
    """Whether UTF-8 can represent ``text``, which then has no lone surrogates."""
    if text.isascii():
        return True
    try:
        for at in range(0, len(text), _UTF8_AT_ONCE):
            text[at : at + _UTF8_AT_ONCE].encode()
    except UnicodeEncodeError:
        return False
    return True


def clean(text: str) -> str:
    """``text`` with U+FFFD for each lone surrogate, which UTF-8 cannot represent. Two halves that
    match become one character."""
    if encodable(text):
        return text
    return "".join(
        part[0].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for part in _PARTS.finditer(text)
    )


_UTF8_AT_ONCE = 2**20

_PARTS = re.compile(r"(?s).{1,65536}(?<![\ud800-\udbff])|.{1,65536}")
"""Short pieces, none of which cuts a surrogate pair."""
