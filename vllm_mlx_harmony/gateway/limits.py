"""Who may ask, and how often: API keys and a rate limit for each. No I/O; times are passed in.

Keys are compared by their digests, so that how long it takes says nothing of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from hashlib import sha256

MINUTE = 60.0


class Keys:
    """The API keys of a gateway, by name; none: everybody may ask."""

    def __init__(self, named: Iterable[tuple[str, str]]) -> None:
        self._names = {_digest(key): name for name, key in named}

    def __bool__(self) -> bool:
        return bool(self._names)

    def name_of(self, key: str) -> str | None:
        """The name of a key; ``None`` for a wrong one."""
        return self._names.get(_digest(key))


class RateLimit:
    """No more than ``limit`` requests of one tenant in any minute; 0: any number."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._times: dict[str, deque[float]] = {}

    def count(self, tenant: str, now: float) -> int:
        """Counts a request that comes ``now``; seconds to wait when it is one too many, else 0."""
        if not self.limit:
            return 0
        times = self._times.setdefault(tenant, deque())
        while times and times[0] <= now - MINUTE:
            times.popleft()
        if len(times) >= self.limit:
            return max(1, math.ceil(times[0] + MINUTE - now))
        times.append(now)
        return 0

    def take_back(self, tenant: str) -> None:
        """The last request that was counted does not count: another limit has refused it."""
        if self.limit and self._times[tenant]:
            self._times[tenant].pop()


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
