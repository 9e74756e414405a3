"""Stored responses, for ``previous_response_id`` and for asking after them: memory, file or Redis.

Knows how many to keep, which to drop first, and whose they are. Refuses to know what a response's
document says.

A file is one SQLite database with a write-ahead log (https://www.sqlite.org/wal.html): a response
is in it whole or not at all, whatever ends the process, and readers never wait for a writer. What
else can happen to a file must not be felt by requests that have nothing to do with it:

- A lock that another program holds is waited for once, for ``_BUSY`` seconds. For ``_PAUSE``
  seconds after that nobody waits: every call fails at once.
- A full disk takes no response, but a deletion must succeed: it is somebody's wish that something
  be gone. It needs some pages of the log. A small file holds the place for them, and the log is
  moved into the database often, so that it is written from its beginning again.
- A file that was removed or replaced is noticed, and a new one is begun.
- Reading writes nothing: what was used is noted, and written with the next response.

In Redis each response is one value, which expires; `server.shared` says what happens without it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import starmap
from pathlib import Path
from typing import Any, Protocol, get_args

from pydantic import TypeAdapter
from pydantic_core import from_json

from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.lru import ByteLRU
from vllm_mlx_harmony.core.turn import Message
from vllm_mlx_harmony.protocols.events import encode, encode_slowly
from vllm_mlx_harmony.server.shared import (
    STORE_VARIABLE,
    Shared,
    SharedError,
    is_url,
    server_shared,
    shared_key,
)

MAX_COUNT = 1000
MAX_BYTES = 256 * 1024 * 1024


class StoreError(HostError):
    """What is stored cannot be read, or nothing can be stored, now. 503."""

    code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as it was given: its ``document``, the ``input_items`` of its request, and the
    conversation up to and with it as ``messages`` (without the request's own instructions).
    It belongs to ``tenant``."""

    id: str
    document: Mapping[str, Any]
    input_items: Sequence[Mapping[str, Any]]
    messages: tuple[Message, ...]
    tenant: str = ""


class Store(Protocol):
    """Where answers are kept. Every call may block on a disk, and raise ``StoreError``."""

    def put(self, stored: StoredResponse) -> bool:
        """Keeps it, in place of one with the same id; the least recently used go first.

        False for one that is larger than the store: all the others would have to go for it.
        """

    def get(self, id: str, tenant: str) -> StoredResponse | None:  # noqa: A002 - the field's name for it
        """What ``tenant`` has kept under ``id``, which counts as a use; ``None`` for all else."""

    def delete(self, id: str, tenant: str) -> bool:  # noqa: A002
        """Forgets it; whether ``tenant`` had anything to forget."""


class MemoryStore:
    """Keeps answers as long as the process lives, up to ``max_count`` and ``max_bytes``."""

    def __init__(self, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: ByteLRU[tuple[str, str], str] = ByteLRU(max_bytes, max_count)

    @property
    def bytes(self) -> int:
        """What is kept, in bytes."""
        return self._texts.size

    def put(self, stored: StoredResponse) -> bool:
        """See ``Store``."""
        text, key = _written(stored), (stored.tenant, stored.id)
        if len(text) > self._max_bytes:
            return False
        self._texts.put(key, text, len(text))
        return True

    def get(self, id: str, tenant: str) -> StoredResponse | None:  # noqa: A002
        """See ``Store``."""
        text = self._texts.get((tenant, id))
        return None if text is None else _read(text)

    def delete(self, id: str, tenant: str) -> bool:  # noqa: A002
        """See ``Store``."""
        return self._texts.discard((tenant, id))


# What is counted, ordered and touched at every use stands apart from the texts: a use costs the
# same however large the file is.
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
CREATE TABLE IF NOT EXISTS response_texts (
    tenant TEXT NOT NULL, id TEXT NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (tenant, id),
    FOREIGN KEY (tenant, id) REFERENCES responses (tenant, id) ON DELETE CASCADE
);
"""
_NEXT = "(SELECT COALESCE(MAX(used), 0) + 1 FROM responses)"
_DROP_OLDEST = """
DELETE FROM responses WHERE (tenant, id) IN (
    SELECT tenant, id FROM (
        SELECT tenant, id, COUNT(*) OVER newer AS count, SUM(size) OVER newer AS bytes
        FROM responses WINDOW newer AS (ORDER BY used DESC)
    ) WHERE count > ? OR bytes > ?
)
"""

VERSION = 1
"""Of the tables, as ``PRAGMA user_version``. A file with a higher one is from a later version."""

_BUSY = 1.0
_PAUSE = 5.0
_RESERVED = 512 * 1024
"""Bytes held for deletions on a full disk, each of which writes some pages of 4 KiB."""

_LOG_PAGES = 100
"""Pages in the log after which they are moved into the database."""


class FileStore:
    """Keeps answers in a SQLite file that only this user can read.

    Raises ``StoreError``, which says what to do, for a path that cannot be such a file: a
    directory, a damaged file, another program's or a later version's, one that cannot be written.
    """

    def __init__(self, path: Path, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._reserve = path, path.with_name(f"{path.name}.reserve")
        self._max_count, self._max_bytes = max_count, max_bytes
        self._lock = threading.RLock()  # of the writer, and of which file it is
        self._reading = threading.Lock()
        self._used: dict[tuple[str, str], None] = {}
        self._opened: tuple[int, int] | None = None  # device and inode
        self._paused_until = 0.0
        try:
            self._open()
            (damage,) = self._reader.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{_UNUSABLE.format(path)}: {error}. {_REMEDY}") from error
        if damage != "ok":
            self.close()
            raise StoreError(f"{_UNUSABLE.format(path)}: it is damaged ({damage}). {_REMEDY}")

    def put(self, stored: StoredResponse) -> bool:
        """See ``Store``."""
        text = _written(stored)
        if len(text) > self._max_bytes:
            return False
        key = (stored.tenant, stored.id)
        with self._writing() as file:
            file.execute(
                f"INSERT OR REPLACE INTO responses VALUES (?, ?, {_NEXT}, ?)", (*key, len(text))
            )
            file.execute("INSERT INTO response_texts VALUES (?, ?, ?)", (*key, text))
            file.execute(_DROP_OLDEST, (self._max_count, self._max_bytes))
        return True

    def get(self, id: str, tenant: str) -> StoredResponse | None:  # noqa: A002
        """See ``Store``."""
        with self._failing():
            self._follow()
            with self._reading:
                row = self._reader.execute(
                    "SELECT text FROM response_texts WHERE tenant = ? AND id = ?", (tenant, id)
                ).fetchone()
        if row is None:
            return None
        self._used.pop((tenant, id), None)
        self._used[tenant, id] = None
        return _read(row[0])

    def delete(self, id: str, tenant: str) -> bool:  # noqa: A002
        """See ``Store``."""
        try:
            return self._delete(id, tenant)
        except StoreError as error:
            cause = error.__cause__
            full = isinstance(cause, sqlite3.OperationalError) and "full" in str(cause)
            if not full or not self._reserve.exists():
                raise
        with self._lock, self._failing():
            # On where SQLite was built so: it writes zeros over all that is deleted.
            (secure,) = self._file.execute("PRAGMA secure_delete").fetchone()
            self._reserve.unlink()
            try:
                self._file.execute("PRAGMA wal_checkpoint(PASSIVE)")
                self._file.execute("PRAGMA secure_delete=OFF")
                return self._delete(id, tenant)
            finally:
                self._file.execute(f"PRAGMA secure_delete={secure}")
                self._hold_reserve()

    def _delete(self, id: str, tenant: str) -> bool:  # noqa: A002
        with self._writing() as file:
            deletion = "DELETE FROM responses WHERE tenant = ? AND id = ?"
            return file.execute(deletion, (tenant, id)).rowcount > 0

    def close(self) -> None:
        """Closes the file; the next call opens it anew."""
        self._opened = None
        self._reader.close()
        self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, by one thread at a time; what was used since the last comes first."""
        with self._lock, self._failing():
            self._follow()
            with self._file:
                used, self._used = self._used, {}
                for key in used:
                    update = f"UPDATE responses SET used = {_NEXT} WHERE tenant = ? AND id = ?"
                    self._file.execute(update, key)
                yield self._file

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What the disk says, as a ``StoreError``; nothing is tried while the store is paused."""
        if time.monotonic() < self._paused_until:
            raise StoreError(f"{self._path} is locked by another program", retry_after=int(_PAUSE))
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if "locked" in str(error):
                self._paused_until = time.monotonic() + _PAUSE
            raise StoreError(f"{self._path}: {error}", retry_after=int(_PAUSE)) from error

    def _follow(self) -> None:
        """Opens the file anew when the path no longer leads to the one that is open."""
        if self._is_open():
            return
        with self._lock, self._reading:
            if not self._is_open():
                self.close()
                self._open()

    def _is_open(self) -> bool:
        try:
            now = self._path.stat()
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == self._opened

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Made here, so that it, and with it SQLite's files beside it, are nobody else's to read.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(self._path, 0o600)
        self._file = self._connected()
        self._reader = self._connected()
        (version,) = self._file.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            self.close()
            raise StoreError(
                f"{_UNUSABLE.format(self._path)}: a later version of vllm-mlx-harmony wrote it "
                f"(layout {version}, this one knows {VERSION}). {_REMEDY}"
            )
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA foreign_keys=ON")
        self._file.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
        self._file.executescript(_TABLES)
        if version < VERSION:
            self._file.execute(f"PRAGMA user_version={VERSION}")
        self._reader.execute("PRAGMA query_only=ON")
        now = self._path.stat()
        self._opened = (now.st_dev, now.st_ino)
        self._hold_reserve()

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, check_same_thread=False, timeout=_BUSY)

    def _hold_reserve(self) -> None:
        """Fills the reserve with bytes that no file system leaves out; without room, none is."""
        try:
            if self._reserve.stat().st_size == _RESERVED:
                return
        except OSError:
            pass
        try:
            opened = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(opened, "wb") as file:
                file.write(os.urandom(_RESERVED))
        except OSError:
            with suppress(OSError):
                self._reserve.unlink()


class SharedStore:
    """Keeps answers in Redis, for all servers that use the same one, until they expire."""

    def __init__(self, shared: Shared, max_bytes: int = MAX_BYTES) -> None:
        self._shared, self._max_bytes = shared, max_bytes

    def put(self, stored: StoredResponse) -> bool:
        """See ``Store``. What goes first when Redis is full is a setting of it (maxmemory)."""
        text = zlib.compress(_written(stored).encode(), 1)
        if len(text) > self._max_bytes:
            return False
        name = shared_key("response", stored.tenant, stored.id)
        with _as_store_error():
            self._shared.call(lambda redis: redis.set(name, text, ex=self._shared.seconds))
        return True

    def get(self, id: str, tenant: str) -> StoredResponse | None:  # noqa: A002
        """See ``Store``."""
        name = shared_key("response", tenant, id)
        with _as_store_error():
            text = self._shared.call(lambda redis: redis.get(name))
        return None if text is None else _read(zlib.decompress(text).decode())

    def delete(self, id: str, tenant: str) -> bool:  # noqa: A002
        """See ``Store``."""
        name = shared_key("response", tenant, id)
        with _as_store_error():
            deleted = self._shared.call(lambda redis: redis.delete(name))
        return bool(deleted)


@contextmanager
def _as_store_error() -> Iterator[None]:
    try:
        yield
    except SharedError as error:
        raise StoreError(error.message, retry_after=error.retry_after) from error


_UNUSABLE = f"{STORE_VARIABLE}={{}} cannot be used"
_REMEDY = f"Name another file, move this one away, or unset {STORE_VARIABLE}"

_opening = threading.Lock()


def server_store() -> Store:
    """The store of this server: the file or Redis that the environment names, or in memory.

    Raises ``StoreError`` for one that cannot be used.
    """
    with _opening:
        return _opened()


@lru_cache(maxsize=1)
def _opened() -> Store:
    path = os.environ.get(STORE_VARIABLE, "")
    if is_url(path):
        with _as_store_error():
            shared = server_shared()
        assert shared is not None
        return SharedStore(shared)
    return FileStore(Path(path).expanduser()) if path else MemoryStore()


_MESSAGES: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def _written(stored: StoredResponse) -> str:
    """One by one, so that other threads run in between: of 20,000 items it would be 100 ms."""
    messages = ([type(message).__name__, *asdict(message).values()] for message in stored.messages)
    several = (f"[{','.join(map(encode_slowly, each))}]" for each in (stored.input_items, messages))
    document = encode_slowly(stored.document)
    return f"[{encode(stored.id)},{document},{','.join(several)},{encode(stored.tenant)}]"


def _read(text: str) -> StoredResponse:
    # Many times as fast as `json` with long strings.
    key, document, input_items, messages, tenant = from_json(text, cache_strings="none")
    return StoredResponse(key, document, input_items, tuple(starmap(_message, messages)), tenant)


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
