"""The disk below the prefix cache: writing, reading, eviction, and faults."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from engine_models import IDS, PLACES, PLENTY
from waiting import wait_until

from vllm_mlx_harmony.core.replay import GeneratedTurn
from vllm_mlx_harmony.core.turn import Call, Reasoning
from vllm_mlx_harmony.engine.disk import cache as disks
from vllm_mlx_harmony.engine.disk import identity, index, writer
from vllm_mlx_harmony.engine.disk.cache import DIRECTORY, PIECES, DiskCache, Loaded
from vllm_mlx_harmony.engine.disk.index import Contents
from vllm_mlx_harmony.engine.pieces import (
    WHOLE,
    Piece,
    cut,
    exported,
    imported,
    join,
    windows,
)
from vllm_mlx_harmony.engine.prefix_tree import pack

Open = Callable[..., DiskCache]
ROOT = b"a root"


def offer_arguments(pieces: list[Piece], places: list[int] = PLACES) -> Any:
    """The last two arguments of ``offer``."""
    return list(zip(places, pieces, strict=False)), exported


def write(disk: DiskCache, pieces: list[Piece], root: bytes = ROOT, ids: list[int] = IDS) -> None:
    places = PLACES[: len(pieces)]
    disk.offer(root, pack(ids[: places[-1]]), *offer_arguments(pieces, places))
    assert disk.flush(10)


def load(
    disk: DiskCache, known: int = 0, root: bytes = ROOT, ids: Sequence[int] = (*IDS, 1)
) -> tuple[Loaded, ...]:
    rows = disk.chain([root], pack(ids))
    return asyncio.run(disk.load(rows, lambda: known))


def fetch(
    disk: DiskCache, known: int = 0, root: bytes = ROOT, ids: Sequence[int] = (*IDS, 1)
) -> list[tuple[int, int]]:
    return [(piece.start, piece.end) for piece in load(disk, known, root, ids)]


def reach(disk: DiskCache, root: bytes, ids: Sequence[int]) -> int:
    return max((row.end for row in disk.chain([root], pack(ids))), default=0)


ALL = [(0, 150), (150, 400), (400, 600)]


def same(piece: Piece, other: Piece) -> bool:
    return piece.parts.keys() == other.parts.keys() and all(
        part.dtype == other.parts[window].dtype and mx.array_equal(part, other.parts[window])
        for window, part in piece.parts.items()
    )


def files(disk: DiskCache) -> list[Path]:
    """The files of pieces, oldest first."""
    paths = (disk.directory / DIRECTORY / PIECES).glob("*.safetensors")
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


# --- Writing and reading


@pytest.mark.nightly
def test_written_pieces_are_read_by_another_process(open_disk: Open, pieces: list[Piece]) -> None:
    write(open_disk(), pieces)
    again = open_disk()
    read = load(again)
    assert [(piece.start, piece.end) for piece in read] == ALL
    for loaded, piece in zip(read, pieces, strict=True):
        assert same(imported(loaded, loaded.start, loaded.end), piece)
    counters = again.counters()
    assert (counters.hits, counters.misses, counters.tokens_read) == (1, 0, 600)
    assert counters.bytes_read == counters.nbytes == sum(map(os.path.getsize, files(again)))
    assert (counters.pieces, counters.conversations) == (3, 1)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_files_are_safetensors_of_any_dtype(
    disk: DiskCache, pieces: list[Piece], dtype: Any
) -> None:
    original = pieces[0]
    piece = Piece(
        original.tokens, {window: part.astype(dtype) for window, part in original.parts.items()}
    )
    mx.eval(list(piece.parts.values()))
    write(disk, [piece])
    (path,) = files(disk)
    loaded = mx.load(str(path))
    expected = {"whole": dtype, "window.128": dtype}
    assert {name: part.dtype for name, part in loaded.items()} == expected
    assert mx.array_equal(loaded["whole"], piece.parts[WHOLE])
    assert same(imported(Loaded(0, original.tokens, path.read_bytes()), 0, original.tokens), piece)


def test_files_are_private(disk: DiskCache, pieces: list[Piece]) -> None:
    write(disk, pieces)
    disk.put(b"k", TURN)
    assert disk.flush(10)
    paths = list((disk.directory / DIRECTORY).rglob("*"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()}
    assert modes == {0o600} and len(paths) > 4
    directories = [disk.directory, disk.directory / DIRECTORY, disk.directory / DIRECTORY / PIECES]
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}


@pytest.mark.parametrize(
    ("known", "expected"), [(0, ALL), (150, ALL[1:]), (200, ALL[1:]), (599, ALL[2:]), (600, [])]
)
def test_only_pieces_missing_from_memory_are_read(
    disk: DiskCache, pieces: list[Piece], known: int, expected: list[tuple[int, int]]
) -> None:
    write(disk, pieces)
    assert fetch(disk, known) == expected
    assert (disk.counters().hits, disk.counters().misses) == ((1, 0) if expected else (0, 1))
    assert fetch(disk, ids=[7, *IDS]) == []  # begins differently
    assert disk.counters().misses == (1 if expected else 2)


@pytest.mark.parametrize("count", range(4))
def test_read_pieces_fit_buffer(open_disk: Open, pieces: list[Piece], count: int) -> None:
    disk = open_disk()
    write(disk, pieces)
    sizes = [row.size for row in disk.chain([ROOT], pack((*IDS, 1)))]
    assert fetch(open_disk(buffer=sum(sizes[:count]) + 1)) == ALL[:count]


def test_several_event_loops_read_same_pieces(disk: DiskCache, pieces: list[Piece]) -> None:
    """The second starts to load while the first is reading."""
    write(disk, pieces)
    rows = disk.chain([ROOT], pack((*IDS, 1)))
    reading, may_go_on = threading.Event(), threading.Event()

    def known() -> int:
        reading.set()
        assert may_go_on.wait(10)
        return 0

    async def first() -> tuple[Loaded, ...]:
        return await asyncio.wait_for(disk.load(rows, known), 10)

    async def second() -> tuple[Loaded, ...]:
        assert await asyncio.to_thread(reading.wait, 5)
        task = asyncio.ensure_future(disk.load(rows, known))
        await asyncio.sleep(0)
        may_go_on.set()
        return await asyncio.wait_for(task, 5)

    with ThreadPoolExecutor(2) as threads:
        futures = threads.submit(asyncio.run, first()), threads.submit(asyncio.run, second())
        for future in futures:
            assert [(piece.start, piece.end) for piece in future.result()] == ALL


def test_last_id_is_never_matched(disk: DiskCache, pieces: list[Piece]) -> None:
    write(disk, pieces)
    assert fetch(disk, ids=IDS) == ALL[:2]
    assert (reach(disk, ROOT, IDS), reach(disk, ROOT, [*IDS, 1])) == (400, 600)


def test_longer_of_two_cuts_is_found(disk: DiskCache, model: Any, pieces: list[Piece]) -> None:
    write(disk, pieces[:1])
    longer = join(model, pieces[:2])
    disk.offer(ROOT, pack(IDS[:400]), *offer_arguments([cut(longer, 0, 400)], [400]))
    assert disk.flush(10)
    assert fetch(disk) == [(0, 400)]


def test_pieces_are_written_once(open_disk: Open, pieces: list[Piece]) -> None:
    disk, other = open_disk(), open_disk()
    for cache in (disk, disk, other):
        write(cache, pieces)
    assert len(files(disk)) == 3
    assert (disk.counters().pieces_written, other.counters().pieces_written) == (3, 0)


# --- Owners


@pytest.mark.parametrize("field", ["weights_digest", "layout", "tenant"])
def test_pieces_of_another_root_are_not_found(
    disk: DiskCache, pieces: list[Piece], field: str
) -> None:
    fields = {"weights_digest": b"w", "layout": b"l", "tenant": "alice"}
    write(disk, pieces, identity.root(**fields))
    assert fetch(disk, root=identity.root(**fields)) == ALL
    other = {**fields, field: type(fields[field])(fields[field] * 2)}
    assert fetch(disk, root=identity.root(**other)) == []


def test_pieces_of_old_digest_are_ignored_and_evicted_first(
    open_disk: Open, model: Any, pieces: list[Piece], tiny: Path
) -> None:
    """Earlier versions digested only names, sizes and times."""
    (path,) = tiny.glob("*.safetensors")
    state = path.stat()
    names = [f"{path.name} {state.st_size} {state.st_mtime_ns}".encode()]
    earlier = index.key_of((tiny / "config.json").read_bytes(), *names)
    now = identity.of_weights(str(tiny))
    assert now is not None and now != earlier
    layout = identity.of_layout("Model", windows(model) or ())
    old, new = (identity.root(digest, layout, "") for digest in (earlier, now))
    disk = open_disk()
    write(disk, pieces, old)
    disk.put(b"k", TURN)
    assert disk.flush(10)
    nbytes = disk.counters().nbytes
    disk.close(1.0)
    again = open_disk(budget=nbytes + 1000)
    assert fetch(again, root=new) == [] and again.find([b"k"]) == [TURN]
    write(again, pieces, new)
    assert fetch(again, root=new) == ALL and again.find([b"k"]) == [TURN]
    assert reach(again, old, [*IDS, 1]) < 600
    assert again.counters().damaged == 0


# --- Budgets


def test_least_recently_used_ends_are_evicted_first(open_disk: Open, pieces: list[Piece]) -> None:
    disk = open_disk()
    write(disk, pieces)
    conversation = disk.counters().nbytes
    other = [*IDS[:150], *range(5000, 5450)]
    write(disk, pieces, ids=other)  # shares the first piece
    total = disk.counters().nbytes
    assert len(files(disk)) == 5
    assert fetch(disk) == ALL and disk.flush(10)  # used last
    small = open_disk(budget=total)
    small.offer(ROOT, pack(list(range(7000, 7150))), *offer_arguments(pieces[:1], [150]))
    assert small.flush(10) and small.counters().evictions == 1
    assert reach(small, ROOT, [*other, 1]) == 400
    smaller = open_disk(budget=conversation + 2 * pieces[0].nbytes + 2000)
    smaller.offer(ROOT, pack(list(range(8000, 8150))), *offer_arguments(pieces[:1], [150]))
    assert smaller.flush(10)
    assert fetch(smaller) == ALL  # its first piece is shared
    assert reach(smaller, ROOT, [*other, 1]) == 150
    assert smaller.counters().nbytes <= smaller.budget
    assert sum(map(os.path.getsize, files(smaller))) == smaller.counters().nbytes


def test_pieces_beyond_budget_are_not_written(open_disk: Open, pieces: list[Piece]) -> None:
    disk = open_disk(budget=pieces[0].nbytes + pieces[1].nbytes + 10_000)
    write(disk, pieces)
    assert fetch(disk) == ALL[:2]
    assert disk.counters().evictions == 0


def test_pieces_beyond_write_buffer_are_dropped(open_disk: Open, pieces: list[Piece]) -> None:
    disk = open_disk(buffer=pieces[0].nbytes + pieces[1].nbytes - 1)
    with disk._changing:  # the writer waits
        disk.offer(ROOT, pack(IDS), *offer_arguments(pieces))
    assert disk.flush(10) and disk.counters().dropped == 1
    assert fetch(disk) == ALL[:1]
    for _ in range(2):  # what was dropped is offered again
        write(disk, pieces)
    assert fetch(open_disk()) == ALL


def test_use_before_write_is_recorded(open_disk: Open, pieces: list[Piece]) -> None:
    """Uses that wait are recorded together, before jobs that were queued later."""
    disk = open_disk()
    write(disk, pieces[:1])
    with disk._changing:  # the writer waits
        disk.offer(ROOT, pack(IDS[:150]), *offer_arguments(pieces[:1], PLACES[:1]))
        disk.offer(ROOT, pack(IDS), *offer_arguments(pieces))
    assert disk.flush(10)
    assert len(disk._written) == 3  # no piece is offered twice
    assert fetch(disk) == ALL


def test_turns_stay_within_budget(open_disk: Open) -> None:
    nbytes = len(TURN.to_bytes())
    disk = open_disk(budget=10 * nbytes)
    for n in range(20):
        disk.put(b"%d" % n, TURN)
        assert disk.flush(10)
        disk.use(b"0")
        assert disk.flush(10)
    assert disk.find([b"0", b"19", b"1"]) == [TURN, TURN, None]
    assert disk.counters().turns == 10 and disk.counters().nbytes == 10 * nbytes


def test_writes_are_throttled_while_engine_computes(
    open_disk: Open, pieces: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(writer, "time", Clock(slept))
    for busy in (False, True):
        disk = open_disk()
        disk.clear()
        slept.clear()
        if busy:
            with disk.writing_slowly():
                write(disk, pieces[:1])
        else:
            write(disk, pieces[:1])
        spent = disk.counters().write_seconds
        assert sum(slept) == pytest.approx(spent / writer.WRITE_DUTY_CYCLE if busy else 0.0)


class Clock:
    """The module ``time``, whose ``sleep`` only records the seconds."""

    def __init__(self, slept: list[float]) -> None:
        self._slept = slept

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        self._slept.append(seconds)


def test_clear_removes_pieces_and_turns(disk: DiskCache, pieces: list[Piece]) -> None:
    write(disk, pieces)
    disk.put(b"k", TURN)
    assert disk.flush(10)
    with disk.writing_slowly():
        disk.offer(b"other", pack(IDS), *offer_arguments(pieces))
        disk.clear()
    assert disk.flush(10)
    assert files(disk) == [] and fetch(disk) == [] and disk.find([b"k"]) == [None]
    assert disk.counters().nbytes == disk.counters().pieces == disk.counters().turns == 0
    assert b"of a client" in TURN.to_bytes()
    stored = b"".join(p.read_bytes() for p in (disk.directory / DIRECTORY).iterdir() if p.is_file())
    assert b"of a client" not in stored
    write(disk, pieces)
    assert fetch(disk) == ALL


# --- Faults


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def foreign(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("fault", [cut_short, flipped, foreign, empty, a_directory, a_link, gone])
def test_altered_piece_is_set_aside(
    disk: DiskCache,
    pieces: list[Piece],
    fault: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(disk, pieces)
    fault(files(disk)[1])
    with caplog.at_level(logging.WARNING):
        assert fetch(disk) == ALL[:1]
        assert fetch(disk) == ALL[:1]
    damaged = fault is not gone  # another process may have evicted it
    assert len(caplog.records) == disk.counters().damaged == damaged
    assert bool(disk.counters().last_error) == damaged
    write(disk, pieces)
    assert fetch(disk) == ALL


def test_piece_evicted_by_another_process_is_not_damaged(
    open_disk: Open,
    pieces: list[Piece],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files that the other process writes anew are not removed with the old row."""
    disk, other = open_disk(), open_disk()
    write(disk, pieces)
    reading = disk._read

    def late(row: index.Row) -> Loaded | None:
        monkeypatch.undo()
        other.clear()
        write(other, pieces)
        return reading(row)

    monkeypatch.setattr(disk, "_read", late)
    with caplog.at_level(logging.WARNING):
        assert fetch(disk) == []
        assert fetch(disk) == ALL
    assert caplog.records == [] and disk.counters().damaged == 0
    assert not disk.counters().last_error and len(files(disk)) == 3


@pytest.mark.parametrize(
    ("code", "damaged"),
    [(errno.EACCES, False), (errno.EMFILE, False), (errno.ENOMEM, False), (errno.EIO, True)],
)
def test_temporarily_unreadable_file_is_kept(
    disk: DiskCache,
    pieces: list[Piece],
    code: int,
    damaged: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated, since root may read any file. Only EIO is permanent: the block is damaged."""
    write(disk, pieces)
    (*_, unreadable), real = files(disk), os.open

    def refusing(path: Any, flags: int, *more: Any) -> int:
        if Path(path) == unreadable and not flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *more)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "open", refusing)
        for _ in range(2):
            assert fetch(disk) == ALL[:2]
    assert len(caplog.records) == 1 and os.strerror(code) in disk.counters().last_error
    assert (disk.counters().damaged, unreadable.exists()) == (damaged, not damaged)
    if damaged:
        write(disk, pieces)
    assert fetch(disk) == ALL


def test_failing_operation_is_logged_until_it_works(
    disk: DiskCache,
    pieces: list[Piece],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A successful read is logged, too: a server may never write a piece."""
    write(disk, pieces)

    def unreadable(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(disks, "verified", unreadable)
                for _ in range(2):
                    assert fetch(disk) == []
            assert fetch(disk) == ALL
        Broken(monkeypatch, errno.ENOSPC)
        write(disk, pieces, root=b"another")
    failed, works = (
        f"prefix cache: reading in {disk.directory} failed: [Errno 5] Input/output error",
        f"prefix cache: reading in {disk.directory} works again",
    )
    *read, written = [record.message for record in caplog.records]
    assert read == [failed, works] * 2
    assert written.startswith(f"prefix cache: writing in {disk.directory} failed: ")


class Broken:
    """Fails every write with one error, as a full or read-only disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.broken, self._real, self._code = True, os.fdopen, code
        monkeypatch.setattr(os, "fdopen", self)

    def __call__(self, opened: int, mode: str = "r", *more: Any, **others: Any) -> Any:
        if self.broken and "w" in mode:
            os.close(opened)
            raise OSError(self._code, os.strerror(self._code))
        return self._real(opened, mode, *more, **others)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_failing_disk_is_logged_once_and_retried(
    disk: DiskCache,
    pieces: list[Piece],
    code: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(disk, pieces[:1])
    faulty = Broken(monkeypatch, code)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            write(disk, pieces)
            assert 0 < disk._paused_until - time.monotonic() <= disks.PAUSE
            disk._paused_until = 0.0  # as after `PAUSE`
        assert fetch(disk) == ALL[:1]  # existing pieces are read
        assert len(caplog.records) == 1 and os.strerror(code) in caplog.text
        assert os.strerror(code) in disk.counters().last_error
        assert len(files(disk)) == 1
        faulty.broken = False
        write(disk, pieces)
        assert "again" in caplog.records[-1].message and len(caplog.records) == 2
    assert fetch(disk) == ALL


def test_daily_write_budget_is_shared_by_processes(
    open_disk: Open, pieces: list[Piece], caplog: pytest.LogCaptureFixture
) -> None:
    """By this process, others and later ones. Existing pieces are still read."""
    disk = open_disk(per_day=pieces[0].nbytes)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            write(disk, pieces)
            disk.put(b"k", TURN)
            assert disk.flush(10)
        later = open_disk(per_day=pieces[0].nbytes)
        write(later, pieces)
    assert [record.message.count("until midnight") for record in caplog.records] == [1, 1]
    for cache in (disk, later):
        assert fetch(cache) == ALL[:1] and cache.find([b"k"]) == [None] and cache.counters().paused
    written = sum(path.stat().st_size for path in files(disk))
    assert disk.counters().written_today == disk.counters().bytes_written == written
    disk.clear()
    write(disk, pieces)
    assert files(disk) == [], "emptying it does not undo what was written"
    yesterday = "UPDATE written SET day = date(day, '-1 day')"
    with closing(sqlite3.connect(disk.directory / DIRECTORY / index.NAME)) as file, file:
        file.execute(yesterday)
    unlimited = open_disk()
    write(unlimited, pieces[:2])
    assert fetch(unlimited) == ALL[:2]
    disk.put(b"k", TURN)
    assert disk.flush(10) and disk.find([b"k"]) == [None], "the other has used up the new day, too"
    with closing(sqlite3.connect(disk.directory / DIRECTORY / index.NAME)) as file, file:
        file.execute("DELETE FROM written")
    disk.put(b"k", TURN)
    assert disk.flush(10) and disk.find([b"k"]) == [TURN] and not disk.counters().paused


def test_daily_write_budget_is_renewed_at_midnight(
    open_disk: Open, pieces: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as counted by a server that writes nothing after it."""
    disk = open_disk(per_day=1)
    write(disk, pieces)
    assert disk.counters().paused and disk.counters().written_today

    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date.today() + timedelta(days=1)

    monkeypatch.setattr(disks, "date", Tomorrow, raising=False)
    assert not disk.counters().paused and not disk.counters().written_today


def test_refused_piece_does_not_undo_uses(open_disk: Open, pieces: list[Piece]) -> None:
    """When the daily limit is reached, used pieces are still evicted last."""
    write(open_disk(), pieces[:1], root=b"used")
    disk = open_disk(per_day=1)
    write(open_disk(), pieces[:1], root=b"not used")
    with disk._changing:  # the writer waits
        disk.offer(ROOT, pack(IDS[:150]), *offer_arguments(pieces[:1], PLACES[:1]))
        assert reach(disk, b"used", [*IDS, 1]) == 150
        disk.offer(b"used", pack(IDS[:150]), *offer_arguments(pieces[:1], PLACES[:1]))
    assert disk.flush(10)
    assert reach(disk, ROOT, [*IDS, 1]) == 0
    small = open_disk(budget=open_disk().counters().nbytes)
    write(small, pieces[:1], root=b"new")
    lengths = [reach(small, root, [*IDS, 1]) for root in (b"used", b"not used", b"new")]
    assert lengths == [150, 0, 150]


def mount(place: Path, options: str) -> None:
    """Mounts a file system of its own at ``place``."""
    place.mkdir(exist_ok=True)
    assert not os.system(f"mount -t tmpfs -o {options} none {place}")


@pytest.mark.needs("mounts")
def test_read_only_file_system_is_rejected(tmp_path: Path, pieces: list[Piece]) -> None:
    """At the start. For one that becomes read-only at runtime, see above."""
    mount(tmp_path / "ssd", "size=16m")
    try:
        disk = DiskCache(tmp_path / "ssd", PLENTY)
        write(disk, pieces[:1])
        disk.close(1.0)
        assert not os.system(f"mount -o remount,ro {tmp_path / 'ssd'}")
        with pytest.raises(disks.Failed):
            DiskCache(tmp_path / "ssd", PLENTY)
    finally:
        os.system(f"umount -l {tmp_path / 'ssd'}")


@pytest.mark.needs("mounts")
def test_full_file_system_pauses_writes(
    tmp_path: Path, pieces: list[Piece], caplog: pytest.LogCaptureFixture
) -> None:
    """A file system with room for one piece and the log of the index."""
    small = tmp_path / "small"
    mount(small, "size=4m")
    try:
        disk = DiskCache(small, PLENTY)
        write(disk, pieces[:1])
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        (small / "others").write_bytes(b"x" * (free - pieces[1].nbytes // 2))
        with caplog.at_level(logging.WARNING):
            write(disk, pieces)
        assert len(caplog.records) == 1 and disk.counters().paused
        assert fetch(disk) == ALL[:1]
        disk.clear()
        assert files(disk) == [] and fetch(disk) == []
        disk.close(1.0)
    finally:
        os.system(f"umount -l {small}")


@pytest.mark.parametrize("whole", [True, False])
def test_directory_removed_at_runtime_is_recreated(
    disk: DiskCache,
    pieces: list[Piece],
    whole: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the subdirectory is: the configured one may be a mount point."""
    write(disk, pieces)
    shutil.rmtree(disk.directory if whole else disk.directory / DIRECTORY)
    with caplog.at_level(logging.WARNING):
        assert fetch(disk) == []
        for _ in range(3):
            write(disk, pieces)
            disk._paused_until = 0.0  # as after `PAUSE`
        assert fetch(disk) == ([] if whole else ALL)
        messages = [record.message.partition(" in ")[0] for record in caplog.records]
        operations = ["reading the index", "writing"] if whole else []
        assert messages == [f"prefix cache: {operation}" for operation in operations]
        if whole:
            disk.directory.mkdir()
            write(disk, pieces)
            assert fetch(disk) == ALL and disk.directory.is_dir()


def test_removed_pieces_directory_is_recreated(
    disk: DiskCache, pieces: list[Piece], caplog: pytest.LogCaptureFixture
) -> None:
    """Its pieces are computed again; turns are stored elsewhere."""
    write(disk, pieces)
    disk.put(b"k", TURN)
    assert disk.flush(10)
    shutil.rmtree(disk.directory / DIRECTORY / PIECES)
    with caplog.at_level(logging.WARNING):
        assert fetch(disk) == [] and disk.find([b"k"]) == [TURN]
        write(disk, pieces)
        assert fetch(disk) == ALL
    assert caplog.records == [] and disk.counters().pieces == 3


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0" + b"\xff" * 5000])
@pytest.mark.parametrize("running", [True, False])
def test_damaged_index_is_set_aside(
    open_disk: Open,
    pieces: list[Piece],
    content: bytes,
    running: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = open_disk()
    write(disk, pieces)
    path = disk.directory / DIRECTORY / index.NAME
    if not running:
        disk.close(1.0)
    with closing(sqlite3.connect(path)) as other:  # or SQLite would read its log instead
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.write_bytes(content * 3)
    with caplog.at_level(logging.WARNING):
        again = disk if running else open_disk()
        assert fetch(again) == []
        for _ in range(2):
            write(again, pieces)
    assert fetch(again) == ALL
    assert path.with_suffix(".damaged").read_bytes() == content * 3
    messages = [record.message.partition(" in ")[0] for record in caplog.records]
    aside = "prefix cache: the index"
    reading = "prefix cache: reading the index"
    assert messages == ([reading, aside, reading] if running else [aside])


def test_index_of_newer_version_is_rejected(open_disk: Open, pieces: list[Piece]) -> None:
    disk = open_disk()
    write(disk, pieces)
    path = disk.directory / DIRECTORY / index.NAME
    disk.close(1.0)
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA user_version={index.VERSION + 1}")
    file.close()
    with pytest.raises(sqlite3.DatabaseError, match="newer vllm-mlx-harmony"):
        open_disk()
    assert len(files(disk)) == 3


def test_start_does_not_write_to_existing_index(open_disk: Open, pieces: list[Piece]) -> None:
    """The disk may be too full to write. Here, another process holds a write transaction."""
    disk = open_disk()
    write(disk, pieces)
    path = disk.directory / DIRECTORY / index.NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        log = path.with_name(f"{index.NAME}-wal").stat().st_size
        again = open_disk()
        assert reach(again, ROOT, [*IDS, 1]) == 600
        assert path.with_name(f"{index.NAME}-wal").stat().st_size == log
        other.execute("ROLLBACK")


def test_index_of_older_version_is_replaced(open_disk: Open, pieces: list[Piece]) -> None:
    disk = open_disk()
    write(disk, pieces)
    disk.put(b"k", TURN)
    assert disk.flush(10)
    path = disk.directory / DIRECTORY / index.NAME
    disk.close(1.0)
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version=0")
    file.close()
    again = open_disk()
    assert fetch(again) == [] and again.find([b"k"]) == [TURN]
    write(again, pieces)
    assert fetch(again) == ALL


def test_old_unknown_files_are_swept(open_disk: Open, pieces: list[Piece]) -> None:
    disk = open_disk()
    write(disk, pieces[:1])
    place = disk.directory / DIRECTORY / PIECES
    old, new = (place / f"{letter * 32}-00000000.safetensors" for letter in "ab")
    foreign = place / "notes.txt"
    for path in (old, new, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign, files(disk)[0]):
        os.utime(path, (0, 0))
    again = open_disk()
    write(again, pieces)
    wait_until(lambda: not old.exists(), "the old file to be removed")
    assert new.exists() and foreign.exists()
    assert len(files(again)) == 4


def test_two_processes_share_directory(open_disk: Open, pieces: list[Piece]) -> None:
    """Each finds what the other wrote, and misses what the other evicted."""
    first, second = open_disk(), open_disk()
    write(first, pieces[:2])
    write(second, pieces)
    assert fetch(first) == fetch(second) == ALL
    first.clear()
    assert fetch(second) == []
    write(second, pieces)
    write(second, pieces)  # by now it knows that the first piece is gone
    assert fetch(first) == ALL


# --- Turns


TURN = GeneratedTurn(
    (Reasoning, Call),
    ((200006, 1, 2), (200006, 3)),
    "content \ud83d of a client",
    (Call("call_1", "weather", '{"city": "Zürich"}'),),
)


def test_turns_outlive_process(open_disk: Open) -> None:
    disk = open_disk()
    disk.put(b"key", TURN)
    assert disk.flush(10)
    again = open_disk()
    assert again.find([b"key", b"other"]) == [TURN, None]


def test_written_turn_ends_failure(
    disk: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server may write nothing but turns."""
    monkeypatch.setattr(disks, "PAUSE", 0.0)
    with caplog.at_level(logging.WARNING):
        for key in (b"a", b"b"):
            with monkeypatch.context() as patched:
                patched.setattr(disk._index, "put", lambda *_: os.open("", os.O_RDONLY))
                disk.put(key, TURN)
                assert disk.flush(10)
            disk.put(key, TURN)
            assert disk.flush(10)
    assert [" works again" in record.message for record in caplog.records] == [False, True] * 2


def put_damaged(disk: DiskCache, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(TURN.to_bytes())
    content[at] ^= 1
    with monkeypatch.context() as patched:
        patched.setattr(GeneratedTurn, "to_bytes", lambda _: bytes(content))
        disk.put(b"damaged", TURN)


def test_turns_are_read_while_another_process_writes(
    disk: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``find`` runs on the event loop: it must not wait for a writer that takes seconds."""
    disk.put(b"k", TURN)
    put_damaged(disk, 0, monkeypatch)
    assert disk.flush(10)
    other = sqlite3.connect(disk.directory / DIRECTORY / index.NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with closing(other), ThreadPoolExecutor(1) as loop, disk._changing:
        for _ in range(2):
            assert loop.submit(disk.find, [b"k", b"damaged"]).result(5) == [TURN, None]
        assert disk.counters().damaged == 1
        other.execute("ROLLBACK")
    disk.put(b"last", TURN)
    assert disk.flush(10) and disk.counters().turns == 2


@pytest.mark.parametrize(
    ("query", "slow", "result"),
    [
        ("contents", "SELECT slow(), 0, 0, 0", Contents(1)),
        ("files", "SELECT slow()", {1}),
        ("turns", "SELECT zeroblob(slow())", {b"\0"}),
    ],
)
def test_turns_are_read_during_full_scan(
    disk: DiskCache, query: str, slow: str, result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``find`` runs on the event loop: it must not wait for a scan that takes a second."""
    disk.put(b"k", TURN)
    assert disk.flush(10)
    reading, may_end = threading.Event(), threading.Event()

    def wait() -> int:
        reading.set()
        return int(may_end.wait(10))

    for connection in (disk._index.connection, disk._index.reader):
        connection.create_function("slow", 0, wait)
    monkeypatch.setattr(index, f"_SELECT_{query.upper()}", slow)
    with ThreadPoolExecutor(2) as threads:
        contents = threads.submit(getattr(disk._index, query))
        assert reading.wait(5)
        try:
            assert threads.submit(disk.find, [b"k"]).result(5) == [TURN]
        finally:
            may_end.set()
        assert contents.result(5) == result


@pytest.mark.parametrize("kind", ["piece", "turn"])
def test_failed_write_is_retried_when_offered_again(
    disk: DiskCache, pieces: list[Piece], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the writer is quicker than the thread that queues the job."""
    put = disk._writer.queue.put

    def put_and_wait(job: Any) -> None:
        put(job)
        disk.flush(10)

    def full(*_: object) -> list[str]:
        raise sqlite3.OperationalError("disk is full")

    def offer() -> None:
        if kind == "piece":
            write(disk, pieces[:1])
        else:
            disk.put(b"k", TURN)

    monkeypatch.setattr(disk._writer.queue, "put", put_and_wait)
    monkeypatch.setattr(disks, "PAUSE", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(index.Index, "add" if kind == "piece" else "put", full)
        offer()
    assert not disk._written and not disk._turns
    offer()
    assert disk.counters().pieces + disk.counters().turns == 1


@pytest.mark.parametrize("at", [0, 5, 20, -1])
def test_damaged_turn_is_dropped(disk: DiskCache, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put_damaged(disk, at, monkeypatch)
    assert disk.flush(10)
    for _ in range(2):
        assert disk.find([b"damaged"]) == [None] and disk.counters().damaged == 1
    assert disk.flush(10) and disk.counters().turns == 0
