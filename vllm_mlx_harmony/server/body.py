"""The body of a request: bounded, and parsed where no other request waits for it.

A server has one event loop, and one interpreter lock. What takes long is done in a thread, which
other threads get the lock from every few milliseconds, unless one call of a library holds it from
beginning to end, as parsers do. A parser takes a few tenths of a microsecond for each value and
little for the length of a string, so values and escapes have to be bounded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from json import loads
from typing import TypeVar

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Message, Receive

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.validation import mended
from vllm_mlx_harmony.server.garbage import without_collections
from vllm_mlx_harmony.server.settings import number

VARIABLE = "VLLM_MLX_HARMONY_MAX_BODY"
"""Environment variable: bytes that a request may have, as ``32M``."""

VALUES = "VLLM_MLX_HARMONY_MAX_VALUES"
"""Environment variable: JSON values that a request may have, as ``200000``.

What else is bounded below grows with it."""

DEFAULT = 32 * 2**20

LARGE = 32_768
"""Bytes (characters, for a conversation) from which on a request is noticed by others."""

MOST_VALUES = 50_000
"""JSON values in a body. Each that means anything is a token at least, or one of a few fields. A
parser takes 10 to 15 ms for as many, and a collection of garbage that looks at what they have
become, some 15."""

BARE_EACH = 80
"""Bytes outside strings for each value that there may be: a parser takes 6 ms for a megabyte of
digits."""

ESCAPES_EACH = 40
"""Backslashes for each value that there may be: a parser takes up to 16 ms for a million."""

WIDE_EACH = 240
"""Bytes beyond ASCII for each value that there may be: a parser takes 2 ms for a megabyte."""

MOST_MENDED = 8 * 2**20
"""Bytes of a body with half a surrogate pair in it: ``json`` takes 2 ms for a megabyte."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Where half a surrogate pair may be: whatever repeats it to the client could not be encoded."""

_R = TypeVar("_R")
_SLICE = 2**16


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed body. What is made of a ``large`` one is made in a thread."""

    value: object
    large: bool = False


@lru_cache(maxsize=1)
def limit() -> int:
    """Bytes that a body may have. Reads the environment once."""
    return number(VARIABLE, DEFAULT)


@lru_cache(maxsize=1)
def most_values() -> int:
    """JSON values that a body may have. Reads the environment once."""
    return number(VALUES, MOST_VALUES)


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
    problem = f"the request body is larger than {limit()} bytes: send less, or raise {VARIABLE}"
    return RequestError(problem, status=413, code="request_too_large")


async def parse_body(body: bytes) -> Document:
    """The document in ``body``. Raises ``RequestError`` for what is no JSON, or too much of it."""
    if len(body) > limit():
        raise too_large()
    if len(body) < LARGE:
        return Document(_parse(body))
    return Document(await in_thread(_parse_large, body), large=True)


def _parse(body: bytes) -> object:
    try:
        document: object = loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    return mended(document) if _SURROGATE.search(body) else document


def _parse_large(body: bytes) -> object:
    _check(body)
    try:
        # Many times as fast as `json` with long strings, but it refuses half surrogate pairs.
        document: object = from_json(body, allow_inf_nan=True, cache_strings="none")
    except ValueError as error:
        if len(body) > MOST_MENDED:
            raise RequestError(f"the request body is not valid JSON: {error}") from error
        return _parse(body)
    return document


def _check(body: bytes) -> None:
    """Raises ``RequestError`` for a body that would keep its parser, and the lock, too long."""
    most = most_values()
    values = bare = escapes = wide = 0
    for at in range(0, len(body), _SLICE):
        part = body[at : at + _SLICE]
        escapes += part.count(b"\\")
        wide += 0 if part.isascii() else len(part.translate(None, _ASCII))
    if escapes > most * ESCAPES_EACH:
        raise _too_much(f"{most * ESCAPES_EACH} backslashes", "send text as UTF-8, not escaped")
    if wide > most * WIDE_EACH:
        raise _too_much(f"{most * WIDE_EACH} bytes that are not ASCII", "send less text")
    for outside in _outside_strings(body):
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        bare += len(outside)
        if values >= most:
            raise _too_much(f"{most} JSON values", "send fewer messages, tools or other values")
        if bare > most * BARE_EACH:
            raise _too_much(
                f"{most * BARE_EACH} bytes outside its strings", "send less white space"
            )


_ASCII = bytes(range(128))


def _too_much(what: str, instead: str) -> RequestError:
    problem = f"the request body has more than {what}: {instead}, or raise {VALUES}"
    return RequestError(problem, status=413, code="request_too_large")


async def in_thread(function: Callable[..., _R], *arguments: object) -> _R:
    """``function`` of ``arguments`` in a thread, and no garbage is collected meanwhile."""
    return await asyncio.to_thread(without_collections, function, *arguments)


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
