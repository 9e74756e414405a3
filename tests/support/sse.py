"""The documents of a stream of server-sent events.

``event_checker.from_wire`` also has the names of events, and requires a valid stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any


def documents(text: str) -> list[Any]:
    """The JSON of each event of a stream, without ``[DONE]``."""
    return list(arriving(text.split("\n")))


def arriving(lines: Iterable[str]) -> Iterator[Any]:
    """``documents``, as their lines arrive."""
    return (json.loads(line.removeprefix("data: ")) for line in lines if line[:7] == "data: {")
