"""``Answers``: all answers of a front end, which a client may cancel and a shutdown ends.

Everything runs on the thread of the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, Protocol

from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.server.errors import CLIENT_CLOSED

SHUTTING_DOWN = "shutting_down"


class AnswerKey(NamedTuple):
    """Identifies an answer that is being generated: all its ids contain ``seed``."""

    seed: str
    tenant: str


class ReasoningStop(Enum):
    """Whether the reasoning of an answer was ended; the value says why not."""

    ENDED = ""
    UNLIMITED = "the reasoning of this answer is not limited by the server, and cannot be ended"
    UNKNOWN = "no answer with this id is being generated"


class Endable(Protocol):
    """An answer that is being generated (`answer.Answer`)."""

    def end(self, failure: HarmonyFailure) -> None:
        """Ends the answer with ``failure``."""

    def end_reasoning(self) -> bool:
        """Has the model answer now; returns whether that is possible."""


class Answers:
    """The answers of a front end."""

    def __init__(self) -> None:
        self._running: dict[AnswerKey, Endable] = {}
        self._being_read: set[object] = set()
        self._rejecting = False

    # --- For an answer

    def add(self, key: AnswerKey, answer: Endable) -> None:
        """``answer`` waits for its engine, or is generated."""
        self._running[key] = answer

    def remove(self, key: AnswerKey, answer: Endable) -> None:
        """``answer`` is no longer generated."""
        if self._running.get(key) is answer:
            del self._running[key]

    def begin_reading(self, reader: object) -> None:
        """A shutdown waits for ``reader``, the answer or connection that a client reads."""
        self._being_read.add(reader)

    def end_reading(self, reader: object) -> None:
        self._being_read.discard(reader)

    @contextmanager
    def delay_shutdown(self) -> Iterator[None]:
        """Within the block, a shutdown waits, as it does for an answer that is being read."""
        reader = object()
        self.begin_reading(reader)
        try:
            yield
        finally:
            self.end_reading(reader)

    # --- For clients

    @property
    def running(self) -> list[AnswerKey]:
        """The key of each answer that is generated or waits for its engine."""
        return list(self._running)

    def cancel(self, key: AnswerKey) -> bool:
        """Ends the answer with an error; returns whether there is one."""
        answer = self._running.get(key)
        if answer is None:
            return False
        answer.end(OutputError("the request was cancelled", status=CLIENT_CLOSED, code="cancelled"))
        return True

    def end_reasoning(self, key: AnswerKey) -> ReasoningStop:
        """Has the model answer now, if that is possible."""
        answer = self._running.get(key)
        if answer is None:
            return ReasoningStop.UNKNOWN
        return ReasoningStop.ENDED if answer.end_reasoning() else ReasoningStop.UNLIMITED

    # --- For a shutdown

    @property
    def unread(self) -> bool:
        """Whether there are answers that have not been read to their ends."""
        return bool(self._being_read)

    def end_all(self, failure: HarmonyFailure) -> None:
        for answer in list(self._running.values()):
            answer.end(failure)

    def reject_new(self, rejecting: bool) -> None:
        """Sets whether answers that have not begun fail with 503."""
        self._rejecting = rejecting

    def rejection(self) -> HostError | None:
        """The failure of new answers during a shutdown; otherwise ``None``."""
        return shutdown_error() if self._rejecting else None


def shutdown_error() -> HostError:
    """A new error each time, as raising one adds to its traceback."""
    return HostError("the server is shutting down", code=SHUTTING_DOWN)
