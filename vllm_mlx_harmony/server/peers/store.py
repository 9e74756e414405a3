"""The store of responses in Redis, where any of the servers finds them."""

from __future__ import annotations

import logging
import zlib

from vllm_mlx_harmony.server.peers.connection import Connection, key_of
from vllm_mlx_harmony.server.storage.store import MAX_BYTES, ResourceKey, StoredResponse

logger = logging.getLogger("vllm_mlx_harmony")


class SharedStore:
    """A store in Redis, whose setting ``maxmemory-policy`` decides what is dropped."""

    def __init__(self, connection: Connection, max_bytes: int = MAX_BYTES) -> None:
        self._connection, self._max_bytes = connection, max_bytes

    def put(self, stored: StoredResponse) -> bool:
        text = zlib.compress(stored.text().encode(), 1)
        if len(text) > self._max_bytes:
            return False
        name = _redis_key(stored.key)
        self._connection.call(lambda redis: redis.set(name, text, ex=self._connection.seconds))
        return True

    def get(self, key: ResourceKey) -> StoredResponse | None:
        name = _redis_key(key)
        text = self._connection.call(lambda redis: redis.get(name))
        if text is None:
            return None
        try:
            written = zlib.decompress(text).decode()
        except (ValueError, zlib.error) as error:  # another program's: absent (docs/gateway.md)
            logger.warning("an entry in Redis cannot be read: %s", type(error).__name__)
            return None
        return StoredResponse.of_text(written)

    def delete(self, key: ResourceKey) -> bool:
        name = _redis_key(key)
        return bool(self._connection.call(lambda redis: redis.delete(name)))


def _redis_key(key: ResourceKey) -> str:
    return key_of("response", key.tenant, key.id)
