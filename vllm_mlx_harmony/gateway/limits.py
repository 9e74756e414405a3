"""API keys, and the rate limit of each. No I/O; times are passed in.

Keys are compared by their digests, so that the time of a comparison reveals nothing about them.
"""

from __future__ import annotations

import math
from collections import deque
from hashlib import sha256

MINUTE = 60.0


def digest(key: str) -> bytes:
    """A digest of an API key."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class RateLimit:
    """At most ``limit`` requests per tenant in any 60 seconds; 0 is unlimited."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._times: dict[str, deque[float]] = {}

    def count(self, tenant: str, now: float) -> int:
        """Counts a request at ``now``; returns the seconds to wait if it is one too many."""
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
        """Uncounts the last request, which another limit has rejected."""
        if self.limit and self._times[tenant]:
            self._times[tenant].pop()
