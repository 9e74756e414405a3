"""Answers in the background of other servers: that they run, what they said, who wants what.

Knows what servers that share a Redis tell each other of their background. Refuses to know how an
answer is generated (background).

Only the server that generates an answer can stop it. It says every ``BEAT`` seconds that the answer
runs, hands on the events that have come since, and asks what others want of it. Who wants something
leaves a word, and waits for what comes of it. An answer of which nothing was heard for ``ALIVE``
seconds is lost: its server has gone, and with it what it had generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from json import dumps, loads
from typing import Any

from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.shared import Shared, SharedError, server_shared, shared_key

BEAT = 0.5
"""Seconds between two times that a server says what runs."""

ALIVE = 10
"""Seconds for which that holds."""

EVENTS_SECONDS = 600
"""Seconds for which events are there, after the last of them."""


class Wish(str, Enum):
    """What another server wants of an answer."""

    CANCEL = "cancel"
    DELETE = "delete"


class Elsewhere:
    """The background of all servers that share a Redis.

    An answer is named by its id and its tenant. Every call is for a thread, and raises
    ``SharedError``.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    # --- For the server that generates

    def beat(
        self, running: Sequence[tuple[str, str]], events: Sequence[Sequence[Event]]
    ) -> list[Wish | None]:
        """These run here, with these new events since the last time: what is wanted of each."""

        def beat(redis: Any) -> list[bytes | None]:
            pipe = redis.pipeline(transaction=False)
            for (key, tenant), new in zip(running, events, strict=True):
                pipe.set(shared_key("run", tenant, key), b"1", ex=ALIVE)
                if new:
                    name = shared_key("events", tenant, key)
                    pipe.rpush(name, *(dumps(event) for event in new))
                    pipe.expire(name, EVENTS_SECONDS)
            pipe.mget([shared_key("wish", tenant, key) for key, tenant in running])
            wishes: list[bytes | None] = pipe.execute()[-1]
            return wishes

        wishes = self._shared.call(beat)
        return [None if wish is None else Wish(wish.decode()) for wish in wishes]

    def ended(self, key: str, tenant: str) -> None:
        """It does not run any more."""
        names = [shared_key(kind, tenant, key) for kind in ("run", "wish")]
        self._shared.call(lambda redis: redis.delete(*names))

    def forget(self, key: str, tenant: str) -> None:
        """Nothing is left of it."""
        names = [shared_key(kind, tenant, key) for kind in ("run", "wish", "events")]
        self._shared.call(lambda redis: redis.delete(*names))

    # --- For the others

    def runs(self, key: str, tenant: str) -> bool:
        """Whether some server generates it."""
        return bool(self._shared.call(lambda redis: redis.exists(shared_key("run", tenant, key))))

    def want(self, key: str, tenant: str, wish: Wish) -> None:
        """Leaves word for the server that generates it."""
        name = shared_key("wish", tenant, key)
        self._shared.call(lambda redis: redis.set(name, wish.value, ex=6 * ALIVE))

    def events(self, key: str, tenant: str, start: int) -> list[Event]:
        """Its events from number ``start`` on, as far as they were handed on."""
        name = shared_key("events", tenant, key)
        found = self._shared.call(lambda redis: redis.lrange(name, start, -1))
        return [Event(*loads(event)) for event in found]


def runs_elsewhere(key: str, tenant: str) -> bool:
    """Whether another server generates it, as far as that can be known. For a thread."""
    elsewhere = server_elsewhere()
    try:
        return elsewhere is not None and elsewhere.runs(key, tenant)
    except SharedError:
        return True  # it is not said to be lost because Redis is


def server_elsewhere() -> Elsewhere | None:
    """The background of the servers that share their clients with this one, if any."""
    shared = server_shared()
    return None if shared is None else _elsewhere(shared)


@lru_cache(maxsize=1)
def _elsewhere(shared: Shared) -> Elsewhere:
    return Elsewhere(shared)
