"""The prefix cache on disk: what outlives the process, its crash, and the model's unloading.

Who does what, and on which thread:

- The engine's thread hands over pieces (`Disk.offer`): keys and where their bytes are, no copies.
- A thread of its own writes them, one at a time. While an engine computes it takes ``SHARE`` of a
  processor's time, and so as much of the disk as it gets done in that; else it writes on.
- Another thread reads (`Disk.fetch`), before the engine's turn: it checks every byte and leaves
  them in plain memory. The engine's thread only copies them to where the model wants them. What is
  read while an engine has no place for it is bounded: then the next prompt waits to be read.
- The event loop waits for none of it. It reads turns, which are rows, beside what is being written.

**Nothing here may fail a request.** A file that is not what was written is removed, with what goes
on from it, and computed again. When the disk fails as a whole (full, read-only, gone), that is said
once, and for ``PAUSE`` seconds nothing is tried; what is in memory goes on as without a disk.

**At any moment the process may end.** A file is written first, then its row, in one transaction; a
file without a row is nobody's, and swept by a later process. What was in the queue is lost.

Several processes may share the directory: SQLite orders their transactions, a file's name is its
writer's alone, and a file that another process has removed is a piece that is not known.

Knows the directory, threads and time. Refuses to know mlx (`layers`), and what makes a piece valid
(`identity`).
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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary
from zlib import crc32

from vllm_mlx_harmony.host.kv.files import SLICE, Damaged, Tensors, decoded, encoded
from vllm_mlx_harmony.host.kv.index import NAME, Found, Index, Row, below
from vllm_mlx_harmony.host.kv.tree import WIDTH

logger = logging.getLogger("vllm_mlx_harmony")

DIRECTORY = "vllm-mlx-harmony"
"""Below the directory that was named: others may have theirs beside it, as vllm-mlx does."""

PIECES = "pieces"

SHARE = 0.02
"""Part of a processor's time that writing takes while an engine computes."""

LINGER = 0.1
"""Seconds after a step of an engine in which another is expected."""

PAUSE = 30.0
"""Seconds in which nothing is tried after the disk has failed."""

RETRY = 0.05
"""Seconds after which it is looked again whether what was read for others has had its turn."""

ABANDONED = 600.0
"""Seconds after which a file without a row is nobody's: another process may be writing it."""

WRITING = "writing"

_OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.safetensors")

_T = TypeVar("_T")

_Used: TypeAlias = tuple[dict[bytes, None], dict[bytes, None]]
"""Keys of pieces and of turns that were used, in this order."""

Failed = (OSError, sqlite3.Error)


@dataclass(frozen=True, slots=True)
class Root:
    """What sequences of one tenant begin with: ``key`` stands for all that makes a piece valid.

    ``model`` is a digest of the weights alone.
    """

    key: bytes
    model: bytes


@dataclass(frozen=True, slots=True)
class Offered:
    """A piece that is in memory: up to ``end`` ids, ``nbytes`` bytes. ``export`` says where."""

    end: int
    nbytes: int
    export: Callable[[], Tensors]


@dataclass(frozen=True, eq=False)  # without slots: it is referred to weakly
class Fetched:
    """A piece that was read: the ids from ``start`` to ``end``."""

    start: int
    end: int
    tensors: Tensors

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Counters:
    """What the disk did for this process. Bytes and pieces are what is there now, of everybody.

    ``hits`` and ``misses`` are prompts of which more, or no more, than in memory was there;
    ``dropped`` pieces were not written because the disk did not keep up; ``damaged`` ones were
    not what was written. Seconds are those of reading and writing, without waiting.
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


class Pace:
    """Whether an engine computes, so that others hold back. Any thread may ask or tell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._computing = 0
        self._ended = 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While an engine does."""
        with self._lock:
            self._computing += 1
        try:
            yield
        finally:
            with self._lock:
                self._computing -= 1
                self._ended = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether one does, or will in a moment."""
        return self._computing > 0 or time.monotonic() - self._ended < LINGER


class _Trying:
    """A block that the disk may end early: ``fail`` is told, and what follows it goes on."""

    def __init__(self, fail: Callable[[str, Exception], None], what: str) -> None:
        self._fail, self._what = fail, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Failed):
            self._fail(self._what, error)
            return True
        return False


class Disk:
    """Pieces and turns in ``directory``, no more than ``budget`` bytes of them.

    Raises ``OSError`` and ``sqlite3.Error`` when there can be none. No other call does.
    """

    def __init__(self, directory: Path, budget: int, patience: int = 1 << 30) -> None:
        """``patience``: bytes that may wait to be written, and, having been read, for a turn."""
        self.directory, self.budget = directory, budget
        self.pace = Pace()
        self._home = directory / DIRECTORY
        self._patience = patience
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTED, 0)
        self._last_error = ""
        self._failing = False
        self._paused_until = 0.0
        self._queue: deque[_Piece | _Turn] = deque()
        self._waiting = 0
        self._there: set[bytes] = set()
        """Keys of pieces that are on the disk or on their way, as far as this process knows. When
        it turns out that another has removed some, all are offered, and looked for, again."""
        self._turns: set[bytes] = set()
        self._used: _Used = ({}, {})
        self._more = threading.Condition()
        """Of what the engines' threads change, too: held for no longer than that takes."""
        self._changing = threading.RLock()
        """Of which index it is, and of whether it is being emptied."""
        self._cleared = 0
        self._closing = False
        self._hurry = False
        self._recent: WeakValueDictionary[bytes, Fetched] = WeakValueDictionary()
        """What was read and somebody still has."""
        self._line = asyncio.Lock()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._index = self._opened()
        self._found = self._index.found()
        self._reader = ThreadPoolExecutor(1, "prefix-cache-reader")
        self._writer = threading.Thread(target=self._write_on, name="prefix-cache-writer")
        self._writer.daemon = True
        self._writer.start()

    def _opened(self) -> Index:
        """The index, in a directory that is made if need be, but not the one that was named."""
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
        self._there.clear()
        self._turns = index.turns()
        return index

    def _set_index_aside(self, error: Exception) -> None:
        """What it knew is lost: the files are swept. One that is damaged is kept for a look."""
        logger.warning("prefix cache: the index in %s is set aside: %s", self._home, error)
        self._counts["damaged"] += 1
        path = self._home / NAME
        path.rename(path.with_suffix(".damaged"))
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    # --- Faults

    def _trying(self, what: str) -> _Trying:
        """What the disk raises is said once, and nothing written for a while."""
        return _Trying(self._fail, what)

    def _fail(self, what: str, error: Exception) -> None:
        self._last_error = f"{what}: {error}"
        self._there.clear()
        if what == WRITING:
            self._paused_until = time.monotonic() + PAUSE
        if not self._failing:
            self._failing = True
            logger.warning(
                "prefix cache: %s failed (%s: %s); it stays in memory until that is over",
                *(self.directory, what, error),
            )
        if _is_damage(error):
            with suppress(*Failed), self._changing:
                self._index.close()
                self._set_index_aside(error)  # and the next that comes begins anew
                self._paused_until = 0.0

    @property
    def _paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _follow(self) -> None:
        """Begins anew when the index is not there any more, or another. Raises ``Failed``."""
        with self._changing:
            if self._index.is_there():
                if not (self._home / PIECES).is_dir():
                    (self._home / PIECES).mkdir(exist_ok=True, mode=0o700)
                    self._index.remove_pieces()
                    self._there.clear()
                return
            if not self.directory.is_dir():
                raise FileNotFoundError(f"{self.directory} is gone")
            self._index.close()
            self._index = self._opened()

    # --- Writing

    def offer(self, root: Root, sequence: bytes, pieces: Sequence[Offered]) -> None:
        """Has written what is not yet; the others are used. On the engine's thread; never waits.

        ``pieces`` are all those that ``sequence`` (packed) is made of, first to last. None is
        written of which those before it are not, and none that would not fit together with them.
        """
        if self._paused or self._closing:
            return
        ids = memoryview(sequence)
        key, start, nbytes, last = root.key, 0, 0, None
        for piece in pieces:
            parent, key = key, below(key, ids[start * WIDTH : piece.end * WIDTH])
            nbytes += piece.nbytes
            if nbytes > self.budget:
                break
            if key not in self._there:
                name = f"{key.hex()}-{secrets.token_hex(4)}.safetensors"
                row = Row(key, parent, root.model, piece.end - start, start, name, 0, 0)
                if not self._put(_Piece(row, piece.export(), piece.nbytes), piece.nbytes):
                    self._counts["dropped"] += 1
                    break
                self._there.add(key)
            start, last = piece.end, key
        if last is not None:
            self._use(0, last)

    def _put(self, job: _Piece | _Turn, nbytes: int) -> bool:
        with self._more:
            if self._waiting + nbytes > self._patience:
                return False
            self._queue.append(job)
            self._waiting += nbytes
            self._more.notify()
            return True

    def _use(self, kind: int, key: bytes) -> None:
        with self._more:
            self._used[kind][key] = None
            self._more.notify()

    def _write_on(self) -> None:
        swept = False
        while True:
            with self._more:
                while not (self._queue or any(self._used) or self._closing):
                    self._more.wait()
                if self._closing and not self._queue:
                    return
                job = self._queue.popleft() if self._queue else None
                used: _Used = ({}, {})
                if job is None:  # what is used may be on its way
                    used, self._used = self._used, used
                cleared = self._cleared
            try:
                self._write_one(job, used, cleared)
            except Exception:
                logger.exception("the prefix cache on disk failed")
            finally:
                with self._more:
                    self._waiting -= 0 if job is None else _size(job)
                job = None  # what it holds is memory of the engine's
            if not swept:  # not at the start, which everybody waits for
                swept = True
                with suppress(*Failed):
                    self._sweep()

    def _write_one(
        self,
        job: _Piece | _Turn | None,
        used: _Used,
        cleared: int,
    ) -> None:
        if self._paused:
            self._drop(job)
            return
        with self._trying(WRITING):
            self._follow()
            if any(used) and not self._index.touch(*used):
                self._there.clear()
            if isinstance(job, _Turn):
                with self._changing:
                    if job.content is None:
                        self._index.remove_turn(job.key)
                    elif cleared == self._cleared:
                        content = job.content
                        self._remove(self._index.put(job.key, content, len(content), self.budget))
            elif job is not None:
                self._write(job, cleared)
            self._found = self._index.found()
            return
        self._drop(job)

    def _drop(self, job: _Piece | _Turn | None) -> None:
        if isinstance(job, _Piece):
            self._there.discard(job.row.key)
            self._counts["dropped"] += 1
        elif isinstance(job, _Turn):
            self._turns.discard(job.key)

    def _write(self, piece: _Piece, cleared: int) -> None:
        row = piece.row
        if self._index.has(row.key):  # another process was quicker
            return
        if row.start and not self._index.has(row.parent):
            self._there.clear()
            return
        path = self._home / PIECES / row.file
        try:
            size, crc = self._written(path, piece.tensors, row)
            row = replace(row, size=size, crc=crc)
            with self._changing:  # nothing that was cleared comes back
                gone = self._index.add(row, self.budget) if cleared == self._cleared else None
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        if gone is None:
            self._there.discard(row.key)
            with suppress(OSError):
                path.unlink()
            return
        if self._failing:
            self._failing = False
            logger.warning("prefix cache: %s can be used again", self.directory)
        self._counts["pieces_written"] += 1
        self._counts["bytes_written"] += size
        self._remove(gone)

    def _written(self, path: Path, tensors: Tensors, row: Row) -> tuple[int, int]:
        """Bytes and checksum of a new file, written as fast as the engines let it."""
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
                self._counts["write_seconds"] += spent
                size += part.nbytes
                if self.pace.busy and not self._hurry:
                    time.sleep(min(spent / SHARE, 1.0))
        return size, crc

    def _remove(self, names: Sequence[str]) -> None:
        """Removes files whose rows are gone."""
        self._counts["evictions"] += len(names)
        for name in names:
            self._there.discard(bytes.fromhex(name.partition("-")[0]))
            with suppress(FileNotFoundError):
                (self._home / PIECES / name).unlink()

    def _sweep(self) -> None:
        """Removes files that a process has left behind when it ended."""
        known = self._index.files()
        since = time.time() - ABANDONED
        with os.scandir(self._home / PIECES) as entries:
            for entry in entries:
                nobodys = _OURS.fullmatch(entry.name) and entry.name not in known
                if nobodys and entry.stat(follow_symlinks=False).st_mtime < since:
                    os.unlink(entry.path)

    # --- Reading

    @property
    def unused(self) -> int:
        """Bytes that were read and wait for the turn of their prompts."""
        pieces = (reference() for reference in self._recent.valuerefs())
        return sum(piece.nbytes for piece in pieces if piece is not None)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """To read in, one prompt after another, once no more is ``unused`` than may be.

        With the last prompt it may become more, by that one.
        """
        async with self._line:
            while self.unused > self._patience:
                await asyncio.sleep(RETRY)
            yield

    async def in_reader(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """``function`` of ``arguments`` on the thread that reads, one call after another."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, function, *arguments)

    def reach(self, roots: Sequence[Root], sequence: bytes) -> int:
        """How many ids of ``sequence`` `fetch` would find, its last one never. May block."""
        chain = self._chain(roots, sequence)
        return chain[-1].end if chain else 0

    def fetch(
        self,
        roots: Sequence[Root],
        sequence: bytes,
        known: int,
        fits: Callable[[int, Tensors], bool],
    ) -> tuple[Fetched, ...]:
        """The pieces of ``sequence`` that go on behind its ``known`` ids, first to last. May block.

        The first may begin before that. ``fits`` says whether tensors are of so many ids of the
        model. Of several roots, the one that leads furthest counts.
        """
        chain = self._chain(roots, sequence)
        found: list[Fetched] = []
        for row in chain:
            if row.end > known:
                piece = self._piece(row, fits)
                if piece is None:
                    break
                found.append(piece)
        self._counts["hits" if found else "misses"] += 1
        self._counts["tokens_read"] += sum(piece.end - max(piece.start, known) for piece in found)
        if chain:
            self._use(0, chain[-1].key)
        return tuple(found)

    def _chain(self, roots: Sequence[Root], sequence: bytes) -> tuple[Row, ...]:
        limit = len(sequence) // WIDTH - 1
        with self._trying("reading"):
            self._follow()
            chains = [self._index.chain(root.key, sequence, limit) for root in roots]
            best = max(chains, key=lambda rows: rows[-1].end if rows else 0, default=())
            self._there.update(row.key for row in best)
            return best
        return ()

    def _piece(self, row: Row, fits: Callable[[int, Tensors], bool]) -> Fetched | None:
        read = self._recent.get(row.key)
        if read is None:
            began = time.perf_counter()
            try:
                tensors = decoded(memoryview(self._content(row)))
                if not fits(row.tokens, tensors):
                    raise Damaged(f"not {row.tokens} tokens of this model")
            except (OSError, Damaged) as error:
                self._set_aside(row, error)
                return None
            read = Fetched(row.start, row.end, tensors)
            self._recent[row.key] = read  # prompts that come together are served from one reading
            self._counts["read_seconds"] += time.perf_counter() - began
            self._counts["bytes_read"] += row.size
        return read

    def _content(self, row: Row) -> bytearray:
        """The bytes of a file, checked. Raises ``OSError``, ``Damaged``."""
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
        """Removes a piece that cannot be read, and what goes on from it: to be computed again.

        One whose file is gone is not damaged: another process threw it out after we had its row.
        """
        if not isinstance(error, FileNotFoundError):
            self._counts["damaged"] += 1
            self._last_error = f"{row.file}: {error}"
            logger.warning("prefix cache: %s is set aside: %s", row.file, error)
        self._there.discard(row.key)
        with self._trying("setting a piece aside"):
            self._follow()
            names = self._index.remove(row.key, row.file)
            for name in names:
                self._there.discard(bytes.fromhex(name.partition("-")[0]))
                with suppress(OSError):
                    (self._home / PIECES / name).unlink()
            self._found = self._index.found()

    # --- Turns

    def put_turn(self, key: bytes, content: bytes) -> None:
        """Has a turn written; never waits."""
        if not (self._paused or self._closing) and self._put(_Turn(key, content), len(content)):
            self._turns.add(key)

    def turn(self, key: bytes) -> bytes | None:
        """The content of a turn; a disk is asked only if it is there.

        On the event loop: it reads beside whatever is being written, here or by another process.
        What is wrong with the index, the threads that write and read pieces find out and say.
        """
        if key not in self._turns:
            return None
        with suppress(*Failed):
            if self._index.is_there():
                self._use(1, key)
                return self._index.turn(key)
        return None

    def use_turn(self, key: bytes) -> None:
        """Notes that a turn was used."""
        if key in self._turns:
            self._use(1, key)

    def drop_turn(self, key: bytes) -> None:
        """Has a turn removed that is not what was written; never waits."""
        self._turns.discard(key)
        self._counts["damaged"] += 1
        self._put(_Turn(key, None), 0)

    # --- All of it

    def clear(self) -> None:
        """Removes everything, what waits to be written as well. Blocks."""
        with self._more:
            self._cleared += 1
            self._waiting -= sum(map(_size, self._queue))
            self._queue.clear()
            self._used = {}, {}
            self._there.clear()
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
                if _OURS.fullmatch(name):
                    with suppress(FileNotFoundError):
                        (self._home / PIECES / name).unlink()
            self._found = self._index.found()

    def found(self, model: bytes | None = None) -> Found:
        """What is there, of one model's pieces or of all."""
        with self._trying("reading"):
            self._follow()
            return self._index.found(model)
        return Found()

    def counters(self) -> Counters:
        """A look at the counters, without waiting for anybody."""
        found = self._found
        return Counters(
            directory=str(self.directory),
            budget=self.budget,
            nbytes=found.nbytes,
            pieces=found.pieces,
            turns=found.turns,
            conversations=found.conversations,
            waiting=self._waiting,
            last_error=self._last_error,
            paused=self._paused,
            **self._counts,
        )

    def flush(self, patience: float) -> bool:
        """Waits until everything is written, ``patience`` seconds at most; whether it is."""
        until = time.monotonic() + patience
        while (self._waiting or any(self._used)) and time.monotonic() < until:
            time.sleep(0.005)
        return not self._waiting

    def close(self, patience: float = 0.0) -> None:
        """Writes for ``patience`` seconds what still waits, as fast as it can, and ends."""
        self._hurry = True
        with self._more:
            self._closing = True
            self._more.notify()
        self._writer.join(patience)
        self._reader.shutdown(wait=False)
        if not self._writer.is_alive():
            self._index.close()


_COUNTED = (
    *("hits", "misses", "tokens_read", "bytes_read", "read_seconds"),
    *("pieces_written", "bytes_written", "write_seconds", "evictions", "dropped", "damaged"),
)


def _size(job: _Piece | _Turn) -> int:
    return job.nbytes if isinstance(job, _Piece) else len(job.content or b"")


def _is_damage(error: Exception) -> bool:
    """Whether SQLite says that the file is none of its own, and not that it cannot get at it."""
    return type(error) is sqlite3.DatabaseError
