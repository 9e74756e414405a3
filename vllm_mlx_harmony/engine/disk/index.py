"""The index of the disk cache: which pieces and turns it holds, and when each was last used.

A piece is found by its **key**, a digest of the key of the piece before it and of its own ids. The
key before the first piece stands for everything that makes a piece valid (`identity`): weights,
layout, tenant. A look-up starts there and proceeds piece by piece. The ids themselves are not
stored. A turn has a key of its own, and its content is in the index.

The index is a `Database`, which several processes may have open. A file is written before its row
and removed after it, so a row has a file unless another process has just evicted it.

``used`` counts uses. Using a piece uses everything before it as well, so the least recently used
pieces are the ends of conversations, and those are evicted first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path

from vllm_mlx_harmony.database import Database, checked_version
from vllm_mlx_harmony.engine.prefix_tree import WIDTH

VERSION = 4
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
CREATE TABLE IF NOT EXISTS written (day TEXT PRIMARY KEY, nbytes INTEGER NOT NULL);
DELETE FROM entries WHERE file IS NOT NULL;
"""

_NEXT = "SELECT COALESCE(MAX(used), 0) + 1 FROM entries"

_ADD_PIECE = """
INSERT OR REPLACE INTO entries (key, parent, tokens, start, file, size, crc, used)
VALUES (:key, :parent, :tokens, :start, :file, :size, :crc, :used)
"""

_ADD_TURN = """
INSERT OR REPLACE INTO entries (key, tokens, start, size, crc, used, content)
VALUES (:key, 0, 0, :size, 0, :used, :content)
"""

_COUNT = """
INSERT INTO written VALUES (date('now', 'localtime'), ?)
ON CONFLICT (day) DO UPDATE SET nbytes = nbytes + excluded.nbytes
"""

_WRITTEN_TODAY = "SELECT SUM(nbytes) FROM written WHERE day = date('now', 'localtime')"

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

_SELECT_FILES = "SELECT file FROM entries WHERE file IS NOT NULL"

_SELECT_TURNS = "SELECT key FROM entries WHERE file IS NULL"

# Removes the least recently used rows beyond a number of bytes.
_EVICT = """
DELETE FROM entries WHERE key IN (SELECT key FROM (
    SELECT key, SUM(size) OVER (ORDER BY used DESC, start ROWS UNBOUNDED PRECEDING) AS nbytes
    FROM entries
) WHERE nbytes > ?) RETURNING file
"""

_SELECT_CONTENTS = f"""
SELECT COALESCE(SUM(size), 0), COUNT(file), COUNT(*) - COUNT(file), COALESCE(SUM(
    file IS NOT NULL AND NOT EXISTS (SELECT 1 FROM entries WHERE parent = one.key)
), 0), COALESCE(({_WRITTEN_TODAY}), 0) FROM entries AS one
"""


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


_COLUMNS = ", ".join(field.name for field in fields(Row))


@dataclass(slots=True)
class Contents:
    """What the directory holds. A conversation is a piece that no other piece continues.

    ``written_today``: bytes that all processes have written since midnight, local time.
    """

    nbytes: int = 0
    pieces: int = 0
    turns: int = 0
    conversations: int = 0
    written_today: int = 0


def key_of(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class Index(Database):
    """The database in ``directory``.

    All methods raise ``sqlite3.Error`` and ``OSError``; creation raises ``NewerSchema`` as well.
    """

    def __init__(self, directory: Path) -> None:
        # A loss of power may take the end of the log: that is computed again. A deleted turn is
        # overwritten.
        pragmas = "synchronous=NORMAL", "secure_delete=ON"
        super().__init__(directory / NAME, _SCHEMA, VERSION, BUSY, *pragmas)

    def chain(self, roots: Sequence[bytes], sequence: bytes, limit: int) -> tuple[Row, ...]:
        """The pieces, first to last, of the longest cached prefix of at most ``limit`` ids.

        The same ids may be stored in pieces of different lengths and under several roots, so this
        is a search; of equal results, the first root's is returned. ``sequence`` is packed.
        """
        ids = memoryview(sequence)
        best: tuple[Row, ...] = ()
        left: list[tuple[bytes, int, tuple[Row, ...]]] = [(root, 0, ()) for root in roots[::-1]]
        while left:
            parent, start, path = left.pop()
            if start > (best[-1].end if best else 0):
                best = path
            lengths = "SELECT DISTINCT tokens FROM entries WHERE parent = ? AND tokens <= ?"
            for (tokens,) in self.read(lengths, parent, limit - start):
                end = start + tokens
                key = key_of(parent, ids[start * WIDTH : end * WIDTH])
                rows = self.read(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", key)
                left.extend((key, end, (*path, Row(*row))) for row in rows)
        return best

    def has(self, key: bytes) -> bool:
        return bool(self.read("SELECT 1 FROM entries WHERE key = ?", key))

    def add(self, row: Row, budget: int) -> list[str] | None:
        """Adds a piece; returns the files to remove to stay within ``budget`` bytes.

        ``None`` if it is known already, or the piece before it is not: the caller removes its file.
        """
        with self.writing() as connection:
            if self.has(row.key) or (row.start and not self.has(row.parent)):
                return None
            (used,) = connection.execute(_NEXT).fetchone()
            connection.execute(_ADD_PIECE, {**asdict(row), "used": used})
            connection.execute(_COUNT, (row.size,))
            connection.execute(_TOUCH, (used, row.key))
            return _files_of(connection.execute(_EVICT, (budget,)))

    def put(self, key: bytes, content: bytes, budget: int) -> list[str]:
        """Adds a turn; returns the files to remove to stay within ``budget`` bytes."""
        with self.writing() as connection:
            (used,) = connection.execute(_NEXT).fetchone()
            values = {"key": key, "size": len(content), "used": used, "content": content}
            connection.execute(_ADD_TURN, values)
            connection.execute(_COUNT, (len(content),))
            return _files_of(connection.execute(_EVICT, (budget,)))

    def turn(self, key: bytes) -> bytes | None:
        for (content,) in self.read("SELECT content FROM entries WHERE key = ?", key):
            return bytes(content)
        return None

    def turns(self) -> set[bytes]:
        return {bytes(key) for (key,) in self._read_all(_SELECT_TURNS)}

    def files(self) -> set[str]:
        return {file for (file,) in self._read_all(_SELECT_FILES)}

    def touch(self, keys: Iterable[bytes]) -> bool:
        """Marks turns, and pieces with all those before them, as used; whether all still exist."""
        with self.writing() as connection:
            (used,) = connection.execute(_NEXT).fetchone()
            touched = [connection.execute(_TOUCH, (used, key)).rowcount for key in keys]
        return all(touched)

    def remove(self, key: bytes, file: str | None) -> list[str]:
        """Removes a turn, or the piece in ``file`` with all that continue it.

        Returns the files of these pieces. A piece that has since been written to another file
        stays.
        """
        with self.writing() as connection:
            return _files_of(connection.execute(_REMOVE, (key, file)))

    def clear(self) -> None:
        """Removes everything, from the log as well."""
        with self.writing() as connection:
            connection.execute("DELETE FROM entries")
        with self._lock:
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def written_today(self) -> int:
        """Bytes of all pieces and turns that were added since midnight, local time."""
        ((nbytes,),) = self.read(_WRITTEN_TODAY)
        return nbytes or 0

    def contents(self) -> Contents:
        (found,) = self._read_all(_SELECT_CONTENTS)
        return Contents(*found)

    def _read_all(self, query: str) -> list[sqlite3.Row]:
        """The result of a query that reads all rows: not on the connection for reading, which the
        event loop may wait for."""
        with self._lock:
            return self.connection.execute(query).fetchall()


def contents_of(directory: Path) -> Contents | None:
    """What a directory holds, without changing it; ``None`` if there is no index, and nothing if
    an earlier version wrote it.

    Raises ``sqlite3.Error`` and ``NewerSchema``.
    """
    path = directory / NAME
    if not path.exists():
        return None
    # Without a log, no process has the database open, and reading it would create one.
    how = "mode=ro" if path.with_name(f"{NAME}-wal").exists() else "immutable=1"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as connection:
        if checked_version(connection, VERSION) < VERSION:
            return Contents()
        return Contents(*connection.execute(_SELECT_CONTENTS).fetchone())


def _files_of(removed: Iterable[tuple[str | None]]) -> list[str]:
    """The files of rows that were removed; turns have none."""
    return [file for (file,) in removed if file is not None]
