"""A turn run on an engine: its deltas, from the place in the queue to the last one.

Knows order, time and clean-up: whoever stops reading frees the engine.
Refuses to know APIs and sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Delta, Finished, Reason, ToolFinished, ToolStarted
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.core.parse import EndReason
from vllm_mlx_harmony.core.replay import ReplayScope
from vllm_mlx_harmony.core.turn import Message, ServerCall, ServerResult
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.engine import Finish
from vllm_mlx_harmony.server.host import TIMED_OUT, Context, Lease, Tracker
from vllm_mlx_harmony.server.queue import queue_before, reject_all_waiting
from vllm_mlx_harmony.server.replay import remember
from vllm_mlx_harmony.server.sampling import Settings
from vllm_mlx_harmony.server.tools.turn_tools import TurnTools

logger = logging.getLogger(__name__)

Deltas: TypeAlias = AsyncGenerator[list[Delta], None]


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a turn needs to run. ``context`` is a `StreamingHarmonyContext` or another's.

    ``id_seed`` is what the answer's ids are made from, and what `cancel` finds the answer by.
    ``echoed`` is how a message of it is read when a client gives it back. ``reports_cached``: the
    answer begins with how much of the prompt is cached. ``constraint``: what its output must match,
    ``tools`` are those that the server runs in this turn.
    """

    lease: Lease
    context: Context
    settings: Settings
    tracker: Tracker
    replay: ReplayScope | None = None
    echoed: Callable[[Message], Message] = lambda message: message
    reports_cached: bool = False
    id_seed: str = ""
    constraint: Constraint | None = None
    tools: TurnTools | None = None


_running: dict[tuple[str, str], asyncio.Future[HarmonyFailure]] = {}
"""By id seed and tenant, the future that ends an answer which is being generated when its result is
set. For the event loop's thread alone."""

_rejection: HarmonyFailure | None = None
"""What every answer that has not begun is rejected with, if it is."""


def cancel(id_seed: str, tenant: str) -> bool:
    """Ends the answer with this seed, with an error; whether ``tenant``'s was being generated."""
    cancelled = _running.get((id_seed, tenant))
    if cancelled is None:
        return False
    if not cancelled.done():
        failure = OutputError("the request was cancelled", status=CANCELLED, code="cancelled")
        cancelled.set_result(failure)
    return True


def running() -> list[tuple[str, str]]:
    """The answers that are being generated, or wait for their turn: seed and tenant of each."""
    return list(_running)


def reject_new(failure: HarmonyFailure | None) -> None:
    """From now on no answer begins, those that wait for their turn included; ``None``: again."""
    global _rejection
    _rejection = failure
    if failure is not None:
        reject_all_waiting(failure)


def rejection() -> HarmonyFailure | None:
    """What answers are rejected with now, if they are."""
    return _rejection


def end_all(failure: HarmonyFailure) -> None:
    """Ends all answers that are being generated, each with ``failure``."""
    for ended in list(_running.values()):
        if not ended.done():
            ended.set_result(failure)


async def run(job: Job) -> Deltas:
    """The deltas of a turn, in the groups they come in.

    The first group says that the turn has started, as soon as it is this request's turn, before
    anything is generated. With the first step the lease is taken over. When the iterator is closed,
    the engine is free and the lease is released. When it raises while the engine computes, that
    happens behind that step: an engine can be stopped between two steps only, and the client does
    not wait for it.
    Raises ``HostError`` (queue full, time run out, the server ends) and ``OutputError`` (the engine
    failed, or somebody has cancelled it).
    """
    job.lease.taken_over = True
    named = (job.id_seed, job.lease.tenant)
    ended = _running[named] = asyncio.get_running_loop().create_future()
    groups = _Groups(_generated(job), ended)
    seconds: float | None = None  # the queue has a limit of its own
    result = "client_closed"  # unless it ends in another way than being given up
    computing = False
    try:
        if _rejection is not None:
            raise _rejection
        while (group := await groups.next(seconds)) is not None:
            yield group
            seconds = job.lease.deadline.total
        result = "success"
    except Exception as error:
        status = getattr(error, "status", 0)
        result = {TIMED_OUT: "timeout", CANCELLED: "client_closed"}.get(status, "error")
        computing = groups.computing
        raise
    finally:
        if _running.get(named) is ended:
            del _running[named]
        job.tracker.finish(result=result)
        stopping = asyncio.ensure_future(_stop(job, groups))
        _stopping.add(stopping)
        stopping.add_done_callback(_stopping.discard)
        if not computing:
            await end_of(stopping)


_stopping: set[asyncio.Future[None]] = set()
"""What stops engines whose answers have ended; held here, or it could be collected."""


async def _stop(job: Job, groups: _Groups) -> None:
    """Sees ``groups`` ended and the engine given back."""
    try:
        await groups.aclose()
    except Exception:
        logger.exception("an engine could not be stopped")
    finally:
        await job.lease.release()


CANCELLED = 499
"""nginx's number for a client that has gone: here it has asked for the end."""


async def _cached(job: Job) -> int | None:
    if not job.reports_cached:
        return None
    lease, prompt = job.lease, job.context.render_for_completion()
    return await lease.harmony.reusable_tokens(prompt, lease.tenant)


@asynccontextmanager
async def _engine_slot(lease: Lease, seconds: float) -> AsyncIterator[None]:
    """The engine's time for one output: at once where it batches; else waits up to ``seconds``."""
    if not lease.harmony.one_at_a_time:
        yield
        return
    async with queue_before(lease.harmony).slot(seconds):
        yield


async def _generated(job: Job) -> Deltas:
    """What ``run`` gives: the model generates; when it calls a tool that the server runs, the tool
    is run and the model goes on; until it has answered, or calls a tool that the client runs.

    Every output but the first continues exactly the ids so far. While a tool runs, the engine is
    free for others; whoever closes this cancels the tool, or frees the engine.
    """
    context, tools, progress = job.context, job.tools, _Progress()
    settings, constraint = job.settings, job.constraint
    length = job.lease.harmony.context_length
    ended: EndReason = "stop"
    # Calls of the history that have been approved since, or one that the turn was paused before.
    approved = () if tools is None else context.unanswered
    history = list(approved)
    async with _engine_slot(job.lease, job.lease.deadline.left):
        if history:
            progress.started = True
            yield context.start(await _cached(job))
        else:
            async with aclosing(_output(job, settings, constraint, progress)) as output:
                async for deltas in output:
                    yield deltas
    while tools is not None and (calls := _due(context, tools, history)):
        if tools.pauses:
            ended = "pause"
            break
        earlier = calls[0] in approved
        async with aclosing(_answered(context, tools, calls, length, earlier=earlier)) as answers:
            async for deltas in answers:
                yield deltas
        if history:
            continue
        prompt_tokens = len(context.render_for_completion())
        next_output = await tools.continued(
            settings, constraint, prompt_tokens, length, progress.generated
        )
        if next_output is None:
            ended = "length"
            break
        settings, constraint = next_output
        slot = _engine_slot(job.lease, job.lease.deadline.total)
        async with slot, aclosing(_output(job, settings, constraint, progress)) as output:
            async for deltas in output:
                yield deltas
    if ended == "stop" and progress.finish is not None:
        ended = progress.finish
    yield await _finished(job, ended, progress)


def _due(context: Context, tools: TurnTools, history: list[ServerCall]) -> list[ServerCall]:
    """The calls to answer next, from ``history`` or the model's; as a rule one.

    Calls of the history that are not run any more are answered together: each result within it
    renders the whole prompt again, and a request may have thousands.
    """
    if history:
        due = history[:] if tools.exhausted else history[:1]
        del history[: len(due)]
        return due
    call = context.server_call
    return [] if call is None or tools.over or tools.needs_approval(call) else [call]


async def _answered(
    context: Context,
    tools: TurnTools,
    calls: list[ServerCall],
    context_length: int | None,
    *,
    earlier: bool,
) -> Deltas:
    """Runs ``calls`` and puts their results into the conversation. ``earlier``: they stand in the
    history."""
    results: list[ServerResult] = []
    prompt_tokens = len(context.render_for_completion())
    for call in calls:
        yield [ToolStarted(call if earlier else None)]
        answered = await tools.run(call, prompt_tokens, context_length)
        results.append(ServerResult(call.id, call.name, answered.text))
        finished = ToolFinished(answered.text, answered.failure)
        # In a thread: a result within the history renders the whole prompt again.
        is_last = len(results) == len(calls)
        append = context.append_tool_output
        closed = await asyncio.to_thread(append, results) if is_last else []
        yield [*closed, finished]


async def _finished(job: Job, ended: EndReason, progress: _Progress) -> list[Delta]:
    """The deltas that end the turn, when it has been remembered and accounted for."""
    by = progress.reasoning_ended_by
    last: list[Delta] = [
        replace(delta, reasoning_ended_by=by) if by and isinstance(delta, Finished) else delta
        for delta in job.context.finish(ended, progress.cached_tokens)
    ]
    if job.replay is not None and job.replay.blocks:  # before the client can ask another server
        await asyncio.to_thread(remember, job.replay, job.context, job.echoed)
    else:
        remember(job.replay, job.context, job.echoed)
    for delta in last:
        if isinstance(delta, Finished):
            job.tracker.finish(
                result="success",
                prompt_tokens=delta.usage.prompt_tokens,
                completion_tokens=delta.usage.completion_tokens,
                cached_tokens=delta.usage.cached_tokens,
                reasoning_tokens=delta.usage.reasoning_tokens,
            )
    return last


@dataclass(slots=True)
class _Progress:
    """What is known of the outputs so far: ``generated`` ids and ``finish`` are of the last one,
    ``cached_tokens`` those of the turn's own prompt. ``started``: whether ``Started`` was sent."""

    started: bool = False
    outputs: int = 0
    generated: int = 0
    cached_tokens: int = 0
    finish: Finish | None = None
    reasoning_ended_by: Reason = ""


async def _output(
    job: Job, settings: Settings, constraint: Constraint | None, progress: _Progress
) -> Deltas:
    """What the model says next, up to the end of its turn or of a call."""
    context, prompt = job.context, job.context.render_for_completion()
    engine = job.lease.harmony
    cached = None if progress.started else await _cached(job)
    progress.generated, progress.finish = 0, None
    progress.outputs += 1
    async with (
        _accounted(job, constraint, progress),
        aclosing(engine.generate(prompt, settings, job.lease.tenant, constraint)) as steps,
    ):
        if engine.remote:
            await anext(steps, None)
        if not progress.started:
            progress.started = True
            yield context.start(cached)
        async for step in steps:
            progress.finish = step.finish
            progress.generated += len(step.ids)
            if progress.outputs == 1:
                progress.cached_tokens = max(progress.cached_tokens, step.cached_tokens)
            job.tracker.observe_ttft()
            enforcement.check(constraint)
            yield context.append_output(step.ids)
            # A remote engine that has ended the turn says how much was cached behind the last id,
            # and only then its connection is free for the next request. It knows of no stop string.
            if progress.finish is not None:
                break
            if context.done and not (engine.remote and vocab.TURN_ENDS.intersection(step.ids)):
                break


@asynccontextmanager
async def _accounted(
    job: Job, constraint: Constraint | None, progress: _Progress
) -> AsyncIterator[None]:
    """Notes, logs and counts at the end of an output that its reasoning was ended."""
    try:
        yield
    finally:
        if constraint is not None and constraint.reasoning_ended_by:
            progress.reasoning_ended_by = constraint.reasoning_ended_by
            enforcement.account(constraint, job.id_seed, job.tracker)


class _Groups:
    """``groups``, each awaited with a limit, and until ``ended`` says that nobody wants them.

    They run in a task of their own, one step at a time: the host's iterator swallows a cancellation
    that hits it. One task for all of them, and no ``asyncio.wait``, which would be a third of what
    a step costs.
    """

    def __init__(self, groups: Deltas, ended: asyncio.Future[HarmonyFailure]) -> None:
        self._groups = groups
        self._coming: asyncio.Future[list[Delta] | None] | None = None
        self._wanted: asyncio.Future[None] | None = None
        self._closing = False
        self._task: asyncio.Future[None] | None = None
        self._ended = ended
        ended.add_done_callback(self._end)

    @property
    def computing(self) -> bool:
        """Whether a group is on its way."""
        return self._task is not None and not self._task.done() and self._wanted is None

    async def next(self, seconds: float | None) -> list[Delta] | None:
        """The next one, which may take ``seconds``: the limit is on silence, as in the host.
        ``None`` behind the last.

        Raises ``HostError`` 504 after that, what ``ended`` says when it is done before, and
        whatever the groups raise.
        """
        if self._ended.done():
            raise self._ended.result()
        loop = asyncio.get_running_loop()
        self._coming = loop.create_future()
        late = None if seconds is None else loop.call_later(seconds, self._late, seconds)
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        elif self._wanted is not None:
            self._wanted.set_result(None)
            self._wanted = None
        try:
            return await self._coming
        finally:
            self._coming = None  # an error in it holds the frames that it went through
            if late is not None:
                late.cancel()

    async def _run(self) -> None:
        try:
            async for group in self._groups:
                if self._closing:  # whoever was cancelled did not care
                    return
                self._wanted = asyncio.get_running_loop().create_future()
                self._say(group)
                await self._wanted
        except asyncio.CancelledError:
            # Ours comes when nobody waits any more (`aclose`); else it is out of the engine, and
            # handed on it would look as if whoever waits had been cancelled.
            self._say(OutputError("the engine was stopped"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits is told
            self._say(error)
        else:
            self._say(None)

    def _say(self, what: list[Delta] | Exception | None) -> None:
        coming = self._coming
        if coming is None or coming.done():
            return
        if isinstance(what, Exception):
            coming.set_exception(what)
            coming.exception()  # asyncio logs one that nobody is left for
        else:
            coming.set_result(what)

    def _late(self, seconds: float) -> None:
        problem = f"nothing was generated for {seconds:.0f} seconds"
        self._say(HostError(problem, status=TIMED_OUT, code="timeout"))

    def _end(self, ended: asyncio.Future[HarmonyFailure]) -> None:
        if not ended.cancelled():
            self._say(ended.result())

    async def aclose(self) -> None:
        """Sees them ended. Raises what they raise at that."""
        self._closing = True
        self._ended.remove_done_callback(self._end)
        if self._task is not None:
            await stopped(self._task)
        await self._groups.aclose()


async def stopped(task: asyncio.Future[Any]) -> None:
    """Cancels the task and sees it end, in whatever way; a cancellation of ours waits for that.

    A generator that its task still runs could not be closed.
    """
    task.cancel()
    await end_of(task)


async def end_of(task: asyncio.Future[Any]) -> None:
    """Sees the task end, in whatever way; a cancellation of ours waits for that."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled  # or it and this frame would hold each other, and all that waits for us
