"""The index of the disk cache: pieces by what stands before them, turns by key, and their last use.

A piece is found by a **key**, a digest of the key of the piece before it and of its own ids. The
key before the first piece stands for everything that makes a piece valid (`identity`): weights,
layout, tenant. A look-up goes down from there, piece by piece, and finds nothing without that
beginning. The ids themselves are not stored.

It is a SQLite database with a write-ahead log (https://www.sqlite.org/wal.html), which several
processes may have open: a transaction is there whole or not at all, whatever ends the process, and
readers wait for nobody. A file is written before its row and removed after it, so that a row has a
file unless another process has just evicted it.

``used`` counts uses. A piece is used together with everything before it, so that the least recently
used pieces are the ends of conversations, and are evicted first.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_mlx_harmony.engine.prefix_tree import WIDTH

VERSION = 2
"""The format of tables and files, as ``PRAGMA user_version``."""

BUSY = 2.0
"""Seconds that one process waits for another's transaction."""

NAME = "index.sqlite"

_TABLES = """
CREATE TABLE IF NOT EXISTS pieces (
    key BLOB PRIMARY KEY, parent BLOB NOT NULL,
    tokens INTEGER NOT NULL, start INTEGER NOT NULL,
    file TEXT NOT NULL, size INTEGER NOT NULL, crc INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pieces_below ON pieces (parent, tokens);
CREATE INDEX IF NOT EXISTS pieces_used ON pieces (used, start DESC, size, file);
CREATE TABLE IF NOT EXISTS turns (
    key BLOB PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL, content BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS turns_used ON turns (used, size);
"""

_NEXT = """
SELECT MAX((SELECT COALESCE(MAX(used), 0) FROM pieces),
           (SELECT COALESCE(MAX(used), 0) FROM turns)) + 1
"""

_TOUCH = """
UPDATE pieces SET used = ? WHERE key IN (
    WITH RECURSIVE path (key) AS (
        SELECT ? UNION SELECT pieces.parent FROM pieces JOIN path ON pieces.key = path.key
    ) SELECT key FROM path
)
"""

_TOUCH_TURN = "UPDATE turns SET used = ? WHERE key = ?"

_OLDEST = """
SELECT key, file, size FROM (
    SELECT key, file, size, used, start FROM pieces
    UNION ALL SELECT key, NULL, size, used, 0 FROM turns
) ORDER BY used, start DESC
"""

_BELOW = """
WITH RECURSIVE below (key) AS (
    SELECT key FROM pieces WHERE key = ? AND file = ?
    UNION SELECT pieces.key FROM pieces JOIN below ON pieces.parent = below.key
) DELETE FROM pieces WHERE key IN below RETURNING file
"""


_NBYTES = """
SELECT (SELECT COALESCE(SUM(size), 0) FROM pieces) + (SELECT COALESCE(SUM(size), 0) FROM turns)
"""

_FOUND = f"""{_NBYTES.strip()},
    (SELECT COUNT(*) FROM pieces), (SELECT COUNT(*) FROM turns),
    (SELECT COUNT(*) FROM pieces AS one
        WHERE NOT EXISTS (SELECT 1 FROM pieces WHERE parent = one.key))
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
        """Ids up to and with this piece."""
        return self.start + self.tokens


_COLUMNS = "key, parent, tokens, start, file, size, crc"


@dataclass(frozen=True, slots=True)
class Found:
    """What the directory has. A conversation is a piece that no other piece continues."""

    nbytes: int = 0
    pieces: int = 0
    turns: int = 0
    conversations: int = 0


def key_of(*parts: bytes | memoryview) -> bytes:
    """A digest of ``parts`` in this order."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def below(parent: bytes, ids: memoryview | bytes) -> bytes:
    """The key of the piece with ``ids`` (packed) that follows ``parent``."""
    return key_of(parent, ids)


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
        self._file, self._reader = self._connected(), self._connected()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        now = self.path.stat()
        self._opened = (now.st_dev, now.st_ino)

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path, check_same_thread=False, timeout=BUSY, isolation_level=None
        )

    def _prepare(self) -> None:
        (version,) = self._file.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise Later(f"a later version of vllm-mlx-harmony wrote {self.path}")
        self._file.execute("PRAGMA journal_mode=WAL")
        # A loss of power may take the end of the log: that is computed again.
        self._file.execute("PRAGMA synchronous=NORMAL")
        self._file.execute("PRAGMA secure_delete=ON")  # a turn that was deleted is gone
        if version < VERSION:  # otherwise write nothing: the disk may be full, or in use
            with self.writing() as file:
                file.execute("DROP TABLE IF EXISTS pieces")  # turns have not changed
                for statement in filter(None, map(str.strip, _TABLES.split(";"))):
                    file.execute(statement)
                file.execute(f"PRAGMA user_version={VERSION}")
        self._reader.execute("PRAGMA query_only=ON")

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
        with self._lock:
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield self._file
                self._file.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._file.execute("ROLLBACK")
                raise

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    def chain(self, root: bytes, sequence: bytes, limit: int) -> tuple[Row, ...]:
        """The pieces, first to last, of the longest known beginning of at most ``limit`` ids.

        ``sequence`` is packed. The same ids may be known in pieces of different lengths.
        """
        ids = memoryview(sequence)
        best: tuple[Row, ...] = ()
        left: list[tuple[bytes, int, tuple[Row, ...]]] = [(root, 0, ())]
        while left:
            parent, start, path = left.pop()
            if path and path[-1].end > (best[-1].end if best else 0):
                best = path
            lengths = self._read("SELECT DISTINCT tokens FROM pieces WHERE parent = ?", parent)
            for (tokens,) in lengths:
                end = start + tokens
                if end > limit:
                    continue
                key = below(parent, ids[start * WIDTH : end * WIDTH])
                rows = self._read(f"SELECT {_COLUMNS} FROM pieces WHERE key = ?", key)
                left.extend((key, end, (*path, Row(*row))) for row in rows)
        return best

    def has(self, key: bytes) -> bool:
        """Whether there is a piece with this key."""
        return bool(self._read("SELECT 1 FROM pieces WHERE key = ?", key))

    def add(self, row: Row, budget: int) -> list[str] | None:
        """Adds a piece; returns the files to remove for it.

        ``None`` if it is known already, or the piece it continues is not: then the caller removes
        the new file.
        """
        with self.writing() as file:
            parent = file.execute("SELECT 1 FROM pieces WHERE key = ?", (row.parent,))
            if row.start and parent.fetchone() is None:
                return None
            (used,) = file.execute(_NEXT).fetchone()
            added = file.execute(
                f"INSERT OR IGNORE INTO pieces ({_COLUMNS}, used) VALUES (?,?,?,?,?,?,?,?)",
                (*astuple(row), used),
            ).rowcount
            if added:
                file.execute(_TOUCH, (used, row.key))
            return _evicted(file, budget) if added else None

    def put(self, key: bytes, content: bytes, budget: int) -> list[str]:
        """Adds a turn; returns the files to remove for it."""
        with self.writing() as file:
            (used,) = file.execute(_NEXT).fetchone()
            values = (key, len(content), used, content)
            file.execute("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?)", values)
            return _evicted(file, budget)

    def turn(self, key: bytes) -> bytes | None:
        """The content of a turn."""
        for (content,) in self._read("SELECT content FROM turns WHERE key = ?", key):
            return bytes(content)
        return None

    def turns(self) -> set[bytes]:
        """The keys of all turns."""
        return {bytes(key) for (key,) in self._read("SELECT key FROM turns")}

    def touch(self, keys: Iterable[bytes]) -> bool:
        """Notes a use of turns, and of pieces with all those before them.

        Returns whether all of them are still there.
        """
        there = True
        with self.writing() as file:
            (used,) = file.execute(_NEXT).fetchone()
            for key in keys:
                touched = file.execute(_TOUCH, (used, key)).rowcount
                touched += file.execute(_TOUCH_TURN, (used, key)).rowcount
                there &= touched > 0
        return there

    def remove(self, key: bytes, name: str) -> list[str]:
        """Removes the piece in the file ``name`` and all that continue it; returns their files.

        A piece that was written again meanwhile, to another file, stays.
        """
        with self.writing() as file:
            return [str(gone) for (gone,) in file.execute(_BELOW, (key, name)).fetchall()]

    def remove_pieces(self) -> None:
        """Removes the rows of all pieces."""
        with self.writing() as file:
            file.execute("DELETE FROM pieces")

    def remove_turn(self, key: bytes) -> None:
        """Removes a turn."""
        with self.writing() as file:
            file.execute("DELETE FROM turns WHERE key = ?", (key,))

    def clear(self) -> None:
        """Removes everything, turns from the log as well."""
        with self.writing() as file:
            file.execute("DELETE FROM pieces")
            file.execute("DELETE FROM turns")
        with self._lock:
            self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def files(self) -> set[str]:
        """The names of all files with a row."""
        return {str(name) for (name,) in self._read("SELECT file FROM pieces")}

    def found(self) -> Found:
        """What there is."""
        return Found(*self._read(_FOUND)[0])


def looked_at(directory: Path) -> Found | None:
    """What a directory has, without changing it; ``None`` if there is no index.

    Raises ``sqlite3.Error`` and ``Later``.
    """
    path = directory / NAME
    if not path.exists():
        return None
    # Without a log no process has it open, and a reader would create one.
    how = "mode=ro" if path.with_name(f"{NAME}-wal").exists() else "immutable=1"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as file:
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise Later(f"a later version of vllm-mlx-harmony wrote {path}")
        return Found(*file.execute(_FOUND).fetchone())


def _evicted(file: sqlite3.Connection, budget: int) -> list[str]:
    """Removes rows until the rest is within ``budget`` bytes; returns their files."""
    (nbytes,) = file.execute(_NBYTES).fetchone()
    over = nbytes - budget
    gone: list[tuple[bytes, str | None]] = []
    for key, name, size in file.execute(_OLDEST) if over > 0 else ():
        gone.append((key, name))
        over -= size
        if over <= 0:
            break
    file.executemany(
        "DELETE FROM pieces WHERE key = ?", [(key,) for key, name in gone if name is not None]
    )
    file.executemany("DELETE FROM turns WHERE key = ?", [(key,) for key, name in gone if not name])
    return [name for _, name in gone if name is not None]
