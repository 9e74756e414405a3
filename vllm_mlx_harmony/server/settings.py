"""Numbers and sizes that the environment sets. Knows no variable: each stands where it is used."""

from __future__ import annotations

import logging
import os
import re
from functools import lru_cache

logger = logging.getLogger("vllm_mlx_harmony")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"([0-9]{1,15}(?:\.[0-9]+(?=\s*[KMGT]))?)\s*([KMGT]?)(?:I?B)?")


def number(variable: str, default: int) -> int:
    """What the environment says: ``32``, ``64M``, ``1.5GiB``; units are powers of 1,024.

    ``default`` where it says nothing, and, with a warning, where it says no such number.
    """
    given = os.environ.get(variable, "").strip()
    found = _read(variable, given) if given else None
    return default if found is None else found


@lru_cache(maxsize=64)  # so that what is asked for at each request is warned about once
def _read(variable: str, given: str) -> int | None:
    number = _NUMBER.fullmatch(given.upper())
    if number is None:
        logger.warning(
            "%s=%r is not a number such as 32 or 64M: the default counts", variable, given
        )
        return None
    return int(float(number[1]) * _UNITS[number[2]])
