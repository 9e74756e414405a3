"""Limits on a client's text that is processed in one call.

Parsing and writing JSON holds the GIL throughout: for a few tenths of a microsecond per value, and
4 ms per megabyte of a string.
"""

from __future__ import annotations

MAX_JSON_CHARACTERS = 4 * 2**20
"""Characters that may be written as JSON in one call: 16 ms."""

MAX_JSON_VALUES = 100_000
"""JSON values that may be parsed in one call: 30 ms."""

WINDOW = 131_072
"""Tokens of the context of gpt-oss. An engine with little memory has a shorter one."""

MAX_PROMPT_TOKENS = 8 * WINDOW
"""Tokens of a prompt up to which they are counted: no model accepts as many. The garbage collector,
which stops all threads, takes 10 ms to traverse them."""


def is_quick_to_parse(text: str) -> bool:
    """Whether ``text`` is small enough to be parsed and written as JSON in one call. Characters
    that may begin a value count inside strings, too."""
    return len(text) <= MAX_JSON_CHARACTERS and sum(map(text.count, ",[{")) <= MAX_JSON_VALUES


def characters(value: object) -> int:
    """The approximate length of ``value``, parsed JSON, when written. Other threads can run
    meanwhile, since this is pure Python."""
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
