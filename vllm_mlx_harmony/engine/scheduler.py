"""What the engine does next: a chunk of a prompt, or a step of all answers. No mlx, no clock.

Its owner reports what happened and how long it took (``chunk_done``, ``step_done``), and asks
``next`` what to do. The same calls always give the same decisions, so that rows and a simulation
(tests/unit/engine/test_scheduler.py) show how long a request waits.

**The conflict.** A model computes a prompt fastest in large chunks, and while it computes one, no
answer gets a token. Sarathi-Serve (https://arxiv.org/abs/2403.02310) names it: either prompts stall
answers, or answers starve prompts. There, chunk and step are fused into one computation, which
mlx-lm's models cannot do. So the two alternate, and two numbers bound what each does to the other:

- *Pause.* While an answer runs, a chunk is planned to take at most ``PAUSE_MARGIN * pause``
  seconds, by the speed of this prompt's last chunk, or else an average of all chunks in which
  recent ones weigh most. It may take longer if even ``CHUNK_MULTIPLE`` ids do, if no speed is known
  yet, or if the estimate is wrong. Speed falls with the length of a chunk, since attention within
  it grows with its square. So beyond ``FIRST_CHUNK`` ids, a chunk has at most ``GROWTH`` times as
  many as the same prompt's chunk before it.
- *Share.* A chunk that took ``c`` seconds is followed by steps that take
  ``c * DECODE_SHARE / (1 - DECODE_SHARE)`` seconds together. Answers get ``DECODE_SHARE`` of the
  time, and a prompt takes ``1 / (1 - DECODE_SHARE)`` times as long as it would alone. If a step
  overruns what answers were owed, the excess is credited to prompts before the next step. A new
  answer is owed its first id at once, which takes ``FIRST_STEPS``.

**Chunks of a prompt alone.** A new request waits for the current chunk to end, which favours short
chunks; every chunk reads all weights, which favours long ones. On a Mac, a mixture of experts takes
1.2 times as long in chunks of 512 ids as in those of 2,048
(https://github.com/lmstudio-ai/lmstudio-js/issues/507); on a processor, no longer at all. So the
first chunks of long prompts measure several lengths, and then the shortest counts whose ids take at
most ``MAX_SLOWDOWN`` times as long as those of the fastest.

Whatever its length, a chunk takes no more than ``MAX_CHUNK_SECONDS`` seconds by the speed of the
prompt's last one, or of another prompt's if it is the first: attention makes each id slower than
the one before it, and macOS ends a process whose work keeps the GPU busy for about five seconds
without a break. Others have seen that beyond 65,000 ids
(https://github.com/ml-explore/mlx/issues/3302), where mlx computes a layer's attention of a whole
chunk in one piece; its authors leave it to their users to choose shorter chunks. A prompt that
begins behind more than ``LONG_PREFIX`` cached ids starts with ``FIRST_CHUNK`` ids, since its speed
is not known.

**Short prompts together.** What is left of a prompt is computed in one pass with what is left of
others, each padded to the longest, if the pass is no longer than a chunk may be, and no more than
``MAX_PADDING_RATIO`` times as many ids as without the padding, or than ``FIRST_CHUNK``. They become
rows of one batch, so `may_be_padded` has to permit that as well.

**Order.** The prompt with the least left to compute goes first, which minimizes the sum of all
waits; a prompt that has begun can be overtaken between two chunks. That rule alone starves a long
prompt under a steady load of short ones. So of a tenant's prompt time, the fraction
``OLDEST_SHARE`` belongs to its oldest prompt, whatever its length: once a prompt is the oldest, it
takes about ``1 / OLDEST_SHARE`` times its own time at most, if no answers run and no other tenant
waits. **Tenants** take turns, chunk by chunk: the least recently served tenant is next. A tenant
that sends ten prompts gets no more of the time than one that sends a single prompt.

**Admission.** A prompt begins when it is its turn, there is memory for it (``make_room``), and not
too many others are running. The last prompt slot is reserved for single-chunk prompts: otherwise
long prompts in all slots would block a short one until one of them is done. When there is no memory
for the oldest prompt and it has waited for ``STARVATION_SECONDS``, no other one begins: otherwise
small ones would take all memory that becomes free, forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm_mlx_harmony.engine.memory import may_be_padded

STARVATION_SECONDS = 10.0
"""Seconds after which a prompt that lacks memory is no longer overtaken by later ones."""

DECODE_SHARE = 0.32
"""Fraction of the time for answers while prompts are also being computed. An answer is promised a
quarter of the speed that it has alone. Alternating costs time as well: with a share of a quarter,
an answer beside a prompt of 36,000 ids had 0.195 of that speed."""

OLDEST_SHARE = 0.25
"""Fraction of a tenant's prompt time that goes to its oldest prompt."""

CHUNK_MULTIPLE = 32
"""Planned lengths of chunks beside an answer are multiples of this, except a prompt's last one."""

FIRST_CHUNK = 256
"""Ids of a chunk beside an answer while no speed is known; growth never limits one to less, nor
does ``MAX_CHUNK_SECONDS``: weights are read anew for each chunk."""

GROWTH = 1.5
"""Maximum ratio of a chunk beside an answer to the same prompt's previous one. An unlimited one of
1,088 ids took 581 ms, not 200 as the 224 ids before it had promised."""

MAX_CHUNK_SECONDS = 2.5
"""Seconds that a chunk may take while no answer runs: half of those after which macOS ends the
process."""

CHUNK_DIVISORS = (8, 4, 2, 1)
"""The longest chunk divided by these: the lengths that are measured, from ``FIRST_CHUNK`` on."""

MEASUREMENTS = 3
"""How often each length is measured; the fastest counts."""

MAX_SLOWDOWN = 1.1
"""How much longer ids may take in shorter chunks than in the fastest ones."""

MAX_PADDING_RATIO = 1.5
"""Ids of a pass of several prompts, padding included, relative to those of the prompts."""

FIRST_STEPS = 2
"""Steps to an answer's first id: steps run one ahead (`batch`)."""

LONG_PREFIX = 32_768
"""Ids of a cached prefix behind which a chunk is much slower than one without."""

PAUSE_MARGIN = 0.8
"""Fraction of the pause that a chunk is planned to take; the rest is a margin."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much may run at once.

    The smaller of ``sequences`` and ``answers`` limits prompts that have begun plus answers.
    ``prompts``: prompts that have begun. ``chunk``: ids of a prompt, while no answer runs.
    ``pause``: seconds that a chunk may take while one does. ``chunk_beside``: an upper bound of its
    ids besides; 0: none.
    """

    sequences: int = 256
    prompts: int = 8
    answers: int = 32
    chunk: int = 2048
    chunk_beside: int = 0
    pause: float = 0.25


@dataclass(frozen=True, slots=True)
class Begin:
    """The prompt of the request ``number`` gets its caches, with what is cached of it."""

    number: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``ids`` of the prompt of the request ``number``. With ``other_numbers``: all that is
    left of this prompt and of theirs, in one pass; ``ids`` of the longest."""

    number: int
    ids: int
    other_numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step of all answers: an id for each, or more."""


Decision: TypeAlias = "Begin | Chunk | ScheduledStep | None"


@dataclass(slots=True)
class _Prompt:
    """``rest``: ids left to compute, behind ``before`` ones, of which ``cached`` were not computed.
    ``pace``: seconds per id. ``chunk``: ids of its last chunk. ``arrival_time`` as in ``next``.
    """

    number: int
    tenant: str
    rest: int
    arrival_time: float
    has_begun: bool = False
    cached: int = 0
    before: int = 0
    pace: float = 0.0
    chunk: int = 0


@dataclass(slots=True)
class _Tenant:
    """``last_served``: the number of its last chunk, counted over all tenants. ``oldest_owed``:
    seconds owed to its oldest prompt."""

    last_served: int = 0
    oldest_owed: float = 0.0


class Scheduler:
    """Decides by the speed of the model so far, the requests that wait, and when each tenant was
    served. Requests are known by their numbers."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._prompts: dict[int, _Prompt] = {}
        self._answers: set[int] = set()
        self._tenants: dict[str, _Tenant] = {}
        self._chunks_done = 0
        self._answers_owed = 0.0  # seconds; if negative, credit for prompts
        self._pace = 0.0  # seconds per id: the last chunk's, averaged with all before
        self._first_steps = 0  # steps to the first id of the newest answer
        self._chunk_lengths = _ChunkLengths(limits.chunk)

    # --- What happens

    def add(self, number: int, ids: int, tenant: str, arrival_time: float, cached: int = 0) -> None:
        """A prompt with ``ids`` ids to compute has arrived, behind ``cached`` ones."""
        self._tenants.setdefault(tenant, _Tenant())
        self._prompts[number] = _Prompt(
            number, tenant, ids, arrival_time, cached=cached, before=cached
        )

    def begin(self, number: int, rest: int, cached: int = 0, seconds: float = 0.0) -> None:
        """The prompt has its own caches from now on, with ``cached`` of its ids, which took
        ``seconds``; ``rest`` ids are left to compute."""
        prompt = self._prompts[number]
        prompt.has_begun, prompt.rest, prompt.cached = True, rest, cached
        prompt.before = cached
        self._charge(prompt, seconds)

    def chunk_done(self, number: int, ids: int, seconds: float, *, alone: bool = True) -> None:
        """``ids`` of the prompt are computed. Unless ``alone``, ``seconds`` is its share of the
        time of a pass of several prompts."""
        prompt = self._prompts[number]
        if not self._answers:
            self._chunk_lengths.measured(prompt.before, ids, seconds, alone=alone)
        self._charge(prompt, seconds)
        self._chunks_done += 1
        self._tenants[prompt.tenant].last_served = self._chunks_done
        prompt.rest -= ids
        prompt.before += ids
        prompt.chunk = ids
        if ids >= CHUNK_MULTIPLE:  # a shorter one says little about a longer one
            prompt.pace = seconds / ids
            self._pace = prompt.pace if not self._pace else (self._pace + prompt.pace) / 2

    def _charge(self, prompt: _Prompt, seconds: float) -> None:
        """Owes the others their part of the time that a prompt took."""
        tenant = self._tenants[prompt.tenant]
        if prompt is self._oldest()[prompt.tenant]:
            # The debt never falls below minus one chunk: an oldest prompt that was served for long
            # must not pay for it later.
            tenant.oldest_owed = max(tenant.oldest_owed - seconds, -seconds)
        else:
            tenant.oldest_owed += seconds * OLDEST_SHARE / (1 - OLDEST_SHARE)
        if self._answers:
            self._answers_owed += seconds * DECODE_SHARE / (1 - DECODE_SHARE)

    def start_answer(self, number: int) -> None:
        """The prompt is computed: from now on, each step gives the request an id, or more."""
        del self._prompts[number]
        self._answers.add(number)
        self._first_steps = FIRST_STEPS
        self._forget_tenants()

    def step_done(self, seconds: float) -> None:
        self._first_steps = max(0, self._first_steps - 1)
        credit = seconds if self._prompts else 0.0
        self._answers_owed = max(-credit, self._answers_owed - seconds)

    def remove(self, number: int) -> None:
        """The request has ended, or its client has gone."""
        prompt = self._prompts.pop(number, None)
        self._answers.discard(number)
        if not self._answers:
            self._answers_owed, self._first_steps = 0.0, 0
        if prompt is not None:
            self._forget_tenants()

    # --- What to do

    def next(self, now: float, make_room: Callable[[int], bool] = lambda number: True) -> Decision:
        """What to do now; ``None``: nothing. ``make_room`` is called for a prompt that could begin,
        and says whether there is memory for it; it may call ``remove``."""
        if self._answers and (self._answers_owed > 0 or self._first_steps):
            return ScheduledStep()
        limits = self.limits
        prefills = sum(prompt.has_begun for prompt in self._prompts.values())
        free_rows = min(limits.sequences, limits.answers) - prefills - len(self._answers)
        waiting = (prompt for prompt in self._prompts.values() if not prompt.has_begun)
        oldest = min(waiting, key=lambda prompt: prompt.arrival_time, default=None)
        may_begin = free_rows > 0 and prefills < limits.prompts
        if may_begin and oldest is not None and now - oldest.arrival_time > STARVATION_SECONDS:
            free_rows = free_rows if make_room(oldest.number) else 0
        for prompt in self._ranked():
            reserved = limits.prompts > 1 and prompt.rest > limits.chunk
            if prompt.has_begun:
                return self._together(prompt, free_rows > 0 and may_begin, make_room)
            if free_rows > 0 and prefills < limits.prompts - reserved and make_room(prompt.number):
                return Begin(prompt.number)
        return ScheduledStep() if self._answers else None

    def _together(
        self, first: _Prompt, may_begin: bool, make_room: Callable[[int], bool]
    ) -> Begin | Chunk:
        """The next chunk of a prompt that has begun, with others if that is all of a short one.
        Those of them that have not begun do so before."""
        ids, group = self._next_chunk(first), [first]
        if ids == first.rest:
            most = self._max_pass(first)
            for other in self._ranked():
                if other is first or not _may_be_together([*group, other], most):
                    continue
                if other.has_begun:
                    group.append(other)
                elif may_begin and make_room(other.number):
                    return Begin(other.number)
            ids = max(prompt.rest for prompt in group)
        return Chunk(first.number, ids, tuple(prompt.number for prompt in group[1:]))

    def order(self) -> list[int]:
        """Numbers of prompts in the order in which they would be served."""
        return [prompt.number for prompt in self._ranked()]

    def seconds(self, number: int) -> float | None:
        """How long the rest of a prompt takes beside the answers that run, by the speed so far, if
        any."""
        prompt = self._prompts.get(number)
        if prompt is None or not prompt.rest:
            return 0.0
        pace = prompt.pace or self._pace
        share = DECODE_SHARE if self._answers else 0.0
        return prompt.rest * pace / (1 - share) if pace else None

    def _forget_tenants(self) -> None:
        """Drops tenants that have no prompt and were served before every waiting tenant: a new
        entry would rank the same."""
        waiting = {prompt.tenant for prompt in self._prompts.values()}
        served = (self._tenants[tenant].last_served for tenant in waiting)
        first = min(served, default=self._chunks_done + 1)
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if name in waiting or tenant.last_served >= first
        }

    def _oldest(self) -> dict[str, _Prompt]:
        """Each tenant's oldest prompt."""
        oldest: dict[str, _Prompt] = {}
        for prompt in sorted(
            self._prompts.values(), key=lambda prompt: (prompt.arrival_time, prompt.number)
        ):
            oldest.setdefault(prompt.tenant, prompt)
        return oldest

    def _ranked(self) -> list[_Prompt]:
        oldest = self._oldest()

        def rank(prompt: _Prompt) -> tuple[int, bool, int, int]:
            tenant = self._tenants[prompt.tenant]
            by_age = tenant.oldest_owed > 0 and prompt is oldest[prompt.tenant]
            return tenant.last_served, not by_age, prompt.rest, prompt.number

        return sorted(self._prompts.values(), key=rank)

    def _next_chunk(self, prompt: _Prompt) -> int:
        """Ids of the next chunk of a prompt that has begun."""
        most = self._max_pass(prompt)
        if not self._answers:
            return self._chunk_lengths.best(prompt.before, prompt.rest, most)
        if most >= prompt.rest:
            return prompt.rest
        return max(min(CHUNK_MULTIPLE, most), most - most % CHUNK_MULTIPLE)

    def _max_pass(self, prompt: _Prompt) -> int:
        """Ids that the next pass may have, of all of its prompts."""
        limits = self.limits
        if not self._answers:
            return min(limits.chunk, self._max_by_time(prompt))
        pace = prompt.pace or self._pace
        length = int(limits.pause * PAUSE_MARGIN / pace) if pace else FIRST_CHUNK
        length = min(length, max(FIRST_CHUNK, int(GROWTH * prompt.chunk)))
        most = min(limits.chunk, limits.chunk_beside or limits.chunk)
        return min(most, max(CHUNK_MULTIPLE, length))

    def _max_by_time(self, prompt: _Prompt) -> int:
        """Ids that take no more than ``MAX_CHUNK_SECONDS`` seconds."""
        if not prompt.pace and prompt.cached > LONG_PREFIX:
            return FIRST_CHUNK
        pace = prompt.pace or self._chunk_lengths.pace
        if not pace:
            return self.limits.chunk
        length = int(MAX_CHUNK_SECONDS / pace)
        return max(FIRST_CHUNK, length - length % CHUNK_MULTIPLE)


class _ChunkLengths:
    """What an id takes in chunks of several lengths: those at the beginning of prompts, where the
    ids before them cost little. ``pace``: seconds per id of the last one that was not short."""

    def __init__(self, longest: int) -> None:
        shorter = [longest // part for part in CHUNK_DIVISORS]
        self._paces: dict[int, list[float]] = {
            length: [] for length in shorter if length >= min(FIRST_CHUNK, longest)
        }
        """By length, ascending."""
        self._longest = longest
        self.pace = 0.0

    def measured(self, before: int, ids: int, seconds: float, *, alone: bool) -> None:
        if before < self._longest and ids >= FIRST_CHUNK:
            self.pace = seconds / ids
        paces = self._paces.get(ids)
        if alone and paces is not None and before < self._longest and len(paces) < MEASUREMENTS:
            paces.append(seconds / ids)

    def best(self, before: int, rest: int, most: int) -> int:
        """Ids of the next chunk, at most ``most`` of the ``rest`` ids behind those ``before``."""
        paces = {length: measured for length, measured in self._paces.items() if length <= most}
        least_measured = min(paces, key=lambda length: len(paces[length]), default=most)
        takes_several = before < self._longest <= rest - least_measured
        if takes_several and len(paces.get(least_measured, ())) < MEASUREMENTS:
            return least_measured
        length = most
        if paces and all(paces.values()):
            fastest = min(min(measured) for measured in paces.values())
            length = next(
                length for length in paces if min(paces[length]) <= MAX_SLOWDOWN * fastest
            )
        return length if rest >= 2 * length else min(rest, most)


def _may_be_together(prompts: Sequence[_Prompt], most: int) -> bool:
    """Whether what is left of prompts may be computed in one pass of at most ``most`` ids."""
    rests = [prompt.rest for prompt in prompts]
    padded = len(rests) * max(rests)
    return (
        min(rests) > 0
        and padded <= min(most, max(FIRST_CHUNK, MAX_PADDING_RATIO * sum(rests)))
        and may_be_padded([prompt.before + prompt.rest for prompt in prompts])
    )
