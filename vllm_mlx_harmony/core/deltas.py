"""Deltas: the parser's output and every emitter's input (semantics B, "Meaning").

A turn is Started, then Progress… while its prompt waits and is computed, then Opened, Text…, Closed
for each message that is shown, then Finished or Failed. ToolStarted and ToolFinished follow the
message that calls a tool of the server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.core.turn import ServerCall

FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "pause"]

Reason: TypeAlias = Literal["", "budget", "repetition"]
"""Why reasoning was ended, so that the model answers; empty when it was not."""


class Kind(Enum):
    """What a shown message is. Messages that are not shown have no kind and no delta."""

    REASONING = "reasoning"
    PREAMBLE = "preamble"
    ANSWER = "answer"
    CALL = "call"
    SERVER_CALL = "server_call"  # of a tool that the server runs, within the same turn


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one turn; ``cached_tokens`` of the prompt needed no prefill.

    ``tool_tokens`` are those of what tools of the server's answered within the turn: neither in the
    prompt, which counts once, nor in what was generated.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    tool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is rendered, and it is this request's turn: its engine computes it next.

    ``cached_tokens`` of it need no prefill, as far as is known by then; ``None`` when it is not.
    """

    prompt_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the engine is with the prompt, before it generates anything.

    ``processed`` of ``total`` tokens are done, the ``cached`` ones included. ``seconds`` have
    passed since the engine began to compute it. ``place`` is its place in the queue, from 1; 0 once
    the engine has begun.
    """

    total: int
    cached: int = 0
    processed: int = 0
    seconds: float = 0.0
    place: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """A message begins. ``index`` counts the shown messages of the turn from 0.

    ``name`` is the tool's name as the request declared it, of a tool that the server runs the whole
    recipient; empty unless ``kind`` is ``CALL`` or ``SERVER_CALL``.
    Never sent for a message that turns out empty, except for a call. ``at`` is how many ids the
    model had generated where the message's header begins: for whoever keeps the ids.
    """

    index: int
    kind: Kind
    name: str = ""
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Text:
    """More of the open message: never empty, never half a character, never a control token."""

    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The open message ends; ``complete`` is false when the output was cut inside it."""

    complete: bool = True


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """The tool that the message before calls runs now, on the server.

    Without it the call was not run: its caller wants to approve it first, or it was cut. A call
    that an earlier turn ended with, approved since, has no message in this one: ``call`` is it.
    """

    call: ServerCall | None = None


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """Why a call failed. ``by_tool``: the tool itself says so, and ``text`` is its own."""

    text: str
    by_tool: bool = False


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """The tool has answered: ``text`` is what the model gets to read, of a failure, too."""

    text: str
    failure: ToolFailure | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn ends. ``stop_sequence`` is the caller's string that ended it, if one did.

    With ``pause`` it ends before a call that the server has yet to run: the turn goes on when its
    caller gives it back as it is. ``reasoning_ended_by`` says why the model was made to stop
    thinking; empty when it was not.
    """

    reason: FinishReason
    stop_sequence: str | None = None
    usage: Usage = Usage()
    reasoning_ended_by: Reason = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn ends because something broke after it had started."""

    error: HarmonyFailure


Delta: TypeAlias = (
    "Started | Progress | Opened | Text | Closed | ToolStarted | ToolFinished | Finished | Failed"
)
