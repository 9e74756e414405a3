"""What was used last, within a number of bytes.

Knows the order of use and the sizes it is given. Refuses to know what it holds, and the time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteLRU(Generic[Key, Value]):
    """A mapping that never holds more than ``limit`` bytes: what was used longest ago goes first.

    Nor more than ``most`` values. A value larger than the limit is not taken in. Any thread may use
    it at any time.
    """

    def __init__(self, limit: int, most: int | None = None) -> None:
        self._limit, self._most = limit, most
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of all values, as ``put`` was given them."""
        return self._size

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """The value of ``key``, used now; ``None`` when there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Takes in ``value``, which takes ``size`` bytes with its key, in place of an older one."""
        with self._lock:
            self._forget(key)
            if size > self._limit:
                return
            self._entries[key] = value, size
            self._size += size
            most = len(self._entries) if self._most is None else self._most
            while self._size > self._limit or len(self._entries) > most:
                self._forget(next(iter(self._entries)))

    def discard(self, key: Key) -> bool:
        """Forgets ``key``; whether it was there."""
        with self._lock:
            return self._forget(key)

    def cache_clear(self) -> None:
        """Forgets everything; named as that of ``functools.lru_cache``."""
        with self._lock:
            self._entries.clear()
            self._size = 0

    def _forget(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        self._size -= 0 if entry is None else entry[1]
        return entry is not None
