"""Stored responses and generated turns in Redis, where they expire."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress

from vllm_mlx_harmony.core.replay import GeneratedTurn
from vllm_mlx_harmony.core.serialization import read, written
from vllm_mlx_harmony.server.peers.connection import Connection, PeersError, key_of
from vllm_mlx_harmony.server.responses.stored import MAX_BYTES, StoredResponse


class SharedStore:
    """A `responses.store.Store`. A setting of Redis says what is dropped (``maxmemory-policy``)."""

    def __init__(self, connection: Connection, max_bytes: int = MAX_BYTES) -> None:
        self._connection, self._max_bytes = connection, max_bytes

    def put(self, stored: StoredResponse) -> bool:
        """Implements ``Store``."""
        text = zlib.compress(stored.text().encode(), 1)
        if len(text) > self._max_bytes:
            return False
        name = key_of("response", stored.tenant, stored.id)
        self._connection.call(lambda redis: redis.set(name, text, ex=self._connection.seconds))
        return True

    def get(self, id: str, tenant: str) -> StoredResponse | None:  # noqa: A002
        """Implements ``Store``."""
        name = key_of("response", tenant, id)
        text = self._connection.call(lambda redis: redis.get(name))
        return None if text is None else StoredResponse.of_text(zlib.decompress(text).decode())

    def delete(self, id: str, tenant: str) -> bool:  # noqa: A002
        """Implements ``Store``."""
        name = key_of("response", tenant, id)
        return bool(self._connection.call(lambda redis: redis.delete(name)))


class SharedTurns:
    """A `core.replay.Archive`."""

    blocks = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Writes the turn, unless Redis is unavailable."""
        name, content = key_of("turn", key.hex()), written(turn)
        with suppress(PeersError):
            self._connection.call(
                lambda redis: redis.set(name, content, ex=self._connection.seconds)
            )

    def find(self, keys: Sequence[bytes]) -> list[GeneratedTurn | None]:
        """The turns; none while Redis is unavailable, so that messages are rendered instead."""
        names = [key_of("turn", key.hex()) for key in keys]
        try:
            found = self._connection.call(lambda redis: redis.mget(names))
        except PeersError:
            return [None] * len(keys)
        return [None if content is None else read(content) for content in found]

    def use(self, key: bytes) -> None:
        """Has no effect: turns expire by the time at which they were generated."""
