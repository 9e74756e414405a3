"""Generates a turn: its deltas, from the first to the last.

Closing the iterator of deltas frees the engine. `server.answer` owns that iterator.

Several answers to one prompt (Chat's `n`), or to prompts that begin alike (decisions), are
generated concurrently (`_run_choices`). Each is a turn of its own, with its own context, seed,
constraint and tools. The first begins alone. The others start once the engine has computed the
prompt for the first, and find it in the engine's prefix cache. So a prompt is computed once, unless
the engine has no such cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeAlias

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.deltas import (
    ChoiceDelta,
    Citation,
    Delta,
    Failed,
    Finished,
    Progress,
    ReasoningCut,
    Started,
    ToolStarted,
    Usage,
)
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.core.pages import Citations
from vllm_mlx_harmony.core.parse import EndReason
from vllm_mlx_harmony.core.render import answer_ids
from vllm_mlx_harmony.core.replay import ReplayScope
from vllm_mlx_harmony.core.turn import Message, ServerCall, ServerResult
from vllm_mlx_harmony.engine_api.engine import Finish, GenerationRequest, GenerationSettings, Step
from vllm_mlx_harmony.protocols.citations import link
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.host import Context, Lease, Tracker
from vllm_mlx_harmony.server.observer import Observer, observe_steps
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.turn_tools import TurnTools
from vllm_mlx_harmony.tasks import wait_until_done

logger = logging.getLogger("vllm_mlx_harmony")

Deltas: TypeAlias = AsyncGenerator[list[Delta], None]
"""The deltas of an answer, in groups:

- ``Started`` is the first group, alone.
- ``Progress`` is alone in its group, and comes before the first id.
- Each other group is what a step of the engine, or a tool, adds. It may be empty. Even then a step
  shows that the engine has computed the prompt, and is not silent.
- ``Finished`` is the last delta of the last group.
- Of several answers, all deltas are ``ChoiceDelta``s, except ``Progress`` and the last
  ``Finished``. Of a job with ``append``, a step adds what ``append`` returns. Neither need be a
  ``Delta``, so the job's emitter has to know them.

An answer that fails has no ``Failed``: the iterator raises the failure.
"""


class Emitter(Protocol):
    """Writes one answer in an API's format."""

    def feed(self, delta: Delta) -> list[Event]:
        """The events for ``delta``; none if the answer is not streamed."""

    def keep_alive(self) -> Event:
        """What the client gets after a silence: an event that it parses, if the API has one."""

    def result(self) -> dict[str, Any]:
        """The whole answer, if it is not streamed."""


FinalWriter: TypeAlias = "Callable[[Finished | Failed], Awaitable[list[Event]]]"
"""Writes the last events of an answer, which may take time."""


class ReasoningEnd:
    """Ends the reasoning of an answer on request, in whichever of its outputs it is."""

    def __init__(self) -> None:
        self._requested = False
        self._constraints: list[Constraint] = []

    def request(self) -> None:
        """Ends the reasoning that is generated, or is generated next."""
        self._requested = True
        for constraint in self._constraints:
            constraint.end_reasoning()

    @contextmanager
    def applied_to(self, constraint: Constraint | None) -> Iterator[None]:
        """Within the block, an output with this ``constraint`` is generated."""
        if constraint is None:
            yield
            return
        if self._requested:
            constraint.end_reasoning()
        self._constraints.append(constraint)
        try:
            yield
        finally:
            self._constraints.remove(constraint)


@dataclass(frozen=True, slots=True)
class Job:
    """A turn to generate, and how its answer is written.

    ``model`` is its name in the answer. ``comments_progress`` and ``reports_cached`` are those of
    the API (`serving.TurnApi`).
    """

    lease: Lease
    context: Context
    settings: GenerationSettings
    emitter: Emitter
    stream: bool
    id_seed: str
    """Contained in all ids of the answer; identifies it for a cancellation."""
    model: str = ""
    server_settings: ServerSettings = field(default_factory=ServerSettings)
    constraint: Constraint | None = None
    replay: ReplayScope | None = None
    as_sent_back: Callable[[Message], Message] = lambda message: message
    """Maps a message of the answer to what will be parsed when the client sends it back."""
    tools: TurnTools | None = None
    """The tools that the server runs in this turn."""
    comments_progress: bool = False
    reports_cached: bool = False
    fixed_answer: str = ""
    """The answer, if the server gives it in place of the model (`Turn.fixed_answer`)."""
    other_jobs: tuple[Job, ...] = ()
    """Further answers, with the lease, emitter and metrics of this one. Their prompts are the same,
    or begin alike."""
    append: Callable[[Step], list[Delta]] | None = None
    """Takes the engine's steps in place of the context, for an output that is not parsed."""
    reasoning_end: ReasoningEnd = field(default_factory=ReasoningEnd)
    write_last: FinalWriter | None = None
    """Writes the last delta in place of the emitter, for example to store a response first."""
    citation_text: Callable[[Citation], str] = link
    """The text of a citation in the API."""


async def _reusable_tokens(job: Job) -> int | None:
    if not (job.reports_cached and job.stream):
        return None
    lease, prompt = job.lease, job.context.render_for_completion()
    return await lease.engine.reusable_tokens(prompt, lease.tenant)


def deltas_of(job: Job, tracker: Tracker, observers: Sequence[Observer]) -> Deltas:
    """The deltas of the answer to ``job``, in groups."""
    if job.fixed_answer:
        assert not job.other_jobs  # of Chat and decisions, which have no fixed answers
        return _fixed_answer(job, observers)
    return (_run_choices if job.other_jobs else _run)(job, tracker, observers)


def _run(job: Job, tracker: Tracker, observers: Sequence[Observer]) -> Deltas:
    """The deltas of a turn, in groups: those of `_turn`, with the citations of the browser's
    pages."""
    turn = _turn(job, tracker, observers)
    if job.tools is None or not job.tools.turn.has_browser:
        return turn
    return _with_citations(turn, Citations(job.tools.pages))


async def _with_citations(turn: Deltas, citations: Citations) -> Deltas:
    async with aclosing(turn) as groups:
        async for deltas in groups:
            yield citations.feed(deltas)


async def _turn(job: Job, tracker: Tracker, observers: Sequence[Observer]) -> Deltas:
    """The deltas of a turn, in groups.

    When the model calls a tool of the server, the tool is run and the model continues, until it
    answers or calls a tool of the client. Every output but the first continues the ids so far. The
    engine is free while a tool runs.

    Closing the iterator cancels the tool, or frees the engine. Raises what the engine raises:
    ``HostError`` and ``OutputError``.
    """
    context, tools, state = job.context, job.tools, _TurnState()
    settings, constraint = job.settings, job.constraint
    context_length = job.lease.engine.context_length
    end_reason: EndReason = "stop"
    # Calls without a result. At first, those of the history: the caller has approved them, or
    # the previous turn paused at one.
    pending = [] if tools is None else [*context.unanswered]
    if pending:
        state.started = True
        yield context.start(await _reusable_tokens(job))
    while True:
        from_history = bool(pending)
        if not from_history:
            output = _output(job, tracker, settings, constraint, state, observers=observers)
            with job.reasoning_end.applied_to(constraint):
                async with aclosing(output) as groups:
                    async for deltas in groups:
                        yield deltas
            pending = [] if tools is None else _calls_to_run(context, tools)
        if tools is None or not pending:
            break
        if tools.pauses:
            end_reason = "pause"
            break
        # Each result within the history renders the whole prompt again, and a request may have
        # thousands of calls. Those beyond the limit are answered together.
        calls = pending if tools.exhausted else pending[:1]
        results = _run_tools(
            context, tools, calls, context_length, observers, from_history=from_history
        )
        async with aclosing(results) as groups:
            async for deltas in groups:
                yield deltas
        pending = pending[len(calls) :]
        if pending:
            continue
        prompt_tokens = len(context.render_for_completion())
        next_output = await tools.prepare_next_output(
            settings, constraint, prompt_tokens, context_length, state.last_output_tokens
        )
        if next_output is None:
            end_reason = "length"
            break
        settings, constraint = next_output
    yield await _finish(job, end_reason, state)


async def _fixed_answer(job: Job, observers: Sequence[Observer]) -> Deltas:
    """The deltas of a turn whose answer the server gives. The engine is not used."""
    ids = answer_ids(job.fixed_answer)
    for observer in observers:
        observer.prompt(job.context.render_for_completion(), None)
        observer.step(Step(ids, "stop"))
    yield job.context.start(0)
    yield job.context.append_output(ids)
    yield await _finish(job, "stop", _TurnState())


def _calls_to_run(context: Context, tools: TurnTools) -> list[ServerCall]:
    """The call with which the output ended, if the server has to run it now."""
    call = context.server_call
    return [] if call is None or tools.keeps_calling or tools.needs_approval(call) else [call]


async def _run_tools(
    context: Context,
    tools: TurnTools,
    calls: list[ServerCall],
    context_length: int | None,
    observers: Sequence[Observer],
    *,
    from_history: bool,
) -> Deltas:
    """Runs ``calls`` and appends their results."""
    results: list[ServerResult] = []
    prompt_tokens = len(context.render_for_completion())
    for call in calls:
        yield [ToolStarted(call if from_history else None)]
        for observer in observers:
            observer.tool(call)
        finished = await tools.execute(call, prompt_tokens, context_length)
        results.append(ServerResult(call.id, call.name, finished.text))
        # In a thread: a result within the history renders the whole prompt again.
        is_last = len(results) == len(calls)
        append = context.append_tool_output
        closed = await asyncio.to_thread(append, results) if is_last else []
        yield [*closed, finished]


async def _finish(job: Job, end_reason: EndReason, state: _TurnState) -> list[Delta]:
    """Stores the generated turn, and returns the last deltas."""
    if end_reason == "stop" and state.last_finish is not None:
        end_reason = state.last_finish
    last: list[Delta] = []
    for delta in job.context.finish(end_reason, state.cached_tokens):
        if isinstance(delta, Finished):
            usage = replace(
                delta.usage,
                accepted_prediction_tokens=state.accepted,
                rejected_prediction_tokens=state.rejected,
            )
            cut = state.reasoning_ended_by
            delta = replace(delta, usage=usage, reasoning_ended_by=cut)  # noqa: PLW2901
        last.append(delta)
    if job.replay is not None:
        for output in job.context.outputs:
            messages: Sequence[Message] = output.messages
            if job.tools is not None and job.tools.turn.has_browser:
                messages = Citations(job.tools.pages).rewrite(messages, job.citation_text)
            stored = replace(output, messages=tuple(map(job.as_sent_back, messages)))
            if job.replay.blocks:  # before the client can ask another server
                await asyncio.to_thread(job.replay.remember, stored)
            else:
                job.replay.remember(stored)
    return last


@dataclass(slots=True)
class _TurnState:
    """The state of a turn, which its outputs share."""

    started: bool = False
    """Whether ``Started`` has been sent."""
    output_count: int = 0
    last_output_tokens: int = 0
    last_finish: Finish | None = None
    cached_tokens: int = 0
    """Of the prompt of the first output."""
    accepted: int = 0
    rejected: int = 0
    reasoning_ended_by: ReasoningCut = ""


def _appended(job: Job, step: Step) -> list[Delta]:
    if job.append is not None:
        return job.append(step)
    return job.context.append_output(step.ids, step.logprobs)


async def _output(
    job: Job,
    tracker: Tracker,
    settings: GenerationSettings,
    constraint: Constraint | None,
    state: _TurnState,
    *,
    observers: Sequence[Observer],
) -> Deltas:
    """The deltas of one output, which ends with the turn or with a call."""
    context, prompt = job.context, job.context.render_for_completion()
    engine = job.lease.engine
    cached = None if state.started else await _reusable_tokens(job)
    state.last_output_tokens, state.last_finish = 0, None
    state.output_count += 1
    accepted, rejected = state.accepted, state.rejected
    try:
        steps = engine.generate(GenerationRequest(prompt, settings, job.lease.tenant, constraint))
        for observer in observers:
            observer.prompt(prompt, constraint)
        if observers:
            steps = observe_steps(steps, observers)
        async with aclosing(steps):
            if engine.remote:
                await anext(steps, None)  # an empty step: the request is accepted
            if not state.started:
                state.started = True
                yield context.start(cached)
            async for step in steps:
                if step.progress is not None:
                    # Only before the first token: later reports would interrupt a stream that has
                    # begun.
                    if state.output_count == 1 and not state.last_output_tokens:
                        yield [step.progress]
                    continue
                state.last_finish = step.finish
                state.last_output_tokens += len(step.ids)
                state.accepted = accepted + step.accepted
                state.rejected = rejected + step.rejected
                cached_tokens = step.cached_tokens if state.output_count == 1 else 0
                state.cached_tokens = max(state.cached_tokens, cached_tokens)
                tracker.observe_ttft()
                check(constraint)
                yield _appended(job, step)
                # A remote engine reports the cached tokens after the last id of a turn, and its
                # connection can be reused only after that. It does not know stop strings.
                more_to_read = engine.remote and vocab.TURN_ENDS.intersection(step.ids)
                if state.last_finish is not None or (context.done and not more_to_read):
                    break
    finally:
        if constraint is not None and constraint.reasoning_ended_by:
            state.reasoning_ended_by = constraint.reasoning_ended_by
            report_reasoning_ended(constraint, job.id_seed, tracker)


def check(constraint: Constraint | None) -> None:
    """Raises ``OutputError`` if the output could not be constrained to the end."""
    if constraint is not None and constraint.failure:
        raise OutputError("the output could not be constrained as requested; see the server's log")


def report_reasoning_ended(constraint: Constraint, id_seed: str, tracker: Tracker) -> None:
    """Logs and counts that the server ended the reasoning of the answer ``id_seed``."""
    reason = constraint.reasoning_ended_by
    logger.info(
        "%s: reasoning cut short (%s) after %d tokens", id_seed, reason, constraint.reasoning_tokens
    )
    tracker.reasoning_ended(reason)


# --- Several answers to one prompt

_Groups: TypeAlias = "asyncio.Queue[tuple[int, list[Delta] | Exception | None]]"
"""Groups of deltas with the index of their answer; at its end its error, or ``None``."""


async def _run_choices(job: Job, tracker: Tracker, observers: Sequence[Observer]) -> Deltas:
    """The deltas of ``job`` and ``job.other_jobs`` as ``ChoiceDelta``s, in groups, as they come.

    The progress of the prompt is that of the first; the last group has the usage of all. Closing
    the iterator ends all of them. Raises what one of them raises, and ends the others. Observers
    see the first, as they see one sequence of ids.
    """
    running = 1 + len(job.other_jobs)
    prompts = [choice.context.render_for_completion() for choice in (job, *job.other_jobs)]
    shared = all(prompt == prompts[0] for prompt in prompts)
    groups: _Groups = asyncio.Queue(running)
    tasks = [asyncio.ensure_future(_queue(0, job, tracker, observers, groups))]
    finished: dict[int, Finished] = {}
    try:
        while running:
            index, group = await groups.get()
            if isinstance(group, Exception):
                raise group
            if group is None:
                running -= 1
                continue
            first = group[0] if group else None
            if not isinstance(first, Progress):
                numbered: list[Any] = [ChoiceDelta(index, delta) for delta in group]
                yield numbered
                if group and isinstance(group[-1], Finished):
                    finished[index] = group[-1]
            elif index == 0:
                yield group
            if len(tasks) == 1 and _is_computed(first):
                tasks += [
                    asyncio.ensure_future(_queue(number, other, tracker, (), groups))
                    for number, other in enumerate(job.other_jobs, start=1)
                ]
        usages = [finished[index].usage for index in sorted(finished)]
        yield [Finished(finished[0].reason, usage=_total(usages, shared=shared))]
    finally:
        for task in tasks:
            task.cancel()
        await wait_until_done(asyncio.gather(*tasks, return_exceptions=True))


async def _queue(
    index: int, job: Job, tracker: Tracker, observers: Sequence[Observer], groups: _Groups
) -> None:
    """Generates one answer and puts its groups into the queue, which bounds how far it is ahead."""
    last: Exception | None = None
    try:
        async with aclosing(_run(job, tracker, observers)) as deltas:
            async for group in deltas:
                await groups.put((index, group))
    except Exception as error:  # noqa: BLE001 - raised where the groups are read
        last = error
    await groups.put((index, last))


def _is_computed(first: Delta | None) -> bool:
    """Whether the engine has computed the prompt, as the first delta of a group shows."""
    if isinstance(first, Progress):
        return first.processed >= first.total
    return not isinstance(first, Started)


def _total(usages: list[Usage], *, shared: bool) -> Usage:
    """The usage of several answers. A prompt that they share counts once."""
    total = {
        counter.name: sum(getattr(one, counter.name) for one in usages) for counter in fields(Usage)
    }
    if shared:
        first = usages[0]
        total |= {"prompt_tokens": first.prompt_tokens, "cached_tokens": first.cached_tokens}
    return Usage(**total)
