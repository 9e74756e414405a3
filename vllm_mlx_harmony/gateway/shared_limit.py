"""The rate limit of all gateways that share a Redis: requests per tenant and minute.

``count`` is all that the rest of the gateway uses, and does nothing without a Redis.

A sliding window made of two counters: the requests of this clock minute, and of the previous one
the share that is less than a minute ago. It assumes that a tenant's requests are spread evenly over
the previous minute, and is off by as much as they are not.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

from vllm_mlx_harmony.gateway.limits import MINUTE
from vllm_mlx_harmony.server.peers.connection import (
    Connection,
    PeersError,
    key_of,
    server_connection,
)


async def count(tenant: str, limit: int) -> int:
    """Counts a request at all gateways; returns the seconds to wait if it exceeds ``limit``.

    0 without a limit or a Redis, and while Redis does not answer: each gateway then has only its
    own limit.
    """
    shared = server_connection() if limit else None
    if shared is not None:
        with suppress(PeersError):
            return await asyncio.to_thread(count_at, shared, tenant, limit, time.time())
    return 0


def count_at(shared: Connection, tenant: str, limit: int, now: float) -> int:
    """``count`` at ``now`` (Unix time). Blocks. Raises ``PeersError``."""
    minute, elapsed = divmod(now, MINUTE)
    name, before = (key_of("rate", tenant, str(int(minute) - ago)) for ago in (0, 1))

    def counted(redis: Any) -> tuple[int, int]:
        pipe = redis.pipeline()
        pipe.incr(name)
        pipe.expire(name, int(3 * MINUTE))
        pipe.get(before)
        count, _, last = pipe.execute()
        return int(count), int(last or 0)

    count, last = shared.call(counted)
    left = 1 - elapsed / MINUTE
    if count + last * left <= limit:
        return 0
    shared.call(lambda redis: redis.decr(name))  # rejected requests do not count
    if count > limit:
        return max(1, math.ceil(MINUTE - elapsed))
    free = (limit - count) / last  # the share of the previous minute for which there is room
    return max(1, math.ceil((left - free) * MINUTE))
