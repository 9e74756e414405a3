"""The body of a request: no larger than it may be, and parsed where nobody waits for it.

A server has one event loop, and one interpreter lock. What takes long is done in a thread, which
other threads get the lock from every few milliseconds, unless one call of a library holds it from
beginning to end, as parsers do: a parser takes a few tenths of a microsecond for each value and
nothing for the length of a string, so that it is the number of values that has to be bounded.
Refuses to know what a body says (protocols).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from json import loads

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Message, Receive

from vllm_mlx_harmony.core.errors import RequestError

logger = logging.getLogger("vllm_mlx_harmony")

VARIABLE = "VLLM_MLX_HARMONY_MAX_BODY"
"""Environment variable: bytes that a request may have, as ``32M``; K and G, too."""

DEFAULT = 32 * 2**20

LARGE = 32_768
"""Bytes (characters, for a conversation) from which on a request is noticed by others."""

MOST_VALUES = 100_000
"""JSON values in a body. Each that means anything is a token at least, or one of a few fields; a
parser takes 20 to 30 ms for as many."""

MOST_BARE = 4 * 2**20
"""Bytes of a body outside its strings. A parser takes 6 ms for a megabyte of digits."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SLICE = 2**16


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed body. What is made of a ``large`` one is made in a thread."""

    value: object
    large: bool = False


@lru_cache(maxsize=1)
def limit() -> int:
    """Bytes that a body may have. Reads the environment once."""
    given = os.environ.get(VARIABLE, "").strip().upper().removesuffix("B")
    number = given.rstrip("KMG")
    if not given:
        return DEFAULT
    if not (number.isascii() and number.isdigit() and given[len(number) :] in _UNITS):
        logger.warning("%s=%r is not a number of bytes: 32M it is", VARIABLE, given)
        return DEFAULT
    return int(number) * _UNITS[given[len(number) :]]


def bounded(request: Request) -> Request:
    """``request``, whose body cannot be read beyond the limit: raises ``RequestError`` 413 instead.

    Whatever it says of its length, and before it is there.
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:18]) > limit():
        raise too_large()
    return Request(request.scope, _counted(request.receive), request._send)


def _counted(receive: Receive) -> Receive:
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit():
            raise too_large()
        return message

    return counted


def too_large() -> RequestError:
    """The error for a body of more than the limit."""
    problem = f"the request body is larger than {limit()} bytes (see {VARIABLE})"
    return RequestError(problem, status=413, code="request_too_large")


async def parsed(body: bytes) -> Document:
    """The document in ``body``. Raises ``RequestError`` for what is no JSON, or too much of it."""
    if len(body) > limit():
        raise too_large()
    if len(body) < LARGE:
        return Document(_parsed(body))
    return Document(await asyncio.to_thread(_parsed_large, body), large=True)


def _parsed(body: bytes) -> object:
    try:
        document: object = loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    return document


def _parsed_large(body: bytes) -> object:
    _freeze_once()
    values = bare = 0
    for outside in _outside_strings(body):
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        bare += len(outside)
        if values >= MOST_VALUES or bare > MOST_BARE:
            problem = (
                f"the request body has more than {MOST_VALUES} JSON values, or {MOST_BARE} bytes "
                "outside its strings"
            )
            raise RequestError(problem, status=413, code="request_too_large")
    try:
        # Many times as fast as `json` with long strings, but it refuses half surrogate pairs.
        document: object = from_json(body, allow_inf_nan=True, cache_strings="keys")
    except ValueError:
        return _parsed(body)
    return document


@lru_cache(maxsize=1)
def _freeze_once() -> None:
    """Keeps the collector of garbage away from what the server has loaded.

    As many values as a large body has set it off, and it would walk over all modules again.
    """
    gc.freeze()


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """``body`` part by part, without strings: a value begins at each comma and bracket."""
    in_string = False
    at = 0
    while at < len(body):
        part = body[at : at + _SLICE]
        at += len(part)
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is cut in two
            part += body[at : at + 1]
            at += 1
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
