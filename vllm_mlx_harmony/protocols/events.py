"""What an emitter hands to the wire, shared by every API.

Knows what one server-sent event is made of. Refuses to know what any API puts in it,
and anything about sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

quote: Callable[[str], str] = encode_basestring_ascii
"""A Python string as a JSON string, in ASCII."""


class Event(NamedTuple):
    """One server-sent event: its ``data`` (one line) and its name, where an API names them."""

    data: str
    name: str = ""


DONE = Event("[DONE]")


def encode(document: Any) -> str:
    """``document`` as compact one-line JSON."""
    return dumps(document, separators=(",", ":"))


def frame(event: Event) -> str:
    """The event as it stands on the wire. Clients read one event per write."""
    if event.name:
        return f"event: {event.name}\ndata: {event.data}\n\n"
    return f"data: {event.data}\n\n"
