"""The index of the disk cache: which pieces and turns it holds, and when each was last used.

A piece is found by its **key**, a digest of the key of the piece before it and of its own ids. The
key before the first piece stands for everything that makes a piece valid (`identity`): weights,
layout, tenant. A look-up starts there and proceeds piece by piece. The ids themselves are not
stored. A turn has a key of its own, and its content is in the index.

The index is a SQLite database with a write-ahead log (https://www.sqlite.org/wal.html), which
several processes may have open. A transaction is either complete or absent, however the process
ends, and readers never wait. A file is written before its row and removed after it, so a row has a
file unless another process has just evicted it.

``used`` counts uses. Using a piece uses everything before it as well, so the least recently used
pieces are the ends of conversations, and those are evicted first.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path

from vllm_mlx_harmony.engine.prefix_tree import WIDTH

VERSION = 3
"""The format of tables and files, as ``PRAGMA user_version``."""

BUSY = 2.0
"""Seconds to wait for another process's transaction."""

NAME = "index.sqlite"

# A turn has no parent and no file. The index by use serves eviction and all sums, which then read
# no content.
_SCHEMA = """
DROP TABLE IF EXISTS pieces;
DROP TABLE IF EXISTS turns;
CREATE TABLE IF NOT EXISTS entries (
    key BLOB PRIMARY KEY, parent BLOB, tokens INTEGER NOT NULL, start INTEGER NOT NULL,
    file TEXT, size INTEGER NOT NULL, crc INTEGER NOT NULL, used INTEGER NOT NULL, content BLOB
);
CREATE INDEX IF NOT EXISTS entries_below ON entries (parent, tokens);
CREATE INDEX IF NOT EXISTS entries_used ON entries (used, start DESC, size, file, key);
DELETE FROM entries WHERE file IS NOT NULL;
"""

_NEXT = "SELECT COALESCE(MAX(used), 0) + 1 FROM entries"

_ADD = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

# sqlite3 counts the rows of a statement only if it begins with UPDATE.
_TOUCH = """
UPDATE entries SET used = ? WHERE key IN (
    WITH RECURSIVE path (key) AS (
        SELECT ? UNION SELECT parent FROM entries JOIN path USING (key)
    ) SELECT key FROM path
)
"""

_REMOVE = """
WITH RECURSIVE below (key) AS (
    SELECT key FROM entries WHERE key = ? AND file IS ?
    UNION SELECT entries.key FROM entries JOIN below ON entries.parent = below.key
) DELETE FROM entries WHERE key IN below RETURNING file
"""

# Removes the least recently used rows beyond a number of bytes.
_EVICT = """
DELETE FROM entries WHERE key IN (SELECT key FROM (
    SELECT key, SUM(size) OVER (ORDER BY used DESC, start ROWS UNBOUNDED PRECEDING) AS nbytes
    FROM entries
) WHERE nbytes > ?) RETURNING file
"""

_FOUND = """
SELECT COALESCE(SUM(size), 0), COUNT(file), COUNT(*) - COUNT(file), COALESCE(SUM(
    file IS NOT NULL AND NOT EXISTS (SELECT 1 FROM entries WHERE parent = one.key)
), 0) FROM entries AS one
"""


class Later(sqlite3.DatabaseError):
    """A later version of this package wrote the database."""


@dataclass(frozen=True, slots=True)
class Row:
    """A piece: the ``tokens`` ids that follow the ``start`` ids of ``parent``, in ``file``."""

    key: bytes
    parent: bytes
    tokens: int
    start: int
    file: str
    size: int
    crc: int

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(slots=True)
class Found:
    """What the directory holds. A conversation is a piece that no other piece continues."""

    nbytes: int = 0
    pieces: int = 0
    turns: int = 0
    conversations: int = 0


def key_of(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _checked_version(file: sqlite3.Connection, path: Path) -> int:
    (version,) = file.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise Later(f"a later version of vllm-mlx-harmony wrote {path}")
    return int(version)


class Index:
    """The database in ``directory``, which is created if need be. Any thread may call it.

    All methods raise ``sqlite3.Error`` and ``OSError``; creation raises ``Later`` as well.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        # SQLite gives its files the mode of this one: only the owner may read turns.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(self.path, 0o600)
        self._file, self._reader = (
            sqlite3.connect(self.path, check_same_thread=False, timeout=BUSY, isolation_level=None)
            for _ in range(2)
        )
        try:
            version = _checked_version(self._file, self.path)
            self._file.execute("PRAGMA journal_mode=WAL")
            # A loss of power may take the end of the log: that is computed again.
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute("PRAGMA secure_delete=ON")  # a deleted turn is overwritten
            if version < VERSION:  # otherwise write nothing: the disk may be full, or in use
                with self.writing() as file:
                    for statement in filter(None, map(str.strip, _SCHEMA.split(";"))):
                        file.execute(statement)
                    file.execute(f"PRAGMA user_version={VERSION}")
            self._reader.execute("PRAGMA query_only=ON")
            now = self.path.stat()
        except BaseException:
            self.close()
            raise
        self._opened = (now.st_dev, now.st_ino)

    def close(self) -> None:
        with self._lock, self._reading:
            self._reader.close()
            self._file.close()

    def is_there(self) -> bool:
        """Whether the path still leads to the database that is open."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == self._opened

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction; one thread of one process at a time."""
        with self._lock, self._file:
            self._file.execute("BEGIN IMMEDIATE")
            yield self._file

    def _read(self, what: str, *values: object) -> list[sqlite3.Row]:
        with self._reading:
            return self._reader.execute(f"SELECT {what}", values).fetchall()

    def chain(self, roots: Sequence[bytes], sequence: bytes, limit: int) -> tuple[Row, ...]:
        """The pieces, first to last, of the longest known beginning of at most ``limit`` ids.

        The same ids may be stored in pieces of different lengths, and below several roots, of which
        the first counts then: hence a search. ``sequence`` is packed.
        """
        ids = memoryview(sequence)
        best: tuple[Row, ...] = ()
        left: list[tuple[bytes, int, tuple[Row, ...]]] = [(root, 0, ()) for root in roots[::-1]]
        while left:
            parent, start, path = left.pop()
            if start > (best[-1].end if best else 0):
                best = path
            for (tokens,) in self._read("DISTINCT tokens FROM entries WHERE parent = ?", parent):
                end = start + tokens
                if end > limit:
                    continue
                key = key_of(parent, ids[start * WIDTH : end * WIDTH])
                columns = "key, parent, tokens, start, file, size, crc"
                rows = self._read(f"{columns} FROM entries WHERE key = ?", key)
                left.extend((key, end, (*path, Row(*row))) for row in rows)
        return best

    def has(self, key: bytes) -> bool:
        return bool(self._read("1 FROM entries WHERE key = ?", key))

    def add(self, row: Row, budget: int) -> list[str] | None:
        """Adds a piece; returns the files to remove to stay within ``budget`` bytes.

        ``None`` if it is known already, or the piece before it is not: the caller removes its file.
        """
        with self.writing() as file:
            known = "SELECT COUNT(*) FROM entries WHERE key = ?"
            (there,), (before,) = (
                file.execute(known, (key,)).fetchone() for key in (row.key, row.parent)
            )
            if there or (row.start and not before):
                return None
            (used,) = file.execute(_NEXT).fetchone()
            file.execute(_ADD, (*astuple(row), used, None))
            file.execute(_TOUCH, (used, row.key))
            return _files(file.execute(_EVICT, (budget,)))

    def put(self, key: bytes, content: bytes, budget: int) -> list[str]:
        """Adds a turn; returns the files to remove to stay within ``budget`` bytes."""
        with self.writing() as file:
            (used,) = file.execute(_NEXT).fetchone()
            file.execute(_ADD, (key, None, 0, 0, None, len(content), 0, used, content))
            return _files(file.execute(_EVICT, (budget,)))

    def turn(self, key: bytes) -> bytes | None:
        for (content,) in self._read("content FROM entries WHERE key = ?", key):
            return bytes(content)
        return None

    def turns(self) -> set[bytes]:
        return {bytes(key) for (key,) in self._read("key FROM entries WHERE file IS NULL")}

    def files(self) -> set[str]:
        return {name for (name,) in self._read("file FROM entries WHERE file IS NOT NULL")}

    def touch(self, keys: Iterable[bytes]) -> bool:
        """Marks turns, and pieces with all those before them, as used; whether all still exist."""
        with self.writing() as file:
            (used,) = file.execute(_NEXT).fetchone()
            touched = [file.execute(_TOUCH, (used, key)).rowcount for key in keys]
        return all(touched)

    def remove(self, key: bytes, name: str | None) -> list[str]:
        """Removes a turn, or the piece in the file ``name`` with all that continue it.

        Returns the files of these pieces. A piece that has since been written to another file
        stays.
        """
        with self.writing() as file:
            return _files(file.execute(_REMOVE, (key, name)))

    def clear(self) -> None:
        """Removes everything, from the log as well."""
        with self.writing() as file:
            file.execute("DELETE FROM entries")
        with self._lock:
            self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def found(self) -> Found:
        with self._lock:  # not on the connection for reading: it reads all rows
            return Found(*self._file.execute(_FOUND).fetchone())


def looked_at(directory: Path) -> Found | None:
    """What a directory holds, without changing it; ``None`` if there is no index.

    Raises ``sqlite3.Error`` and ``Later``.
    """
    path = directory / NAME
    if not path.exists():
        return None
    # Without a log, no process has the database open, and reading it would create one.
    how = "mode=ro" if path.with_name(f"{NAME}-wal").exists() else "immutable=1"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as file:
        _checked_version(file, path)
        return Found(*file.execute(_FOUND).fetchone())


def _files(removed: Iterable[tuple[str | None]]) -> list[str]:
    """The files of rows that were removed; turns have none."""
    return [name for (name,) in removed if name is not None]
