"""A running answer: what owns the engine until it is free, and the accounting until it is closed.

An ``Answer`` has one task. The task takes groups of deltas from the engine, has them written as
events, and puts the events into one buffer. Whoever reads the buffer is a reader: a stream of
server-sent events, a WebSocket, a client that waits for the whole answer, the log of a response in
the background. A reader never drives the engine, and an answer ends in one of three ways:

- **It is generated to its end**, or the engine fails. The lease is released first; then a failure
  is written, and the reader comes to the end.
- **Something else ends it** (``end``): a client cancels it, the server shuts down, or nothing is
  generated for too long. An engine can be stopped only between two steps, which may be many
  seconds apart, so the reader gets the error at once, and the task releases the lease later.
- **Its reader goes away** (``close``). The engine is stopped and nothing more is written.

A failure before the first event is raised where the reader waits for that event, so that it becomes
an HTTP status. Later it is an event in the shape of the API.

An engine that waited for its readers would be held up by the slowest of them. So it does not wait,
unless each request has a connection of its own to it (``Engine.remote``). The buffer is bounded
instead: an answer that outgrows it ends with an error, the engine is free, and what is left in the
buffer can still be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeAlias

from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished, Progress, Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.protocols.progress import progress_comment
from vllm_mlx_harmony.server.errors import logged_failure
from vllm_mlx_harmony.server.generation import Deltas, Job, end_of
from vllm_mlx_harmony.server.host import TIMED_OUT
from vllm_mlx_harmony.server.settings import number

logger = logging.getLogger(__name__)

CAPACITY_VARIABLE = "VLLM_MLX_HARMONY_STREAM_BYTES"
"""Environment variable: unread bytes of an answer beyond which it is ended."""

DEFAULT_CAPACITY = 8 * 1024 * 1024

HIGH_WATER = 128 * 1024
"""Unread bytes of an answer above which a remote engine waits, until half of them are read."""

PIECE = 32 * 1024
"""Bytes of events that are sent at once, about."""

PING_VARIABLE = "VLLM_MLX_HARMONY_PING_SECONDS"
"""Environment variable: seconds of silence after which a ping is sent, in APIs that have one; 0:
never."""

DEFAULT_PING_SECONDS = 5

PROGRESS_SECONDS = 0.5
"""Seconds between two reports of how far a prompt is."""

CANCELLED = 499
"""nginx's status for a client that has closed its request: here it has asked for the end."""


class Emitter(Protocol):
    """Writes one answer in the shape of an API."""

    def feed(self, delta: Delta) -> list[Event]:
        """The events for ``delta``; none where the answer is not streamed."""

    def result(self) -> dict[str, Any]:
        """The whole answer, when it is not streamed."""


End: TypeAlias = "Callable[[Finished | Failed], Awaitable[list[Event]]]"
"""Writes the last delta of an answer."""


class Answer:
    """The answer to ``job``, made of ``deltas``, from now on until it is read or closed.

    ``end`` writes the last delta in place of the emitter, and may take time (a response is stored).
    ``announced``: a client knows of the answer already, so that every failure is an event. ``keep``
    takes the events in place of the buffer. ``ping`` is read after every ``pings_after`` seconds of
    silence; comments do not break it. ``comments_progress``: where the emitter has no event for the
    progress of the prompt, it is written as comments. ``capacity`` is the bound of the buffer in
    bytes; the first group of events does not count, because it repeats what the client has sent.

    Iterating gives the events. There is one reader: ``whole``, or ``begun`` and the iteration.
    """

    def __init__(
        self,
        job: Job,
        deltas: Deltas,
        emitter: Emitter,
        *,
        end: End | None = None,
        announced: bool = False,
        keep: Callable[[list[Event]], None] | None = None,
        ping: Event | None = None,
        pings_after: float | None = None,
        comments_progress: bool = False,
        capacity: int | None = None,
    ) -> None:
        self._lease, self._tracker = job.lease, job.tracker
        self._lease.taken_over = True
        self._waits = job.lease.harmony.remote
        self._deltas, self._emitter, self._write_last, self._keep = deltas, emitter, end, keep
        if pings_after is None:
            pings_after = number(PING_VARIABLE, DEFAULT_PING_SECONDS)
        self._ping, self._pings_after = ping if pings_after else None, pings_after
        self._silent_since: float | None = None  # for the reader, by the clock of the loop
        self._comments_progress = comments_progress
        self._reported: float | None = None  # when progress was shown last
        self._room = number(CAPACITY_VARIABLE, DEFAULT_CAPACITY) if capacity is None else capacity
        self._capacity: int | None = None  # of the buffer, from the first group on

        self._announced = announced
        self._ended = False  # the last event is written, or is being written
        self._stopped = False  # nothing more is taken from the engine
        self._complete = False  # nothing more comes into the buffer
        self._generating = False  # the task may be cancelled: it is not cleaning up
        self._accounted = False
        self._read = False  # the reader has come to the end
        self._failure: Exception | None = None  # for the reader of an answer not announced

        self._unread: deque[Event] = deque()
        self._bytes = 0
        self._more: asyncio.Future[None] | None = None  # the reader waits for it
        self._less: asyncio.Future[None] | None = None  # the task waits for it

        self._name = (job.id_seed, job.lease.tenant)
        _running[self._name] = self
        if keep is None:
            _being_read.add(self)
        self._task = _held(self._run())

    # --- For the reader

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Event:
        clock = asyncio.get_running_loop().time
        if self._silent_since is None:
            self._silent_since = clock()
        while True:
            left = self._silent_since + self._pings_after - clock()
            silent = self._unread[0].comment if self._unread else not self._complete
            if self._ping and silent and left <= 0:
                self._silent_since = clock()
                return self._ping
            if self._unread:
                event = self._taken()
                if not event.comment:
                    self._silent_since = clock()
                return event
            if self._complete:
                self._read = True
                _being_read.discard(self)
                raise StopAsyncIteration
            await self._next_group(left if self._ping else None)

    def ready(self) -> list[Event]:
        """The events that can be read now, about ``PIECE`` bytes of them at most.

        Always empty for an engine in this process, which is never far ahead of its reader.
        """
        events: list[Event] = []
        size = 0
        while self._waits and self._unread and size < PIECE:
            events.append(self._taken())
            size += len(events[-1].data)
        return events

    async def begun(self) -> bool:
        """Waits for the first events: true. Raises what ended the answer before there were any."""
        while not (self._announced or self._complete):
            await self._next_group()
        self._raise_failure()
        return True

    async def whole(self) -> dict[str, Any]:
        """The whole answer, when the engine is free. Raises what ended it before its end."""
        while not self._complete:
            await self._next_group()
        self._raise_failure()
        return self._emitter.result()

    def close(self) -> None:
        """Ends the answer for a reader that has gone; the engine is freed behind its step."""
        _being_read.discard(self)
        self._account("client_closed")
        self._unread.clear()
        self._failure = None
        self._stop()
        self._complete = True
        self._wake()

    async def aclose(self) -> None:
        """As ``close``, but returns when the engine is free and the lease is released.

        At once for an answer that was read to its end, which ``end`` has not waited for either.
        """
        self.close()
        if not self._read:
            await end_of(self._task)

    # --- For others

    def end(self, failure: HarmonyFailure) -> None:
        """Ends the answer with ``failure``, which the reader gets at once."""
        if not (self._stopped or self._ended):
            self._stop()
            _held(self._conclude(failure))

    # --- The task

    async def _run(self) -> None:
        try:
            async with aclosing(self._deltas) as groups:
                if not self._stopped:
                    await self._generate(groups)
        except asyncio.CancelledError:
            await self._release()
            if not self._stopped:  # not by us: the engine stops all its work, and says it this way
                await self._conclude(OutputError("the engine was stopped"))
        except Exception as error:
            await self._release()
            if not self._stopped:
                await self._conclude(error)
            elif not isinstance(error, HarmonyFailure):
                logger.exception("an engine could not be stopped")
        else:
            await self._release()
            if not self._stopped:
                await self._conclude(None)

    async def _generate(self, groups: Deltas) -> None:
        """Writes all groups, each of which may take as long as the whole request (as in the host).

        The first group is limited by the deadline of the request (``serving.respond``). Progress is
        no group of its own here: the limit is for the whole prompt.
        """
        self._generating = True
        silence: asyncio.TimerHandle | None = None
        loop, deadline = asyncio.get_running_loop(), self._lease.deadline
        try:
            if _rejection is not None:
                raise _rejection
            deadline.remaining()
            async for group in groups:
                if self._stopped:  # an engine may swallow the cancellation
                    return
                if group and isinstance(group[0], Progress):
                    self._report(group[0])
                    continue
                if silence is not None:
                    silence.cancel()
                await self._write(group)
                silence = loop.call_later(deadline.total, self._silent)
        finally:
            self._generating = False
            if silence is not None:
                silence.cancel()

    def _silent(self) -> None:
        problem = f"nothing was generated for {self._lease.deadline.total:.0f} seconds"
        self.end(HostError(problem, status=TIMED_OUT, code="timeout"))

    async def _write(self, group: list[Delta]) -> None:
        """Puts the events of ``group`` into the buffer. Raises ``HostError`` when it is full."""
        last = group[-1] if group else None
        if isinstance(last, Finished):
            self._put([event for delta in group[:-1] for event in self._emitter.feed(delta)])
            self._ended = True
            self._account("success", last)
            self._put(await self._last_events(last))
            return
        self._put([event for delta in group for event in self._emitter.feed(delta)])
        if self._waits:
            while self._bytes > HIGH_WATER:
                self._less = asyncio.get_running_loop().create_future()
                await self._less
        elif self._capacity is None:
            self._capacity = self._bytes + self._room
        elif self._bytes > self._capacity:
            logger.info("an answer was ended: %d bytes of it were not read", self._bytes)
            problem = "the answer was not read as fast as it was generated, and has been ended"
            raise HostError(problem, code="reader_too_slow")

    def _report(self, progress: Progress) -> None:
        """Shows how far the prompt is, at most twice a second.

        Clients that asked for events get the first and the last of them at once, as from llama.cpp.
        """
        now = asyncio.get_running_loop().time()
        events = self._emitter.feed(progress)
        first, complete = self._reported is None, progress.processed >= progress.total
        at_once = bool(events) and (first or complete)
        if not events and self._comments_progress:
            events = [progress_comment(progress)]
        if self._reported is None:
            self._reported = now
        if at_once or now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            self._put(events)

    async def _last_events(self, delta: Finished | Failed) -> list[Event]:
        if self._write_last is not None:
            return await self._write_last(delta)
        return self._emitter.feed(delta)

    async def _release(self) -> None:
        self._forget()
        try:
            await self._lease.release()
        except Exception:
            logger.exception("an engine could not be given back")

    async def _conclude(self, failure: Exception | None) -> None:
        """Writes what ended the answer, if that was not its own end; nothing comes after it."""
        try:
            if failure is None:
                self._account("success")
            else:
                results = {TIMED_OUT: "timeout", CANCELLED: "client_closed"}
                self._account(results.get(getattr(failure, "status", 0), "error"))
                if not self._announced:
                    self._failure = failure
                elif not self._ended:
                    self._ended = True
                    last = Failed(logged_failure(failure, "an answer failed"))
                    self._put(await self._last_events(last))
        except Exception:
            logger.exception("the end of an answer could not be written")
        finally:
            self._complete = True
            self._wake()

    # --- Used by both sides

    def _stop(self) -> None:
        """Takes nothing more from the engine. The task cleans up after itself.

        A task that is cancelled before it began would leave everything as it is.
        """
        if self._stopped:  # an engine that cleans up must not be interrupted
            return
        self._stopped = True
        self._forget()
        if self._generating:
            self._task.cancel()

    def _forget(self) -> None:
        if _running.get(self._name) is self:
            del _running[self._name]

    def _account(self, result: str, last: Finished | None = None) -> None:
        """Closes the accounting, once; ``last`` has what the request cost."""
        if self._accounted:
            return
        self._accounted = True
        usage = Usage() if last is None else last.usage
        self._tracker.finish(
            result=result,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        )

    def _put(self, events: list[Event]) -> None:
        if self._complete:
            return
        if self._keep is not None:
            self._keep(events)
        else:
            self._announced = True
            self._unread.extend(events)
            self._bytes += sum(len(event.data) for event in events)
        self._wake()

    def _taken(self) -> Event:
        event = self._unread.popleft()
        self._bytes -= len(event.data)
        if self._less is not None and self._bytes <= HIGH_WATER // 2 and not self._less.done():
            self._less.set_result(None)
        return event

    async def _next_group(self, seconds: float | None = None) -> None:
        """Waits until something was put into the buffer, or ``seconds`` are over."""
        loop = asyncio.get_running_loop()
        self._more = loop.create_future()
        silence = None if seconds is None else loop.call_later(seconds, self._wake)
        try:
            await self._more
        finally:
            if silence is not None:
                silence.cancel()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def _raise_failure(self) -> None:
        """Raises the failure, and lets go of it: its traceback refers to this answer."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                self._read = True
                _being_read.discard(self)
                raise failure
        finally:
            del failure


def dropped(_: list[Event]) -> None:
    """``keep`` of an answer that is not streamed: its emitter has all of it."""


# --- All answers of this server, for the thread of the event loop

_running: dict[tuple[str, str], Answer] = {}
"""The answers that are generated, or wait for their turn, by id seed and tenant."""

_being_read: set[object] = set()
"""The answers that have not been read to their ends."""

_tasks: set[asyncio.Future[None]] = set()
"""All tasks of answers; asyncio itself refers to tasks only weakly."""

_rejection: HarmonyFailure | None = None
"""What every answer that has not begun is rejected with, if it is."""


def _held(work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    task: asyncio.Future[None] = asyncio.ensure_future(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def cancel(id_seed: str, tenant: str) -> bool:
    """Ends the answer with this seed, with an error; whether ``tenant``'s was being generated."""
    answer = _running.get((id_seed, tenant))
    if answer is None:
        return False
    answer.end(OutputError("the request was cancelled", status=CANCELLED, code="cancelled"))
    return True


def running() -> list[tuple[str, str]]:
    """The answers that are generated, or wait for their turn: seed and tenant of each."""
    return list(_running)


def end_all(failure: HarmonyFailure) -> None:
    """Ends all answers that are being generated, each with ``failure``."""
    for answer in list(_running.values()):
        answer.end(failure)


def reject_new(failure: HarmonyFailure | None) -> None:
    """From now on rejects every answer that has not begun; ``None``: accepts them again."""
    global _rejection
    _rejection = failure


def rejection() -> HarmonyFailure | None:
    """What answers are rejected with now, if they are."""
    return _rejection


def unread() -> bool:
    """Whether there are answers that have not been read to their ends."""
    return bool(_being_read)


@contextmanager
def unread_until_left() -> Iterator[None]:
    """An answer is on its way from here on, whether or not any of it has been generated."""
    answer = object()
    _being_read.add(answer)
    try:
        yield
    finally:
        _being_read.discard(answer)
