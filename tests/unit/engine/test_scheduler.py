"""Decisions of the scheduler: rows of history and decision, and simulations of hours."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest

from vllm_mlx_harmony.engine.scheduler import (
    CHUNK_MULTIPLE,
    DECODE_SHARE,
    FIRST_CHUNK,
    FIRST_STEPS,
    MAX_CHUNK_SECONDS,
    MAX_SLOWDOWN,
    MEASUREMENTS,
    PAUSE_MARGIN,
    STARVATION_SECONDS,
    BatchLimits,
    Begin,
    Chunk,
    Decision,
    ScheduledStep,
    Scheduler,
)

PACE = 1e-3
"""Seconds per id of a prompt, in the rows."""

CUT = int(BatchLimits().pause * PAUSE_MARGIN / PACE) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
"""Ids of a chunk beside an answer, at that pace."""


def begin_prompt(
    scheduler: Scheduler, number: int, ids: int, tenant: str = "", now: float = 0.0
) -> None:
    scheduler.add(number, ids, tenant, now)
    scheduler.begin(number, ids)


def add_answer(scheduler: Scheduler, number: int = 0, ids: int = 512) -> None:
    """Adds a request whose prompt was computed at ``PACE``."""
    begin_prompt(scheduler, number, ids)
    scheduler.chunk_done(number, ids, ids * PACE)
    start_answer(scheduler, number)


def start_answer(scheduler: Scheduler, number: int, seconds: float = 0.0) -> None:
    """Starts an answer, up to its first id; its steps take ``seconds`` together."""
    scheduler.start_answer(number)
    for _ in range(FIRST_STEPS):
        assert scheduler.next(0.0) == ScheduledStep()
        scheduler.step_done(seconds / FIRST_STEPS)


def nothing(scheduler: Scheduler) -> None:
    pass


def alone(scheduler: Scheduler) -> None:
    """The first chunks of a long prompt measure the costs of their lengths."""
    begin_prompt(scheduler, 1, 12_000)


def and_the_shortest_is_measured(scheduler: Scheduler) -> None:
    alone(scheduler)
    scheduler.chunk_done(1, 256, 0.3)


def and_all_are_measured(scheduler: Scheduler) -> None:
    and_the_shortest_is_measured(scheduler)
    scheduler.chunk_done(1, 512, 0.54)
    scheduler.chunk_done(1, 1024, 1.04)
    scheduler.chunk_done(1, 2048, 2.0)


def lengths_are_measured_alone(scheduler: Scheduler) -> None:
    """A pass of two prompts of 512 ids is one of 1,024."""
    for number in (1, 2):
        begin_prompt(scheduler, number, 512)
    for number in (1, 2):
        scheduler.chunk_done(number, 512, 0.52, alone=False)
        scheduler.remove(number)
    begin_prompt(scheduler, 3, 12_000)
    scheduler.chunk_done(3, 256, 0.3)


def the_next_one_measures_again(scheduler: Scheduler) -> None:
    and_all_are_measured(scheduler)
    scheduler.remove(1)
    begin_prompt(scheduler, 2, 12_000)


def of_one_chunk(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 2048)


def of_little_more_than_the_best_length(scheduler: Scheduler) -> None:
    and_all_are_measured(scheduler)
    scheduler.remove(1)
    begin_prompt(scheduler, 2, 1023)


def deep_in_its_context(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 100_000)
    scheduler.chunk_done(1, 2048, 2048 * 5e-3)


def too_slow_for_anything(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 100_000)
    scheduler.chunk_done(1, 2048, 200.0)


def behind_a_long_cached_prefix(scheduler: Scheduler) -> None:
    """The speed of prompts without a prefix says little about its own."""
    add_answer(scheduler)
    scheduler.remove(0)
    scheduler.add(1, 103_000, "", 0.0)
    scheduler.begin(1, 3000, 100_000)


def and_its_first_chunk_is_computed(scheduler: Scheduler) -> None:
    behind_a_long_cached_prefix(scheduler)
    scheduler.chunk_done(1, 256, 0.5)


def behind_a_short_cached_prefix(scheduler: Scheduler) -> None:
    scheduler.add(1, 33_000, "", 0.0)
    scheduler.begin(1, 3000, 30_000)


def nearly_done(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 2050)
    scheduler.chunk_done(1, 2048, 2.0)


def an_answer(scheduler: Scheduler) -> None:
    add_answer(scheduler)


def beside_an_answer(scheduler: Scheduler) -> None:
    add_answer(scheduler)
    begin_prompt(scheduler, 1, 5000)


def beside_an_answer_and_behind_a_chunk(scheduler: Scheduler) -> None:
    beside_an_answer(scheduler)
    scheduler.chunk_done(1, 192, 0.192)


def an_answer_has_just_begun(scheduler: Scheduler) -> None:
    """It gets its first id before anything else is computed."""
    begin_prompt(scheduler, 0, 60)
    begin_prompt(scheduler, 1, 5000)
    scheduler.chunk_done(0, 60, 0.06)
    scheduler.start_answer(0)


def and_has_made_a_step(scheduler: Scheduler) -> None:
    an_answer_has_just_begun(scheduler)
    scheduler.step_done(0.02)


def and_has_its_first_id(scheduler: Scheduler) -> None:
    and_has_made_a_step(scheduler)
    scheduler.step_done(0.02)


def beside_an_answer_and_behind_a_slow_disk(scheduler: Scheduler) -> None:
    """The answer waited while the caches of the prompt were read."""
    add_answer(scheduler)
    scheduler.add(1, 8000, "", 0.0)
    scheduler.begin(1, 5000, cached=3000, seconds=0.2)


def the_debt_is_paid(scheduler: Scheduler) -> None:
    beside_an_answer_and_behind_a_chunk(scheduler)
    owed = 0.192 * DECODE_SHARE / (1 - DECODE_SHARE)
    scheduler.step_done(owed - 0.015)
    assert scheduler.next(0) == ScheduledStep()
    scheduler.step_done(0.015)


def a_step_took_longer_than_was_owed(scheduler: Scheduler) -> None:
    """Two chunks of 50 ms earned it 47 ms, and its step took 200."""
    beside_an_answer(scheduler)
    for _ in range(2):
        scheduler.chunk_done(1, 50, 0.05)
    scheduler.step_done(0.2)
    scheduler.chunk_done(1, 50, 0.05)


def steps_of_an_answer_alone_are_no_credit(scheduler: Scheduler) -> None:
    an_answer(scheduler)
    scheduler.step_done(5.0)
    begin_prompt(scheduler, 1, 5000)
    scheduler.chunk_done(1, 50, 0.05)


def the_answer_has_ended(scheduler: Scheduler) -> None:
    beside_an_answer_and_behind_a_chunk(scheduler)
    scheduler.remove(0)


def of_unknown_speed(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 0, 8)
    scheduler.chunk_done(0, 8, 0.5)  # too short to measure
    start_answer(scheduler, 0, 1.0)
    begin_prompt(scheduler, 1, 5000)


def slow(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 0, 512)
    scheduler.chunk_done(0, 512, 51.2)
    start_answer(scheduler, 0, 100.0)
    begin_prompt(scheduler, 1, 5000)


def a_prompt_of_its_own_speed(scheduler: Scheduler) -> None:
    """Deep in its context, it is slower than the short prompt before it."""
    begin_prompt(scheduler, 1, 9000)
    scheduler.chunk_done(1, 2048, 8.192)
    add_answer(scheduler)


def fast_at_its_beginning(scheduler: Scheduler) -> None:
    """Five times the ids would take fourteen times as long."""
    add_answer(scheduler)
    begin_prompt(scheduler, 1, 36_000)
    scheduler.chunk_done(1, 224, 0.041)
    scheduler.step_done(1.0)


def both_came_together(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 5000)
    begin_prompt(scheduler, 2, 60)


def the_long_one_has_begun(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 36_000)
    scheduler.chunk_done(1, 16_384, 16.4)
    scheduler.add(2, 60, "", 16.3)


def short_ones_have_had_their_part(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 9000)
    for number in (2, 3):
        scheduler.add(number, 60, "", 1.0)
    scheduler.begin(2, 60)
    scheduler.chunk_done(2, 60, 0.06)
    scheduler.remove(2)


def and_the_oldest_has_had_its_part(scheduler: Scheduler) -> None:
    short_ones_have_had_their_part(scheduler)
    scheduler.chunk_done(1, 2048, 2.0)


def tenants(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 9000, "a")
    begin_prompt(scheduler, 2, 9000, "b")
    scheduler.chunk_done(1, 2048, 2.0)


def a_tenant_that_came_back(scheduler: Scheduler) -> None:
    """It had the last turn, although its request has ended since."""
    begin_prompt(scheduler, 1, 9000, "a")
    scheduler.chunk_done(1, 2048, 2.0)
    begin_prompt(scheduler, 2, 60, "b", 2.0)
    scheduler.chunk_done(2, 60, 0.06)
    start_answer(scheduler, 2, 1.0)
    scheduler.add(3, 60, "b", 2.1)


def all_prompts_have_begun(scheduler: Scheduler) -> None:
    for number in range(2):
        begin_prompt(scheduler, number, 9000)
    scheduler.add(5, 60, "", 0.0)


def all_rows_are_taken(scheduler: Scheduler) -> None:
    for number in range(4):
        add_answer(scheduler, number)
    scheduler.step_done(10.0)
    scheduler.add(5, 60, "", 0.0)


def a_long_one_has_begun(scheduler: Scheduler) -> None:
    """The second slot is for prompts of one chunk."""
    begin_prompt(scheduler, 0, 9000)
    scheduler.chunk_done(0, 2048, 2.0)
    scheduler.add(1, 9000, "b", 0.0)


def and_a_short_one_comes(scheduler: Scheduler) -> None:
    a_long_one_has_begun(scheduler)
    scheduler.add(2, 2048, "c", 0.0)


def short_ones_wait(scheduler: Scheduler) -> None:
    """All of them can begin; the first has."""
    begin_prompt(scheduler, 1, 60)
    scheduler.add(2, 70, "b", 0.0)
    scheduler.add(3, 9000, "c", 0.0)


def and_have_begun(scheduler: Scheduler) -> None:
    short_ones_wait(scheduler)
    scheduler.begin(2, 70)


def of_very_different_lengths(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 60)
    begin_prompt(scheduler, 2, 600)


def both_so_short_that_padding_costs_nothing(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 3)
    begin_prompt(scheduler, 2, 100)


def behind_prefixes_of_very_different_lengths(scheduler: Scheduler) -> None:
    for number, cached in ((1, 0), (2, 2500)):
        scheduler.add(number, 60, "", 0.0)
        scheduler.begin(number, 60, cached)


def one_of_which_has_not_begun(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 60)
    scheduler.add(2, 60, "", 0.0, cached=2500)


def together_longer_than_a_pause(scheduler: Scheduler) -> None:
    add_answer(scheduler)
    begin_prompt(scheduler, 1, 120)
    begin_prompt(scheduler, 2, 120)


def the_end_of_a_long_one_and_a_short_one(scheduler: Scheduler) -> None:
    begin_prompt(scheduler, 1, 2 * 2048 + 50)
    for _ in range(2):
        scheduler.chunk_done(1, 2048, 2.0)
    begin_prompt(scheduler, 2, 60)


SMALL = BatchLimits(prompts=2, answers=4)

ROWS: list[tuple[Callable[[Scheduler], None], float, Decision]] = [
    (nothing, 0.0, None),
    (alone, 0.0, Chunk(1, 256)),
    (and_the_shortest_is_measured, 0.0, Chunk(1, 512)),
    (and_all_are_measured, 0.0, Chunk(1, 512)),
    (lengths_are_measured_alone, 0.0, Chunk(3, 512)),
    (the_next_one_measures_again, 0.0, Chunk(2, 256)),
    (of_one_chunk, 0.0, Chunk(1, 2048)),
    (of_little_more_than_the_best_length, 0.0, Chunk(2, 1023)),
    (deep_in_its_context, 0.0, Chunk(1, 480)),
    (too_slow_for_anything, 0.0, Chunk(1, FIRST_CHUNK)),
    (behind_a_long_cached_prefix, 0.0, Chunk(1, FIRST_CHUNK)),
    (and_its_first_chunk_is_computed, 0.0, Chunk(1, 1280)),
    (behind_a_short_cached_prefix, 0.0, Chunk(1, 2048)),
    (nearly_done, 0.0, Chunk(1, 2)),
    (an_answer, 0.0, ScheduledStep()),
    (an_answer_has_just_begun, 0.0, ScheduledStep()),
    (and_has_made_a_step, 0.0, ScheduledStep()),
    (and_has_its_first_id, 0.0, Chunk(1, CUT)),
    (beside_an_answer, 0.0, Chunk(1, CUT)),
    (beside_an_answer_and_behind_a_chunk, 0.0, ScheduledStep()),
    (beside_an_answer_and_behind_a_slow_disk, 0.0, ScheduledStep()),
    (the_debt_is_paid, 0.0, Chunk(1, CUT)),
    (a_step_took_longer_than_was_owed, 0.0, Chunk(1, CUT)),
    (steps_of_an_answer_alone_are_no_credit, 0.0, ScheduledStep()),
    (the_answer_has_ended, 0.0, Chunk(1, 256)),
    (of_unknown_speed, 0.0, Chunk(1, FIRST_CHUNK)),
    (slow, 0.0, Chunk(1, CHUNK_MULTIPLE)),
    (a_prompt_of_its_own_speed, 0.0, Chunk(1, 32)),
    (fast_at_its_beginning, 0.0, Chunk(1, 320)),
    (both_came_together, 0.0, Chunk(2, 60)),
    (both_came_together, 1.0, Chunk(2, 60)),
    (the_long_one_has_begun, 16.5, Begin(2)),
    (short_ones_have_had_their_part, 1.1, Chunk(1, 256)),
    (and_the_oldest_has_had_its_part, 3.1, Begin(3)),
    (tenants, 2.0, Chunk(2, 256)),
    (a_tenant_that_came_back, 2.2, Chunk(1, CUT)),
    (all_prompts_have_begun, 9.0, Chunk(0, 256)),
    (all_rows_are_taken, 9.0, ScheduledStep()),
    (a_long_one_has_begun, 2 * STARVATION_SECONDS, Chunk(0, 2048)),
    (and_a_short_one_comes, 0.0, Begin(2)),
    (short_ones_wait, 0.0, Begin(2)),
    (and_have_begun, 0.0, Chunk(1, 70, (2,))),
    (of_very_different_lengths, 0.0, Chunk(1, 60)),
    (both_so_short_that_padding_costs_nothing, 0.0, Chunk(1, 100, (2,))),
    (behind_prefixes_of_very_different_lengths, 0.0, Chunk(1, 60)),
    (one_of_which_has_not_begun, 0.0, Chunk(1, 60)),
    (together_longer_than_a_pause, 0.0, Chunk(1, 120)),
    (the_end_of_a_long_one_and_a_short_one, 0.0, Chunk(1, 50)),
]


@pytest.mark.parametrize(
    ("history", "now", "decision"), ROWS, ids=[f"{row[0].__name__}-{row[1]:g}" for row in ROWS]
)
def test_history_leads_to_decision(
    history: Callable[[Scheduler], None], now: float, decision: Decision
) -> None:
    scheduler = Scheduler(SMALL)
    history(scheduler)
    assert scheduler.next(now) == decision
    assert scheduler.next(now) == decision, "asking changes nothing"


def test_chunk_is_bounded_by_flags() -> None:
    scheduler = Scheduler(BatchLimits(chunk=100, chunk_beside=64))
    begin_prompt(scheduler, 1, 5000)
    assert scheduler.next(0) == Chunk(1, 100)
    add_answer(scheduler)
    assert scheduler.next(0) == Chunk(1, 64)


@pytest.mark.parametrize("limit", [1, 16, 31, 33])
@pytest.mark.parametrize("flag", ["chunk", "chunk_beside"])
def test_slow_chunk_is_bounded_by_flags(flag: str, limit: int) -> None:
    """Even where a chunk has to be longer than the pause allows."""
    scheduler = Scheduler(BatchLimits(**{flag: limit}))
    slow(scheduler)
    decision = scheduler.next(0)
    assert isinstance(decision, Chunk) and decision.ids == min(limit, CHUNK_MULTIPLE)


def test_prompt_without_memory_is_overtaken_for_a_while() -> None:
    scheduler = Scheduler(BatchLimits())
    begin_prompt(scheduler, 0, 100)
    scheduler.add(1, 50_000, "", 0.0)
    scheduler.add(2, 60, "", 1.0)

    def fits(number: int) -> bool:
        return number != 1

    scheduler.chunk_done(0, 100, 0.1)
    start_answer(scheduler, 0, 1.0)
    assert scheduler.next(2.0, fits) == Begin(2)
    assert scheduler.next(STARVATION_SECONDS + 1, fits) == ScheduledStep(), (
        "no later one begins any more"
    )
    assert scheduler.next(STARVATION_SECONDS + 1) == Begin(2), "there is memory for both"
    scheduler.remove(1)
    assert scheduler.next(STARVATION_SECONDS + 1, fits) == Begin(2)


def test_prompt_without_slot_takes_no_memory() -> None:
    """Others' cached prompts would be evicted for it, long before it begins."""
    scheduler = Scheduler(BatchLimits(prompts=1))
    begin_prompt(scheduler, 0, 5_000)
    scheduler.add(1, 5_000, "", 0.0)

    def make_room(number: int) -> bool:
        raise AssertionError(number)

    assert scheduler.next(STARVATION_SECONDS + 1, make_room) == Chunk(0, 256)


def test_idle_tenants_are_forgotten() -> None:
    scheduler = Scheduler(BatchLimits())
    for number in range(10_000):
        begin_prompt(scheduler, number, 60, tenant=str(number))
        scheduler.chunk_done(number, 60, 0.06)
        scheduler.start_answer(number)
        scheduler.remove(number)
    assert len(scheduler._tenants) < 3


# --- The simulation


@dataclass
class Request:
    """A request that arrives ``at`` a time, and what became of it: ids and seconds."""

    at: float
    prompt: int
    answer: int
    tenant: str = ""
    first: float = 0.0
    pauses: list[float] = field(default_factory=list)
    finished: float = 0.0
    chunks: list[tuple[int, float]] = field(default_factory=list)
    """The chunks of its prompt: ids and seconds."""

    @property
    def wait(self) -> float:
        """Seconds to the first id."""
        return self.first - self.at


@dataclass(frozen=True)
class Machine:
    """The speed of a device: an id of a prompt costs more the more ids precede it."""

    per_id: float = 5e-4
    per_id_before: float = 1e-8
    per_chunk: float = 0.004
    per_step: float = 0.02
    noise: float = 0.1

    def chunk(self, before: int, ids: int, luck: random.Random) -> float:
        """Seconds that ``ids`` take behind ``before`` others."""
        seconds = self.per_chunk + ids * (self.per_id + self.per_id_before * (before + ids / 2))
        return seconds * luck.uniform(1 - self.noise, 1 + self.noise)


def simulate(  # noqa: C901 - one loop, as the engine has it
    requests: Iterable[Request],
    limits: BatchLimits,
    machine: Machine,
    until: float,
    memory: float = math.inf,
) -> None:
    """Runs a scheduler on a machine, and records times in the requests.

    ``memory`` is in ids of whole prompts and answers.
    """
    luck, scheduler, now = random.Random(1), Scheduler(limits), 0.0
    arrivals = sorted(requests, key=lambda request: request.at)
    arrived: dict[int, Request] = {}
    computed: dict[int, int] = {}
    remaining: dict[int, int] = {}
    last: dict[int, float] = {}

    def fits(number: int) -> bool:
        running = {other for other in (number, *computed) if not arrived[other].finished}
        return sum(arrived[other].prompt + arrived[other].answer for other in running) <= memory

    while now < until:
        while arrivals and arrivals[0].at <= now:
            request = arrivals.pop(0)
            number = len(arrived)
            arrived[number] = request
            scheduler.add(number, request.prompt, request.tenant, request.at)
        match scheduler.next(now, fits):
            case Begin(number):
                computed[number] = 0
                scheduler.begin(number, arrived[number].prompt)
            case Chunk(number, ids, others):
                group = [number, *others]
                rests = [min(ids, arrived[member].prompt - computed[member]) for member in group]
                before = max(computed[member] for member in group)
                seconds = machine.chunk(before, len(group) * max(rests), luck)
                now += seconds
                for member, rest in zip(group, rests, strict=True):
                    computed[member] += rest
                    arrived[member].chunks.append((rest, seconds))
                    share, is_alone = seconds * rest / sum(rests), len(group) == 1
                    scheduler.chunk_done(member, rest, share, alone=is_alone)
                    if computed[member] == arrived[member].prompt:
                        scheduler.start_answer(member)
                        remaining[member], last[member] = arrived[member].answer, now
            case ScheduledStep():
                now += machine.per_step
                scheduler.step_done(machine.per_step)
                for number in list(remaining):
                    request = arrived[number]
                    request.first = request.first or now
                    request.pauses.append(now - last[number])
                    last[number] = now
                    remaining[number] -= 1
                    if not remaining[number]:
                        del remaining[number]
                        request.finished = now
                        scheduler.remove(number)
            case None:
                if not arrivals:
                    return
                now = arrivals[0].at


MACHINE = Machine()


def alone_takes(prompt: int) -> float:
    """Seconds to the first id of a prompt that runs alone."""
    request = Request(0.0, prompt, 1)
    simulate([request], BatchLimits(), MACHINE, 1e9)
    return request.wait


SLOW = Machine(per_id=7e-4, per_id_before=3e-8, per_chunk=0.04, noise=0.0)
"""A slow Mac, whose chunks of 2,048 ids take 1.5 seconds at first, and 9.5 behind 131,072."""


@pytest.mark.parametrize("prompt", [1_000, 32_000, 100_000, 131_072])
def test_chunk_of_lone_prompt_is_short(prompt: int) -> None:
    """Otherwise macOS may end the process. Shorter chunks cost little."""
    request = Request(0.0, prompt, 1)
    simulate([request], BatchLimits(), SLOW, 1e9)
    assert sum(ids for ids, _ in request.chunks) == prompt
    assert max(seconds for _, seconds in request.chunks) < 1.05 * MAX_CHUNK_SECONDS
    starts, luck = range(0, prompt, 2048), random.Random(1)
    full = sum(SLOW.chunk(start, min(2048, prompt - start), luck) for start in starts)
    assert sum(seconds for _, seconds in request.chunks) < MAX_SLOWDOWN * full


@pytest.mark.parametrize("prompt", [1_000, 1_500, 2_048])
def test_first_chunk_of_prompt_is_short_on_slow_machine(prompt: int) -> None:
    """By the speed of earlier prompts, unless there were none, or only short ones."""
    machine = replace(SLOW, per_id=9e-3)
    requests = [Request(100.0 * number, ids, 1) for number, ids in enumerate((300, 40, prompt))]
    simulate(requests, BatchLimits(), machine, 1e9)
    assert max(seconds for _, seconds in requests[-1].chunks) < 1.05 * MAX_CHUNK_SECONDS


@pytest.mark.parametrize(
    ("per_chunk", "length"), [(0.004, 256), (0.03, 512), (0.1, 1024), (0.2, 2048)]
)
def test_chunks_are_as_short_as_is_cheap(per_chunk: float, length: int) -> None:
    """Once a few prompts have measured what a pass costs."""
    machine = replace(MACHINE, per_chunk=per_chunk, noise=0.0)
    prompts = [Request(100.0 * number, 32_000, 1) for number in range(MEASUREMENTS + 1)]
    simulate(prompts, BatchLimits(), machine, 1e9)
    assert {ids for ids, _ in prompts[-1].chunks[:-1]} == {length}


def test_long_prompt_hardly_pauses_answer() -> None:
    """The engine's goals for pauses, speed and price, on a machine as fast as a Mac."""
    answer, prompt = Request(0.0, 200, 10_000), Request(5.0, 36_000, 1)
    simulate([answer, prompt], BatchLimits(), MACHINE, 1e9)
    meanwhile = prompt.first - prompt.at
    ids = sum(1 for pause in answer.pauses if pause)
    assert max(answer.pauses) < BatchLimits().pause + MACHINE.per_step
    assert max(answer.pauses) / meanwhile < 0.03
    assert meanwhile / alone_takes(36_000) < 1.5
    paused = sum(pause - MACHINE.per_step for pause in answer.pauses)
    steps = (meanwhile - paused) / MACHINE.per_step
    assert steps * MACHINE.per_step / meanwhile > 0.25, ids


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("prompt", [1_000, 32_000, 100_000])
@pytest.mark.parametrize("machine", [MACHINE, SLOW], ids=["fast", "slow"])
def test_answers_get_their_share_at_any_depth(machine: Machine, prompt: int) -> None:
    """Although an id of a prompt costs more the more ids precede it."""
    answer, beside = Request(0.0, 200, 100_000), Request(5.0, prompt, 1)
    simulate([answer, beside], BatchLimits(), machine, 1e9)
    steps = accumulate(answer.pauses[1:], initial=answer.first)
    count = sum(beside.at <= time < beside.first for time in steps)
    assert count * machine.per_step / (beside.first - beside.at) == pytest.approx(DECODE_SHARE, 0.1)
    assert max(answer.pauses) < BatchLimits().pause + machine.per_step


def test_short_prompt_overtakes_long_one() -> None:
    """Once the costs of chunk lengths are measured."""
    before = [Request(100.0 * number, 13_000, 1) for number in range(MEASUREMENTS)]
    long = Request(1000.0, 13_000, 1)
    short = [Request(at, 60, 16) for at in (1001.0, 1003.0)]
    simulate([*before, long, *short], BatchLimits(), MACHINE, 1e9)
    for request in short:
        assert request.wait / long.wait < 0.04
    assert long.wait / before[0].wait < 1.2, "and it costs the long one little"


def test_simultaneous_short_prompts_start_together() -> None:
    single, eight = Request(0.0, 60, 1), [Request(10.0, 60 + more, 1) for more in range(8)]
    simulate([single, *eight], BatchLimits(), replace(MACHINE, per_id=1e-4, per_chunk=0.2), 1e9)
    assert max(request.wait for request in eight) < 1.5 * single.wait


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_long_prompt_is_served_under_load_of_short_ones(load: float) -> None:
    """For 15 minutes, short prompts take the share ``load`` of the time for prompts."""
    luck = random.Random(2)
    short = MACHINE.per_chunk + 400 * MACHINE.per_id
    at, requests = 0.0, []
    while at < 900:
        requests.append(Request(at, 400, 1))
        at += luck.expovariate(load / short)
    long = [Request(60.0 + 200 * number, 20_000, 1) for number in range(4)]
    simulate([*requests, *long], BatchLimits(), MACHINE, 3600)
    waits = sorted(request.wait for request in requests)
    assert all(request.finished for request in [*requests, *long]), "none starves"
    # Answers take up to a third of the time, and the short ones three quarters of the rest.
    assert max(request.wait for request in long) < alone_takes(20_000) / (0.75 * 0.25)
    assert waits[len(waits) // 2] < 15 * short, "half of the short ones hardly wait"


def test_tenants_share_equally() -> None:
    many = [Request(0.0, 8_000, 1, "many") for _ in range(10)]
    other = Request(0.1, 8_000, 1, "one")
    simulate([*many, other], BatchLimits(), MACHINE, 1e9)
    assert other.wait < 3 * alone_takes(8_000)
    assert all(request.finished for request in many)


def test_long_prompts_of_other_tenants_do_not_delay_short_one() -> None:
    """Even if each has waited longer than ``STARVATION_SECONDS``."""
    long = [Request(0.0, 36_000, 1, str(number)) for number in range(12)]
    short = [Request(20.0 + 10 * number, 60, 1, f"short {number}") for number in range(30)]
    simulate([*long, *short], BatchLimits(), MACHINE, 1e9)
    assert max(request.wait for request in short) < 0.15 * alone_takes(36_000)
    assert all(request.finished for request in long)


def test_large_prompts_are_not_starved_by_small_ones() -> None:
    """Memory fits the long prompt and a few short ones, or many short ones."""
    short = [Request(0.5 * number, 400, 100) for number in range(1200)]
    long = Request(5.0, 20_000, 1)
    simulate([*short, long], BatchLimits(), MACHINE, 1e9, memory=24_000)
    assert long.wait < 5 * alone_takes(20_000) + STARVATION_SECONDS
    assert all(request.finished for request in short)


def test_load_of_one_tenant_does_not_starve_another() -> None:
    short = [Request(0.05 * number, 400, 1, "busy") for number in range(600)]
    long = Request(0.0, 20_000, 1, "long")
    simulate([*short, long], BatchLimits(), MACHINE, 1e9)
    assert long.wait < 4 * alone_takes(20_000)
