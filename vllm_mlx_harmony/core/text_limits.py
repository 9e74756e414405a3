"""What is done with a client's text in one call, and how long that text may be.

A parser, and what writes JSON, holds the interpreter's lock from its first character to its last:
a few tenths of a microsecond for each value, and 4 ms for a megabyte of a string.
"""

from __future__ import annotations

MOST_CHARACTERS = 4 * 2**20
"""Characters that are written as JSON in one call, at most: 16 ms."""

MOST_VALUES = 100_000
"""JSON values that are parsed in one call, at most: 30 ms."""


MOST_TOKENS = 2**20
"""Tokens of a prompt, at most: eight times the window of a gpt-oss model. What a collection of
garbage, which lets nobody else run, takes 10 ms to look at."""


def is_parsed_soon(text: str) -> bool:
    """Whether ``text`` as JSON is parsed, and written again, before others notice.

    Counts what may begin a value, and so too many where they stand in strings.
    """
    return len(text) <= MOST_CHARACTERS and sum(map(text.count, ",[{")) <= MOST_VALUES


def characters(value: object) -> int:
    """How long ``value``, parsed JSON, is when it is written, about. A loop, not one call."""
    level, total = [value], 0
    while level:
        inner: list[object] = []
        for each in level:
            if isinstance(each, str):
                total += len(each) + 3
            elif isinstance(each, dict):
                inner += each
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            else:
                total += 8
        level = inner
    return total
