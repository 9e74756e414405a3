"""What an emitter hands to the wire, shared by every API.

Knows what one server-sent event is made of. Refuses to know what any API puts in it,
and anything about sockets.

Documents are written by ``json``, once per message or response. A delta is what there are thousands
of: its JSON is made once per message, and the text alone is quoted (``quote``, in C) and put in
between. That takes about 0.1 µs; a library that writes the whole chunk takes five times as long
(orjson 3.13: 0.5 µs), because most of a chunk is always the same. orjson also refuses what the host
and clients may send: half a surrogate pair, and integers beyond 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from json import dumps
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from vllm_mlx_harmony.core.text_limits import MOST_CHARACTERS, characters

quote: Callable[[str], str] = encode_basestring_ascii
"""A Python string as a JSON string, in ASCII."""


class Event(NamedTuple):
    """One server-sent event: its ``data`` (one line) and its name, where an API names them."""

    data: str
    name: str = ""


DONE = Event("[DONE]")

REASONING_ENDED_BY = "reasoning_ended_by"
"""The field that tells why the model was made to stop thinking (C5): no API has one for that."""


def encode(document: Any) -> str:
    """``document`` as compact one-line JSON."""
    return dumps(document, separators=(",", ":"))


def encode_slowly(document: Any) -> str:
    """As ``encode``, for a thread: others run in between, however much there is of it."""
    if characters(document) <= MOST_CHARACTERS:
        return encode(document)
    return "".join(_parts(document))


def _parts(value: Any) -> Iterator[str]:
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
        for inner in value:
            yield before
            yield from _parts(inner)
            before = ","
        yield "]"
    else:
        yield encode(value)


_AT_ONCE = 2**20


def frame(event: Event) -> str:
    """The event as it stands on the wire. Clients read one event per write."""
    if event.name:
        return f"event: {event.name}\ndata: {event.data}\n\n"
    return f"data: {event.data}\n\n"
