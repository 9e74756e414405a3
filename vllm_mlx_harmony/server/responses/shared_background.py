"""Background responses that are visible to all servers that share a Redis.

Only the server that generates a response can stop it. Every ``BEAT`` seconds it renews an entry for
the response, appends new events, and reads the commands that other servers have left. If the entry
expires, after ``ALIVE`` seconds, the response is lost: its server has died.
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
"""Seconds between two heartbeats."""

ALIVE = 10
"""Seconds after the last heartbeat at which a response is lost."""

EVENTS_SECONDS = 600
"""Seconds for which events are stored after the last one."""


class Command(str, Enum):
    """A command for the server that generates a response."""

    CANCEL = "cancel"
    DELETE = "delete"


class SharedBackground:
    """The background responses of all servers that share a Redis.

    A response is identified by its id and its tenant. Every method blocks, and raises
    ``SharedError``.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    # --- For the server that generates the response

    def beat(
        self, running: Sequence[tuple[str, str]], events: Sequence[Sequence[Event]]
    ) -> list[Command | None]:
        """Renews the entries of ``running`` and appends the new ``events`` of each response.

        Returns the command for each response, if there is one.
        """

        def beat(redis: Any) -> list[bytes | None]:
            pipe = redis.pipeline(transaction=False)
            for (key, tenant), new in zip(running, events, strict=True):
                pipe.set(shared_key("run", tenant, key), b"1", ex=ALIVE)
                if new:
                    name = shared_key("events", tenant, key)
                    pipe.rpush(name, *(dumps(event) for event in new))
                    pipe.expire(name, EVENTS_SECONDS)
            pipe.mget([shared_key("wish", tenant, key) for key, tenant in running])
            commands: list[bytes | None] = pipe.execute()[-1]
            return commands

        commands = self._shared.call(beat)
        return [None if command is None else Command(command.decode()) for command in commands]

    def ended(self, key: str, tenant: str) -> None:
        """Removes the entry of a response that has ended, but not its events."""
        names = [shared_key(kind, tenant, key) for kind in ("run", "wish")]
        self._shared.call(lambda redis: redis.delete(*names))

    def forget(self, key: str, tenant: str) -> None:
        """Removes the entry and the events of a response."""
        names = [shared_key(kind, tenant, key) for kind in ("run", "wish", "events")]
        self._shared.call(lambda redis: redis.delete(*names))

    # --- For other servers

    def runs(self, key: str, tenant: str) -> bool:
        """Whether any server generates the response."""
        return bool(self._shared.call(lambda redis: redis.exists(shared_key("run", tenant, key))))

    def send(self, key: str, tenant: str, command: Command) -> None:
        """Leaves ``command`` for the server that generates the response."""
        name = shared_key("wish", tenant, key)
        self._shared.call(lambda redis: redis.set(name, command.value, ex=6 * ALIVE))

    def events(self, key: str, tenant: str, start: int) -> list[Event]:
        """The stored events of the response from number ``start`` on."""
        name = shared_key("events", tenant, key)
        found = self._shared.call(lambda redis: redis.lrange(name, start, -1))
        return [Event(*loads(event)) for event in found]


def another_server_runs(key: str, tenant: str) -> bool:
    """Whether another server generates the response. Blocks.

    True if Redis is unavailable, since the response may be running.
    """
    background = shared_background()
    try:
        return background is not None and background.runs(key, tenant)
    except SharedError:
        return True


def shared_background() -> SharedBackground | None:
    """The shared background responses, if this server has a Redis."""
    shared = server_shared()
    return None if shared is None else _shared_background(shared)


@lru_cache(maxsize=1)
def _shared_background(shared: Shared) -> SharedBackground:
    return SharedBackground(shared)
