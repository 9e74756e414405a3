"""Deltas: the parser's output and every emitter's input (semantics B, "Meaning").

A turn is ``Started``, then ``Progress``… while its prompt waits and is computed, then ``Opened``,
``Text``…, ``Closed`` for each visible message, then ``Finished`` or ``Failed``. ``ToolStarted`` and
``ToolFinished`` follow a message that calls a tool which the server runs. ``Citation`` stands
between texts, if the turn has a browser (`core.pages`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.core.turn import ServerCall

FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "pause"]

ReasoningCut: TypeAlias = Literal["", "budget", "repetition", "request"]
"""Why the server ended the reasoning; empty if it did not."""


class Kind(Enum):
    """What a visible message is. Hidden messages have no kind and no deltas."""

    REASONING = "reasoning"
    PREAMBLE = "preamble"
    ANSWER = "answer"
    CALL = "call"
    SERVER_CALL = "server_call"  # a tool that the server runs within the same turn


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one turn; ``cached_tokens`` of the prompt were cached, not computed again.

    ``reasoning_tokens`` and ``call_tokens`` are those in bodies of reasoning and of calls, and part
    of ``completion_tokens``, as are headers. ``tool_tokens`` are the results of tools that the
    server ran within the turn. They count neither as prompt nor as completion. Of the speculated
    tokens, ``accepted_prediction_tokens`` were accepted and count towards ``completion_tokens``;
    ``rejected_prediction_tokens`` were rejected.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    tool_tokens: int = 0
    call_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def by_channel(self) -> dict[str, int]:
        """``completion_tokens`` as ``reasoning``, ``calls``, and ``content``, with all headers."""
        content = self.completion_tokens - self.reasoning_tokens - self.call_tokens
        return {"reasoning": self.reasoning_tokens, "calls": self.call_tokens, "content": content}


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt has been rendered, and the engine computes it next. ``cached_tokens`` of it are
    cached (``None``: not known yet)."""

    prompt_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the engine has got with the prompt, before it generates anything.

    ``processed`` of ``total`` tokens are done, the ``cached`` ones included, in ``seconds``.
    ``place`` is its place in the queue, from 1; 0 once the engine has begun.
    """

    total: int
    cached: int = 0
    processed: int = 0
    seconds: float = 0.0
    place: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """A message begins. ``index`` counts the visible messages of the turn from 0.

    ``name`` is the name of the called tool as the request declared it, or the whole recipient for a
    tool that the server runs; empty for other kinds. An empty message is never opened, except for a
    call. ``at`` is the number of ids that were generated before the message's header.
    """

    index: int
    kind: Kind
    name: str = ""
    at: int = field(default=0, compare=False)


LOWEST_LOGPROB = -9999.0
"""Represents a probability of 0, whose logarithm JSON cannot express, as in OpenAI's APIs."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a generated id, of the model's own distribution.

    ``top`` has the likeliest ids in its place with their log probabilities, likeliest first. They
    may be control tokens. A log probability is finite: none is below ``LOWEST_LOGPROB``.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A ``TokenLogprob`` as clients receive it.

    The tokens in ``top`` are converted in the same way. ``content`` has the exact bytes, which may
    be part of a character. A control token has a name as its ``text``, and no bytes (``None``).
    """

    text: str
    content: bytes | None
    logprob: float
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """More text of the open message: not empty, only whole characters, no control tokens.

    ``logprobs`` are those of the ids of a preamble or an answer, if they were requested: each id
    that is at least partly shown is reported once, with the first text that contains part of it.
    """

    text: str
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Citation:
    """The text of the open message cites ``passage``, of the page at ``url``.

    ``mark`` is what the model wrote in the text; ``logprobs`` as in ``Text``.
    """

    mark: str
    url: str
    title: str
    passage: str = ""
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """The open message ends; ``complete`` is false if the output was cut inside it."""

    complete: bool = True


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """The server starts to run the tool that the previous message calls, or a ``call`` of an
    earlier turn that has been approved since.

    Without this delta the call is not run: it needs approval, or was cut off.
    """

    call: ServerCall | None = None


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """Why a call failed. ``by_tool``: ``text`` is the tool's own report. ``code`` is the kind of
    failure, in the words of Anthropic's API, if the tool states it."""

    text: str
    by_tool: bool = False
    code: str = ""


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """The tool has finished, or failed; the model reads ``text`` in both cases."""

    text: str
    failure: ToolFailure | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn ends. ``stop_sequence`` is the caller's stop string that ended it, if any.

    After ``pause``, the server has yet to run the last call; the turn continues when the caller
    sends it back unchanged. ``reasoning_ended_by`` is why reasoning was cut short, if it was.
    """

    reason: FinishReason
    stop_sequence: str | None = None
    usage: Usage = Usage()
    reasoning_ended_by: ReasoningCut = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn ends with an error after it has started."""

    error: HarmonyFailure


Delta: TypeAlias = (
    Started
    | Progress
    | Opened
    | Text
    | Citation
    | Closed
    | ToolStarted
    | ToolFinished
    | Finished
    | Failed
)


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """A delta of the answer at ``index``, one of several to the same prompt. ``Progress``,
    ``Failed`` and the ``Finished`` with the total usage belong to no single choice."""

    index: int
    delta: Delta
