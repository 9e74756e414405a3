"""What the engine does next: rows of a history and a decision, and a simulation of hours."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest

from vllm_mlx_harmony.engine.scheduler import (
    AIM,
    CHUNK_MULTIPLE,
    DECODE_SHARE,
    FIRST_CHUNK,
    FIRST_STEPS,
    LONGEST,
    MEASUREMENTS,
    PRICE,
    STARVATION_SECONDS,
    BatchLimits,
    Chunk,
    Decision,
    ScheduledStep,
    Scheduler,
)

PACE = 1e-3
"""Seconds an id of a prompt takes, in rows."""

CUT = int(BatchLimits().pause * AIM / PACE) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
"""Ids of a chunk beside an answer at that speed."""


def began(scheduler: Scheduler, request: int, ids: int, tenant: str = "", now: float = 0.0) -> None:
    scheduler.add(request, ids, tenant, now)
    scheduler.begin(request, ids)


def answering(scheduler: Scheduler, request: int = 0, ids: int = 512) -> None:
    """A request whose prompt is computed, at ``PACE``."""
    began(scheduler, request, ids)
    scheduler.computed(request, ids, ids * PACE)
    started(scheduler, request)


def started(scheduler: Scheduler, request: int, seconds: float = 0.0) -> None:
    """An answer that has its first id, after steps of so many ``seconds`` together."""
    scheduler.start_answer(request)
    for _ in range(FIRST_STEPS):
        assert scheduler.next(0.0) == ScheduledStep()
        scheduler.stepped(seconds / FIRST_STEPS)


def nothing(scheduler: Scheduler) -> None:
    pass


def alone(scheduler: Scheduler) -> None:
    """The first chunks of a long prompt measure what their lengths cost."""
    began(scheduler, 1, 12_000)


def and_the_shortest_is_measured(scheduler: Scheduler) -> None:
    alone(scheduler)
    scheduler.computed(1, 256, 0.3)


def and_all_are_measured(scheduler: Scheduler) -> None:
    and_the_shortest_is_measured(scheduler)
    scheduler.computed(1, 512, 0.54)
    scheduler.computed(1, 1024, 1.04)
    scheduler.computed(1, 2048, 2.0)


def the_next_one_measures_again(scheduler: Scheduler) -> None:
    and_all_are_measured(scheduler)
    scheduler.remove(1)
    began(scheduler, 2, 12_000)


def of_one_chunk(scheduler: Scheduler) -> None:
    began(scheduler, 1, 2048)


def of_little_more_than_the_best_length(scheduler: Scheduler) -> None:
    and_all_are_measured(scheduler)
    scheduler.remove(1)
    began(scheduler, 2, 1023)


def deep_in_its_context(scheduler: Scheduler) -> None:
    began(scheduler, 1, 100_000)
    scheduler.computed(1, 2048, 2048 * 5e-3)


def too_slow_for_anything(scheduler: Scheduler) -> None:
    began(scheduler, 1, 100_000)
    scheduler.computed(1, 2048, 200.0)


def behind_a_long_cached_prefix(scheduler: Scheduler) -> None:
    """The speed of others, without one, says little about its own."""
    answering(scheduler)
    scheduler.remove(0)
    scheduler.add(1, 103_000, "", 0.0)
    scheduler.begin(1, 3000, 100_000)


def and_its_first_chunk_is_computed(scheduler: Scheduler) -> None:
    behind_a_long_cached_prefix(scheduler)
    scheduler.computed(1, 256, 0.5)


def behind_a_short_cached_prefix(scheduler: Scheduler) -> None:
    scheduler.add(1, 33_000, "", 0.0)
    scheduler.begin(1, 3000, 30_000)


def nearly_done(scheduler: Scheduler) -> None:
    began(scheduler, 1, 2050)
    scheduler.computed(1, 2048, 2.0)


def an_answer(scheduler: Scheduler) -> None:
    answering(scheduler)


def beside_an_answer(scheduler: Scheduler) -> None:
    answering(scheduler)
    began(scheduler, 1, 5000)


def beside_an_answer_and_behind_a_chunk(scheduler: Scheduler) -> None:
    beside_an_answer(scheduler)
    scheduler.computed(1, 192, 0.192)


def an_answer_has_just_begun(scheduler: Scheduler) -> None:
    """It is owed its first id, whatever waits."""
    began(scheduler, 0, 60)
    began(scheduler, 1, 5000)
    scheduler.computed(0, 60, 0.06)
    scheduler.start_answer(0)


def and_has_made_a_step(scheduler: Scheduler) -> None:
    an_answer_has_just_begun(scheduler)
    scheduler.stepped(0.02)


def and_has_its_first_id(scheduler: Scheduler) -> None:
    and_has_made_a_step(scheduler)
    scheduler.stepped(0.02)


def the_debt_is_paid(scheduler: Scheduler) -> None:
    beside_an_answer_and_behind_a_chunk(scheduler)
    owed = 0.192 * DECODE_SHARE / (1 - DECODE_SHARE)
    scheduler.stepped(owed - 0.015)
    assert scheduler.next(0) == ScheduledStep()
    scheduler.stepped(0.015)


def a_step_took_longer_than_was_owed(scheduler: Scheduler) -> None:
    """Two chunks of 50 ms gave it 47 ms, and it took 200."""
    beside_an_answer(scheduler)
    for _ in range(2):
        scheduler.computed(1, 50, 0.05)
    scheduler.stepped(0.2)
    scheduler.computed(1, 50, 0.05)


def steps_of_an_answer_alone_are_no_credit(scheduler: Scheduler) -> None:
    an_answer(scheduler)
    scheduler.stepped(5.0)
    began(scheduler, 1, 5000)
    scheduler.computed(1, 50, 0.05)


def the_answer_has_ended(scheduler: Scheduler) -> None:
    beside_an_answer_and_behind_a_chunk(scheduler)
    scheduler.remove(0)


def of_unknown_speed(scheduler: Scheduler) -> None:
    began(scheduler, 0, 8)
    scheduler.computed(0, 8, 0.5)  # too short to say anything
    started(scheduler, 0, 1.0)
    began(scheduler, 1, 5000)


def slow(scheduler: Scheduler) -> None:
    began(scheduler, 0, 512)
    scheduler.computed(0, 512, 51.2)
    started(scheduler, 0, 100.0)
    began(scheduler, 1, 5000)


def a_prompt_of_its_own_speed(scheduler: Scheduler) -> None:
    """Deep in its context it is slower than the short one computed just now."""
    began(scheduler, 1, 9000)
    scheduler.computed(1, 2048, 8.192)
    answering(scheduler)


def fast_at_its_beginning(scheduler: Scheduler) -> None:
    """Five times as many ids would take fourteen times as long."""
    answering(scheduler)
    began(scheduler, 1, 36_000)
    scheduler.computed(1, 224, 0.041)
    scheduler.stepped(1.0)


def both_came_together(scheduler: Scheduler) -> None:
    began(scheduler, 1, 5000)
    began(scheduler, 2, 60)


def the_long_one_has_begun(scheduler: Scheduler) -> None:
    began(scheduler, 1, 36_000)
    scheduler.computed(1, 16_384, 16.4)
    scheduler.add(2, 60, "", 16.3)


def short_ones_have_had_their_part(scheduler: Scheduler) -> None:
    began(scheduler, 1, 9000)
    for request in (2, 3):
        scheduler.add(request, 60, "", 1.0)
    scheduler.begin(2, 60)
    scheduler.computed(2, 60, 0.06)
    scheduler.remove(2)


def and_the_oldest_has_had_its_part(scheduler: Scheduler) -> None:
    short_ones_have_had_their_part(scheduler)
    scheduler.computed(1, 2048, 2.0)


def tenants(scheduler: Scheduler) -> None:
    began(scheduler, 1, 9000, "a")
    began(scheduler, 2, 9000, "b")
    scheduler.computed(1, 2048, 2.0)


def a_tenant_that_came_back(scheduler: Scheduler) -> None:
    """It had the last turn: a request of its own that has ended since does not change that."""
    began(scheduler, 1, 9000, "a")
    scheduler.computed(1, 2048, 2.0)
    began(scheduler, 2, 60, "b", 2.0)
    scheduler.computed(2, 60, 0.06)
    started(scheduler, 2, 1.0)
    scheduler.add(3, 60, "b", 2.1)


def all_prompts_have_begun(scheduler: Scheduler) -> None:
    for request in range(2):
        began(scheduler, request, 9000)
    scheduler.add(5, 60, "", 0.0)


def all_rows_are_taken(scheduler: Scheduler) -> None:
    for request in range(4):
        answering(scheduler, request)
    scheduler.stepped(10.0)
    scheduler.add(5, 60, "", 0.0)


def a_long_one_has_begun(scheduler: Scheduler) -> None:
    """The second place is for prompts of one chunk."""
    began(scheduler, 0, 9000)
    scheduler.computed(0, 2048, 2.0)
    scheduler.add(1, 9000, "b", 0.0)


def and_a_short_one_comes(scheduler: Scheduler) -> None:
    a_long_one_has_begun(scheduler)
    scheduler.add(2, 2048, "c", 0.0)


def short_ones_wait(scheduler: Scheduler) -> None:
    """All of them can begin; the first one has."""
    began(scheduler, 1, 60)
    scheduler.add(2, 70, "b", 0.0)
    scheduler.add(3, 9000, "c", 0.0)


def and_have_begun(scheduler: Scheduler) -> None:
    short_ones_wait(scheduler)
    scheduler.begin(2, 70)


def of_very_different_lengths(scheduler: Scheduler) -> None:
    began(scheduler, 1, 60)
    began(scheduler, 2, 600)


def both_so_short_that_padding_costs_nothing(scheduler: Scheduler) -> None:
    began(scheduler, 1, 3)
    began(scheduler, 2, 100)


def behind_prefixes_of_very_different_lengths(scheduler: Scheduler) -> None:
    for request, cached in ((1, 0), (2, 2500)):
        scheduler.add(request, 60, "", 0.0)
        scheduler.begin(request, 60, cached)


def together_longer_than_a_pause(scheduler: Scheduler) -> None:
    answering(scheduler)
    began(scheduler, 1, 120)
    began(scheduler, 2, 120)


def the_end_of_a_long_one_and_a_short_one(scheduler: Scheduler) -> None:
    began(scheduler, 1, 2 * 2048 + 50)
    for _ in range(2):
        scheduler.computed(1, 2048, 2.0)
    began(scheduler, 2, 60)


SMALL = BatchLimits(prompts=2, answers=4)

ROWS: list[tuple[Callable[[Scheduler], None], float, Decision]] = [
    (nothing, 0.0, None),
    (alone, 0.0, Chunk(1, 256)),
    (and_the_shortest_is_measured, 0.0, Chunk(1, 512)),
    (and_all_are_measured, 0.0, Chunk(1, 512)),
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
    (the_long_one_has_begun, 16.5, Chunk(2, 60)),
    (short_ones_have_had_their_part, 1.1, Chunk(1, 256)),
    (and_the_oldest_has_had_its_part, 3.1, Chunk(3, 60)),
    (tenants, 2.0, Chunk(2, 256)),
    (a_tenant_that_came_back, 2.2, Chunk(1, CUT)),
    (all_prompts_have_begun, 9.0, Chunk(0, 256)),
    (all_rows_are_taken, 9.0, ScheduledStep()),
    (a_long_one_has_begun, 2 * STARVATION_SECONDS, Chunk(0, 2048)),
    (and_a_short_one_comes, 0.0, Chunk(2, 2048)),
    (short_ones_wait, 0.0, Chunk(2, 70)),
    (and_have_begun, 0.0, Chunk(1, 70, (2,))),
    (of_very_different_lengths, 0.0, Chunk(1, 60)),
    (both_so_short_that_padding_costs_nothing, 0.0, Chunk(1, 100, (2,))),
    (behind_prefixes_of_very_different_lengths, 0.0, Chunk(1, 60)),
    (together_longer_than_a_pause, 0.0, Chunk(1, 120)),
    (the_end_of_a_long_one_and_a_short_one, 0.0, Chunk(1, 50)),
]


@pytest.mark.parametrize(
    ("history", "now", "decision"), ROWS, ids=[f"{row[0].__name__}-{row[1]:g}" for row in ROWS]
)
def test_a_decision(history: Callable[[Scheduler], None], now: float, decision: Decision) -> None:
    scheduler = Scheduler(SMALL)
    history(scheduler)
    assert scheduler.next(now) == decision
    assert scheduler.next(now) == decision, "asking changes nothing"


def test_the_flags_bound_a_chunk() -> None:
    scheduler = Scheduler(BatchLimits(chunk=100, chunk_beside=64))
    began(scheduler, 1, 5000)
    assert scheduler.next(0) == Chunk(1, 100)
    answering(scheduler)
    assert scheduler.next(0) == Chunk(1, 64)


@pytest.mark.parametrize("limit", [1, 16, 31, 33])
@pytest.mark.parametrize("flag", ["chunk", "chunk_beside"])
def test_no_chunk_is_longer_than_the_flags_say(flag: str, limit: int) -> None:
    """Not even where a chunk has to be longer than the pause allows."""
    scheduler = Scheduler(BatchLimits(**{flag: limit}))
    slow(scheduler)
    decision = scheduler.next(0)
    assert isinstance(decision, Chunk) and decision.ids == min(limit, CHUNK_MULTIPLE)


def test_prompt_without_memory_is_overtaken_for_a_while() -> None:
    scheduler = Scheduler(BatchLimits())
    began(scheduler, 0, 100)
    scheduler.add(1, 50_000, "", 0.0)
    scheduler.add(2, 60, "", 1.0)

    def fits(request: int) -> bool:
        return request != 1

    scheduler.computed(0, 100, 0.1)
    started(scheduler, 0, 1.0)
    assert scheduler.next(2.0, fits) == Chunk(2, 60)
    assert scheduler.next(STARVATION_SECONDS + 1, fits) == ScheduledStep(), (
        "no later one begins any more"
    )
    assert scheduler.next(STARVATION_SECONDS + 1) == Chunk(2, 60), "there is memory for both"
    scheduler.remove(1)
    assert scheduler.next(STARVATION_SECONDS + 1, fits) == Chunk(2, 60)


def test_idle_tenants_are_forgotten() -> None:
    scheduler = Scheduler(BatchLimits())
    for request in range(10_000):
        began(scheduler, request, 60, tenant=str(request))
        scheduler.computed(request, 60, 0.06)
        scheduler.start_answer(request)
        scheduler.remove(request)
    assert len(scheduler._tenants) < 3


# --- The simulation


@dataclass
class Request:
    """What comes: at a moment, ids of prompt and answer."""

    at: float
    prompt: int
    answer: int
    tenant: str = ""
    first: float = 0.0
    pauses: list[float] = field(default_factory=list)
    done: float = 0.0
    chunks: list[tuple[int, float]] = field(default_factory=list)
    """Of its prompt: ids and seconds."""

    @property
    def wait(self) -> float:
        """Seconds to the first id."""
        return self.first - self.at


@dataclass(frozen=True)
class Machine:
    """How long a device takes: a prompt's id costs more the more stand before it."""

    per_id: float = 5e-4
    per_id_before: float = 1e-8
    per_chunk: float = 0.004
    per_step: float = 0.02
    noise: float = 0.1

    def chunk(self, before: int, ids: int, luck: random.Random) -> float:
        """Seconds for ``ids`` behind ``before`` others."""
        seconds = self.per_chunk + ids * (self.per_id + self.per_id_before * (before + ids / 2))
        return seconds * luck.uniform(1 - self.noise, 1 + self.noise)


def simulate(  # noqa: C901 - one loop, as the engine has it
    requests: Iterable[Request],
    limits: BatchLimits,
    machine: Machine,
    until: float,
    memory: float = math.inf,
) -> None:
    """Runs a scheduler over a machine; notes in each request what happened to it.

    ``memory`` is in ids, of prompts and answers to their ends.
    """
    luck, scheduler, now = random.Random(1), Scheduler(limits), 0.0
    coming = sorted(requests, key=lambda each: each.at)
    known: dict[int, Request] = {}
    computed: dict[int, int] = {}
    left: dict[int, int] = {}
    last: dict[int, float] = {}

    def fits(number: int) -> bool:
        running = {each for each in (number, *computed) if not known[each].done}
        return sum(known[each].prompt + known[each].answer for each in running) <= memory

    while now < until:
        while coming and coming[0].at <= now:
            request = coming.pop(0)
            number = len(known)
            known[number] = request
            scheduler.add(number, request.prompt, request.tenant, request.at)
        match scheduler.next(now, fits):
            case Chunk(number) if number not in computed:
                computed[number] = 0
                scheduler.begin(number, known[number].prompt)
                scheduler.computed(number, 0, 0.0)
            case Chunk(number, ids, others):
                group = [number, *others]
                rests = [min(ids, known[each].prompt - computed[each]) for each in group]
                before = max(computed[each] for each in group)
                seconds = machine.chunk(before, len(group) * max(rests), luck)
                now += seconds
                for each, rest in zip(group, rests, strict=True):
                    computed[each] += rest
                    known[each].chunks.append((rest, seconds))
                    scheduler.computed(each, rest, seconds * rest / sum(rests))
                    if computed[each] == known[each].prompt:
                        scheduler.start_answer(each)
                        left[each], last[each] = known[each].answer, now
            case ScheduledStep():
                now += machine.per_step
                scheduler.stepped(machine.per_step)
                for number in list(left):
                    request = known[number]
                    request.first = request.first or now
                    request.pauses.append(now - last[number])
                    last[number] = now
                    left[number] -= 1
                    if not left[number]:
                        del left[number]
                        request.done = now
                        scheduler.remove(number)
            case None:
                if not coming:
                    return
                now = coming[0].at


MACHINE = Machine()


def alone_takes(prompt: int) -> float:
    """Seconds to the first id of a prompt that nobody disturbs."""
    request = Request(0.0, prompt, 1)
    simulate([request], BatchLimits(), MACHINE, 1e9)
    return request.wait


SLOW = Machine(per_id=7e-4, per_id_before=3e-8, per_chunk=0.04, noise=0.0)
"""A slow Mac, whose chunks of 2,048 ids take 1.5 seconds at first, and 9.5 behind 131,072."""


@pytest.mark.parametrize("prompt", [1_000, 32_000, 100_000, 131_072])
def test_no_chunk_of_a_prompt_alone_takes_long(prompt: int) -> None:
    """So that macOS does not end the process; this costs little."""
    request = Request(0.0, prompt, 1)
    simulate([request], BatchLimits(), SLOW, 1e9)
    assert sum(ids for ids, _ in request.chunks) == prompt
    assert max(seconds for _, seconds in request.chunks) < 1.05 * LONGEST
    starts, luck = range(0, prompt, 2048), random.Random(1)
    full = sum(SLOW.chunk(start, min(2048, prompt - start), luck) for start in starts)
    assert sum(seconds for _, seconds in request.chunks) < PRICE * full


@pytest.mark.parametrize(
    ("per_chunk", "length"), [(0.004, 256), (0.03, 512), (0.1, 1024), (0.2, 2048)]
)
def test_chunks_are_as_short_as_costs_little(per_chunk: float, length: int) -> None:
    """Once a few prompts have shown what a pass costs."""
    machine = replace(MACHINE, per_chunk=per_chunk, noise=0.0)
    prompts = [Request(100.0 * each, 32_000, 1) for each in range(MEASUREMENTS + 1)]
    simulate(prompts, BatchLimits(), machine, 1e9)
    assert {ids for ids, _ in prompts[-1].chunks[:-1]} == {length}


def test_a_long_prompt_beside_an_answer() -> None:
    """The goals of the engine, on a machine of a Mac's speed: pause, speed, price."""
    answer, prompt = Request(0.0, 200, 10_000), Request(5.0, 36_000, 1)
    simulate([answer, prompt], BatchLimits(), MACHINE, 1e9)
    meanwhile = prompt.first - prompt.at
    ids = sum(1 for each in answer.pauses if each)
    assert max(answer.pauses) < BatchLimits().pause + MACHINE.per_step
    assert max(answer.pauses) / meanwhile < 0.03
    assert meanwhile / alone_takes(36_000) < 1.5
    paused = sum(each - MACHINE.per_step for each in answer.pauses)
    steps = (meanwhile - paused) / MACHINE.per_step
    assert steps * MACHINE.per_step / meanwhile > 0.25, ids


@pytest.mark.parametrize("prompt", [1_000, 32_000, 100_000])
@pytest.mark.parametrize("machine", [MACHINE, SLOW], ids=["fast", "slow"])
def test_answers_have_their_third_at_every_depth(machine: Machine, prompt: int) -> None:
    """Although an id of a prompt costs more the more ids there are before it."""
    answer, beside = Request(0.0, 200, 100_000), Request(5.0, prompt, 1)
    simulate([answer, beside], BatchLimits(), machine, 1e9)
    steps = accumulate(answer.pauses[1:], initial=answer.first)
    count = sum(beside.at <= each < beside.first for each in steps)
    assert count * machine.per_step / (beside.first - beside.at) == pytest.approx(DECODE_SHARE, 0.1)
    assert max(answer.pauses) < BatchLimits().pause + machine.per_step


def test_a_short_prompt_behind_a_long_one() -> None:
    """Once lengths of chunks are measured."""
    before = [Request(100.0 * each, 13_000, 1) for each in range(MEASUREMENTS)]
    long = Request(1000.0, 13_000, 1)
    short = [Request(at, 60, 16) for at in (1001.0, 1003.0)]
    simulate([*before, long, *short], BatchLimits(), MACHINE, 1e9)
    for each in short:
        assert each.wait / long.wait < 0.04
    assert long.wait / before[0].wait < 1.2, "and it costs the long one little"


def test_short_prompts_that_come_together_begin_together() -> None:
    one, eight = Request(0.0, 60, 1), [Request(10.0, 60 + each, 1) for each in range(8)]
    simulate([one, *eight], BatchLimits(), replace(MACHINE, per_id=1e-4, per_chunk=0.2), 1e9)
    assert max(each.wait for each in eight) < 1.5 * one.wait


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_under_a_steady_load_of_short_ones_a_long_one_is_served(load: float) -> None:
    """Short ones take ``load`` of the time that prompts may have, for a quarter of an hour."""
    luck = random.Random(2)
    short = MACHINE.per_chunk + 400 * MACHINE.per_id
    at, requests = 0.0, []
    while at < 900:
        requests.append(Request(at, 400, 1))
        at += luck.expovariate(load / short)
    long = [Request(60.0 + 200 * each, 20_000, 1) for each in range(4)]
    simulate([*requests, *long], BatchLimits(), MACHINE, 3600)
    waits = sorted(each.wait for each in requests)
    assert all(each.done for each in [*requests, *long]), "none starves"
    # Answers take up to a third of the time, and the short ones three quarters of the rest.
    assert max(each.wait for each in long) < alone_takes(20_000) / (0.75 * 0.25)
    assert waits[len(waits) // 2] < 15 * short, "half of the short ones hardly wait"


def test_tenants_share_equally_whatever_their_prompts() -> None:
    many = [Request(0.0, 8_000, 1, "many") for _ in range(10)]
    one = Request(0.1, 8_000, 1, "one")
    simulate([*many, one], BatchLimits(), MACHINE, 1e9)
    assert one.wait < 3 * alone_takes(8_000)
    assert all(each.done for each in many)


def test_long_prompts_of_other_tenants_do_not_delay_a_short_one() -> None:
    """Each has waited for longer than ``STARVATION_SECONDS`` when the short one comes."""
    long = [Request(0.0, 36_000, 1, str(each)) for each in range(12)]
    short = [Request(20.0 + 10 * each, 60, 1, f"short {each}") for each in range(30)]
    simulate([*long, *short], BatchLimits(), MACHINE, 1e9)
    assert max(each.wait for each in short) < 0.15 * alone_takes(36_000)
    assert all(each.done for each in long)


def test_large_prompts_are_not_starved_by_small_ones() -> None:
    """There is memory for the long prompt, or for ten of the short ones."""
    short = [Request(0.5 * each, 400, 100) for each in range(1200)]
    long = Request(5.0, 20_000, 1)
    simulate([*short, long], BatchLimits(), MACHINE, 1e9, memory=24_000)
    assert long.wait < 5 * alone_takes(20_000) + STARVATION_SECONDS
    assert all(each.done for each in short)


def test_a_steady_load_of_one_tenant_does_not_starve_another() -> None:
    short = [Request(0.05 * each, 400, 1, "busy") for each in range(600)]
    long = Request(0.0, 20_000, 1, "long")
    simulate([*short, long], BatchLimits(), MACHINE, 1e9)
    assert long.wait < 4 * alone_takes(20_000)
