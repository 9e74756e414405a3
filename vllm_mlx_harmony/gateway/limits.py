"""The limits of an API key, as values: what was used of each, and how long to wait. No I/O.

A minute is a sliding window made of two counters: the use of this clock minute, and of the previous
one the share that is less than a minute ago, as if it had been spread evenly. A day is a calendar
day in UTC. Tokens are known only when an answer ends, so a request is rejected once the limit has
been reached, and running answers may exceed it.

The headers are those of OpenAI (https://platform.openai.com/docs/guides/rate-limits). Its SDKs, and
Anthropic's, obey ``Retry-After`` up to a minute; ``x-should-retry`` stops them from retrying sooner
than a longer wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple, TypeAlias

MINUTE, DAY = 60, 86_400

Unit: TypeAlias = Literal["requests", "tokens"]


def digest(key: str) -> bytes:
    """A digest of an API key. A comparison of digests takes a time that reveals nothing."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key; 0 is unlimited. Tokens are those of prompts and of outputs."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    requests_per_day: int = 0
    tokens_per_day: int = 0
    concurrent_requests: int = 0

    def quotas(self, requests: int = 0, tokens: int = 0) -> list[Quota]:
        """All limits that are set, and what is added to each."""
        every = (
            Quota("requests", MINUTE, self.requests_per_minute, requests),
            Quota("requests", DAY, self.requests_per_day, requests),
            Quota("tokens", MINUTE, self.tokens_per_minute, tokens),
            Quota("tokens", DAY, self.tokens_per_day, tokens),
        )
        return [quota for quota in every if quota.limit]


class Quota(NamedTuple):
    """``limit`` units in ``seconds``, and the ``amount`` to be added to what was used."""

    unit: Unit
    seconds: int
    limit: int
    amount: int

    def window(self, now: float) -> int:
        """The number of the window that contains ``now`` (Unix time)."""
        return int(now // self.seconds)

    def budget(self, now: float, count: int, last: int) -> Budget:
        """The budget if ``count`` were used in this window and ``last`` in the previous one,
        including the request that asks."""
        slides = self.seconds == MINUTE
        last = last if slides else 0
        elapsed = now % self.seconds
        left = 1 - elapsed / self.seconds
        used = count + last * left
        needed = count + (0 if self.unit == "requests" else 1)
        wait = 0.0
        if needed + last * left > self.limit:
            if needed <= self.limit:  # enough of the previous window has to pass
                wait = (left - (self.limit - needed) / last) * self.seconds
            else:
                wait = self.seconds - elapsed
                if slides and needed > 1:
                    wait += (1 - (self.limit - 1) / (needed - 1)) * self.seconds
                    wait = min(wait, MINUTE)  # SDKs wait no longer
        reset = max(wait, self.seconds - elapsed)
        return Budget(self, max(0, math.floor(self.limit - used)), wait, reset)


class Budget(NamedTuple):
    """How much of a limit remains."""

    quota: Quota
    remaining: int
    wait: float
    """Seconds until the request fits; 0 if it does."""
    reset: float
    """Seconds until the window ends, or ``wait`` if that is longer."""

    def __str__(self) -> str:
        period = "minute" if self.quota.seconds == MINUTE else "day"
        return f"{self.quota.limit} {self.quota.unit} per {period}"


class Counts:
    """What was used in this process: of each key and limit, the last two windows."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, Unit, int], tuple[int, int, int]] = {}

    def add(self, name: str, quotas: Iterable[Quota], now: float) -> list[Budget]:
        """Adds to the ``quotas`` of the key ``name``; returns the budget of each."""
        budgets = []
        for quota in quotas:
            place = (name, quota.unit, quota.seconds)
            window, count, last = self._used.get(place, (0, 0, 0))
            if window != quota.window(now):
                last = count if window == quota.window(now) - 1 else 0
                window, count = quota.window(now), 0
            self._used[place] = (window, count + quota.amount, last)
            budgets.append(quota.budget(now, count + quota.amount, last))
        return budgets


def exceeded(budgets: Iterable[Budget], unit: Unit) -> Budget | None:
    """The limit of ``unit`` that takes longest to have room again; ``None`` if all have room."""
    full = [budget for budget in budgets if budget.quota.unit == unit and budget.wait]
    return max(full, key=lambda budget: budget.wait, default=None)


def headers(budgets: Sequence[Budget]) -> Iterator[tuple[bytes, bytes]]:
    """The ``x-ratelimit-*`` headers: of each unit, the limit of which the least is left."""
    for unit in ("requests", "tokens"):
        mine = [budget for budget in budgets if budget.quota.unit == unit]
        if mine:
            least = min(mine, key=lambda budget: (-budget.wait, budget.remaining))
            values = (
                ("limit", str(least.quota.limit)),
                ("remaining", str(least.remaining)),
                ("reset", _duration(least.reset)),
            )
            for name, value in values:
                yield f"x-ratelimit-{name}-{unit}".encode(), value.encode()


def _duration(seconds: float) -> str:
    """As Go writes durations, and OpenAI's headers: ``6m0s``."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
