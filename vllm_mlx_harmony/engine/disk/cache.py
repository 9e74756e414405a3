"""The prefix cache on disk: survives the end of the process, crashes and unloading of the model.

Threads:

- The engine's thread offers pieces (`DiskCache.offer`): keys and where their bytes are, no copies.
- The writer writes them, one at a time; slowly while the engine computes (`writer`).
- The reader reads for all event loops (`DiskCache.load`), one prompt at a time, before the engine's
  turn: it verifies every byte and leaves them in plain memory. If too much read-ahead is unused,
  the next prompt waits.
- Event loops wait for none of them. They read turns, which are rows, on a connection that is used
  for rows by their keys alone.

**No failure here fails a request.** A file that differs from what was written is removed, with all
pieces that continue it, and computed again. When the disk fails as a whole (full, read-only,
removed), or a file cannot be read for another reason, one warning per operation is logged until it
works again; after a failed write, nothing is written for ``PAUSE`` seconds.

**Flash memory wears out by being written.** When all processes together have written ``per_day``
bytes, nothing more is written until midnight, local time.

**The process may end at any moment.** A file is written first, then its row; a later process
removes files without a row. Several processes may share the directory: SQLite orders their
transactions, the names of files are unique, and a piece whose file is gone counts as unknown.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary, ref
from zlib import crc32

from vllm_mlx_harmony.core.replay import GeneratedTurn
from vllm_mlx_harmony.engine.disk.index import NAME, Contents, Index, Row, key_of
from vllm_mlx_harmony.engine.disk.safetensors import Damaged, Tensors, encoded, verified
from vllm_mlx_harmony.engine.disk.writer import WriteJob, Writer
from vllm_mlx_harmony.engine.prefix_tree import WIDTH, Sized
from vllm_mlx_harmony.sizes import format_size

logger = logging.getLogger("vllm_mlx_harmony")

DIRECTORY = "vllm-mlx-harmony"
"""Our directory below the given one, where vllm-mlx may have files of its own."""

PIECES = "pieces"

PAUSE = 30.0
"""Seconds without writing after the disk has failed."""

RETRY = 0.05
"""Seconds after which a prompt checks again whether it may be read."""

_FILE_PATTERN = "[0-9a-f]" * 32 + "-" + "[0-9a-f]" * 8 + ".safetensors"

Failed = (OSError, sqlite3.Error)
"""What a disk that fails raises."""

T = TypeVar("T", bound=Sized)


@dataclass(frozen=True, eq=False)  # without slots: weakly referenced
class Loaded:
    """A piece that was read: the ids from ``start`` to ``end``, as the content of its file."""

    start: int
    end: int
    content: bytes


@dataclass(slots=True)
class DiskCounters(Contents):
    """What the disk did for this process, and what it held when this process last changed it.

    ``hits`` and ``misses`` are prompts of which the disk had more, or no more, than memory;
    ``dropped`` pieces and turns were not written; ``damaged`` ones differ from what was written.
    Seconds are those of reading and writing, without waiting.
    """

    directory: str = ""
    budget: int = 0
    per_day: int = 0
    waiting: int = 0
    hits: int = 0
    misses: int = 0
    tokens_read: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    pieces_written: int = 0
    bytes_written: int = 0
    write_seconds: float = 0.0
    evictions: int = 0
    dropped: int = 0
    damaged: int = 0
    last_error: str = ""
    paused: bool = False


class DiskCache:
    """Pieces and turns in ``directory``, at most ``budget`` bytes of them.

    ``buffer``: bytes that may wait to be written, and bytes that may be read ahead. ``per_day``: 0
    for no limit. Creation raises ``OSError`` and ``sqlite3.Error``. No other call does.
    """

    def __init__(
        self, directory: Path, budget: int, buffer: int = 1 << 30, per_day: int = 0
    ) -> None:
        self.directory, self.budget = directory, budget
        self._home = directory / DIRECTORY
        self._pieces = self._home / PIECES
        self._buffer = buffer
        self._counters = DiskCounters(directory=str(directory), budget=budget, per_day=per_day)
        self._failing: set[str] = set()
        """Operations that failed and have not succeeded since."""
        self._spent_on: date | None = None
        """The last day whose limit was found to be reached."""
        self._paused_until = 0.0
        self._used: set[bytes] = set()
        """Keys of pieces and turns that were used and are not yet marked so in the index."""
        self._written: set[bytes] = set()
        """Keys of pieces that are on the disk or in the queue, as far as this process knows. When
        another process has removed some, it is emptied: all are offered again."""
        self._turns: set[bytes] = set()
        self._lock = threading.Lock()
        """Guards ``_used``. Engines' threads take it: it is held only briefly. Other sets are
        changed one key at a time, and counters may miss one."""
        self._changing = threading.RLock()
        """Guards which index is open, and clearing it."""
        self._generation = 0
        """Incremented by `clear`; jobs queued under an older value write nothing."""
        self._closing = False
        self._recent: WeakValueDictionary[bytes, Loaded] = WeakValueDictionary()
        """What was read and is still held by a prompt."""
        self._reader = ThreadPoolExecutor(1, "prefix-cache-reader")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._index = self._open_index()
        self._writer = Writer(self._run_job, buffer)
        self._writer.enqueue(WriteJob(self._sweep))

    # --- Faults

    def _open_index(self) -> Index:
        """The index, in a directory below the one that was named, which is created if need be."""
        self._home.mkdir(exist_ok=True, mode=0o700)
        os.chmod(self._home, 0o700)
        try:
            index = Index(self._home)
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # it is a database, but cannot be opened
                raise
            self._set_index_aside(error)
            index = Index(self._home)
        self._written.clear()
        self._turns = index.turns()
        self._contents_on, self._contents = date.today(), index.contents()
        return index

    def _set_index_aside(self, error: Exception) -> None:
        logger.warning("prefix cache: the index in %s is moved aside: %s", self._home, error)
        self._counters.damaged += 1
        path = self._home / NAME
        path.rename(path.with_suffix(".damaged"))
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Suppresses a failure of the disk in the operation ``what``; ``"writing"`` then pauses.

        Logs the first failure of each operation, until it succeeds again (`_works`).
        """
        try:
            yield
        except Failed as error:
            self._counters.last_error = f"{what}: {error}"
            self._written.clear()
            if what not in self._failing:
                self._failing.add(what)
                logger.warning("prefix cache: %s in %s failed: %s", what, self.directory, error)
            if type(error) is sqlite3.DatabaseError:  # the file is no database
                with suppress(*Failed), self._changing:
                    self._index.close()
                    self._set_index_aside(error)  # `_reopen_if_replaced` opens a new one
            elif what == "writing":
                self._paused_until = time.monotonic() + PAUSE

    def _works(self, what: str) -> None:
        if what in self._failing:
            self._failing.discard(what)
            logger.warning("prefix cache: %s in %s works again", what, self.directory)

    def _reopen_if_replaced(self) -> None:
        """Opens the index again if it was removed or replaced. Raises ``Failed``."""
        with self._changing:
            if not self._index.is_there():
                if not self.directory.is_dir():  # a volume may be mounted there: it is not created
                    raise FileNotFoundError(f"{self.directory} is gone")
                self._index.close()
                self._index = self._open_index()

    @property
    def _refuses(self) -> bool:
        """Whether nothing may be queued: the disk has failed just now, or this is closing."""
        return self._closing or time.monotonic() < self._paused_until

    # --- Writing

    def writing_slowly(self) -> AbstractContextManager[None]:
        """To be held while an engine computes, which the writer would slow down."""
        return self._writer.writing_slowly()

    def offer(
        self,
        root: bytes,
        sequence: bytes,
        pieces: Sequence[tuple[int, T]],
        export: Callable[[T], Tensors],
    ) -> None:
        """Queues the pieces that are not on the disk; the others count as used. Never waits.

        ``pieces`` are all those of ``sequence`` (packed), first to last, each with its end;
        ``export`` returns the bytes of one. A piece is written only after those before it, and only
        if all of them fit together.
        """
        if self._refuses:
            return
        ids = memoryview(sequence)
        key, start, nbytes, last = root, 0, 0, None
        for end, piece in pieces:
            parent, key = key, key_of(key, ids[start * WIDTH : end * WIDTH])
            nbytes += piece.nbytes
            if nbytes > self.budget:
                break
            if key not in self._written:
                name = f"{key.hex()}-{secrets.token_hex(4)}.safetensors"
                row = Row(key, parent, end - start, start, name, 0, 0)
                write = partial(self._write, row, export(piece), self._generation)
                if not self._enqueue(WriteJob(write, key, piece.nbytes, ref(piece)), self._written):
                    break
            start, last = end, key
        if last is not None:
            self._mark_used(last)

    def _enqueue(self, job: WriteJob, known: set[bytes]) -> bool:
        """Queues ``job``, unless too much waits, and adds its key to ``known``."""
        queued = self._writer.enqueue(job, known)
        self._counters.dropped += not queued
        return queued

    @property
    def evicted(self) -> int:
        """Bytes of pieces that wait to be written and are in memory only for that."""
        return self._writer.evicted

    def drop_evicted(self) -> int:
        """Gives up writing the pieces that are in memory only for that, but for the one that is
        being written; returns their bytes. A slow disk must not keep memory from requests."""
        given_up = self._writer.give_up_evicted()
        self._written.difference_update(key for key, _ in given_up)
        self._counters.dropped += len(given_up)
        return sum(nbytes for _, nbytes in given_up)

    def _mark_used(self, key: bytes) -> None:
        with self._lock:
            first = not self._used
            self._used.add(key)
        if first:  # it takes all keys that are added before it runs
            self._writer.enqueue(WriteJob(self._touch))

    def _touch(self) -> None:
        with self._lock:
            used, self._used = self._used, set()
        # What is not written yet will count as used when it is.
        if not self._index.touch(used - self._writer.keys()):
            self._written.clear()

    def _run_job(self, job: WriteJob) -> None:
        """Runs a job, unless writing pauses or its bytes exceed today's limit."""
        done = False
        try:
            if time.monotonic() >= self._paused_until:
                with self._trying("writing"):
                    self._reopen_if_replaced()
                    if not job.nbytes or self._may_write():
                        job.run()
                        done = True
        except Exception:
            logger.exception("the prefix cache on disk failed")
        if not done:
            self._forget(job)

    def _forget(self, job: WriteJob) -> None:
        """What a job that failed would have stored is not known, and may be offered again."""
        with self._lock:
            if job.run == self._touch:  # the next use queues another one
                self._used = set()
            self._used.discard(job.key)
        self._written.discard(job.key)
        self._turns.discard(job.key)
        self._counters.dropped += bool(job.key)

    def _may_write(self) -> bool:
        """Whether today's budget is not used up. When it is, the log says so once."""
        limit, today = self._counters.per_day, date.today()
        spent = 0 < limit <= self._index.written_today()
        if spent and self._spent_on != today:
            logger.warning(
                "prefix cache: the daily limit of %s written to %s is reached; new entries stay in "
                "memory until midnight",
                *(format_size(limit), self.directory),
            )
        self._spent_on = today if spent else None
        return not spent

    def _write(self, row: Row, tensors: Tensors, generation: int) -> None:
        if generation != self._generation:
            return
        if self._index.has(row.key):  # another process has written it
            return
        if row.start and not self._index.has(row.parent):
            self._written.clear()
            self._counters.dropped += 1
            return
        path, removed = self._pieces / row.file, None
        try:
            nbytes, crc = self._write_file(path, tensors, row)
            with self._changing:
                if generation == self._generation:
                    removed = self._index.add(replace(row, size=nbytes, crc=crc), self.budget)
        finally:
            if removed is None:
                self._written.discard(row.key)
                with suppress(OSError):
                    path.unlink()
        if removed is None:
            return
        self._works("writing")
        self._counters.pieces_written += 1
        self._counters.bytes_written += nbytes
        self._counters.evictions += len(removed)
        self._drop_files(removed)

    def _write_file(self, path: Path, tensors: Tensors, row: Row) -> tuple[int, int]:
        """Size and checksum of a new file, written as fast as the engine permits."""
        nbytes = crc = 0
        metadata = {"format": "vllm-mlx-harmony", "start": str(row.start), "end": str(row.end)}
        path.parent.mkdir(exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for part in encoded(tensors, metadata):
                began = time.perf_counter()
                crc = crc32(part, crc)
                left = part
                while left:
                    left = left[file.write(left) :]
                spent = time.perf_counter() - began
                self._counters.write_seconds += spent
                nbytes += part.nbytes
                self._writer.throttle(spent)
        return nbytes, crc

    def _drop_files(self, removed: Sequence[str]) -> None:
        """Called after each change of the index, with the files whose rows it has removed."""
        for name in removed:
            self._written.discard(bytes.fromhex(name.partition("-")[0]))
            with suppress(OSError):  # a later `_sweep` removes it
                (self._pieces / name).unlink()
        self._contents_on, self._contents = date.today(), self._index.contents()

    def _remove(self, key: bytes, name: str | None) -> None:
        self._drop_files(self._index.remove(key, name))

    def _sweep(self) -> None:
        """Removes files that a process left behind when it ended. Another process may be writing
        those of the last ten minutes."""
        known = self._index.files()
        since = time.time() - 600
        for path in self._pieces.glob(_FILE_PATTERN):
            with suppress(OSError):  # another process may do the same
                if path.name not in known and path.lstat().st_mtime < since:
                    path.unlink()

    # --- Reading

    def chain(self, roots: Sequence[bytes], sequence: bytes) -> tuple[Row, ...]:
        """The pieces of the longest beginning of ``sequence`` that is shorter than it is.

        Of several roots, the one that leads furthest counts. Reads the index; blocks briefly.
        """
        best: tuple[Row, ...] = ()
        with self._trying("reading the index"):
            self._reopen_if_replaced()
            best = self._index.chain(roots, sequence, len(sequence) // WIDTH - 1)
            self._written.update(row.key for row in best)
            self._works("reading the index")
        return best

    async def load(self, rows: Sequence[Row], in_memory: Callable[[], int]) -> tuple[Loaded, ...]:
        """The pieces of ``rows`` that end after the ids ``in_memory``, read and verified, in order.

        The first may begin before that; what follows one that cannot be read is missing, and so is
        what exceeds ``buffer``. Waits while what was read for other prompts, and not yet used,
        exceeds ``buffer``; then asks how many ids are ``in_memory``, on the reader's thread.
        """
        if not rows:
            self._counters.misses += 1
            return ()
        given_up = threading.Event()
        reading = self._reader.submit(self._load_in_turn, rows, in_memory, given_up)
        try:
            return await asyncio.wrap_future(reading)
        finally:
            given_up.set()

    @property
    def read_ahead(self) -> int:
        """Bytes that were read and wait for the turn of their prompts."""
        pieces = (reference() for reference in self._recent.valuerefs())
        return sum(len(piece.content) for piece in pieces if piece is not None)

    def _load_in_turn(
        self, rows: Sequence[Row], in_memory: Callable[[], int], given_up: threading.Event
    ) -> tuple[Loaded, ...]:
        while self.read_ahead >= self._buffer and not self._closing:
            if given_up.wait(RETRY):
                return ()
        return self._load(rows, in_memory)

    def _load(self, rows: Sequence[Row], in_memory: Callable[[], int]) -> tuple[Loaded, ...]:
        found: list[Loaded] = []
        before, nbytes = in_memory(), 0
        for row in rows:
            if row.end > before:
                nbytes += row.size
                if nbytes > self._buffer:
                    break
                piece = self._recent.get(row.key) or self._read(row)
                if piece is None:
                    break
                found.append(piece)
        else:
            if found:
                self._works("reading")
        self._counters.hits += bool(found)
        self._counters.misses += not found
        self._counters.tokens_read += sum(piece.end - max(piece.start, before) for piece in found)
        self._mark_used(rows[-1].key)
        return tuple(found)

    def _read(self, row: Row) -> Loaded | None:
        began, piece = time.perf_counter(), None
        with self._trying("reading"):
            try:
                content = verified(self._pieces / row.file, row.size, row.crc)
                piece = Loaded(row.start, row.end, content)
                self._recent[row.key] = piece  # prompts that come together share it
                self._counters.read_seconds += time.perf_counter() - began
                self._counters.bytes_read += row.size
            except (Damaged, FileNotFoundError) as error:
                if isinstance(error, Damaged):  # otherwise another process has evicted it
                    self._counters.damaged += 1
                    self._counters.last_error = f"{row.file}: {error}"
                    problem = "prefix cache: %s is damaged and was removed: %s"
                    logger.warning(problem, row.file, error)
                self._written.discard(row.key)
                self._reopen_if_replaced()
                self._remove(row.key, row.file)
        return piece

    # --- Generated turns: a `core.replay.Archive`, on the event loop, where nothing may wait

    blocks = False
    """It waits for no network."""

    def put(self, key: bytes, turn: GeneratedTurn) -> None:
        """Queues ``turn`` to be written."""
        content, generation = turn.to_bytes(), self._generation

        def write() -> None:
            with self._changing:
                if generation == self._generation:
                    removed = self._index.put(key, content, self.budget)
                    self._counters.evictions += len(removed)
                    self._drop_files(removed)
                    self._works("writing")

        if not self._refuses:
            self._enqueue(WriteJob(write, key, len(content)), self._turns)

    def find(self, keys: Sequence[bytes]) -> list[GeneratedTurn | None]:
        """The turns with these keys; ``None`` for one that is missing or damaged.

        Faults of the index are reported by the threads that write and read pieces.
        """
        found: list[GeneratedTurn | None] = []
        there = self._index.is_there()
        for key in keys:
            content = None
            with suppress(*Failed):
                if there and key in self._turns:
                    self._mark_used(key)
                    content = self._index.turn(key)
            found.append(None if content is None else GeneratedTurn.from_bytes(content))
            if content is not None and found[-1] is None:
                self._turns.discard(key)
                self._counters.damaged += 1
                self._writer.enqueue(WriteJob(partial(self._remove, key, None)))
        return found

    def use(self, key: bytes) -> None:
        if key in self._turns:
            self._mark_used(key)

    # --- All of it

    def clear(self) -> None:
        """Removes everything, also what waits to be written. Blocks."""
        self._generation += 1
        self._written.clear()
        self._turns.clear()
        with self._changing, self._trying("emptying the cache"):
            self._reopen_if_replaced()
            try:
                self._index.clear()
            except sqlite3.Error:  # a full disk has no room for it
                for path in self._home.glob(f"{NAME}*"):
                    path.unlink()
                self._reopen_if_replaced()
            self._drop_files([path.name for path in self._pieces.glob(_FILE_PATTERN)])
            self._works("emptying the cache")

    def counters(self) -> DiskCounters:
        """The counters now, without waiting for another thread."""
        today, found = date.today(), asdict(self._contents)
        if self._contents_on != today:
            found["written_today"] = 0
        paused = self._spent_on == today or time.monotonic() < self._paused_until
        return replace(self._counters, waiting=self._writer.waiting, paused=paused, **found)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything is written, at most ``timeout`` seconds; returns whether it is."""
        return self._writer.flush(timeout)

    def close(self, timeout: float = 0.0) -> None:
        """Writes for ``timeout`` seconds what still waits, at full speed, and ends."""
        self._closing = True
        if self._writer.close(timeout):
            self._index.close()
