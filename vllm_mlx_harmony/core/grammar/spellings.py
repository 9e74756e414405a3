r"""Regular expressions of JSON's scalars, in every spelling that a JSON parser reads as the same.

JSON writes one value in many ways: ``a`` is ``\u0061``, ``/`` is ``\/``, ``2`` is ``2.0``, ``2e0``
and ``0.2e1`` (RFC 8259, 6 and 7). What is compared with a schema is the value. So every function
here takes what a value must be, and gives an expression of all its spellings, in the syntax of
https://docs.rs/regex. Strings come with their quotes.

**Numbers.** A bound on decimals is a comparison digit by digit, and thus regular. One on numbers
with an exponent is not, because the exponent moves the point as far as it likes. So exponents are
taken one by one: what stands before ``e3`` is compared with a thousandth of the bound. That is done
for ``_EXPONENTS`` to either side and as far as the bound itself has digits; beyond it a number is
as good as zero or as infinity, and its mantissa has at most three digits before the point.
Numbers that JavaScript and Python read as infinity are left out where they would not be valid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import lru_cache

from vllm_mlx_harmony.core.grammar import escaped
from vllm_mlx_harmony.core.grammar.escaped import NotExpressible

MOST_WHITE_SPACE = 256

WHITE_SPACE = rf"[ \t\n\r]{{0,{MOST_WHITE_SPACE}}}"

CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\\x2fbfnrt]|\\u[0-9a-fA-F]{4})'
"""Of a string whose length does not matter: half of a surrogate pair is one, as parsers have it."""

_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_BASIC = r"\\u(?:[0-9a-ceA-CEfF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
_COUNTED = rf'(?:[^"\\\x00-\x1f]|\\["\\\x2fbfnrt]|{_BASIC}|{_PAIR})'
"""Of a string whose characters are counted: a surrogate pair is one, half of it is none."""

_SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


# --- strings ---


def string(least: int = 0, most: int | None = None) -> str:
    """Any string of ``least`` to ``most`` characters."""
    if not least and most is None:
        return f'"{CHARACTER}*"'
    return f'"{_COUNTED}{{{least},{"" if most is None else most}}}"'


def text(value: str) -> str:
    """The string ``value``."""
    return f'"{"".join(map(character, value))}"'


def any_of(values: Iterable[str]) -> str:
    """One of the strings ``values``."""
    return f'"(?:{"|".join("".join(map(character, value)) for value in values)})"'


_ESCAPED = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')


@lru_cache(maxsize=4096)
def character(one: str) -> str:
    """One character of a string."""
    code = ord(one)
    spellings = [] if _ESCAPED.match(one) else [literal(one)]
    if one in _SHORT:
        spellings.append(rf"\\{literal(_SHORT[one])}")
    units = [code] if one <= "\uffff" else [0xD7C0 + (code >> 10), 0xDC00 + (code & 0x3FF)]
    spellings.append("".join(rf"\\u{_hexadecimal([(unit, unit)])}" for unit in units))
    return f"(?:{'|'.join(spellings)})"


def literal(written: str) -> str:
    """Exactly the characters of ``written``."""
    return "".join(
        one if one.isalnum() or not one.isascii() else f"\\x{ord(one):02x}" for one in written
    )


def _hexadecimal(ranges: Sequence[tuple[int, int]], width: int = 4) -> str:
    """The numbers in ``ranges`` (ascending, apart), with ``width`` hexadecimal digits each."""
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

MOST_REPEATED = 5000
"""Times that a part of a pattern may be repeated by its counts together."""


@lru_cache(maxsize=256)
def matching(pattern: str) -> str:
    """Strings in which ``pattern`` is found: anywhere, as JSON Schema has it, if without anchors.

    Raises ``NotExpressible`` for what no regular expression is, or takes too long to follow.
    """
    try:
        re.compile(_CATEGORY.sub("[a-z]", pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise NotExpressible("a pattern that is no regular expression") from error
    if _repeated(pattern) > MOST_REPEATED:
        raise NotExpressible("a pattern with so many repetitions")
    flags = _FLAGS.match(pattern)
    alternatives = []
    for one in _alternatives(pattern[flags.end() :] if flags else pattern):
        before = "" if one.startswith("^") else f"{_COUNTED}*"
        after = "" if _ENDS.search(one) else f"{_COUNTED}*"
        spelling = _Spelling(one, flags[1] if flags else "")
        alternatives.append(before + "".join(spelling.pieces()) + after)
    return f'"(?:{"|".join(alternatives)})"'


_CATEGORY = re.compile(r"\\[pP](?:\{[\w=&. ]+\}|[A-Z])")
_FLAGS = re.compile(r"\(\?([isu]+)\)")
_ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[(|)]", re.DOTALL)


def _alternatives(pattern: str) -> list[str]:
    """The alternatives that are within no group: each has anchors of its own."""
    depth, cuts = 0, [-1]
    for part in _PART.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if part[0] == "|" and not depth:
            cuts.append(part.start())
    return [pattern[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], len(pattern)], strict=True)]


_COUNT = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")


def _repeated(pattern: str) -> int:
    """How often the part of ``pattern`` that is repeated most may be repeated by its counts.

    What may match in several ways at once (a group in which something is repeated without a count)
    counts twice: an automaton has to follow all of them.
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


class _Spelling(escaped.Rewriting):
    """A pattern in which every character may have any of its spellings."""

    def _character(self, one: str) -> str:
        cased = {one, one.lower(), one.upper()} if "i" in self._flags else {one}
        spelled = [character(other) for other in sorted(cased) if len(other) == 1]
        return spelled[0] if len(spelled) == 1 else f"(?:{'|'.join(spelled)})"

    def _class(self, written: str) -> str:
        spelled = _members(written, "i" in self._flags)
        return f"(?:{self._cased(spelled[0])}|{'|'.join(spelled[1:])})"


@lru_cache(maxsize=256)
def _members(written: str, any_case: bool) -> tuple[str, ...]:
    """The members of a class: as they are, and with a backslash."""
    plain = f'[{written}&&[^"\\\\\\x00-\\x1f]]'
    if _CATEGORY.search(written):  # Python does not know them: any escape that may be one
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
    if len(ranges) <= _FEW_RANGES:  # in no notation that Python and Rust read differently
        listed = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)
        listed += r"\x{10000}-\x{10ffff}" if has_pairs else ""
        plain = rf'[[{listed}]&&[^"\\\x00-\x1f]]' if listed else r"[^\s\S]"
    found = [
        rf"\\{literal(short)}" for special, short in _SHORT.items() if members.fullmatch(special)
    ]
    if ranges:
        found.append(rf"\\u{_hexadecimal(ranges)}")
    if has_pairs:
        found.append(_PAIR)
    return plain, *(found or [r"[^\s\S]"])


_FEW_RANGES = 60
_BELOW_SURROGATES = "".join(map(chr, range(0xD800)))
_ABOVE_SURROGATES = "".join(map(chr, range(0xE000, 0x10000)))


# --- numbers ---

NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?"

_EXPONENTS = 12
_DIGITS = 20
_FINITE = r"0*(?:[0-9]{1,2}|[12][0-9]{2}|30[0-7])"
"""An exponent, of numbers that are no infinity."""


def _integer() -> str:
    """Numbers whose fraction is zero, whatever they look like; with up to ``_DIGITS`` digits that
    an exponent takes across the point."""
    whole = r"(?:0|[1-9][0-9]*)"
    forms = [rf"{whole}(?:\.0+)?(?:[eE](?:\+?{_FINITE}|-0+))?", r"0(?:\.0+)?[eE]-[0-9]{1,3}"]
    for many in range(1, _DIGITS + 1):
        forms.append(rf"{whole}\.[0-9]{{1,{many}}}0*[eE]\+?0*{many}")
        forms.append(rf"[1-9][0-9]*0{{{many}}}(?:\.0+)?[eE]-0*{many}")
    forms.append(rf"{whole}\.[0-9]+[eE]\+?0*(?:2[1-9]|[3-9][0-9]|[12][0-9]{{2}})")
    return f"-?(?:{'|'.join(forms)})"


INTEGER = _integer()


def at_least(bound: Decimal, *, strictly: bool = False) -> str:
    """Numbers that are not less than ``bound``, nor equal to it if ``strictly``."""
    if bound <= 0:
        positive = rf"{_UNSIGNED}" if bound < 0 or not strictly else _nonzero("")
        zero = "" if bound == 0 and strictly else rf"|-{_ZERO}"
        negative = "" if bound == 0 else f"|{_scaled(-bound, strictly, '-', below=True)}"
        return f"(?:{positive}{zero}{negative})"
    return _scaled(bound, strictly, "", below=False)


def at_most(bound: Decimal, *, strictly: bool = False) -> str:
    """Numbers that are not greater than ``bound``, nor equal to it if ``strictly``."""
    if bound >= 0:
        negative = f"-{_UNSIGNED}" if bound > 0 or not strictly else _nonzero("-")
        zero = "" if bound == 0 and strictly else f"|{_ZERO}"
        positive = "" if bound == 0 else f"|{_scaled(bound, strictly, '', below=True)}"
        return f"(?:{negative}{zero}{positive})"
    return _scaled(-bound, strictly, "-", below=False)


def equal_to(value: Decimal) -> str:
    """The number ``value``."""
    if not value:
        return f"-?{_ZERO}"
    sign, size = ("-" if value < 0 else ""), abs(value)
    forms = []
    for exponent in range(-6, 7):
        whole, _, fraction = f"{size.scaleb(-exponent):f}".partition(".")
        fraction = fraction.rstrip("0")
        rest = rf"\.{fraction}0*" if fraction else r"(?:\.0+)?"
        forms.append(f"{whole}{rest}{_power(exponent)}")
    forms += [f"{literal(found)}" for found in (repr(float(size)), json.dumps(float(size)))]
    return f"{sign}(?:{'|'.join(dict.fromkeys(forms))})"


_ZERO = r"0(?:\.0+)?(?:[eE][-+]?[0-9]{1,3})?"
_UNSIGNED = NUMBER.removeprefix("-?")


def _nonzero(sign: str) -> str:
    digits = r"(?:[1-9][0-9]*(?:\.[0-9]+)?|0\.0*[1-9][0-9]*)"
    return rf"{sign}{digits}(?:[eE][-+]?[0-9]{{1,2}})?"


def _power(exponent: int) -> str:
    if not exponent:
        return "(?:[eE][-+]?0+)?"
    return rf"[eE]{'-' if exponent < 0 else '[+]?'}0*{abs(exponent)}"


def _scaled(bound: Decimal, strictly: bool, sign: str, *, below: bool) -> str:
    """Spellings of the numbers with ``sign`` whose size is on one side of ``bound``, which is
    positive; below it, zero among them."""
    order = bound.adjusted()
    first, last = min(-_EXPONENTS, order - 3), max(_EXPONENTS, order + 3)
    forms = []
    is_long = len(bound.as_tuple().digits) > _COMPARED
    for exponent in range(first, last + 1):
        if is_long and exponent not in (0, order):
            forms.append(_shorter(order - exponent, below) + _power(exponent))
        else:
            compared = _below if below else _above
            forms.append(compared(bound.scaleb(-exponent), strictly) + _power(exponent))
    small = r"(?:0|[1-9][0-9]{0,2})(?:\.[0-9]+)?"
    beyond = _integers_from((-first if below else last) + 1)
    if below:
        forms += [_ZERO, rf"{small}[eE]-0*{beyond}"]
    else:
        forms.append(rf"[1-9][0-9]*(?:\.[0-9]+)?[eE]\+?0*{beyond}")
    return f"{sign}(?:{'|'.join(forms)})"


_COMPARED = 6
"""Digits of a bound with which mantissas are compared whatever their exponent; with a longer one
their lengths are, but in the usual notations: without exponent, and with one digit before it."""


def _shorter(order: int, below: bool) -> str:
    """Decimals with fewer digits before the point than one of ``order``, or with more."""
    some = r"(?:\.[0-9]+)?"
    if below:
        return f"[1-9][0-9]{{0,{order - 1}}}{some}" if order > 0 else r"[^\s\S]"
    return f"[1-9][0-9]{{{max(order + 1, 0)},}}{some}"


def _integers_from(least: int) -> str:
    """Integers of up to three digits that are not less than ``least``, which is positive."""
    digits = str(least)
    forms = [
        f"{digits[:at]}[{int(digit) + 1}-9][0-9]{{{len(digits) - at - 1}}}"
        for at, digit in enumerate(digits)
        if digit != "9"
    ]
    longer = [f"[1-9][0-9]{{{len(digits)},2}}"] if len(digits) <= len("99") else []
    return f"(?:{'|'.join([digits, *forms, *longer])})"


def _above(bound: Decimal, strictly: bool) -> str:
    """Decimals without sign or exponent that are not less than ``bound``."""
    whole, fraction = _digits(bound)
    some = r"(?:\.[0-9]+)?"
    forms = [f"[1-9][0-9]{{{len(whole) if whole != '0' else 0},}}{some}"]
    for at, digit in enumerate(whole if whole != "0" else ""):
        rest = f"[0-9]{{{len(whole) - at - 1}}}"
        if digit != "9":
            forms.append(f"{whole[:at]}[{int(digit) + 1}-9]{rest}{some}")
        if not fraction and not strictly and not whole[at + 1 :].strip("0"):
            return f"(?:{'|'.join([*forms, f'{whole[: at + 1]}{rest}{some}'])})"
    more = [
        rf"{fraction[:at]}[{int(digit) + 1}-9][0-9]*"
        for at, digit in enumerate(fraction)
        if digit != "9"
    ]
    more.append(rf"{fraction}0*[1-9][0-9]*" if strictly else rf"{fraction}[0-9]*")
    forms.append(rf"{whole}\.(?:{'|'.join(more)})")
    return f"(?:{'|'.join(forms)})"


def _below(bound: Decimal, strictly: bool) -> str:
    """Decimals without sign or exponent that are not greater than ``bound``, but for zero."""
    whole, fraction = _digits(bound)
    some = r"(?:\.[0-9]+)?"
    forms = []
    if len(whole) > 1:
        forms.append(f"(?:0|[1-9][0-9]{{0,{len(whole) - 2}}}){some}")
    for at, digit in enumerate(whole):
        least = 1 if at == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            rest = f"[0-9]{{{len(whole) - at - 1}}}"
            forms.append(f"{whole[:at]}[{least}-{int(digit) - 1}]{rest}{some}")
    less = [
        rf"{fraction[:at]}[0-{int(digit) - 1}][0-9]*"
        for at, digit in enumerate(fraction)
        if digit != "0"
    ]
    less += [fraction[:at] + "0*" for at in range(1, len(fraction))]
    if not strictly:
        less.append(f"{fraction}0*" if fraction else "0+")
    ends = rf"(?:\.(?:{'|'.join(less)}))" if less else ""
    if fraction or not strictly:
        forms.append(f"{whole}{ends}?" if ends else whole)
    return f"(?:{'|'.join(forms)})" if forms else r"[^\s\S]"


def _digits(bound: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{bound:f}".partition(".")
    return whole, fraction.rstrip("0")


def multiple_of(step: Decimal) -> str | None:
    """Multiples of ``step``, which is positive, where the last digits tell them; ``None`` where
    they do not: ``step`` has another factor than two and five."""
    plain = _multiples(step)
    if plain is None:
        return None
    forms = [plain + _power(0)]
    zeros = next(many for many in range(-_DIGITS, _DIGITS) if not Decimal(10) ** many % step)
    for exponent in range(-_SHIFTED, _DIGITS + 1):
        places = exponent - zeros
        if exponent and places >= 0:  # all of so few digits behind the point
            more = rf"(?:\.[0-9]{{1,{places}}}0*)?" if places else r"(?:\.0+)?"
            forms.append(f"(?:0|[1-9][0-9]*){more}{_power(exponent)}")
        elif exponent < 0 and (scaled := _multiples(step.scaleb(-exponent))):
            forms.append(scaled + _power(exponent))
    return f"-?(?:{'|'.join(forms)})"


_SHIFTED = 3
_MOST_ENDINGS = 100


def _multiples(step: Decimal) -> str | None:
    """Decimals without sign or exponent."""
    places = max(-int(step.normalize().as_tuple().exponent), 0)
    zeros = 0
    while 10**zeros % step and zeros < _DIGITS:
        zeros += 1
    length = zeros + places
    if 10**zeros % step or Decimal(10) ** zeros / step > _MOST_ENDINGS:
        return _hundredths(places) if step == Decimal(1).scaleb(-places) else None
    endings = [f"{int(step.scaleb(places)) * at:0{length}d}" for at in range(int(10**zeros / step))]
    forms = []
    for ending in endings:
        whole, fraction = ending[:zeros], ending[zeros:].rstrip("0")
        rest = rf"\.{fraction}0*" if fraction else r"(?:\.0+)?"
        short = whole.lstrip("0")
        shorter = short or "0"
        forms.append(f"(?:{shorter}|[1-9][0-9]*{whole}){rest}")
    return f"(?:{'|'.join(forms)})"


def _hundredths(places: int) -> str:
    return rf"(?:0|[1-9][0-9]*)(?:\.[0-9]{{1,{places}}}0*)?"


def decimal(value: object) -> Decimal | None:
    """A number of a schema, as it was written; ``None`` for one that is too large to be of use."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    found = Decimal(repr(value) if isinstance(value, float) else str(value)[:400])
    return found if not found or abs(found.adjusted()) < _LARGE else None


_LARGE = 300
"""Powers of ten that a double has."""
