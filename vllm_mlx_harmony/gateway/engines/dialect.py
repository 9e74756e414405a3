"""What differs between one kind of engine and another: fields, events and abilities. No I/O.

A ``Dialect`` writes the body of a request and reads the events of its stream; one file beside this
one for each kind of server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError, RequestError
from vllm_mlx_harmony.server.engine import Finish
from vllm_mlx_harmony.server.sampling import Settings

TURN_ENDS = sorted(vocab.TURN_ENDS)
"""The ids at which every engine is told to stop."""

DONE = "[DONE]"
"""What OpenAI's streams, and those made after them, end with."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do of what the front end could ask of it.

    ``ids``: a prompt of ids in, every generated id out. ``grammar``: llguidance's Lark, with
    control tokens as ids; ``grammar_white_space``: JSON may have some, as llguidance 1.9 bounds it.
    ``tenant_salt``: prefixes of one tenant are never another's hits.
    """

    ids: bool = True
    grammar: bool = False
    grammar_white_space: bool = False
    cached_tokens: bool = False
    logit_bias: bool = True
    min_tokens: bool = True
    tenant_salt: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """What it cannot do, in words."""
        names = [field.name for field in fields(self) if not getattr(self, field.name)]
        if not self.grammar:
            names.remove("grammar_white_space")
        return tuple(name.replace("_", " ") for name in names)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to an engine. ``grammar`` is text for llguidance; ``salt`` the tenant's."""

    model: str
    prompt: tuple[int, ...]
    settings: Settings
    salt: str = ""
    grammar: str | None = None
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event brought: ``ids`` that are new, and how the turn ended, if it did.

    ``cached_tokens`` counts ids of the prompt that were not computed.
    """

    ids: tuple[int, ...] = ()
    finish: Finish | None = None
    cached_tokens: int = 0


EMPTY = Chunk()


class Reader(Protocol):
    """Follows the events of one stream."""

    def read(self, data: str) -> Chunk:
        """What the event with these ``data`` brought. Raises ``OutputError`` for what is none."""


class Dialect(Protocol):
    """One kind of server. A value: equal for equal servers, and shared by all requests."""

    @property
    def name(self) -> str:
        """What the kind is called in flags, logs and metrics."""

    @property
    def path(self) -> str:
        """Where requests are posted."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """The request's JSON. Raises ``RequestError`` for what the engine cannot do."""

    def reader(self) -> Reader:
        """For a new stream."""


def sampling(settings: Settings) -> dict[str, Any]:
    """The fields of a body that every engine calls alike."""
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
    }


def parsed(data: str) -> dict[str, Any]:
    """The JSON object of an event. Raises ``OutputError`` for anything else."""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise garbled(data) from error
    if not isinstance(event, dict):
        raise garbled(data)
    return event


def garbled(data: object) -> OutputError:
    """For what no event of this engine looks like; how it begins stands in the message."""
    return OutputError(f"the engine sent what cannot be read: {str(data)[:80]!r}")


def failure_in(event: Mapping[str, Any]) -> HarmonyFailure:
    """What the ``error`` of an event says: of the request (4xx), or of the engine."""
    error = event["error"]
    status = error.get("code") if isinstance(error, Mapping) else None
    said = message_of(event) or "it did not say why"
    if type(status) is int and 400 <= status < 500:  # noqa: PLR2004
        return RequestError(f"the engine refused the request: {said}", code="engine_refused")
    return OutputError(f"the engine failed: {said}")


FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length"}


def finish_of(
    reason: object, finishes: Mapping[str, Finish] = FINISHES, said: object = None
) -> Finish | None:
    """How the turn ended, by the engine's word for it; ``None`` as long as it goes on.

    ``said`` is what the engine says about that. Raises ``OutputError`` for an answer that the
    engine gave up.
    """
    if reason is None:
        return None
    finish = finishes.get(reason) if isinstance(reason, str) else None
    if finish is None:
        about = f"{reason}: {said}" if said else reason
        raise OutputError(f"the engine gave the answer up ({about})")
    return finish


def ids_of(value: object) -> tuple[int, ...]:
    """``value`` as ids; nothing for ``None``. Raises ``OutputError``."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise garbled(value)
    return tuple(value)


def count_of(value: object) -> int:
    """``value`` as a number of tokens; 0 for what is none."""
    return value if type(value) is int and value > 0 else 0


def message_of(body: object) -> str:
    """What an error says, in any of the shapes that engines have for it; empty if nothing."""
    if isinstance(body, Mapping):
        for name in ("error", "message", "detail", "object"):
            if found := message_of(body.get(name)):
                return found
        return ""
    return body if isinstance(body, str) else ""
