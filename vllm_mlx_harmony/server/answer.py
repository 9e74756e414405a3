"""``Answer``: an answer that is being generated, and everything that has to be released after it.

An ``Answer`` owns the lease of the engine, the metrics, the deadline and the cancellation of a
request. It has one task, which takes groups of deltas from `generation`, writes them as events, and
puts the events into an ``EventBuffer``. A reader takes them out: a stream of server-sent events, a
WebSocket, or a client that waits for the whole answer. (The events of a background response go to
its log instead.) Readers never drive the engine. An answer ends in one of three ways:

- **Its generation ends**, or fails. The lease is released first. Then a failure is written, and the
  reader reaches the end.
- **It is ended** (``end``): a client cancels it, the server shuts down, or nothing is generated for
  too long. An engine stops only between two steps, which may be many seconds apart. So the reader
  gets the error immediately, and the task releases the lease later.
- **Its reader disconnects** (``aclose``). The engine is stopped and nothing more is written.

The task, the reader and whoever ends the answer act on it independently. What each of them may
still do depends on the **state** of the answer. As in h11
(https://github.com/python-hyper/h11/blob/master/h11/_state.py), the states are an enum and the
transitions are a table, `TRANSITIONS`. They are here and nowhere else; what a transition does is
code in ``Answer``:

    WAITING ─BEGIN─▶ GENERATING ─LAST_DELTA─▶ FINISHING ─WRITTEN─▶ FINISHED ─RELEASED─▶ COMPLETE
                         └───────LEAVE──────────┴─▶ STOPPING ─FAIL─▶ FAILING ─WRITTEN─▶ COMPLETE

- ``end`` is a ``FAIL`` that comes from outside, also in ``WAITING`` and ``GENERATING``. ``aclose``
  is ``CLOSE``, which leads to ``COMPLETE`` from every state. In both cases the task may still be
  generating. It then stops, frees the engine, and writes nothing more.
- They cancel the task in ``GENERATING`` and ``FINISHING`` only. A task that is cancelled before it
  has begun would never clean up. Later it frees the engine, which must not be interrupted.
- ``FINISHED`` and ``STOPPING`` differ in what may follow. After the last events no failure is
  written. If they could not be written, the failure to do so is: every answer has an end. ``end``
  has no effect in ``FINISHING`` and ``FINISHED``.

A failure before the first event is raised where the reader waits for that event, so that it becomes
an HTTP status. A later failure is an event in the API's format. Whether the client knows of the
answer is not a part of the state: for a background response it does from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from enum import Enum
from typing import Any, Protocol

from vllm_mlx_harmony import tasks
from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished, Progress, Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.progress import progress_comment
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.errors import CLIENT_CLOSED, failure_of
from vllm_mlx_harmony.server.event_buffer import EventBuffer
from vllm_mlx_harmony.server.generation import Deltas, Job, deltas_of
from vllm_mlx_harmony.server.host import TIMED_OUT, Tracker
from vllm_mlx_harmony.server.observer import Observer

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.5
"""Seconds between two reports of the progress of a prompt."""


class State(Enum):
    WAITING = "waiting"
    """The task has not begun."""
    GENERATING = "generating"
    """The task takes deltas from the generation, and writes them."""
    FINISHING = "finishing"
    """The generation has given its last delta, whose events are written now."""
    FINISHED = "finished"
    """The last events are written, and the engine is being freed."""
    STOPPING = "stopping"
    """The generation has ended without last events, and the engine is being freed."""
    FAILING = "failing"
    """A failure is being written."""
    COMPLETE = "complete"
    """Nothing more is written."""


class Trigger(Enum):
    """Causes a transition."""

    BEGIN = "begin"
    """The task begins to generate."""
    LAST_DELTA = "last_delta"
    """The generation gives its last delta."""
    LEAVE = "leave"
    """The task has left the generation, whether it ended or was cancelled."""
    FAIL = "fail"
    """A failure is to be written last."""
    WRITTEN = "written"
    """The last events are written."""
    RELEASED = "released"
    """The engine is free, and nothing more is to be written."""
    CLOSE = "close"
    """The reader has gone."""


TRANSITIONS: dict[State, dict[Trigger, State]] = {
    State.WAITING: {
        Trigger.BEGIN: State.GENERATING,
        Trigger.FAIL: State.FAILING,
        Trigger.CLOSE: State.COMPLETE,
    },
    State.GENERATING: {
        Trigger.LAST_DELTA: State.FINISHING,
        Trigger.LEAVE: State.STOPPING,
        Trigger.FAIL: State.FAILING,
        Trigger.CLOSE: State.COMPLETE,
    },
    State.FINISHING: {
        Trigger.WRITTEN: State.FINISHED,
        Trigger.LEAVE: State.STOPPING,
        Trigger.CLOSE: State.COMPLETE,
    },
    State.FINISHED: {
        Trigger.LEAVE: State.FINISHED,
        Trigger.RELEASED: State.COMPLETE,
        Trigger.CLOSE: State.COMPLETE,
    },
    State.STOPPING: {
        Trigger.FAIL: State.FAILING,
        Trigger.RELEASED: State.COMPLETE,
        Trigger.CLOSE: State.COMPLETE,
    },
    State.FAILING: {
        Trigger.LEAVE: State.FAILING,
        Trigger.WRITTEN: State.COMPLETE,
        Trigger.CLOSE: State.COMPLETE,
    },
    State.COMPLETE: {
        Trigger.LEAVE: State.COMPLETE,
        Trigger.WRITTEN: State.COMPLETE,
        Trigger.CLOSE: State.COMPLETE,
    },
}
"""The state that each trigger leads to. Any other trigger is a bug."""

_TAKING = (State.GENERATING, State.FINISHING)
"""The states in which the task takes deltas from the generation."""
_LEFT = (State.STOPPING, State.FINISHED)
"""The states in which the task has left the generation, and writes the end itself."""


class Sink(Protocol):
    """Gets the events of an answer in place of its buffer."""

    def append(self, events: list[Event]) -> None: ...

    def end(self) -> None:
        """Nothing follows, even if there were no last events. Not called after ``aclose``."""


def after(state: State, trigger: Trigger) -> State:
    """The state that ``trigger`` leads to. Raises ``RuntimeError`` if there is none."""
    following = TRANSITIONS[state].get(trigger)
    if following is None:
        raise RuntimeError(f"an answer is {state.value}: {trigger.value} is impossible")
    return following


class Answer:
    """The answer to ``job``. Creating it starts the generation, independently of the reader.

    ``tracker`` has the metrics of the request. ``answers`` are all answers of the front end, which
    it is one of until it ends. ``observers`` see the answer.

    Iterating yields the events. There is one reader, which uses either ``document``, or
    ``first_event`` and then the iteration. An answer that is not streamed has no events, only its
    document. After a silence (comments do not count), the reader gets the emitter's
    ``keep_alive``: clients give up on a stream in which they find no event (semantics E1).

    ``announced``: the client already has the id of the answer, so every failure is an event.
    ``sink`` gets the events instead of the buffer. ``deltas`` replaces the generation.
    """

    def __init__(
        self,
        job: Job,
        tracker: Tracker,
        answers: Answers,
        observers: Sequence[Observer] = (),
        *,
        announced: bool = False,
        sink: Sink | None = None,
        deltas: Deltas | None = None,
    ) -> None:
        self._lease, self._emitter = job.lease, job.emitter
        self._tracker, self._answers, self._observers = tracker, answers, observers
        self._deltas = deltas_of(job, tracker, observers) if deltas is None else deltas
        self._write_last, self._sink = job.write_last, sink
        self._reasoning_end = job.reasoning_end
        self._limits_reasoning = job.constraint is not None and job.constraint.spec.limits_reasoning
        self._is_remote = job.lease.engine.remote
        self._comments_progress = job.comments_progress
        self._progress_at: float | None = None  # when progress was last reported
        self._buffer = EventBuffer(
            job.server_settings.stream_bytes,
            job.server_settings.ping_seconds,
            job.emitter.keep_alive,
        )

        self._state = State.WAITING
        self._announced = announced
        self._result = ""  # as recorded in the metrics
        self._failure: Exception | None = None  # to be raised to the reader

        self._key = AnswerKey(job.id_seed, job.lease.tenant)
        answers.add(self._key, self)
        self._buffered = sink is None and job.stream
        if self._buffered:
            answers.begin_reading(self)
        self._task = tasks.start(self._run())

    # --- For the reader

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Event:
        event = await self._buffer.get()
        if event is None:
            self._answers.end_reading(self)
            raise StopAsyncIteration
        return event

    def readable(self) -> list[Event]:
        """The events that can be read now, as in ``EventBuffer``.

        Always empty for an engine in this process, which is never far ahead of its reader.
        """
        return self._buffer.readable() if self._is_remote else []

    async def first_event(self) -> None:
        """Waits for the first event. Raises a failure that comes before it."""
        while not (self._announced or self._state is State.COMPLETE):
            await self._buffer.changed()
        self._raise_failure()

    async def document(self) -> dict[str, Any]:
        """The whole answer, after the engine is free. Raises the failure that ended the answer."""
        while self._state is not State.COMPLETE:
            await self._buffer.changed()
        self._raise_failure()
        document = self._emitter.result()
        for observer in self._observers:
            observer.whole(document)
        return document

    async def aclose(self, result: str = "client_closed") -> None:
        """Ends the answer after its reader has disconnected, or has waited for too long.

        ``result`` is for the metrics. The engine stops at the end of its current step. Returns when
        it is free and the lease is released; immediately if the answer was read to its end.
        """
        self._answers.end_reading(self)
        self._finish_metrics(result)
        self._failure = None
        self._stop(Trigger.CLOSE)
        self._buffer.discard()
        if not self._buffer.read_to_end:
            await tasks.wait_until_done(self._task)

    def _raise_failure(self) -> None:
        """Raises the failure and drops it, because its traceback refers to this answer."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                self._buffer.end_reading()
                self._answers.end_reading(self)
                raise failure
        finally:
            del failure

    # --- For everything else

    def end(self, failure: HarmonyFailure) -> None:
        """Ends the answer with ``failure``, which the reader gets immediately.

        Has no effect once the last delta, or another failure, is being written.
        """
        if Trigger.FAIL in TRANSITIONS[self._state]:
            self._stop(Trigger.FAIL)
            tasks.start(self._write_failure(failure))

    def end_reasoning(self) -> bool:
        """Ends the reasoning, so that the model answers; returns whether that is possible."""
        self._reasoning_end.request()
        return self._limits_reasoning

    # --- The task

    async def _run(self) -> None:
        failure: Exception | None = None
        try:
            async with aclosing(self._deltas) as groups:
                if self._state is State.WAITING:
                    await self._generate(groups)
        except asyncio.CancelledError:
            # By `_stop`, and then this failure is not written; or because the engine was shut down.
            failure = OutputError("the engine was stopped")
        except Exception as error:  # noqa: BLE001 - the reader gets every error
            failure = error
        try:
            self._answers.remove(self._key, self)
            await self._lease.release()
        except Exception:
            logger.exception("an engine could not be released")
        try:
            if self._state in _LEFT:
                await self._conclude(failure)
            elif not (failure is None or isinstance(failure, HarmonyFailure)):
                logger.error("an engine could not be stopped", exc_info=failure)
        finally:
            del failure  # its traceback refers to this frame

    async def _generate(self, groups: Deltas) -> None:
        """Writes all groups.

        Each group may take as long as the whole request may, as in vllm-mlx. Reports of progress do
        not extend that time, so it includes the queue and the prompt. Over HTTP, the first group
        (``Started``) and a document must come within the request's deadline (`serving.respond`).
        """
        self._move(Trigger.BEGIN)
        deadline = self._lease.deadline
        silence = tasks.Timer(deadline.total, self._time_out)
        try:
            if failure := self._answers.rejection():
                raise failure
            if not deadline.left:
                raise deadline.timeout_error()
            silence.start()
            async for group in groups:
                if self._state not in _TAKING:  # an engine may suppress the cancellation
                    return
                if group and isinstance(group[0], Progress):
                    self._write_progress(group[0])
                    continue
                silence.stop()
                await self._write(group)
                silence.start()
        finally:
            self._move(Trigger.LEAVE)
            silence.close()

    def _time_out(self) -> None:
        problem = f"no output for {self._lease.deadline.total:.0f} seconds"
        self.end(HostError(problem, status=TIMED_OUT, code="timeout"))

    async def _write(self, group: list[Delta]) -> None:
        """Puts the events of ``group`` into the buffer. Raises ``HostError`` if it is full."""
        last = group[-1] if group else None
        if isinstance(last, Finished):
            group = group[:-1]
        self._put([event for delta in group for event in self._emitter.feed(delta)])
        if isinstance(last, Finished):
            self._move(Trigger.LAST_DELTA)
            self._finish_metrics("success", last)
            self._put(await self._last_events(last))
            self._move(Trigger.WRITTEN)
            return
        if self._is_remote:
            await self._buffer.room()
        elif self._buffer.exceeds_capacity():
            logger.info("closing a stream: the client has not read %d bytes", self._buffer.bytes)
            problem = "the stream was closed because the client read it too slowly"
            raise HostError(problem, code="reader_too_slow")

    def _write_progress(self, progress: Progress) -> None:
        """Writes the progress of the prompt, at most twice a second.

        Clients that asked for progress events get the first and the last one immediately, as with
        llama.cpp.
        """
        now = asyncio.get_running_loop().time()
        events = self._emitter.feed(progress)
        first, complete = self._progress_at is None, progress.processed >= progress.total
        at_once = bool(events) and (first or complete)
        if not events and self._comments_progress:
            events = [progress_comment(progress)]
        # A first comment waits for PROGRESS_SECONDS; a first event is sent immediately.
        if self._progress_at is None:
            self._progress_at = now
        if at_once or now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            self._put(events)

    async def _last_events(self, delta: Finished | Failed) -> list[Event]:
        if self._write_last is not None:
            return await self._write_last(delta)
        return self._emitter.feed(delta)

    async def _conclude(self, failure: Exception | None) -> None:
        """Ends the answer after its generation has ended by itself, maybe with ``failure``."""
        if failure is not None and self._state is State.STOPPING:
            self._move(Trigger.FAIL)
            await self._write_failure(failure)
            return
        # Nothing is written after the last events, but a reader of the document gets the failure.
        if not self._announced:
            self._failure = failure
        elif failure is not None:
            logger.error("an engine failed after an answer", exc_info=failure)
        self._complete(Trigger.RELEASED)
        self._finish_metrics("success")

    async def _write_failure(self, failure: Exception) -> None:
        """Writes ``failure`` as the last event, or leaves it for the reader to be raised."""
        try:
            results = {TIMED_OUT: "timeout", CLIENT_CLOSED: "client_closed"}
            result = results.get(getattr(failure, "status", 0), "error")
            self._finish_metrics(result, failure=failure)
            if self._announced:
                last = Failed(failure_of(failure, "an answer failed"))
                self._put(await self._last_events(last))
            else:
                self._failure = failure
        except Exception:
            logger.exception("failed to write the end of an answer")
        finally:
            self._complete(Trigger.WRITTEN)

    def _complete(self, trigger: Trigger) -> None:
        closed = self._state is State.COMPLETE
        self._move(trigger)
        self._buffer.close()
        if self._sink is not None and not closed:
            self._sink.end()

    def _put(self, events: list[Event]) -> None:
        if self._state is State.COMPLETE:
            return
        for observer in self._observers:
            observer.events(events)
        if self._sink is not None:
            self._sink.append(events)
        elif self._buffered:
            self._announced = True
            self._buffer.put(events)

    # --- For both sides

    def _move(self, trigger: Trigger) -> None:
        self._state = after(self._state, trigger)

    def _stop(self, trigger: Trigger) -> None:
        """Takes nothing more from the engine; the task cleans up."""
        is_taking = self._state in _TAKING
        self._move(trigger)
        self._answers.remove(self._key, self)
        if is_taking:
            self._task.cancel()

    def _finish_metrics(
        self, result: str, last: Finished | None = None, failure: Exception | None = None
    ) -> None:
        """Ends the metrics of the request, once. ``last`` has the usage."""
        if self._result:
            return
        self._result = result
        usage = Usage() if last is None else last.usage
        self._tracker.finish(result, usage)
        for observer in self._observers:
            observer.ended(result, usage, failure)
