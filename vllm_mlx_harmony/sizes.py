"""Numbers of bytes as operators write and read them; units are powers of 1,024."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"([0-9]{1,15}(?:\.[0-9]+(?=\s*[KMGT]))?)\s*([KMGT]?)(?:I?B)?")


def parse_size(text: str) -> int:
    """``32``, ``64M`` or ``1.5GiB`` as a number. Raises ``ValueError`` for any other text."""
    found = _NUMBER.fullmatch(text.upper())
    if found is None:
        raise ValueError(f"{text!r} is not a number such as 32 or 64M")
    return int(float(found[1]) * _UNITS[found[2]])


def format_size(nbytes: int) -> str:
    """Bytes in the largest of these units that fits, such as ``1.5 GiB``."""
    for unit in "GMK":
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.1f} {unit}iB".replace(".0 ", " ")
    return f"{nbytes} bytes"
