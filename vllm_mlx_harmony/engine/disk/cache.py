"""The prefix cache on disk: what outlives the process, its crash and the unloading of the model.

Which thread does what:

- The engine's thread offers pieces (`DiskCache.offer`): keys and where their bytes are, no copies.
- The writer writes them, one at a time. While the engine computes, it uses ``SHARE`` of a
  processor's time; otherwise it writes on.
- The reader reads (`DiskCache.load`) before the engine's turn: it checks every byte and leaves them
  in plain memory. What was read and not yet used is bounded: the next prompt waits to be read.
- The event loop waits for neither. It reads turns, which are rows, beside what is being written.

**Nothing here may fail a request.** A file that is not what was written is removed, with all pieces
that continue it, and computed again. When the disk fails as a whole (full, read-only, removed), the
log says so once, and nothing is written for ``PAUSE`` seconds; the cache in memory goes on.

**The process may end at any moment.** A file is written first, then its row, in one transaction; a
later process removes files without a row. What waits to be written is lost.

Several processes may share the directory: SQLite orders their transactions, the names of files are
unique, and a piece whose file another process has removed counts as unknown.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary
from zlib import crc32

from vllm_mlx_harmony.engine.disk.index import NAME, Index, Row, below
from vllm_mlx_harmony.engine.disk.safetensors import SLICE, Damaged, Tensors, decoded, encoded
from vllm_mlx_harmony.engine.prefix_tree import WIDTH

logger = logging.getLogger("vllm_mlx_harmony")

DIRECTORY = "vllm-mlx-harmony"
"""Below the directory that was named, in which vllm-mlx may have files of its own."""

PIECES = "pieces"

SHARE = 0.02
"""Part of a processor's time that writing takes while the engine computes."""

LINGER = 0.1
"""Seconds after a step of the engine in which another is expected."""

PAUSE = 30.0
"""Seconds without writing after the disk has failed."""

RETRY = 0.05
"""Seconds after which a prompt looks again whether it may be read."""

ABANDONED = 600.0
"""Seconds after which a file without a row is removed: another process may be writing it."""

_FILE = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.safetensors")

Failed = (OSError, sqlite3.Error)


@dataclass(frozen=True, slots=True)
class Offered:
    """A piece in memory, up to ``end`` ids; ``export`` gives its ``nbytes`` bytes."""

    end: int
    nbytes: int
    export: Callable[[], Tensors]


@dataclass(frozen=True, eq=False)  # without slots: weakly referenced
class Loaded:
    """A piece that was read: the ids from ``start`` to ``end``."""

    start: int
    end: int
    tensors: Tensors

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


@dataclass(slots=True)
class Counters:
    """What the disk did for this process, and what it holds now, whichever process wrote it.

    ``hits`` and ``misses`` are prompts of which the disk had more, or no more, than memory;
    ``dropped`` pieces were not written in time; ``damaged`` ones were not what was written. Seconds
    are those of reading and writing, without waiting.
    """

    directory: str = ""
    budget: int = 0
    nbytes: int = 0
    pieces: int = 0
    turns: int = 0
    conversations: int = 0
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece on its way to the disk."""

    row: Row
    tensors: Tensors
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn on its way to the disk, or, without content, off it."""

    key: bytes
    content: bytes | None

    @property
    def nbytes(self) -> int:
        return len(self.content or b"")


class DiskCache:
    """Pieces and turns in ``directory``, at most ``budget`` bytes of them.

    Creation raises ``OSError`` and ``sqlite3.Error``. No other call does.
    """

    def __init__(self, directory: Path, budget: int, patience: int = 1 << 30) -> None:
        """``patience``: bytes that may wait to be written, and bytes that may be read ahead."""
        self.directory, self.budget = directory, budget
        self._home = directory / DIRECTORY
        self._patience = patience
        self._counters = Counters(str(directory), budget)
        self._failing = False
        self._paused_until = 0.0
        self._queue: deque[_Piece | _Turn] = deque()
        self._waiting = 0
        self._used: dict[bytes, None] = {}
        """Keys of pieces and turns that were used, in this order."""
        self._written: set[bytes] = set()
        """Keys of pieces that are on the disk or in the queue, as far as this process knows. When
        another process has removed some, it is emptied: all are offered again."""
        self._turns: set[bytes] = set()
        self._computing, self._computed = 0, 0.0
        self._more = threading.Condition()
        """Guards the queue. Engines' threads take it, so that it is held for moments only."""
        self._changing = threading.RLock()
        """Guards which index is open, and clearing it."""
        self._cleared = 0
        self._closing = False
        self._recent: WeakValueDictionary[bytes, Loaded] = WeakValueDictionary()
        """What was read and is still held by a prompt."""
        self._line = asyncio.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._index = self._opened()
        self._found = self._index.found()
        self._reader = ThreadPoolExecutor(1, "prefix-cache-reader")
        self._writer = threading.Thread(target=self._write_on, name="prefix-cache-writer")
        self._writer.daemon = True
        self._writer.start()

    def _opened(self) -> Index:
        """The index, in a directory below the one that was named, which is created if need be."""
        self._home.mkdir(exist_ok=True, mode=0o700)
        os.chmod(self._home, 0o700)
        (self._home / PIECES).mkdir(exist_ok=True, mode=0o700)
        try:
            index = Index(self._home)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            self._set_index_aside(error)
            index = Index(self._home)
        self._written.clear()
        self._turns = index.turns()
        return index

    def _set_index_aside(self, error: Exception) -> None:
        """Renames a damaged index. Its files are swept later."""
        logger.warning("prefix cache: the index in %s is set aside: %s", self._home, error)
        self._counters.damaged += 1
        path = self._home / NAME
        path.rename(path.with_suffix(".damaged"))
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    # --- Faults

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Ends the block early when the disk fails: logs that once, and pauses writing."""
        try:
            yield
        except Failed as error:
            self._counters.last_error = f"{what}: {error}"
            self._written.clear()
            if not self._failing:
                self._failing = True
                logger.warning(
                    "prefix cache: %s failed (%s: %s); it stays in memory until that is over",
                    *(self.directory, what, error),
                )
            if _is_damage(error):
                with suppress(*Failed), self._changing:
                    self._index.close()
                    self._set_index_aside(error)  # `_follow` opens a new one
            elif what == "writing":
                self._paused_until = time.monotonic() + PAUSE

    @property
    def _paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _follow(self) -> None:
        """Opens the index again when it was removed or replaced. Raises ``Failed``."""
        with self._changing:
            if self._index.is_there():
                if not (self._home / PIECES).is_dir():
                    (self._home / PIECES).mkdir(exist_ok=True, mode=0o700)
                    self._index.remove_pieces()
                    self._written.clear()
                return
            if not self.directory.is_dir():  # a volume may be mounted there: it is not created
                raise FileNotFoundError(f"{self.directory} is gone")
            self._index.close()
            self._index = self._opened()

    # --- Writing

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While an engine computes: the writer holds back."""
        with self._more:
            self._computing += 1
        try:
            yield
        finally:
            with self._more:
                self._computing -= 1
                self._computed = time.monotonic()

    def offer(self, root: bytes, sequence: bytes, pieces: Sequence[Offered]) -> None:
        """Queues the pieces that are not on the disk; the others count as used. Never waits.

        ``pieces`` are all those of ``sequence`` (packed), first to last. A piece is written only
        after those before it, and only if all of them fit together.
        """
        if self._paused or self._closing:
            return
        ids = memoryview(sequence)
        key, start, nbytes, last = root, 0, 0, None
        for piece in pieces:
            parent, key = key, below(key, ids[start * WIDTH : piece.end * WIDTH])
            nbytes += piece.nbytes
            if nbytes > self.budget:
                break
            if key not in self._written:
                name = f"{key.hex()}-{secrets.token_hex(4)}.safetensors"
                row = Row(key, parent, piece.end - start, start, name, 0, 0)
                if not self._put(_Piece(row, piece.export(), piece.nbytes)):
                    self._counters.dropped += 1
                    break
                self._written.add(key)
            start, last = piece.end, key
        if last is not None:
            self._use(last)

    def _put(self, job: _Piece | _Turn) -> bool:
        with self._more:
            if self._waiting + job.nbytes > self._patience:
                return False
            self._queue.append(job)
            self._waiting += job.nbytes
            self._more.notify()
            return True

    def _use(self, key: bytes) -> None:
        with self._more:
            self._used[key] = None
            self._more.notify()

    def _write_on(self) -> None:
        swept = False
        while True:
            used: dict[bytes, None] = {}
            with self._more:
                while not (self._queue or self._used or self._closing):
                    self._more.wait()
                if self._closing and not self._queue:
                    return
                job = self._queue.popleft() if self._queue else None
                if job is None:  # only then: what is used may have been in the queue
                    used, self._used = self._used, used
                cleared = self._cleared
            try:
                if not self._carry_out(job, used, cleared):
                    self._drop(job)
            except Exception:
                logger.exception("the prefix cache on disk failed")
            with self._more:
                self._waiting -= 0 if job is None else job.nbytes
            job = None  # its buffers are the engine's memory
            if not swept:  # not at the start, which everybody waits for
                swept = True
                with suppress(*Failed):
                    self._sweep()

    def _carry_out(self, job: _Piece | _Turn | None, used: Iterable[bytes], cleared: int) -> bool:
        """Writes one job, or notes what was used. Returns whether the disk worked."""
        done = False
        if not self._paused:
            with self._trying("writing"):
                self._follow()
                if isinstance(job, _Piece):
                    self._write(job, cleared)
                elif job is not None:
                    self._write_turn(job, cleared)
                elif not self._index.touch(used):
                    self._written.clear()
                self._found = self._index.found()
                done = True
        return done

    def _drop(self, job: _Piece | _Turn | None) -> None:
        if isinstance(job, _Piece):
            self._written.discard(job.row.key)
            self._counters.dropped += 1
        elif job is not None:
            self._turns.discard(job.key)

    def _write_turn(self, turn: _Turn, cleared: int) -> None:
        with self._changing:
            if turn.content is None:
                self._index.remove_turn(turn.key)
            elif cleared == self._cleared:
                self._remove(self._index.put(turn.key, turn.content, self.budget))

    def _write(self, piece: _Piece, cleared: int) -> None:
        row = piece.row
        if self._index.has(row.key):  # another process was quicker
            return
        if row.start and not self._index.has(row.parent):
            self._written.clear()
            return
        path = self._home / PIECES / row.file
        try:
            size, crc = self._write_file(path, piece.tensors, row)
            row = replace(row, size=size, crc=crc)
            with self._changing:  # nothing that was cleared comes back
                gone = self._index.add(row, self.budget) if cleared == self._cleared else None
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        if gone is None:
            self._written.discard(row.key)
            with suppress(OSError):
                path.unlink()
            return
        if self._failing:
            self._failing = False
            logger.warning("prefix cache: %s can be used again", self.directory)
        self._counters.pieces_written += 1
        self._counters.bytes_written += size
        self._remove(gone)

    def _write_file(self, path: Path, tensors: Tensors, row: Row) -> tuple[int, int]:
        """Bytes and checksum of a new file, written as fast as the engine permits."""
        size = crc = 0
        metadata = {"format": "vllm-mlx-harmony", "start": str(row.start), "end": str(row.end)}
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb", buffering=0) as file:
            for part in encoded(tensors, metadata):
                began = time.perf_counter()
                crc = crc32(part, crc)
                left = part
                while left:
                    left = left[file.write(left) :]
                spent = time.perf_counter() - began
                self._counters.write_seconds += spent
                size += part.nbytes
                busy = self._computing > 0 or time.monotonic() - self._computed < LINGER
                if busy and not self._closing:
                    time.sleep(min(spent / SHARE, 1.0))
        return size, crc

    def _remove(self, names: Sequence[str], *, evicted: bool = True) -> None:
        """Removes files whose rows are gone."""
        self._counters.evictions += len(names) if evicted else 0
        for name in names:
            self._written.discard(bytes.fromhex(name.partition("-")[0]))
            with suppress(FileNotFoundError):
                (self._home / PIECES / name).unlink()

    def _sweep(self) -> None:
        """Removes files that a process left behind when it ended."""
        known = self._index.files()
        since = time.time() - ABANDONED
        with os.scandir(self._home / PIECES) as entries:
            for entry in entries:
                ours = _FILE.fullmatch(entry.name) and entry.name not in known
                if ours and entry.stat(follow_symlinks=False).st_mtime < since:
                    os.unlink(entry.path)

    # --- Reading

    def find(self, roots: Sequence[bytes], sequence: bytes) -> tuple[Row, ...]:
        """The pieces of the longest beginning of ``sequence`` that is shorter than it is.

        Of several roots, the one that leads furthest counts. Reads the index; blocks for moments.
        """
        limit = len(sequence) // WIDTH - 1
        best: tuple[Row, ...] = ()
        with self._trying("reading"):
            self._follow()
            chains = [self._index.chain(root, sequence, limit) for root in roots]
            best = max(chains, key=lambda rows: rows[-1].end if rows else 0, default=())
            self._written.update(row.key for row in best)
        return best

    async def load(self, rows: Sequence[Row], known: Callable[[], int]) -> tuple[Loaded, ...]:
        """The pieces of ``rows`` that end behind ``known`` ids, read and checked; first to last.

        The first may begin before that; what follows a damaged one is missing. Waits while what was
        read for other prompts, and not yet used, exceeds ``patience``; then asks how much is
        ``known``, on the reader's thread.
        """
        loop = asyncio.get_running_loop()
        async with self._line:
            while self.read_ahead > self._patience:
                await asyncio.sleep(RETRY)
            return await loop.run_in_executor(self._reader, self._load, rows, known)

    @property
    def read_ahead(self) -> int:
        """Bytes that were read and wait for the turn of their prompts."""
        pieces = (reference() for reference in self._recent.valuerefs())
        return sum(piece.nbytes for piece in pieces if piece is not None)

    def _load(self, rows: Sequence[Row], known: Callable[[], int]) -> tuple[Loaded, ...]:
        found: list[Loaded] = []
        before = known()
        for row in rows:
            if row.end > before:
                piece = self._recent.get(row.key) or self._read(row)
                if piece is None:
                    break
                found.append(piece)
        self._counters.hits += bool(found)
        self._counters.misses += not found
        self._counters.tokens_read += sum(each.end - max(each.start, before) for each in found)
        if rows:
            self._use(rows[-1].key)
        return tuple(found)

    def _read(self, row: Row) -> Loaded | None:
        began = time.perf_counter()
        try:
            tensors = decoded(memoryview(self._content(row)))
        except (OSError, Damaged) as error:
            self._set_aside(row, error)
            return None
        piece = Loaded(row.start, row.end, tensors)
        self._recent[row.key] = piece  # prompts that come together share it
        self._counters.read_seconds += time.perf_counter() - began
        self._counters.bytes_read += row.size
        return piece

    def _content(self, row: Row) -> bytearray:
        """The bytes of a file, checked. Raises ``OSError`` and ``Damaged``."""
        opened = os.open(self._home / PIECES / row.file, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(opened, "rb", buffering=0) as file:
            size = os.fstat(opened).st_size
            if size != row.size:
                raise Damaged(f"{size} bytes, not {row.size}")
            content = bytearray(size)
            at = crc = 0
            view = memoryview(content)
            while at < size:
                count = file.readinto(view[at : at + SLICE])
                if not count:
                    raise Damaged(f"it ends after {at} bytes")
                crc = crc32(view[at : at + count], crc)
                at += count
        if crc != row.crc:
            raise Damaged("its checksum is another")
        return content

    def _set_aside(self, row: Row, error: Exception) -> None:
        """Removes a piece that cannot be read, and all pieces that continue it."""
        if not isinstance(error, FileNotFoundError):  # that was another process, for room
            self._counters.damaged += 1
            self._counters.last_error = f"{row.file}: {error}"
            logger.warning("prefix cache: %s is set aside: %s", row.file, error)
        self._written.discard(row.key)
        with self._trying("setting a piece aside"):
            self._follow()
            for name in self._index.remove(row.key, row.file):
                with suppress(OSError):
                    self._remove([name], evicted=False)
            self._found = self._index.found()

    # --- Turns

    def put_turn(self, key: bytes, content: bytes) -> None:
        """Queues a turn; never waits."""
        if not (self._paused or self._closing) and self._put(_Turn(key, content)):
            self._turns.add(key)

    def turn(self, key: bytes) -> bytes | None:
        """The content of a turn. On the event loop: reads beside what is being written.

        Faults of the index are found, and reported, by the threads that write and read pieces.
        """
        if key in self._turns:
            with suppress(*Failed):
                if self._index.is_there():
                    self._use(key)
                    return self._index.turn(key)
        return None

    def use_turn(self, key: bytes) -> None:
        """Notes that a turn was used."""
        if key in self._turns:
            self._use(key)

    def drop_turn(self, key: bytes) -> None:
        """Queues the removal of a damaged turn; never waits."""
        self._turns.discard(key)
        self._counters.damaged += 1
        self._put(_Turn(key, None))

    # --- All of it

    def clear(self) -> None:
        """Removes everything, also what waits to be written. Blocks."""
        with self._more:
            self._cleared += 1
            self._waiting -= sum(job.nbytes for job in self._queue)
            self._queue.clear()
            self._used = {}
            self._written.clear()
            self._turns.clear()
        with self._changing, self._trying("emptying it"):
            self._follow()
            try:
                self._index.clear()
            except sqlite3.Error:  # a full disk has no room for it
                for path in self._home.glob(f"{NAME}*"):
                    path.unlink()
                self._follow()
            for name in os.listdir(self._home / PIECES):
                if _FILE.fullmatch(name):
                    with suppress(FileNotFoundError):
                        (self._home / PIECES / name).unlink()
            self._found = self._index.found()

    def counters(self) -> Counters:
        """The counters now, without waiting for another thread."""
        found = self._found
        return replace(
            self._counters,
            nbytes=found.nbytes,
            pieces=found.pieces,
            turns=found.turns,
            conversations=found.conversations,
            waiting=self._waiting,
            paused=self._paused,
        )

    def flush(self, patience: float) -> bool:
        """Waits until everything is written, at most ``patience`` seconds; whether it is."""
        until = time.monotonic() + patience
        while (self._waiting or self._used) and time.monotonic() < until:
            time.sleep(0.005)
        return not self._waiting

    def close(self, patience: float = 0.0) -> None:
        """Writes for ``patience`` seconds what still waits, without holding back, and ends."""
        with self._more:
            self._closing = True
            self._more.notify()
        self._writer.join(patience)
        self._reader.shutdown(wait=False)
        if not self._writer.is_alive():
            self._index.close()


def _is_damage(error: Exception) -> bool:
    """Whether SQLite reports a file that is no database, rather than one it cannot get at."""
    return type(error) is sqlite3.DatabaseError
