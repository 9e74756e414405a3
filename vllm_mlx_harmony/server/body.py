"""The body of a request: bounded in size, and parsed without holding up other requests.

The server has one event loop and one interpreter lock. Long work runs in a thread; Python passes
the lock on every few milliseconds, except during a single call into a library that holds it, such
as a JSON parser. A parser takes a few tenths of a microsecond per value and hardly any time for the
length of a string, so the numbers of values and of escapes are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from json import loads

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Message

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.validation import repair
from vllm_mlx_harmony.server.settings import number
from vllm_mlx_harmony.server.tasks import in_thread

MAX_BODY_VARIABLE = "VLLM_MLX_HARMONY_MAX_BODY"
"""Environment variable: maximum size of a request body, such as ``32M``."""

MAX_VALUES_VARIABLE = "VLLM_MLX_HARMONY_MAX_VALUES"
"""Environment variable: maximum number of JSON values in a request body, such as ``200000``.

The other limits below are proportional to it."""

DEFAULT_MAX_BODY = 32 * 2**20

LARGE = 32_768
"""A body of this many bytes, or a conversation of this many characters, is processed in a
thread."""

DEFAULT_MAX_VALUES = 50_000
"""JSON values in a body. Parsing this many takes 10 to 15 ms, and a garbage collection that visits
the resulting objects about 15."""

UNQUOTED_PER_VALUE = 80
"""Bytes outside strings, per allowed value: a parser takes 6 ms for a megabyte of digits."""

ESCAPES_PER_VALUE = 40
"""Backslashes, per allowed value: a parser takes up to 16 ms for a million."""

NON_ASCII_PER_VALUE = 240
"""Bytes beyond ASCII, per allowed value: a parser takes 2 ms for a megabyte."""

MAX_REPAIRED = 8 * 2**20
"""Bytes of a body that contains a lone surrogate: ``json`` takes 2 ms for a megabyte."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""A possible lone surrogate. A response that repeated it could not be encoded."""

_SLICE = 2**16


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed body, and its bytes. A ``large`` one is processed in a thread."""

    value: object
    large: bool = False
    raw: bytes = b""


def max_body() -> int:
    """The maximum size of a body in bytes."""
    return number(MAX_BODY_VARIABLE, DEFAULT_MAX_BODY)


def max_values() -> int:
    return number(MAX_VALUES_VARIABLE, DEFAULT_MAX_VALUES)


def bounded(request: Request) -> Request:
    """A copy of ``request`` that raises ``RequestError`` 413 when its body exceeds the limit.

    Raises it immediately for a ``Content-Length`` above the limit.
    """
    declared, limit = request.headers.get("content-length", ""), max_body()
    # int() is quadratic, and 18 digits exceed any limit.
    if declared.isascii() and declared.isdigit() and int(declared[:18]) > limit:
        raise too_large()
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large()
        return message

    return Request(request.scope, receive)


def too_large() -> RequestError:
    problem = f"the request body exceeds {max_body()} bytes, the limit set by {MAX_BODY_VARIABLE}"
    return RequestError(problem, status=413, code="request_too_large")


async def parse_body(body: bytes, more_values: int = 0) -> Document:
    """The document in ``body``. Raises ``RequestError`` for invalid JSON and above the limits.

    ``more_values`` is added to the number of JSON values that a body may have.
    """
    if len(body) > max_body():
        raise too_large()
    if len(body) < LARGE:
        return Document(_parse(body), raw=body)
    document = await in_thread(_parse_large, body, max_values() + more_values)
    return Document(document, large=True, raw=body)


def _parse(body: bytes) -> object:
    try:
        document: object = loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    return repair(document) if _SURROGATE.search(body) else document


def _parse_large(body: bytes, limit: int) -> object:
    """The document in ``body``, which may have ``limit`` values."""

    def check(count: int, maximum: int, what: str, instead: str) -> None:
        if count > maximum:
            problem = f"the request body has more than {maximum} {what}: {instead}"
            raise RequestError(
                f"{problem}, or increase {MAX_VALUES_VARIABLE}",
                status=413,
                code="request_too_large",
            )

    values, unquoted, escapes, non_ascii = 1, 0, 0, 0
    for at in range(0, len(body), _SLICE):
        part = body[at : at + _SLICE]
        escapes += part.count(b"\\")
        non_ascii += 0 if part.isascii() else len(part.translate(None, _ASCII))
    advice = "send text as UTF-8, not escaped"
    check(escapes, limit * ESCAPES_PER_VALUE, "backslashes", advice)
    check(non_ascii, limit * NON_ASCII_PER_VALUE, "bytes that are not ASCII", "send less text")
    for part in _outside_strings(body):
        values += part.count(b",") + part.count(b"[") + part.count(b"{")
        unquoted += len(part)
        check(values, limit, "JSON values", "send fewer messages, tools or other values")
        advice = "send less white space"
        check(unquoted, limit * UNQUOTED_PER_VALUE, "bytes outside its strings", advice)
    try:
        # Many times as fast as `json` for long strings, but it rejects lone surrogates.
        document: object = from_json(body, allow_inf_nan=True, cache_strings="none")
    except ValueError as error:
        if len(body) > MAX_REPAIRED:
            raise RequestError(f"the request body is not valid JSON: {error}") from error
        return _parse(body)
    return document


_ASCII = bytes(range(128))


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """``body`` without its strings, in parts: every comma and opening bracket begins a value."""
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
