"""Reads environment variables, which are defined where they are used."""

from __future__ import annotations

import logging
import os
import re
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from vllm_mlx_harmony.core.errors import HostError

E = TypeVar("E", bound=Enum)

logger = logging.getLogger("vllm_mlx_harmony")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"([0-9]{1,15}(?:\.[0-9]+(?=\s*[KMGT]))?)\s*([KMGT]?)(?:I?B)?")


def number(variable: str, default: int) -> int:
    """The value of ``variable``: ``32``, ``64M`` or ``1.5GiB``; units are powers of 1,024.

    ``default`` if it is not set, and, with a warning, if it is not such a number.
    """
    given = os.environ.get(variable, "").strip()
    found = _read(variable, given) if given else None
    return default if found is None else found


def choice(variable: str, default: E) -> E:
    """The member of ``default``'s enumeration whose value ``variable`` has, in any case.

    ``default`` if it is not set. Raises ``HostError`` for any other value.
    """
    word = os.environ.get(variable, "").strip().lower()
    try:
        return type(default)(word) if word else default
    except ValueError as error:
        known = ", ".join(each.value for each in type(default))
        raise HostError(f"{variable}: {word!r} is not one of {known}") from error


def words(variable: str) -> tuple[str, ...]:
    """The comma-separated words of ``variable``, which may have none."""
    given = map(str.strip, os.environ.get(variable, "").split(","))
    return tuple(filter(None, given))


def size(nbytes: int) -> str:
    """Bytes in the largest of these units that fits, such as ``1.5 GiB``."""
    for unit in "GMK":
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.1f} {unit}iB".replace(".0 ", " ")
    return f"{nbytes} bytes"


@lru_cache(maxsize=64)  # one warning, although some variables are read at each request
def _read(variable: str, given: str) -> int | None:
    number = _NUMBER.fullmatch(given.upper())
    if number is None:
        logger.warning(
            "%s=%r is not a number such as 32 or 64M; using the default", variable, given
        )
        return None
    return int(float(number[1]) * _UNITS[number[2]])
