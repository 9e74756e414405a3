"""A turn run on an engine: its deltas, from the first to the last.

Whoever stops reading frees the engine. The life of an answer around it is ``server.answer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import Delta, Finished, Reason, ToolFinished, ToolStarted
from vllm_mlx_harmony.core.parse import EndReason
from vllm_mlx_harmony.core.replay import ReplayScope
from vllm_mlx_harmony.core.turn import Message, ServerCall, ServerResult
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.engine import Finish
from vllm_mlx_harmony.server.host import Context, Lease, Tracker
from vllm_mlx_harmony.server.replay import remember
from vllm_mlx_harmony.server.sampling import Settings
from vllm_mlx_harmony.server.tools.turn_tools import TurnTools

Deltas: TypeAlias = AsyncGenerator[list[Delta], None]


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a turn needs to run. ``context`` is a `StreamingHarmonyContext` or another's.

    ``id_seed`` is what the answer's ids are made from, and what it is cancelled by.
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


async def _cached(job: Job) -> int | None:
    if not job.reports_cached:
        return None
    lease, prompt = job.lease, job.context.render_for_completion()
    return await lease.harmony.reusable_tokens(prompt, lease.tenant)


async def run(job: Job) -> Deltas:
    """The deltas of a turn, in the groups they come in; an ``Answer`` reads them.

    The model generates; when it calls a tool that the server runs, the tool is run and the model
    goes on, until it has answered or calls a tool that the client runs. Every output but the first
    continues exactly the ids so far. While a tool runs, the engine is free for others.

    The first group says that the turn has started, before anything is generated. Closing the
    iterator cancels the tool, or frees the engine. Raises what the engine raises: ``HostError``
    and ``OutputError``.
    """
    context, tools, progress = job.context, job.tools, _Progress()
    settings, constraint = job.settings, job.constraint
    length = job.lease.harmony.context_length
    ended: EndReason = "stop"
    # Calls of the history that have been approved since, or one that the turn was paused before.
    approved = () if tools is None else context.unanswered
    history = list(approved)
    if history:
        progress.started = True
        yield context.start(await _cached(job))
    while True:
        if not history:
            async with aclosing(_output(job, settings, constraint, progress)) as output:
                async for deltas in output:
                    yield deltas
        if tools is None or not (calls := _due(context, tools, history)):
            break
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
    """The deltas that end the turn, once it is remembered."""
    if ended == "stop" and progress.finish is not None:
        ended = progress.finish
    by = progress.reasoning_ended_by
    last: list[Delta] = [
        replace(delta, reasoning_ended_by=by) if by and isinstance(delta, Finished) else delta
        for delta in job.context.finish(ended, progress.cached_tokens)
    ]
    if job.replay is not None and job.replay.blocks:  # before the client can ask another server
        await asyncio.to_thread(remember, job.replay, job.context, job.echoed)
    else:
        remember(job.replay, job.context, job.echoed)
    return last


@dataclass(slots=True)
class _Progress:
    """The outputs so far: ``generated`` ids and ``finish`` are the last one's, ``cached_tokens`` of
    the turn's own prompt. ``started``: ``Started`` has been sent."""

    started: bool = False
    outputs: int = 0
    generated: int = 0
    cached_tokens: int = 0
    finish: Finish | None = None
    reasoning_ended_by: Reason = ""


async def _output(
    job: Job, settings: Settings, constraint: Constraint | None, progress: _Progress
) -> Deltas:
    """The deltas of one output: up to the end of the turn, or of a call."""
    context, prompt = job.context, job.context.render_for_completion()
    engine = job.lease.harmony
    cached = None if progress.started else await _cached(job)
    progress.generated, progress.finish = 0, None
    progress.outputs += 1
    try:
        async with aclosing(
            engine.generate(prompt, settings, job.lease.tenant, constraint)
        ) as steps:
            if engine.remote:
                await anext(steps, None)
            if not progress.started:
                progress.started = True
                yield context.start(cached)
            async for step in steps:
                if step.progress is not None:
                    # Behind a tool's answer the client has had its first token, too.
                    if progress.outputs == 1 and not progress.generated:
                        yield [step.progress]
                    continue
                progress.finish = step.finish
                progress.generated += len(step.ids)
                if progress.outputs == 1:
                    progress.cached_tokens = max(progress.cached_tokens, step.cached_tokens)
                job.tracker.observe_ttft()
                enforcement.check(constraint)
                yield context.append_output(step.ids)
                # A remote engine that has ended the turn says how much was cached behind the last
                # id, and only then its connection is free for the next request. It knows of no
                # stop string.
                if progress.finish is not None:
                    break
                if context.done and not (engine.remote and vocab.TURN_ENDS.intersection(step.ids)):
                    break
    finally:
        if constraint is not None and constraint.reasoning_ended_by:
            progress.reasoning_ended_by = constraint.reasoning_ended_by
            enforcement.account(constraint, job.id_seed, job.tracker)


async def stopped(task: asyncio.Future[Any]) -> None:
    """Cancels the task and waits until it has ended: a generator that runs cannot be closed."""
    task.cancel()
    await end_of(task)


async def end_of(task: asyncio.Future[Any]) -> None:
    """Waits until the task has ended, in whatever way. A cancellation is raised after that."""
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
