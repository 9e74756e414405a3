"""What was used last, within a number of bytes.

Knows the order of use and the sizes it is told. Refuses to know what it holds, and the time.
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

    A value larger than the limit is not taken in. Any thread may use it at any time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes entry, as they were told."""
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
            while self._size > self._limit:
                self._forget(next(iter(self._entries)))

    def cache_clear(self) -> None:
        """Forgets everything; named as that of ``functools.lru_cache``."""
        with self._lock:
            self._entries.clear()
            self._size = 0

    def _forget(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size -= entry[1]
