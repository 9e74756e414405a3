"""The body of a request: bounded in size, and parsed without holding up other requests.

The server has one event loop and one interpreter lock. Long work runs in a thread; Python passes
the lock on every few milliseconds, except during a single call into a library that holds it, such
as a JSON parser. A parser takes a few tenths of a microsecond per value and hardly any time for the
length of a string, so the numbers of values and of escapes are bounded.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from json import loads

import anyio
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Message

from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.protocols.validation import repair
from vllm_mlx_harmony.server.settings import ServerSettings, variable
from vllm_mlx_harmony.tasks import in_thread

MAX_BODY_VARIABLE = variable("max_body")
MAX_VALUES_VARIABLE = variable("max_values")
"""Sets ``ServerSettings.max_values``, to which the limits per value below are proportional."""

UPLOAD_SECONDS = 300
"""Maximum seconds until the body of a request has arrived: until then, it takes up memory."""

LARGE = 32_768
"""A body of this many bytes, or a conversation of this many characters, is processed in a
thread."""

UNQUOTED_PER_VALUE = 80
"""Bytes outside strings, per allowed value: a parser takes 6 ms for a megabyte of digits."""

ESCAPES_PER_VALUE = 40
"""Backslashes, per allowed value: a parser takes up to 16 ms for a million."""

NON_ASCII_PER_VALUE = 240
"""Bytes beyond ASCII, per allowed value: a parser takes 2 ms for a megabyte."""

MAX_REPAIRED = 8 * 2**20
"""Bytes of a body that contains a lone surrogate: ``json`` takes 2 ms for a megabyte."""

MAX_RATIO = 100
"""How many times as long as its compressed form a body may be, beyond ``SMALL_INFLATED`` bytes.
Conversations with repeated tool results reach 30; deflate itself, 1,030."""

SMALL_INFLATED = 2**20
"""Bytes that any compressed body may have, whatever its ratio, and that are inflated before other
requests get their turn."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""A possible lone surrogate. A response that repeated it could not be encoded."""

_SLICE = 2**16
"""Bytes of a body that are examined at once, so that copies of them stay small."""


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed body, and its bytes. A ``large`` one is processed in a thread."""

    value: object
    large: bool = False
    raw: bytes = b""


async def read_document(
    request: Request, settings: ServerSettings, more_values: int = 0
) -> tuple[Request, Document]:
    """The document in the body of ``request``, and the request from which it was read.

    Raises ``RequestError``: 413 above the limits, immediately for a ``Content-Length`` above that
    of a body, 408 if the body takes too long, 415 for an encoding other than gzip, and 400 for
    invalid gzip or JSON. ``more_values`` as in ``parse_json``.
    """
    declared, limit = request.headers.get("content-length", ""), settings.max_body
    # int() is quadratic, and 18 digits exceed any limit.
    if declared.isascii() and declared.isdigit() and int(declared[:18]) > limit:
        raise too_large(limit)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    gzip = _Gzip(limit) if encoding in ("gzip", "x-gzip") else None
    if gzip is None and encoding not in ("", "identity"):
        problem = f"Content-Encoding {quoted(encoding)} is not supported: use gzip, or none"
        raise RequestError(problem, status=415, code="unsupported_encoding")
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        if message["type"] == "http.request":
            if gzip is not None:
                last = not message.get("more_body", False)
                message = {**message, "body": await gzip.inflate(message.get("body", b""), last)}
            size += len(message.get("body", b""))
        if size > limit:
            raise too_large(limit)
        return message

    scope = request.scope
    if gzip is not None:  # whoever else reads the request gets the inflated body
        headers = [header for header in scope["headers"] if header[0] not in _COMPRESSED]
        scope = {**scope, "headers": headers}
    bounded = Request(scope, receive)
    try:
        with anyio.fail_after(UPLOAD_SECONDS):
            received = await bounded.body()
    except TimeoutError as error:
        problem = f"the request body was not received within {UPLOAD_SECONDS} seconds"
        raise RequestError(problem, status=408, code="request_timeout") from error
    return bounded, await parse_json(received, settings, more_values)


_COMPRESSED = (b"content-encoding", b"content-length")


class _Gzip:
    """Inflates the body of one request, of at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS + 16)
        self._received = self._inflated = 0

    async def inflate(self, data: bytes, last: bool) -> bytes:
        """The next piece, in which other requests are not held up. Raises ``RequestError``."""
        self._received += len(data)
        parts: list[bytes] = []
        try:
            while data:
                if self._inflater.eof:  # a file of several members
                    self._inflater = zlib.decompressobj(zlib.MAX_WBITS + 16)
                parts.append(self._inflater.decompress(data, SMALL_INFLATED))
                self._inflated += len(parts[-1])
                if self._inflated > self._limit:
                    raise too_large(self._limit)
                if self._inflated > max(SMALL_INFLATED, MAX_RATIO * self._received):
                    problem = f"the request body is more than {MAX_RATIO} times as long inflated"
                    raise RequestError(problem, status=413, code="request_too_large")
                data = self._inflater.unconsumed_tail or self._inflater.unused_data
                await asyncio.sleep(0)
        except zlib.error as error:
            raise RequestError(f"the request body is not valid gzip: {error}") from error
        if last and not self._inflater.eof:
            raise RequestError("the request body is not valid gzip: it is incomplete")
        return b"".join(parts)


def too_large(limit: int) -> RequestError:
    problem = f"the request body exceeds {limit} bytes, the limit set by {MAX_BODY_VARIABLE}"
    return RequestError(problem, status=413, code="request_too_large")


async def parse_json(body: bytes, settings: ServerSettings, more_values: int = 0) -> Document:
    """The document in ``body``. Raises ``RequestError`` for invalid JSON and above the limits.

    ``more_values`` is added to the number of JSON values that a body may have.
    """
    if len(body) > settings.max_body:
        raise too_large(settings.max_body)
    if len(body) < LARGE:
        return Document(_parse(body), raw=body)
    document = await in_thread(_parse_large, body, settings.max_values + more_values)
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
