"""Regular expressions of JSON's numbers, in every spelling that a JSON parser reads as the same.

JSON can write ``2`` as ``2.0``, ``2e0`` or ``0.2e1`` (RFC 8259, section 6).

A schema constrains the number. So each function here takes a condition on a number, and returns a
regular expression for all its spellings, in the syntax of https://docs.rs/regex.

Comparing decimals with a bound, digit by digit, is regular. With exponents it is not, because they
move the decimal point arbitrarily far. So exponents are handled one at a time: the mantissa before
``e3`` is compared with a thousandth of the bound. That covers ``_EXPONENTS`` to either side of the
bound's own order. Beyond that, a number is practically zero or infinite, and its mantissa may only
have three digits before the point. Numbers that JavaScript and Python read as infinity are excluded
where they would be invalid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Context, Decimal

from vllm_mlx_harmony.core.grammar import spellings

_WHOLE = r"(?:0|[1-9][0-9]*)"
_FRACTION = r"(?:\.[0-9]+)?"
_ZEROS = r"(?:\.0+)?"

NUMBER = rf"-?{_WHOLE}{_FRACTION}(?:[eE][-+]?[0-9]{{1,3}})?"

_EXPONENTS = 12
"""Exponents next to a bound that are handled one at a time, to either side of its order."""

_DIGITS = 20
"""Digits by which an exponent may move the point of an integer or a multiple."""

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


def bounded(bound: Decimal, *, is_minimum: bool, exclusive: bool) -> str:
    """Numbers ``>= bound`` (``<= bound`` unless ``is_minimum``), strictly if ``exclusive``."""
    # the sign of numbers without a bound, and of the others
    unlimited, limited = ("", "-") if is_minimum else ("-", "")
    below_zero = -bound if is_minimum else bound  # how far the other numbers reach
    if below_zero < 0:
        return _scaled(-below_zero, exclusive, unlimited, below=False)
    forms = [unlimited + (_NONZERO if exclusive and not bound else _UNSIGNED)]
    forms += [] if exclusive and not bound else [limited + _ZERO]
    forms += [_scaled(below_zero, exclusive, limited, below=True)] if bound else []
    return f"(?:{'|'.join(forms)})"


def equal_to(value: Decimal) -> str:
    if not value:
        return f"-?{_ZERO}"
    sign, size = ("-" if value < 0 else ""), abs(value)
    forms = []
    for exponent in range(-6, 7):
        whole, fraction = _digits(size.scaleb(-exponent))
        forms.append(f"{whole}{_exactly(fraction)}{_power(exponent)}")
    forms.append(spellings.literal(repr(float(size))))
    return f"{sign}(?:{'|'.join(dict.fromkeys(forms))})"


_ZERO = rf"0{_ZEROS}(?:[eE][-+]?[0-9]{{1,3}})?"
_UNSIGNED = NUMBER.removeprefix("-?")
_NONZERO = rf"(?:[1-9][0-9]*{_FRACTION}|0\.0*[1-9][0-9]*)(?:[eE][-+]?[0-9]{{1,2}})?"


def _power(exponent: int) -> str:
    if not exponent:
        return "(?:[eE][-+]?0+)?"
    return rf"[eE]{'-' if exponent < 0 else '[+]?'}0*{abs(exponent)}"


def _scaled(bound: Decimal, exclusive: bool, sign: str, *, below: bool) -> str:
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
            decimals = f"[1-9][0-9]{{{count}}}{_FRACTION}" if is_possible else spellings.NOTHING
            forms.append(decimals + _power(exponent))
        else:
            compared = _below if below else _above
            forms.append(compared(bound.scaleb(-exponent), exclusive) + _power(exponent))
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


def _differing(digits: str, *, below: bool = False, least: int = 0) -> Iterator[tuple[str, int]]:
    """Numbers of as many digits that are greater than ``digits``, or ``below`` it: how they begin,
    up to the first digit that differs, and how many digits follow. The first is at least ``least``.
    """
    for at, digit in enumerate(digits):
        low, high = (0 if at else least, int(digit) - 1) if below else (int(digit) + 1, 9)
        if low <= high:
            yield f"{digits[:at]}[{low}-{high}]", len(digits) - at - 1


def _integers_from(least: int) -> str:
    """Integers of up to three digits that are not less than ``least``, which is positive."""
    digits = str(least)
    forms = [digits, *(f"{begin}[0-9]{{{left}}}" for begin, left in _differing(digits))]
    if len(digits) <= len("99"):
        forms.append(f"[1-9][0-9]{{{len(digits)},2}}")
    return f"(?:{'|'.join(forms)})"


def _above(bound: Decimal, exclusive: bool) -> str:
    """Decimals without sign or exponent that are not less than ``bound``."""
    whole, fraction = _digits(bound)
    digits = whole.lstrip("0")
    forms = [f"[1-9][0-9]{{{len(digits)},}}{_FRACTION}"]
    includes_bound = bool(digits) and not fraction and not exclusive
    compared = digits.rstrip("0") if includes_bound else digits
    zeros = len(digits) - len(compared)
    forms += [f"{begin}[0-9]{{{left + zeros}}}{_FRACTION}" for begin, left in _differing(compared)]
    if includes_bound:
        forms.append(f"{compared}[0-9]{{{zeros}}}{_FRACTION}")
    else:
        more = [f"{begin}[0-9]*" for begin, _ in _differing(fraction)]
        more.append(rf"{fraction}0*[1-9][0-9]*" if exclusive else rf"{fraction}[0-9]*")
        forms.append(rf"{whole}\.(?:{'|'.join(more)})")
    return f"(?:{'|'.join(forms)})"


def _below(bound: Decimal, exclusive: bool) -> str:
    """Decimals without sign or exponent that are not greater than ``bound``, except zero."""
    whole, fraction = _digits(bound)
    forms = []
    if len(whole) > 1:
        forms.append(f"(?:0|[1-9][0-9]{{0,{len(whole) - 2}}}){_FRACTION}")
    begins = _differing(whole, below=True, least=int(len(whole) > 1))
    forms += [f"{begin}[0-9]{{{left}}}{_FRACTION}" for begin, left in begins]
    less = [f"{begin}[0-9]*" for begin, _ in _differing(fraction, below=True)]
    less += [fraction[:at] + "0*" for at in range(1, len(fraction))]
    if not exclusive:
        less.append(f"{fraction}0*" if fraction else "0+")
    ends = rf"(?:\.(?:{'|'.join(less)}))" if less else ""
    if fraction or not exclusive:
        forms.append(f"{whole}{ends}?" if ends else whole)
    return f"(?:{'|'.join(forms)})" if forms else spellings.NOTHING


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
"""Digits by which a negative exponent may move the point of a multiple."""

_MAX_ENDINGS = 100
"""Endings of the multiples of a step that are listed."""


def _multiples(step: Decimal) -> str | None:
    """Multiples of ``step`` without sign or exponent; ``None`` as in `multiple_of`."""
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
