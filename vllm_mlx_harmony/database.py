"""An SQLite database in a file that only this user can read, for several threads and processes.

It has a write-ahead log (https://www.sqlite.org/wal.html): a transaction is either complete or
absent, however the process ends, and readers, which have a connection of their own, never wait for
a writer.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NewerSchema(sqlite3.DatabaseError):
    """A later version of this package wrote the database."""


def checked_version(connection: sqlite3.Connection, version: int) -> int:
    """The version of the tables. Raises ``NewerSchema`` if it is later than ``version``."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > version:
        problem = (
            f"it was written by a newer vllm-mlx-harmony (schema version {found}; this one "
            f"supports {version})"
        )
        raise NewerSchema(problem)
    return int(found)


class Database:
    """The database in the file ``path``, which is created if need be. Any thread may call it.

    A file of an earlier ``version`` gets the tables of ``schema``. A call waits ``busy`` seconds
    for another process's transaction. All methods raise ``sqlite3.Error`` and ``OSError``; creation
    raises ``NewerSchema`` as well.
    """

    def __init__(self, path: Path, schema: str, version: int, busy: float, *pragmas: str) -> None:
        self.path = path
        self._lock, self._reading = threading.RLock(), threading.Lock()
        # SQLite gives its other files the mode of this one.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(path, 0o600)
        self.connection, self.reader = (
            sqlite3.connect(path, check_same_thread=False, timeout=busy, isolation_level=None)
            for _ in range(2)
        )
        try:
            found = checked_version(self.connection, version)
            for pragma in ("journal_mode=WAL", *pragmas):
                self.connection.execute(f"PRAGMA {pragma}")
            if found < version:  # otherwise write nothing: the disk may be full, or in use
                with self.writing():
                    for statement in (*schema.split(";"), f"PRAGMA user_version={version}"):
                        self.connection.execute(statement)
            self.reader.execute("PRAGMA query_only=ON")
            now = path.stat()
        except BaseException:
            self.close()
            raise
        self._file_id = (now.st_dev, now.st_ino)

    def close(self) -> None:
        with self._lock, self._reading:
            self._file_id = (0, 0)
            self.reader.close()
            self.connection.close()

    def is_there(self) -> bool:
        """Whether it is open, and the path still leads to it."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == self._file_id

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction; one thread of one process at a time."""
        with self._lock, self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection

    def read(self, query: str, *values: object) -> list[sqlite3.Row]:
        with self._reading:
            return self.reader.execute(query, values).fetchall()
