r"""Regular expressions of JSON's scalars, in every spelling that a JSON parser reads as the same.

JSON can write a value in many ways: ``a`` as ``\u0061``, ``/`` as ``\/``, and ``2`` as ``2.0``,
``2e0`` or ``0.2e1`` (RFC 8259, 6 and 7). A schema constrains the value. So each function here takes
a condition on a value, and returns a regular expression for all its spellings, in the syntax of
https://docs.rs/regex. Strings include their quotes.

**Numbers.** Comparing decimals with a bound, digit by digit, is regular. With exponents it is not,
because they move the decimal point arbitrarily far. So exponents are handled one at a time: the
mantissa before ``e3`` is compared with a thousandth of the bound. That covers ``_EXPONENTS`` to
either side of the bound's own order. Beyond that, a number is practically zero or infinite, and its
mantissa may only have three digits before the point. Numbers that JavaScript and Python read as
infinity are excluded where they would be invalid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from decimal import Context, Decimal
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
    for one in _alternatives(pattern[flags.end() :] if flags else pattern):
        before = "" if one.startswith("^") else f"{_COUNTED}*"
        after = "" if escaped.END.search(one) else f"{_COUNTED}*"
        spelling = _Spelling(one, flags[1] if flags else "", tenant)
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


class _Spelling(escaped.Rewriting):
    """Rewrites a pattern so that every character may have any of its spellings."""

    def __init__(self, pattern: str, flags: str, tenant: str) -> None:
        super().__init__(pattern, flags)
        self._tenant = tenant

    def character(self, one: str) -> str:
        cased = {one, one.lower(), one.upper()} if "i" in self._flags else {one}
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
        plain = rf'[[{listed}]&&[^"\\\x00-\x1f]]' if listed else _NOTHING
    found = [
        rf"\\{literal(short)}" for special, short in _SHORT.items() if members.fullmatch(special)
    ]
    if ranges:
        found.append(rf"\\u{_hexadecimal(ranges)}")
    if has_pairs:
        found.append(_PAIR)
    return plain, *(found or [_NOTHING])


_FEW_RANGES = 60
_BELOW_SURROGATES = "".join(map(chr, range(0xD800)))
_ABOVE_SURROGATES = "".join(map(chr, range(0xE000, 0x10000)))


# --- numbers ---

_WHOLE = r"(?:0|[1-9][0-9]*)"
_FRACTION = r"(?:\.[0-9]+)?"
_ZEROS = r"(?:\.0+)?"
_NOTHING = r"[^\s\S]"

NUMBER = rf"-?{_WHOLE}{_FRACTION}(?:[eE][-+]?[0-9]{{1,3}})?"

_EXPONENTS = 12
_DIGITS = 20
_FINITE = r"0*(?:[0-9]{1,2}|[12][0-9]{2}|30[0-7])"
"""The exponent of a finite number."""


def _integer() -> str:
    """Numbers without a fractional part, in any spelling whose exponent moves the point by up to
    ``_DIGITS`` digits."""
    forms = [rf"{_WHOLE}{_ZEROS}(?:[eE](?:\+?{_FINITE}|-0+))?", rf"0{_ZEROS}[eE]-[0-9]{{1,3}}"]
    for many in range(1, _DIGITS + 1):
        forms.append(rf"{_WHOLE}\.[0-9]{{1,{many}}}0*[eE]\+?0*{many}")
        forms.append(rf"[1-9][0-9]*0{{{many}}}{_ZEROS}[eE]-0*{many}")
    forms.append(rf"{_WHOLE}\.[0-9]+[eE]\+?0*(?:2[1-9]|[3-9][0-9]|[12][0-9]{{2}})")
    return f"-?(?:{'|'.join(forms)})"


INTEGER = _integer()


def bounded(bound: Decimal, *, is_least: bool, strictly: bool) -> str:
    """Numbers that are not less than ``bound`` (not greater, unless ``is_least``), nor equal to it
    if ``strictly``."""
    unlimited, limited = ("", "-") if is_least else ("-", "")  # the sign of numbers without a bound
    below_zero = -bound if is_least else bound  # how far the other numbers reach
    if below_zero < 0:
        return _scaled(-below_zero, strictly, unlimited, below=False)
    forms = [unlimited + (_NONZERO if strictly and not bound else _UNSIGNED)]
    forms += [] if strictly and not bound else [limited + _ZERO]
    forms += [_scaled(below_zero, strictly, limited, below=True)] if bound else []
    return f"(?:{'|'.join(forms)})"


def equal_to(value: Decimal) -> str:
    """The number ``value``."""
    if not value:
        return f"-?{_ZERO}"
    sign, size = ("-" if value < 0 else ""), abs(value)
    forms = []
    for exponent in range(-6, 7):
        whole, fraction = _digits(size.scaleb(-exponent))
        forms.append(f"{whole}{_exactly(fraction)}{_power(exponent)}")
    forms.append(literal(repr(float(size))))
    return f"{sign}(?:{'|'.join(dict.fromkeys(forms))})"


_ZERO = rf"0{_ZEROS}(?:[eE][-+]?[0-9]{{1,3}})?"
_UNSIGNED = NUMBER.removeprefix("-?")
_NONZERO = rf"(?:[1-9][0-9]*{_FRACTION}|0\.0*[1-9][0-9]*)(?:[eE][-+]?[0-9]{{1,2}})?"


def _power(exponent: int) -> str:
    if not exponent:
        return "(?:[eE][-+]?0+)?"
    return rf"[eE]{'-' if exponent < 0 else '[+]?'}0*{abs(exponent)}"


def _scaled(bound: Decimal, strictly: bool, sign: str, *, below: bool) -> str:
    """Numbers with ``sign`` whose absolute value is above or ``below`` the positive ``bound``; zero
    is below."""
    order = bound.adjusted()
    first, last = min(-_EXPONENTS, order - 3), max(_EXPONENTS, order + 3)
    forms = []
    is_long = len(bound.as_tuple().digits) > _COMPARED
    for exponent in range(first, last + 1):
        if is_long and exponent not in (0, order):
            digits = order - exponent  # fewer of them before the point, or more
            count = f"{max(digits + 1, 0)}," if not below else f"0,{digits - 1}"
            is_possible = not below or digits > 0
            decimals = f"[1-9][0-9]{{{count}}}{_FRACTION}" if is_possible else _NOTHING
            forms.append(decimals + _power(exponent))
        else:
            compared = _below if below else _above
            forms.append(compared(bound.scaleb(-exponent), strictly) + _power(exponent))
    small = f"(?:0|[1-9][0-9]{{0,2}}){_FRACTION}"
    beyond = _integers_from((-first if below else last) + 1)
    if below:
        forms += [_ZERO, rf"{small}[eE]-0*{beyond}"]
    else:
        forms.append(rf"[1-9][0-9]*{_FRACTION}[eE]\+?0*{beyond}")
    return f"{sign}(?:{'|'.join(forms)})"


_COMPARED = 6
"""The number of digits up to which a bound is compared with mantissas of any exponent. For a longer
bound this is done for the usual notations (no exponent, or one digit before the point); in others
only the number of digits is compared."""


def _digits(value: Decimal) -> tuple[str, str]:
    """The digits before the point, and those after it without trailing zeros."""
    whole, _, fraction = f"{value:f}".partition(".")
    return whole, fraction.rstrip("0")


def _exactly(fraction: str) -> str:
    """These digits after the point, and any zeros."""
    return rf"\.{fraction}0*" if fraction else _ZEROS


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
    forms = [f"[1-9][0-9]{{{len(whole) if whole != '0' else 0},}}{_FRACTION}"]
    for at, digit in enumerate(whole if whole != "0" else ""):
        rest = f"[0-9]{{{len(whole) - at - 1}}}"
        if digit != "9":
            forms.append(f"{whole[:at]}[{int(digit) + 1}-9]{rest}{_FRACTION}")
        if not fraction and not strictly and not whole[at + 1 :].strip("0"):
            return f"(?:{'|'.join([*forms, f'{whole[: at + 1]}{rest}{_FRACTION}'])})"
    more = [
        rf"{fraction[:at]}[{int(digit) + 1}-9][0-9]*"
        for at, digit in enumerate(fraction)
        if digit != "9"
    ]
    more.append(rf"{fraction}0*[1-9][0-9]*" if strictly else rf"{fraction}[0-9]*")
    forms.append(rf"{whole}\.(?:{'|'.join(more)})")
    return f"(?:{'|'.join(forms)})"


def _below(bound: Decimal, strictly: bool) -> str:
    """Decimals without sign or exponent that are not greater than ``bound``, except zero."""
    whole, fraction = _digits(bound)
    forms = []
    if len(whole) > 1:
        forms.append(f"(?:0|[1-9][0-9]{{0,{len(whole) - 2}}}){_FRACTION}")
    for at, digit in enumerate(whole):
        least = 1 if at == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            rest = f"[0-9]{{{len(whole) - at - 1}}}"
            forms.append(f"{whole[:at]}[{least}-{int(digit) - 1}]{rest}{_FRACTION}")
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
    return f"(?:{'|'.join(forms)})" if forms else _NOTHING


def multiple_of(step: Decimal) -> str | None:
    """Multiples of the positive ``step``, as recognized by their last digits; ``None`` if these are
    not sufficient, because ``step`` has a prime factor other than two and five."""
    plain = _multiples(step)
    if plain is None:
        return None
    forms = [plain + _power(0)]
    zeros = next(many for many in range(-_DIGITS, _DIGITS) if not Decimal(10) ** many % step)
    for exponent in range(-_SHIFTED, _DIGITS + 1):
        places = exponent - zeros
        if exponent and places >= 0:  # every number with at most ``places`` decimals is a multiple
            more = rf"(?:\.[0-9]{{1,{places}}}0*)?" if places else _ZEROS
            forms.append(f"{_WHOLE}{more}{_power(exponent)}")
        elif exponent < 0 and (scaled := _multiples(step.scaleb(-exponent))):
            forms.append(scaled + _power(exponent))
    return f"-?(?:{'|'.join(forms)})"


_SHIFTED = 3
_MAX_ENDINGS = 100


def _multiples(step: Decimal) -> str | None:
    """Decimals without sign or exponent."""
    places = max(-int(step.normalize().as_tuple().exponent), 0)
    zeros = 0
    while 10**zeros % step and zeros < _DIGITS:
        zeros += 1
    length = zeros + places
    if 10**zeros % step or Decimal(10) ** zeros / step > _MAX_ENDINGS:
        if step != Decimal(1).scaleb(-places):
            return None
        return rf"{_WHOLE}(?:\.[0-9]{{1,{places}}}0*)?"  # tenths, hundredths, …
    endings = [f"{int(step.scaleb(places)) * at:0{length}d}" for at in range(int(10**zeros / step))]
    forms = []
    for ending in endings:
        whole, fraction = ending[:zeros], ending[zeros:].rstrip("0")
        shorter = whole.lstrip("0") or "0"
        forms.append(f"(?:{shorter}|[1-9][0-9]*{whole}){_exactly(fraction)}")
    return f"(?:{'|'.join(forms)})"


def decimal(value: object) -> Decimal | None:
    """A number of a schema as it was written; ``None`` for others, and beyond the range of a
    double."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    found = Decimal(repr(value) if isinstance(value, float) else str(value)[:400])
    return found if not found or abs(found.adjusted()) < _LARGE else None


_LARGE = 300
"""The greatest power of ten of a double, approximately."""

EXACT = Context(prec=4 * _LARGE)
"""A context in which numbers of schemas have exact products and remainders: 1e300 % 3e-299 needs a
quotient of 599 digits, and a smaller precision raises ``InvalidOperation``."""
