r"""Regular expressions of JSON's strings, in every spelling that a JSON parser reads as the same.

JSON can write a character in many ways: ``a`` as ``\u0061``, ``/`` as ``\/`` (RFC 8259, section
7). A schema constrains the string. So each function here takes a condition on a string, and returns
a regular expression for all its spellings, quotes included, in the syntax of
https://docs.rs/regex. `numbers` does the same for numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from sys import getsizeof

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.grammar import escaped
from vllm_mlx_harmony.core.grammar.escaped import NotExpressible

MAX_WHITE_SPACE = 256

WHITE_SPACE = rf"[ \t\n\r]{{0,{MAX_WHITE_SPACE}}}"

CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\\x2fbfnrt]|\\u[0-9a-fA-F]{4})'
"""A character of a string without a length limit. A lone surrogate counts as one, as JSON parsers
count it."""

_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_BASIC = r"\\u(?:[0-9a-ceA-CEfF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
_COUNTED = rf'(?:[^"\\\x00-\x1f]|\\["\\\x2fbfnrt]|{_BASIC}|{_PAIR})'
"""A character of a string with a length limit. A surrogate pair counts as one; a lone surrogate is
not accepted."""

_SHORT = {**escaped.SHORT, "/": "/"}


def string(least: int = 0, most: int | None = None) -> str:
    """Any string of ``least`` to ``most`` characters."""
    if not least and most is None:
        return f'"{CHARACTER}*"'
    return f'"{_COUNTED}{{{least},{"" if most is None else most}}}"'


def text(value: str) -> str:
    return f'"{"".join(map(character, value))}"'


def any_of(values: Iterable[str]) -> str:
    return f'"(?:{"|".join("".join(map(character, value)) for value in values)})"'


NOTHING = r"[^\s\S]"

_ESCAPED = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')


@lru_cache(maxsize=4096)
def character(char: str) -> str:
    code = ord(char)
    spellings = [] if _ESCAPED.match(char) else [literal(char)]
    if char in _SHORT:
        spellings.append(rf"\\{literal(_SHORT[char])}")
    units = [code] if char <= "\uffff" else [0xD7C0 + (code >> 10), 0xDC00 + (code & 0x3FF)]
    spellings.append("".join(rf"\\u{_hexadecimal([(unit, unit)])}" for unit in units))
    return f"(?:{'|'.join(spellings)})"


def literal(written: str) -> str:
    """Exactly the characters of ``written``."""
    return "".join(
        char if char.isalnum() or not char.isascii() else f"\\x{ord(char):02x}" for char in written
    )


def _hexadecimal(ranges: Sequence[tuple[int, int]], width: int = 4) -> str:
    """The numbers in ``ranges`` (ascending, disjoint), in ``width`` hexadecimal digits."""
    if not width:
        return ""
    unit = 16 ** (width - 1)
    by_rest: dict[tuple[tuple[int, int], ...], str] = {}
    for digit in range(16):
        low, high = digit * unit, (digit + 1) * unit - 1
        rest = tuple(
            (max(first, low) - low, min(last, high) - low)
            for first, last in ranges
            if first <= high and last >= low
        )
        if rest:
            by_rest[rest] = by_rest.get(rest, "") + "".join(dict.fromkeys(f"{digit:x}{digit:X}"))
    parts = []
    for rest, digits in by_rest.items():
        all_ = rest == ((0, unit - 1),) and unit > 1
        written = f"[0-9a-fA-F]{{{width - 1}}}" if all_ else _hexadecimal(rest, width - 1)
        parts.append((digits if len(digits) == 1 else f"[{digits}]") + written)
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


# --- what a string must match ---

MAX_REPEATED = 5000
"""The greatest product of nested repetition counts in a pattern."""


def matching(pattern: str, tenant: str) -> str:
    """Strings that contain a match of ``pattern``, which is not anchored (JSON Schema).

    Its character classes are cached per ``tenant``. Raises ``NotExpressible`` for an invalid
    pattern, and for one that takes too long to match.
    """
    try:
        re.compile(escaped.CATEGORY.sub("[a-z]", pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise NotExpressible("a pattern that is not a valid regular expression") from error
    if _repeated(pattern) > MAX_REPEATED:
        raise NotExpressible("a pattern with too many repetitions")
    flags = _FLAGS.match(pattern)
    alternatives = []
    for alternative in _alternatives(pattern[flags.end() :] if flags else pattern):
        before = "" if alternative.startswith("^") else f"{_COUNTED}*"
        after = "" if escaped.END.search(alternative) else f"{_COUNTED}*"
        spelling = _SpellingRewriter(alternative, flags[1] if flags else "", tenant)
        alternatives.append(before + "".join(spelling.pieces()) + after)
    return f'"(?:{"|".join(alternatives)})"'


_FLAGS = re.compile(r"\(\?([isu]+)\)")
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[(|)]", re.DOTALL)


def _alternatives(pattern: str) -> list[str]:
    """The alternatives at the top level, each of which may have anchors."""
    depth, cuts = 0, [-1]
    for part in _PART.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if part[0] == "|" and not depth:
            cuts.append(part.start())
    return [pattern[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], len(pattern)], strict=True)]


_COUNT = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")


def _repeated(pattern: str) -> int:
    """The greatest number of times that the counts of ``pattern`` repeat a part of it.

    A group that contains a repetition without a count may match in several ways at once, all of
    which an automaton has to follow; so its count is squared.
    """
    most, groups, last = 1, [(1, False)], (1, False)
    at = 0
    while at < len(pattern):
        part, count = _PART.match(pattern, at), _COUNT.match(pattern, at)
        if count:
            often = max(int(count[1][:9]), int((count[2] or "0")[:9]), 1)
            size = last[0] * often * (often if last[1] else 1)
            groups[-1] = max(groups[-1][0], size), groups[-1][1] or count[2] is not None
            most = max(most, size)
        elif pattern[at] == "(":
            groups.append((1, False))
        elif pattern[at] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1][0], last[0]), groups[-1][1] or last[1]
        elif pattern[at] in "*+":
            groups[-1] = groups[-1][0], True
        elif pattern[at] not in "?|^$":
            last = (1, False)
        at = (count or part).end() if count or part else at + 1  # type: ignore[union-attr]
    return most


class _SpellingRewriter(escaped.PatternRewriter):
    """Rewrites a pattern so that every character may have any of its spellings."""

    def __init__(self, pattern: str, flags: str, tenant: str) -> None:
        super().__init__(pattern, flags)
        self._tenant = tenant

    def character(self, char: str) -> str:
        cased = {char, char.lower(), char.upper()} if "i" in self._flags else {char}
        spelled = [character(other) for other in sorted(cased) if len(other) == 1]
        return spelled[0] if len(spelled) == 1 else f"(?:{'|'.join(spelled)})"

    def character_class(self, written: str) -> str:
        key = self._tenant, written, "i" in self._flags
        spelled = _classes.get(key)
        if spelled is None:
            spelled = _members(*key[1:])
            _classes.put(key, spelled, sum(map(getsizeof, (*key, *spelled))))
        return f"(?:{self.cased(spelled[0])}|{'|'.join(spelled[1:])})"


CACHE_BYTES = 4 * 2**20
_classes: lru.ByteLRU[tuple[str, str, bool], tuple[str, ...]] = lru.ByteLRU(CACHE_BYTES)
"""The members of character classes: those of ``\\w`` take 7 ms."""


def _members(written: str, any_case: bool) -> tuple[str, ...]:
    """Expressions of a class's members: unescaped, and in each kind of escape."""
    plain = f'[{written}&&[^"\\\\\\x00-\\x1f]]'
    if escaped.CATEGORY.search(written):  # Python does not know them: any escape that may be one
        return plain, _BASIC, _PAIR, r"\\[\x22\\\x2fbfnrt]"
    try:
        members = re.compile(written, re.IGNORECASE if any_case else 0)
    except re.error as error:
        raise NotExpressible(f"the class {written} in a regular expression") from error
    ranges = [
        (ord(run[0][0]), ord(run[0][-1]))
        for part in (_BELOW_SURROGATES, _ABOVE_SURROGATES)
        for run in re.finditer(f"(?:{written})+", part, members.flags)
    ]
    has_pairs = bool(members.fullmatch("\U0001f600") and members.fullmatch("\U00024b62"))
    if (
        len(ranges) <= _FEW_RANGES
    ):  # by code points: Python and Rust read some notations differently
        listed = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
        listed += r"\x{10000}-\x{10ffff}" if has_pairs else ""
        plain = rf'[[{listed}]&&[^"\\\x00-\x1f]]' if listed else NOTHING
    escapes = [
        rf"\\{literal(short)}" for special, short in _SHORT.items() if members.fullmatch(special)
    ]
    if ranges:
        escapes.append(rf"\\u{_hexadecimal(ranges)}")
    if has_pairs:
        escapes.append(_PAIR)
    return plain, *(escapes or [NOTHING])


_FEW_RANGES = 60
_BELOW_SURROGATES = "".join(map(chr, range(0xD800)))
_ABOVE_SURROGATES = "".join(map(chr, range(0xE000, 0x10000)))
