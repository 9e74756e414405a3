"""The rate limit of all gateways that share a Redis: requests of one tenant in a minute.

Knows how they are counted together. Refuses to know what each counts by itself (limits).

Counted is by minutes of the clock, and of the minute before the part that is not over a minute ago:
a window that slides, in two numbers. It is off by what a tenant does unevenly within a minute.
"""

from __future__ import annotations

import math
from typing import Any

from vllm_mlx_harmony.gateway.limits import MINUTE
from vllm_mlx_harmony.server.shared import Shared, shared_key


class SharedRateLimit:
    """No more than ``limit`` requests of one tenant in a minute, at whichever gateway."""

    def __init__(self, shared: Shared, limit: int) -> None:
        self._shared, self._limit = shared, limit

    def count(self, tenant: str, now: float) -> int:
        """Counts a request at ``now``, in seconds of the clock; as ``limits.RateLimit``.

        For a thread. Raises ``SharedError``.
        """
        minute, elapsed = divmod(now, MINUTE)
        name, before = (shared_key("rate", tenant, str(int(minute) - ago)) for ago in (0, 1))

        def counted(redis: Any) -> tuple[int, int]:
            pipe = redis.pipeline()
            pipe.incr(name)
            pipe.expire(name, int(3 * MINUTE))
            pipe.get(before)
            count, _, last = pipe.execute()
            return int(count), int(last or 0)

        count, last = self._shared.call(counted)
        left = 1 - elapsed / MINUTE
        if count + last * left <= self._limit:
            return 0
        self._shared.call(lambda redis: redis.decr(name))  # what is refused does not count
        if count > self._limit:
            return max(1, math.ceil(MINUTE - elapsed))
        free = (self._limit - count) / last  # of the minute before, how much may still count
        return max(1, math.ceil((left - free) * MINUTE))
