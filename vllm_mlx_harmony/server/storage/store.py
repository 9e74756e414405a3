"""The store of responses, for ``previous_response_id`` and retrieval: in memory, or a file.

Servers that share a Redis have the store of `server.peers.store`.

The file is a `database`. Problems with it must not affect other requests:

- A lock held by another program is waited for once, for ``_BUSY`` seconds. For the next ``_PAUSE``
  seconds every call fails immediately.
- On a full disk nothing can be stored, but deletions must succeed, because clients rely on them. A
  deletion needs some pages of the log. A small file reserves the space for them, and checkpoints
  are frequent, so that the log starts from its beginning again.
- If the file was removed or replaced, a new one is opened.
- Reading does not write: uses are recorded together with the next response.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from json import loads
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

from pydantic import TypeAdapter
from pydantic_core import from_json

from vllm_mlx_harmony.core.errors import StoreError
from vllm_mlx_harmony.core.lru import ByteLRU
from vllm_mlx_harmony.core.turn import Message
from vllm_mlx_harmony.database import Database
from vllm_mlx_harmony.protocols.events import encode, encode_in_chunks
from vllm_mlx_harmony.server.settings import STORE_VARIABLE

logger = logging.getLogger("vllm_mlx_harmony")

MAX_COUNT = 1000
MAX_BYTES = 256 * 1024 * 1024
"""Maximum number and bytes of all responses in a store. One that was dropped cannot be continued:
``previous_response_id`` gets 404."""


class ResourceKey(NamedTuple):
    """Identifies a response or a conversation, which later requests of ``tenant`` can name."""

    id: str
    tenant: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response of ``tenant``: its ``document``, and the ``input_items`` of its request.

    ``messages`` are the conversation that ends with it, without the request's own instructions.
    """

    id: str
    document: Mapping[str, Any]
    input_items: Sequence[Mapping[str, Any]]
    messages: tuple[Message, ...]
    tenant: str = ""

    @property
    def key(self) -> ResourceKey:
        return ResourceKey(self.id, self.tenant)

    def text(self) -> str:
        """The response as JSON in ASCII."""
        messages = (
            {"kind": type(message).__name__, **asdict(message)} for message in self.messages
        )
        # Encoded one by one, so that other threads run in between: 20,000 items take 100 ms.
        lists = (
            f"[{','.join(map(encode_in_chunks, items))}]" for items in (self.input_items, messages)
        )
        document = encode_in_chunks(self.document)
        return f"[{encode(self.id)},{document},{','.join(lists)},{encode(self.tenant)}]"

    @classmethod
    def of_text(cls, text: str) -> StoredResponse | None:
        """The inverse of ``text``; ``None``, with a warning, for what another version wrote."""
        try:
            response_id, document, input_items, written, tenant = parse_written(text)
            messages = tuple(_message(**fields) for fields in written)
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("a stored response cannot be read: %s", type(error).__name__)
            return None
        return cls(response_id, document, input_items, messages, tenant)


def parse_written(text: str) -> Any:
    """The value of JSON that this server wrote. Raises ``ValueError``."""
    try:
        return from_json(text, cache_strings="none")  # many times as fast for long strings
    except ValueError:  # it reads 200 levels, and bodies may have more (`body`)
        return loads(text)


_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def _message(kind: str, **fields: Any) -> Message:
    _KINDS[kind](**fields)  # raises TypeError for fields of another version, which pydantic ignores
    return _adapter(kind).validate_python(fields)


@cache
def _adapter(kind: str) -> TypeAdapter[Message]:
    return TypeAdapter(_KINDS[kind])


class Store(Protocol):
    """The interface of stores. Every call may block, and raise ``StoreError``."""

    def put(self, stored: StoredResponse) -> bool:
        """Stores or replaces a response. If there is no room, the least recently used are dropped.

        Returns false, and stores nothing, if the response is larger than the store.
        """

    def get(self, key: ResourceKey) -> StoredResponse | None:
        """The response, if it is stored. Counts as a use."""

    def delete(self, key: ResourceKey) -> bool:
        """Deletes the response; returns whether it was stored."""


class MemoryStore:
    """A store in memory, of at most ``max_count`` responses and ``max_bytes``."""

    def __init__(self, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._texts: ByteLRU[ResourceKey, str] = ByteLRU(max_bytes, max_count)

    def put(self, stored: StoredResponse) -> bool:
        text = stored.text()
        if len(text) > self._max_bytes:
            return False
        self._texts.put(stored.key, text, len(text))
        return True

    def get(self, key: ResourceKey) -> StoredResponse | None:
        text = self._texts.get(key)
        return None if text is None else StoredResponse.of_text(text)

    def delete(self, key: ResourceKey) -> bool:
        return self._texts.discard(key)


# What every use reads and changes is not in the table of the texts, so that the cost of a use does
# not depend on the size of the file.
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
"""Version of the tables (``PRAGMA user_version``). Files of a later version are not opened."""

_BUSY = 1.0
_PAUSE = 5.0
_RESERVED = 512 * 1024
"""Bytes reserved for deletions on a full disk, each of which writes some pages of 4 KiB."""

_LOG_PAGES = 100
"""Pages in the log at which a checkpoint is made."""


class FileStore:
    """A store in an SQLite file that only this user can read.

    Raises ``StoreError`` if the file cannot be used: for a directory, a damaged file, a file of
    another program or of a later version, and one that cannot be written.
    """

    def __init__(self, path: Path, max_count: int = MAX_COUNT, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._reserve = path, path.with_name(f"{path.name}.reserve")
        self._max_count, self._max_bytes = max_count, max_bytes
        self._lock = threading.RLock()  # for writing, and for opening the file
        self._used: dict[ResourceKey, None] = {}
        self._paused_until = 0.0
        try:
            self._database = self._open_database()
            ((damage,),) = self._database.read("PRAGMA quick_check(1)")
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{_UNUSABLE.format(path)}: {error}. {_REMEDY}") from error
        if damage != "ok":
            self.close()
            raise StoreError(f"{_UNUSABLE.format(path)}: it is damaged ({damage}). {_REMEDY}")

    def put(self, stored: StoredResponse) -> bool:
        text = stored.text()
        if len(text) > self._max_bytes:
            return False
        row = stored.tenant, stored.id
        with self._writing() as connection:
            # REPLACE deletes the old row, and the cascade deletes its text.
            connection.execute(
                f"INSERT OR REPLACE INTO responses VALUES (?, ?, {_NEXT}, ?)", (*row, len(text))
            )
            connection.execute("INSERT INTO response_texts VALUES (?, ?, ?)", (*row, text))
            connection.execute(_DROP_OLDEST, (self._max_count, self._max_bytes))
        return True

    def get(self, key: ResourceKey) -> StoredResponse | None:
        with self._store_errors():
            self._reopen_if_replaced()
            query = "SELECT text FROM response_texts WHERE tenant = ? AND id = ?"
            rows = self._database.read(query, key.tenant, key.id)
        if not rows:
            return None
        self._used.pop(key, None)  # move to the end
        self._used[key] = None
        return StoredResponse.of_text(rows[0][0])

    def delete(self, key: ResourceKey) -> bool:
        try:
            return self._delete(key)
        except StoreError as error:
            cause = error.__cause__
            full = isinstance(cause, sqlite3.Error) and _code_of(cause) == sqlite3.SQLITE_FULL
            if not full or not self._reserve.exists():
                raise
        with self._lock, self._store_errors():
            # Some builds of SQLite overwrite deleted content with zeros, which takes more pages.
            connection = self._database.connection
            (secure,) = connection.execute("PRAGMA secure_delete").fetchone()
            self._reserve.unlink()
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
                connection.execute("PRAGMA secure_delete=OFF")
                return self._delete(key)
            finally:
                connection.execute(f"PRAGMA secure_delete={secure}")
                self._hold_reserve()

    def _delete(self, key: ResourceKey) -> bool:
        with self._writing() as connection:
            deletion = "DELETE FROM responses WHERE tenant = ? AND id = ?"
            return connection.execute(deletion, (key.tenant, key.id)).rowcount > 0

    def close(self) -> None:
        """Closes the file. The next call opens it again."""
        self._database.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction of one thread at a time. It first records the uses since the last one."""
        with self._lock, self._store_errors():
            self._reopen_if_replaced()
            with self._database.writing() as connection:
                used, self._used = self._used, {}
                for key in list(used):  # a reader may still be adding to it
                    update = f"UPDATE responses SET used = {_NEXT} WHERE tenant = ? AND id = ?"
                    connection.execute(update, (key.tenant, key.id))
                yield connection

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raises errors of the disk as ``StoreError``, and any call as one during a pause."""
        if time.monotonic() < self._paused_until:
            raise StoreError(f"{self._path} is locked by another program", retry_after=int(_PAUSE))
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            busy = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if isinstance(error, sqlite3.Error) and _code_of(error) in busy:
                self._paused_until = time.monotonic() + _PAUSE
            raise StoreError(f"{self._path}: {error}", retry_after=int(_PAUSE)) from error

    def _reopen_if_replaced(self) -> None:
        """Opens the file again if it was closed, removed or replaced."""
        if self._database.is_there():
            return
        with self._lock:
            if not self._database.is_there():
                self._database.close()
                self._database = self._open_database()

    def _open_database(self) -> Database:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        pragmas = "foreign_keys=ON", f"wal_autocheckpoint={_LOG_PAGES}"
        database = Database(self._path, _TABLES, VERSION, _BUSY, *pragmas)
        self._hold_reserve()
        return database

    def _hold_reserve(self) -> None:
        """Fills the reserve with random bytes, which file systems cannot compress."""
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


def _code_of(error: sqlite3.Error) -> int:
    """The primary result code; 0 for an error of the module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


_UNUSABLE = f"{STORE_VARIABLE}={{}} cannot be used"
_REMEDY = f"Use another file, move this one away, or unset {STORE_VARIABLE}"


def open_store(path: str) -> FileStore | MemoryStore:
    """The store in the file ``path``; in memory if that is empty. Raises ``StoreError``."""
    return FileStore(Path(path).expanduser()) if path else MemoryStore()
