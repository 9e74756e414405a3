"""A least-recently-used cache with a limit in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteLRU(Generic[Key, Value]):
    """A thread-safe mapping of at most ``limit`` bytes and ``most`` values.

    The least recently used value is evicted first. A value larger than ``limit`` is not stored.
    """

    def __init__(self, limit: int, most: int | None = None) -> None:
        self._limit, self._most = limit, most
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self.size = 0
        """The sum of the sizes that were passed to ``put``."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """The value of ``key``, which becomes the most recently used; ``None`` without one."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Stores or replaces a value; ``size`` is in bytes and includes the key."""
        with self._lock:
            self._forget(key)
            if size > self._limit:
                return
            self._entries[key] = value, size
            self.size += size
            most = len(self._entries) if self._most is None else self._most
            while self.size > self._limit or len(self._entries) > most:
                self._forget(next(iter(self._entries)))

    def discard(self, key: Key) -> bool:
        """Removes ``key``; whether it was there."""
        with self._lock:
            return self._forget(key)

    def cache_clear(self) -> None:
        """Removes everything. Named like the method of ``functools.lru_cache``."""
        with self._lock:
            self._entries.clear()
            self.size = 0

    def _forget(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        self.size -= 0 if entry is None else entry[1]
        return entry is not None
