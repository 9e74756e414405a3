"""Kept answers, for ``previous_response_id`` and for asking after them: in memory or in a file.

Knows how many to keep and which to drop first. Refuses to know what an answer's document says.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import starmap
from json import dumps, loads
from pathlib import Path
from typing import Any, Protocol, get_args

from pydantic import TypeAdapter

from vllm_mlx_harmony.core.turn import Message

STORE_VARIABLE = "VLLM_MLX_HARMONY_STORE"
"""Environment variable: the SQLite file to keep answers in. Without it they are kept in memory."""

MAX_COUNT = 1000
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer as it was given: its ``document``, the ``input_items`` of its request, and the
    conversation up to and with it as ``messages`` (without the request's own instructions)."""

    id: str
    document: Mapping[str, Any]
    input_items: Sequence[Mapping[str, Any]]
    messages: tuple[Message, ...]


class Store(Protocol):
    """Where answers are kept. Every call may block on a disk: not for the event loop."""

    def put(self, kept: Kept) -> None:
        """Keeps it, in place of one with the same id; the least recently used go first.

        One that is larger than the store is not kept: all the others would have to go for it.
        """

    def get(self, id: str) -> Kept | None:  # noqa: A002 - the field's name for it
        """What is kept under ``id``, which counts as a use; ``None`` when it is gone."""

    def delete(self, id: str) -> bool:  # noqa: A002
        """Forgets it; whether there was anything to forget."""


class MemoryStore:
    """Keeps answers as long as the process lives, up to ``max_count`` and ``max_bytes``."""

    def __init__(self, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def put(self, kept: Kept) -> None:
        """See ``Store``."""
        text = _written(kept)
        if len(text) > self._max_bytes:
            return
        with self._lock:
            self._drop(kept.id)
            self._texts[kept.id] = text
            self.bytes += len(text)
            while len(self._texts) > self._max_count or self.bytes > self._max_bytes:
                self._drop(next(iter(self._texts)))

    def get(self, id: str) -> Kept | None:  # noqa: A002
        """See ``Store``."""
        with self._lock:
            text = self._texts.get(id)
            if text is not None:
                self._texts.move_to_end(id)
        return None if text is None else _read(text)

    def delete(self, id: str) -> bool:  # noqa: A002
        """See ``Store``."""
        with self._lock:
            return self._drop(id)

    def _drop(self, id: str) -> bool:  # noqa: A002
        text = self._texts.pop(id, None)
        self.bytes -= len(text or "")
        return text is not None


# What is counted, ordered and touched at every use stands apart from the texts: a use costs the
# same however large the file is.
_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    id TEXT PRIMARY KEY, used INTEGER NOT NULL, size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_used ON answers (used);
CREATE TABLE IF NOT EXISTS texts (
    id TEXT PRIMARY KEY REFERENCES answers (id) ON DELETE CASCADE, text TEXT NOT NULL
);
"""
_NEXT = "(SELECT COALESCE(MAX(used), 0) + 1 FROM answers)"
_DROP_OLDEST = """
DELETE FROM answers WHERE id IN (
    SELECT id FROM (
        SELECT id, COUNT(*) OVER newer AS count, SUM(size) OVER newer AS bytes
        FROM answers WINDOW newer AS (ORDER BY used DESC)
    ) WHERE count > ? OR bytes > ?
)
"""


class FileStore:
    """Keeps answers in a SQLite file with a write-ahead log: whole or not at all, whatever ends us.

    Raises ``sqlite3.Error`` when the file cannot be opened or is no such file.
    """

    def __init__(self, path: Path, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(path, check_same_thread=False, timeout=30)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA foreign_keys=ON")
        self._file.executescript(_TABLES)

    def put(self, kept: Kept) -> None:
        """See ``Store``."""
        text = _written(kept)
        if len(text) > self._max_bytes:
            return
        with self._lock, self._file:
            self._file.execute(
                f"INSERT OR REPLACE INTO answers VALUES (?, {_NEXT}, ?)", (kept.id, len(text))
            )
            self._file.execute("INSERT INTO texts VALUES (?, ?)", (kept.id, text))
            self._file.execute(_DROP_OLDEST, (self._max_count, self._max_bytes))

    def get(self, id: str) -> Kept | None:  # noqa: A002
        """See ``Store``."""
        with self._lock:
            row = self._file.execute("SELECT text FROM texts WHERE id = ?", (id,)).fetchone()
            if row is None:
                return None
            self._use(id)
        return _read(row[0])

    def _use(self, id: str) -> None:  # noqa: A002
        """A disk that is full cannot be written; what it has can be read all the same."""
        with suppress(sqlite3.Error), self._file:
            self._file.execute(f"UPDATE answers SET used = {_NEXT} WHERE id = ?", (id,))

    def delete(self, id: str) -> bool:  # noqa: A002
        """See ``Store``."""
        with self._lock, self._file:
            return self._file.execute("DELETE FROM answers WHERE id = ?", (id,)).rowcount > 0

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


_opening = threading.Lock()


def server_store() -> Store:
    """The store of this server: in the file the environment names, or in memory."""
    with _opening:
        return _opened()


@lru_cache(maxsize=1)
def _opened() -> Store:
    path = os.environ.get(STORE_VARIABLE)
    return FileStore(Path(path).expanduser()) if path else MemoryStore()


_MESSAGES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def _written(kept: Kept) -> str:
    messages = [[type(message).__name__, *asdict(message).values()] for message in kept.messages]
    return dumps([kept.id, kept.document, kept.input_items, messages], separators=(",", ":"))


def _read(text: str) -> Kept:
    key, document, input_items, messages = loads(text)
    return Kept(key, document, input_items, tuple(starmap(_message, messages)))


def _message(name: str, *values: Any) -> Message:
    kind = _MESSAGES[name]
    if name in _NESTED:
        given = dict(zip((field.name for field in fields(kind)), values, strict=True))
        read: Message = TypeAdapter(kind).validate_python(given)
    else:
        read = kind(*values)
    return read


_NESTED = frozenset({"AdditionalTools", "EffortUpdate", "FormatUpdate"})
"""The messages that are more than strings."""
