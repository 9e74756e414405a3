"""What a check asks and what it gets, the same for all three APIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Document: TypeAlias = dict[str, Any]
"""A JSON object."""

LIMIT = 4096
"""Maximum output tokens of a request, reasoning included."""


class Failed(Exception):
    """A check found that something does not hold. The message says what."""


class Unsupported(Exception):
    """A check cannot be made on this server. The message says why."""


def require(holds: object, problem: str) -> None:
    """Raises ``Failed`` unless ``holds``."""
    if not holds:
        raise Failed(problem)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: Document


@dataclass(frozen=True, slots=True)
class Call:
    """A call to a tool. ``arguments`` is JSON text."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. ``reasoning`` is part of ``output``, ``cached`` of ``prompt``; None: not reported."""

    prompt: int
    output: int
    cached: int | None = None
    reasoning: int | None = None


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """What the model answered. ``history`` is how its own API sends it back in the next request."""

    id: str
    text: str
    reasoning: str
    calls: tuple[Call, ...]
    finish: Literal["stop", "length", "calls"]
    usage: Usage
    history: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool returned for a call."""

    call: Call
    text: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. A string in ``messages`` is a message of the user.

    ``choice`` is ``required``, ``none`` or the name of a tool, ``schema`` that of a strict format,
    ``extra`` fields that are added to the body as they are.
    """

    messages: tuple[str | ReceivedAnswer | Result, ...]
    system: str = ""
    tools: tuple[Tool, ...] = ()
    choice: str = ""
    schema: Document | None = None
    effort: str = ""
    stop: str = ""
    limit: int = LIMIT
    extra: Mapping[str, object] = field(default_factory=dict)
