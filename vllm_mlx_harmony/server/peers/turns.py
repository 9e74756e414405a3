"""Generated turns in Redis: each server can reuse those of the others (`core.replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from vllm_mlx_harmony.core.replay import GeneratedTurn
from vllm_mlx_harmony.server.peers.connection import Connection, PeersError, key_of


@dataclass(frozen=True)
class SharedTurns:
    """An archive in the Redis that several servers share, where turns expire."""

    connection: Connection
    blocks = True

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Writes the turn, unless Redis is unavailable."""
        name, content = key_of("turn", key.hex()), turn.to_bytes()
        with suppress(PeersError):
            self.connection.call(lambda redis: redis.set(name, content, ex=self.connection.seconds))

    def find(self, keys: Sequence[bytes]) -> list[GeneratedTurn | None]:
        """The turns; none while Redis is unavailable, so that messages are rendered instead."""
        names = [key_of("turn", key.hex()) for key in keys]
        try:
            found = self.connection.call(lambda redis: redis.mget(names))
        except PeersError:
            return [None] * len(keys)
        return [None if content is None else GeneratedTurn.from_bytes(content) for content in found]

    def use(self, key: bytes) -> None:
        """No-op: entries expire a fixed time after they are stored."""
