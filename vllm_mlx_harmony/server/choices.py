"""Several answers to one prompt (Chat's `n`), generated beside each other.

Each is a turn of its own, with its own context, seed, constraint and tools. The first begins alone.
The others begin when the engine has computed the prompt for it, and find the prompt in the engine's
prefix cache. So a prompt is computed once, unless the engine has no such cache.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import fields
from typing import Any, TypeAlias

from vllm_mlx_harmony.core.deltas import (
    ChoiceDelta,
    Delta,
    Finished,
    Progress,
    Started,
    Usage,
)
from vllm_mlx_harmony.server.generation import Deltas, Job, run
from vllm_mlx_harmony.server.host import Tracker
from vllm_mlx_harmony.server.tasks import wait_until_done

_Groups: TypeAlias = "asyncio.Queue[tuple[int, list[Delta] | Exception | None]]"
"""Groups of deltas with the index of their answer; at its end its error, or ``None``."""


async def run_choices(job: Job, tracker: Tracker) -> Deltas:
    """The deltas of ``job`` and ``job.others`` as ``ChoiceDelta``s, in groups, as they come.

    The progress of the prompt is that of the first; the last group has the usage of all. Closing
    the iterator ends all of them. Raises what one of them raises, and ends the others.
    """
    running = 1 + len(job.others)
    groups: _Groups = asyncio.Queue(running)
    tasks = [asyncio.ensure_future(_queue(0, job, tracker, groups))]
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
                others = enumerate(job.others, start=1)
                tasks += [asyncio.ensure_future(_queue(*each, tracker, groups)) for each in others]
        usages = [finished[each].usage for each in sorted(finished)]
        yield [Finished(finished[0].reason, usage=_total(usages))]
    finally:
        for task in tasks:
            task.cancel()
        await wait_until_done(asyncio.gather(*tasks, return_exceptions=True))


async def _queue(index: int, job: Job, tracker: Tracker, groups: _Groups) -> None:
    """Generates one answer and puts its groups into the queue, which bounds how far it is ahead."""
    last: Exception | None = None
    try:
        async with aclosing(run(job, tracker)) as deltas:
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


def _total(usages: list[Usage]) -> Usage:
    """The usage of several answers to one prompt, which counts once."""
    total = {each.name: sum(getattr(one, each.name) for one in usages) for each in fields(Usage)}
    first = usages[0]
    total |= {"prompt_tokens": first.prompt_tokens, "cached_tokens": first.cached_tokens}
    return Usage(**total)
