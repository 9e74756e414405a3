"""Settings in environment variables: those of the front end, and how any of them is read."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from typing import TypeVar

from vllm_mlx_harmony.core.errors import HostError

E = TypeVar("E", bound=Enum)

logger = logging.getLogger("vllm_mlx_harmony")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"([0-9]{1,15}(?:\.[0-9]+(?=\s*[KMGT]))?)\s*([KMGT]?)(?:I?B)?")


STOPPED_WITHIN = 35.0
"""Seconds after SIGTERM within which any server has ended by itself (`shutdown`), with some to
spare. Whoever stops one waits so long before SIGKILL: a killed process can leave wired memory
behind on a Mac."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The limits of the front end, read once, when it is installed (`host.install`).

    Each is set by the variable ``VLLM_MLX_HARMONY_`` and its name in capitals.
    """

    max_body: int = 32 * 2**20
    """Maximum size of a request body in bytes."""
    max_values: int = 50_000
    """Maximum number of JSON values in a body. Parsing this many takes 10 to 15 ms, and a garbage
    collection that visits the resulting objects about 15."""
    stream_bytes: int = 8 * 2**20
    """Maximum unread bytes of an answer. An answer that has more is ended."""
    stream_seconds: float = 60
    """Seconds after which a client that does not read is disconnected."""
    ping_seconds: float = 5
    """Seconds of silence after which a ping is sent, or a comment in APIs that have no pings; 0:
    never."""
    background_bytes: int = 256 * 2**20
    """Maximum bytes of all running background responses. More are rejected with 503."""

    @classmethod
    def read(cls) -> Environment:
        """The limits in the environment, and the defaults of those that are not set."""
        unset = asdict(cls())
        names = {f"VLLM_MLX_HARMONY_{name.upper()}": name for name in unset}
        return cls(**{name: number(variable, unset[name]) for variable, name in names.items()})


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
