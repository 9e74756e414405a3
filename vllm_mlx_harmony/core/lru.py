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


class Recent(Generic[Key, Value]):
    """A mapping that never holds more than ``limit`` bytes: what was used longest ago goes first.

    A value larger than the limit is not taken in. Any thread may use it at any time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes held, as they were told."""
        return self._size

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Value | None:
        """The value of ``key``, used now; ``None`` when there is none."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            self._held.move_to_end(key)
            return held[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Takes in ``value``, which takes ``size`` bytes with its key, in place of an older one."""
        with self._lock:
            self._forget(key)
            if size > self._limit:
                return
            self._held[key] = value, size
            self._size += size
            while self._size > self._limit:
                self._forget(next(iter(self._held)))

    def cache_clear(self) -> None:
        """Forgets everything; named as that of ``functools.lru_cache``."""
        with self._lock:
            self._held.clear()
            self._size = 0

    def _forget(self, key: Key) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._size -= held[1]
