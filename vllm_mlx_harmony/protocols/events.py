"""Server-sent events and their JSON, shared by every API.

``json`` writes documents, once per message or response. Deltas are far more frequent, so the JSON
around their text is written once per message, and each delta only quotes its text (``quote``, in
C): its cost does not depend on the length of the answer. That takes about 0.1 µs; serializing the
whole chunk takes five times as long (orjson 3.13: 0.5 µs). orjson also rejects values that the host
and clients may send: lone surrogates and integers beyond 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from json.encoder import JSONEncoder, encode_basestring_ascii
from typing import Any, NamedTuple, TypeAlias

from vllm_mlx_harmony.core.text_limits import is_quick_to_write

Document: TypeAlias = dict[str, Any]
"""A JSON object: a document of an API, or a part of one."""

quote: Callable[[str], str] = encode_basestring_ascii
"""A Python string as a JSON string, in ASCII."""


class Event(NamedTuple):
    """One server-sent event: its ``data`` (one line) and its name, where an API names them.

    ``comment``: an SSE comment, which clients ignore. It keeps the connection alive, or reports
    progress.
    """

    data: str
    name: str = ""
    comment: bool = False


DONE = Event("[DONE]")

HEARTBEAT = Event("heartbeat", comment=True)

REASONING_ENDED_BY = "reasoning_ended_by"
"""The field that says why reasoning was cut short (C5), an extension in all three APIs."""


_ENCODER = JSONEncoder(separators=(",", ":"))


def encode(document: object) -> str:
    """``document`` as compact one-line JSON."""
    return _ENCODER.encode(document)


def encode_in_chunks(document: object) -> str:
    """Like ``encode``, but lets other threads run while it writes a large document."""
    if is_quick_to_write(document):
        return encode(document)
    return "".join(_parts(document))


def _parts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield '"'
        for at in range(0, len(value), _AT_ONCE):
            yield quote(value[at : at + _AT_ONCE])[1:-1]
        yield '"'
    elif isinstance(value, Mapping) and value:
        before = "{"
        for key, inner in value.items():
            yield before
            yield from _parts(key)
            yield ":"
            yield from _parts(inner)
            before = ","
        yield "}"
    elif isinstance(value, (list, tuple)) and value:
        before = "["
        for at in range(0, len(value), _VALUES_AT_ONCE):
            some = value[at : at + _VALUES_AT_ONCE]
            if not any(isinstance(inner, (str, Mapping, list, tuple)) for inner in some):
                yield before + encode(some)[1:-1]  # a thousand numbers in one call
                before = ","
                continue
            for inner in some:
                yield before
                yield from _parts(inner)
                before = ","
        yield "]"
    else:
        yield encode(value)


_AT_ONCE = 2**20
"""Characters of a text that are quoted at once, in 5 ms: no other thread runs meanwhile."""

_VALUES_AT_ONCE = 1_000
"""Numbers of a list that are written at once. 300,000 token ids take 70 ms."""


def frame(event: Event) -> str:
    """The event as text, for one write: clients may expect one event per chunk."""
    if event.comment:
        return f": {event.data}\n\n"
    if event.name:
        return f"event: {event.name}\ndata: {event.data}\n\n"
    return f"data: {event.data}\n\n"


def line(event: Event) -> str:
    """The event as a line, for APIs whose streams are lines of JSON. They have no comments."""
    return "" if event.comment else f"{event.data}\n"
