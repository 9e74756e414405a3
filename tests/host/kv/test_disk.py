"""The disk below the prefix cache: what is written, found again, thrown out; what can go wrong."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import stat
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.utils import load_model

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.replay import GeneratedTurn
from vllm_mlx_harmony.core.serialization import read, written
from vllm_mlx_harmony.core.turn import Answer, Call, Reasoning
from vllm_mlx_harmony.host import doctor
from vllm_mlx_harmony.host.kv import disk as disks
from vllm_mlx_harmony.host.kv import identity, index, opening, prefix
from vllm_mlx_harmony.host.kv.disk import DIRECTORY, PIECES, Disk, Offered, Root
from vllm_mlx_harmony.host.kv.files import Damaged, decoded
from vllm_mlx_harmony.host.kv.layers import (
    WHOLE,
    Segment,
    cut,
    exported,
    fits,
    imported,
    join,
)
from vllm_mlx_harmony.host.kv.prefix import TenantPrompt
from vllm_mlx_harmony.host.kv.tree import Tree, pack
from vllm_mlx_harmony.host.kv.turns import Turns

PLENTY = 1 << 30
ROOT = Root(b"a root", b"weights")
IDS = list(range(1000, 1600))
PLACES = [150, 400, 600]


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.write_tiny(tmp_path_factory.mktemp("models") / "tiny", width=16)


@pytest.fixture(scope="session")
def model(directory: Path) -> Any:
    return load_model(directory)[0]


@pytest.fixture(scope="session")
def segments(model: Any) -> list[Segment]:
    """Pieces of ``IDS`` that end at ``PLACES``, as the model computes them."""
    cache, pieces, start = model.make_cache(), [], 0
    for place in PLACES:
        model(mx.array([IDS[start:place]]), cache=cache)
        pieces.append(cut(cache, start, place))
        start = place
    return pieces


Open = Callable[..., Disk]


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Open]:
    """Another process's view, as it were: a disk on the same directory."""
    opened: list[Disk] = []

    def open_one(budget: int = PLENTY, **more: Any) -> Disk:
        opened.append(Disk(tmp_path / "ssd", budget, **more))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close(1.0)


@pytest.fixture
def disk(open_disk: Open) -> Disk:
    return open_disk()


def offered(segments: list[Segment], places: list[int] = PLACES) -> list[Offered]:
    return [
        Offered(end, segment.nbytes, partial(exported, segment))
        for end, segment in zip(places, segments, strict=False)
    ]


def write(disk: Disk, segments: list[Segment], root: Root = ROOT, ids: list[int] = IDS) -> None:
    places = PLACES[: len(segments)]
    disk.offer(root, pack(ids[: places[-1]]), offered(segments, places))
    assert disk.flush(10)


def fetch(disk: Disk, model: Any, known: int = 0, root: Root = ROOT) -> list[tuple[int, int]]:
    pieces = disk.fetch([root], pack([*IDS, 1]), known, partial(fits, model))
    return [(piece.start, piece.end) for piece in pieces]


ALL = [(0, 150), (150, 400), (400, 600)]


def same(one: Segment, other: Segment) -> bool:
    return one.parts.keys() == other.parts.keys() and all(
        part.dtype == other.parts[window].dtype and mx.array_equal(part, other.parts[window])
        for window, part in one.parts.items()
    )


def files(disk: Disk) -> list[Path]:
    """Those of the pieces, first written first."""
    found = (disk.directory / DIRECTORY / PIECES).glob("*.safetensors")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


# --- What is written


def test_what_was_written_is_read_by_another_process(
    open_disk: Open, model: Any, segments: list[Segment]
) -> None:
    write(open_disk(), segments)
    again = open_disk()
    pieces = again.fetch([ROOT], pack([*IDS, 1]), 0, partial(fits, model))
    assert [(piece.start, piece.end) for piece in pieces] == ALL
    for piece, segment in zip(pieces, segments, strict=True):
        back = imported(piece.end - piece.start, piece.tensors)
        assert same(back, segment)
    counters = again.counters()
    assert (counters.hits, counters.misses, counters.tokens_read) == (1, 0, 600)
    assert counters.bytes_read == counters.nbytes == sum(map(os.path.getsize, files(again)))
    assert (counters.pieces, counters.conversations) == (3, 1)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_files_are_safetensors_of_every_type(
    disk: Disk, segments: list[Segment], dtype: Any
) -> None:
    one = segments[0]
    segment = Segment(one.tokens, {window: p.astype(dtype) for window, p in one.parts.items()})
    mx.eval(list(segment.parts.values()))
    write(disk, [segment])
    (path,) = files(disk)
    loaded = mx.load(str(path))
    expected = {"whole": dtype, "window.128": dtype}
    assert {name: part.dtype for name, part in loaded.items()} == expected
    assert mx.array_equal(loaded["whole"], segment.parts[WHOLE])
    assert same(imported(one.tokens, decoded(memoryview(path.read_bytes()))), segment)


def test_nobody_else_may_read_it(disk: Disk, segments: list[Segment]) -> None:
    write(disk, segments)
    disk.put_turn(b"k", b"turn")
    assert disk.flush(10)
    paths = list((disk.directory / DIRECTORY).rglob("*"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()}
    assert modes == {0o600} and len(paths) > 4
    directories = [disk.directory, disk.directory / DIRECTORY, disk.directory / DIRECTORY / PIECES]
    assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}


@pytest.mark.parametrize(
    ("known", "expected"), [(0, ALL), (150, ALL[1:]), (200, ALL[1:]), (599, ALL[2:]), (600, [])]
)
def test_only_what_memory_has_not_is_read(
    disk: Disk, model: Any, segments: list[Segment], known: int, expected: list[tuple[int, int]]
) -> None:
    write(disk, segments)
    assert fetch(disk, model, known) == expected
    assert (disk.counters().hits, disk.counters().misses) == ((1, 0) if expected else (0, 1))


def test_the_last_id_is_never_known(disk: Disk, model: Any, segments: list[Segment]) -> None:
    write(disk, segments)
    pieces = disk.fetch([ROOT], pack(IDS), 0, partial(fits, model))
    assert [piece.end for piece in pieces] == [150, 400]
    assert disk.reach([ROOT], pack(IDS)) == 400 and disk.reach([ROOT], pack([*IDS, 1])) == 600


def test_of_two_cuts_the_longer_is_found(disk: Disk, model: Any, segments: list[Segment]) -> None:
    write(disk, segments[:1])
    longer = join(model, segments[:2])
    disk.offer(ROOT, pack(IDS[:400]), offered([cut(longer, 0, 400)], [400]))
    assert disk.flush(10)
    assert fetch(disk, model) == [(0, 400)]


def test_nothing_is_written_twice(open_disk: Open, segments: list[Segment]) -> None:
    disk, other = open_disk(), open_disk()
    for one in (disk, disk, other):
        write(one, segments)
    assert len(files(disk)) == 3
    assert (disk.counters().pieces_written, other.counters().pieces_written) == (3, 0)


# --- Whose


@pytest.mark.parametrize("seen", ["weights", "layout", "tenant"])
def test_what_is_not_valid_is_not_seen(
    disk: Disk, model: Any, segments: list[Segment], seen: str
) -> None:
    made_of = {"weights": b"w", "layout": b"l", "tenant": "alice"}
    write(disk, segments, identity.root(**made_of))
    assert fetch(disk, model, root=identity.root(**made_of)) == ALL
    other = {**made_of, seen: type(made_of[seen])(made_of[seen] * 2)}
    assert fetch(disk, model, root=identity.root(**other)) == []


def test_weights_are_known_by_their_files(directory: Path, tmp_path: Path) -> None:
    model = shutil.copytree(directory, tmp_path / "model")
    digests = [identity.of_weights(str(model)), identity.of_weights(str(directory))]
    weights = next(model.glob("*.safetensors"))
    os.utime(weights, ns=(0, 0))
    digests.append(identity.of_weights(str(model)))
    weights.rename(model / "renamed.safetensors")
    digests.append(identity.of_weights(str(model)))
    with (model / "renamed.safetensors").open("ab") as file:
        file.write(b"\0")
    os.utime(model / "renamed.safetensors", ns=(0, 0))
    digests.append(identity.of_weights(str(model)))
    config = model / "config.json"
    config.write_text(config.read_text().replace("32.0", "31.0"))
    digests.append(identity.of_weights(str(model)))
    (model / "README.md").write_text("of no matter")
    assert identity.of_weights(str(model)) == digests[-1]
    assert digests[0] == digests[1]  # a copy that keeps its times is the same model
    assert len(set(digests)) == len(digests) - 1 and None not in digests
    assert identity.of_weights(str(tmp_path / "nothing")) is None


def patched(path: Path, place: int, content: bytes) -> None:
    """Writes over a part of a file, whose size and times stay as they were."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (times.st_size, times.st_mtime_ns)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of a model directory, with a header of 300 KB in front of 3 MB of tensors."""
    directory = tmp_path / "weights"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    path = directory / "model.safetensors"
    header = b"{" + b" " * 300_000 + b"}"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(3_000_000))
    return path


@pytest.mark.parametrize(
    ("place", "seen"),
    [
        (8, True),  # the header: at its beginning, inside, at its end
        (150_000, True),
        (300_009, True),
        (1_320_000, True),  # one of the blocks in between
        (-1, True),
        (-4096, True),
        (500_000, False),  # between two of them
    ],
)
def test_content_counts_where_sizes_and_times_are_the_same(
    weights: Path, place: int, seen: bool
) -> None:
    before, content = identity.of_weights(str(weights.parent)), weights.read_bytes()
    original = content[place % len(content) :][:1]
    patched(weights, place, b"x")
    assert (identity.of_weights(str(weights.parent)) != before) == seen
    patched(weights, place, original)
    assert identity.of_weights(str(weights.parent)) == before


@pytest.mark.parametrize("name", ["model.gguf", "weights.npz"])
@pytest.mark.parametrize("place", [0, -1])
def test_content_of_other_formats_counts_too(weights: Path, name: str, place: int) -> None:
    path = weights.rename(weights.with_name(name))
    before = identity.of_weights(str(path.parent))
    patched(path, place, b"x")
    assert identity.of_weights(str(path.parent)) != before


@pytest.mark.parametrize("content", [b"", b"123", b"\xff" * 8, b"\xff" * 5000])
def test_files_that_are_no_safetensors_have_a_digest(weights: Path, content: bytes) -> None:
    weights.write_bytes(content)
    one = identity.of_weights(str(weights.parent))
    assert one is not None and one == identity.of_weights(str(weights.parent))


def test_reads_of_large_weights_are_bounded(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """65 GB in fifteen sparse files, one with a header that claims all of it."""
    for number in range(15):
        with weights.with_name(f"model-{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", 65 << 30 if number == 7 else 60_000))
            file.truncate((65 << 30) // 15)
    read: list[int] = []
    real = os.pread

    def counted(opened: int, size: int, place: int) -> bytes:
        read.append(size)
        return real(opened, size, place)

    monkeypatch.setattr(os, "pread", counted)
    assert identity.of_weights(str(weights.parent)) is not None
    assert sum(read) < 20 << 20 and len(read) < 16 * 20


def test_links_lead_to_the_content(weights: Path, tmp_path: Path) -> None:
    """A repository in the Hugging Face cache: links to files that are named by their content."""
    before = identity.of_weights(str(weights.parent))
    blob = weights.rename(tmp_path / "blob")
    weights.symlink_to(blob)
    assert identity.of_weights(str(weights.parent)) == before
    patched(blob, -1, b"x")
    assert identity.of_weights(str(weights.parent)) != before


def a_broken_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def a_circle(path: Path) -> None:
    path.symlink_to(path)


def an_unreadable_file(path: Path) -> None:
    path.write_bytes(b"weights")
    path.chmod(0)


@pytest.mark.parametrize("fault", [a_broken_link, a_circle, an_unreadable_file])
def test_weights_that_cannot_be_read_have_no_digest(
    weights: Path, fault: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = weights.with_name("more.safetensors")
    fault(path)
    if fault is an_unreadable_file and not os.geteuid():  # who may read everything
        real = os.open

        def refusing(opened: Any, *more: Any) -> int:
            if Path(opened) == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(opened, *more)

        monkeypatch.setattr(os, "open", refusing)
    assert identity.of_weights(str(weights.parent)) is None


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_no_weights(weights: Path, make: Callable[[Path], None]) -> None:
    before = identity.of_weights(str(weights.parent))
    make(weights.with_name("more.safetensors"))
    assert identity.of_weights(str(weights.parent)) == before


def test_pieces_of_an_earlier_digest_are_not_found_and_go_first(
    open_disk: Open, model: Any, segments: list[Segment], directory: Path
) -> None:
    """The digest of earlier versions had names, sizes and times alone."""
    (path,) = directory.glob("*.safetensors")
    state = path.stat()
    names = [f"{path.name} {state.st_size} {state.st_mtime_ns}".encode()]
    earlier = index.key_of((directory / "config.json").read_bytes(), *names)
    now = identity.of_weights(str(directory))
    assert now is not None and now != earlier
    layout = identity.of_layout(model)
    old, new = (identity.root(each, layout, "") for each in (earlier, now))
    disk = open_disk()
    write(disk, segments, old)
    disk.put_turn(b"k", b"turn")
    assert disk.flush(10)
    both = disk.counters().nbytes
    disk.close(1.0)
    again = open_disk(budget=both + 1000)
    assert fetch(again, model, root=new) == [] and again.turn(b"k") == b"turn"
    write(again, segments, new)
    assert fetch(again, model, root=new) == ALL and again.turn(b"k") == b"turn"
    assert again.reach([old], pack([*IDS, 1])) < 600
    assert again.counters().damaged == 0


def test_layouts_differ(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = identity.of_layout(model)
    monkeypatch.setattr(identity, "VERSION", index.VERSION + 1)
    another_format = identity.of_layout(model)
    monkeypatch.undo()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.1")
    another_library = identity.of_layout(model)
    assert len({one, another_format, another_library}) == 3


def test_a_model_without_identity_has_nothing(
    kept: Disk, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(directory)[0]
    for _ in range(2):
        assert asyncio.run(prefix.fetch(model, [*IDS, 1], "")) == ()
        assert asyncio.run(prefix.reach(model, [*IDS, 1], "")) == 0
    computed(model, IDS)
    assert kept.flush(10) and files(kept) == [] and caplog.records == []


# --- How much


def test_ends_go_before_beginnings_and_the_least_used_first(
    open_disk: Open, model: Any, segments: list[Segment]
) -> None:
    disk = open_disk()
    write(disk, segments)
    one = disk.counters().nbytes
    other = [*IDS[:150], *range(5000, 5450)]
    write(disk, segments, ids=other)  # goes on from the same beginning
    both = disk.counters().nbytes
    assert len(files(disk)) == 5
    assert fetch(disk, model) == ALL and disk.flush(10)  # used last
    small = open_disk(budget=both)
    small.offer(ROOT, pack(list(range(7000, 7150))), offered(segments[:1], [150]))
    assert small.flush(10) and small.counters().evictions == 1
    assert small.reach([ROOT], pack([*other, 1])) == 400
    smaller = open_disk(budget=one + 2 * segments[0].nbytes + 2000)
    smaller.offer(ROOT, pack(list(range(8000, 8150))), offered(segments[:1], [150]))
    assert smaller.flush(10)
    assert fetch(smaller, model) == ALL  # its own beginning is the other's, too
    assert smaller.reach([ROOT], pack([*other, 1])) == 150
    assert smaller.counters().nbytes <= smaller.budget
    assert sum(map(os.path.getsize, files(smaller))) == smaller.counters().nbytes


def test_what_would_not_fit_is_not_written(
    open_disk: Open, model: Any, segments: list[Segment]
) -> None:
    disk = open_disk(budget=segments[0].nbytes + segments[1].nbytes + 10_000)
    write(disk, segments)
    assert fetch(disk, model) == ALL[:2]
    assert disk.counters().evictions == 0


def test_no_more_waits_than_may(open_disk: Open, model: Any, segments: list[Segment]) -> None:
    disk = open_disk(patience=segments[0].nbytes + segments[1].nbytes - 1)
    with disk._changing:  # the writer waits
        disk.offer(ROOT, pack(IDS), offered(segments))
    assert disk.flush(10) and disk.counters().dropped == 1
    assert fetch(disk, model) == ALL[:1]
    for _ in range(2):  # what was dropped is offered again
        write(disk, segments)
    assert fetch(disk, model) == ALL


def test_turns_live_within_the_budget(open_disk: Open) -> None:
    disk = open_disk(budget=1000)
    for n in range(20):
        disk.put_turn(b"%d" % n, b"x" * 100)
        assert disk.flush(10)
        disk.use_turn(b"0")
        assert disk.flush(10)
    assert disk.turn(b"0") and disk.turn(b"19") and not disk.turn(b"1")
    assert disk.counters().turns == 10 and disk.counters().nbytes == 1000


def test_while_an_engine_computes_it_is_written_slowly(
    open_disk: Open, segments: list[Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(disks, "time", Clock(slept))
    for busy in (False, True):
        disk = open_disk()
        disk.clear()
        slept.clear()
        if busy:
            with disk.pace.computing():
                write(disk, segments[:1])
        else:
            write(disk, segments[:1])
        spent = disk.counters().write_seconds
        assert sum(slept) == pytest.approx(spent / disks.SHARE if busy else 0.0)


class Clock:
    """The module ``time``, in which nobody sleeps but who waits for the writer."""

    def __init__(self, slept: list[float]) -> None:
        self._slept = slept

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        if seconds == 0.005:  # `flush`
            time.sleep(seconds)
        else:
            self._slept.append(seconds)


def test_emptied(disk: Disk, model: Any, segments: list[Segment]) -> None:
    write(disk, segments)
    disk.put_turn(b"k", b"a thought of somebody's")
    assert disk.flush(10)
    with disk.pace.computing():
        disk.offer(Root(b"other", b""), pack(IDS), offered(segments))
        disk.clear()
    assert disk.flush(10)
    assert files(disk) == [] and fetch(disk, model) == [] and disk.turn(b"k") is None
    assert disk.counters().nbytes == disk.counters().pieces == disk.counters().turns == 0
    said = b"".join(p.read_bytes() for p in (disk.directory / DIRECTORY).iterdir() if p.is_file())
    assert b"a thought" not in said
    write(disk, segments)
    assert fetch(disk, model) == ALL


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
def test_a_piece_that_is_not_what_was_written_is_set_aside(
    disk: Disk,
    model: Any,
    segments: list[Segment],
    fault: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(disk, segments)
    fault(files(disk)[1])
    with caplog.at_level(logging.WARNING):
        assert fetch(disk, model) == ALL[:1]
        assert fetch(disk, model) == ALL[:1]
    damaged = fault is not gone  # that may have been another process, in need of the room
    assert len(caplog.records) == disk.counters().damaged == damaged
    assert bool(disk.counters().last_error) == damaged
    write(disk, segments)
    assert fetch(disk, model) == ALL


def test_what_another_process_throws_out_meanwhile_is_not_damaged(
    open_disk: Open,
    model: Any,
    segments: list[Segment],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is what it has written anew, to other files, removed with the old row."""
    disk, other = open_disk(), open_disk()
    write(disk, segments)
    content = disk._content

    def late(row: index.Row) -> bytearray:
        monkeypatch.undo()
        other.clear()
        write(other, segments)
        return content(row)

    monkeypatch.setattr(disk, "_content", late)
    with caplog.at_level(logging.WARNING):
        assert fetch(disk, model) == []
        assert fetch(disk, model) == ALL
    assert caplog.records == [] and disk.counters().damaged == 0
    assert not disk.counters().last_error and len(files(disk)) == 3


def test_a_file_that_cannot_be_read(
    disk: Disk,
    model: Any,
    segments: list[Segment],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As root, who may read everything, too."""
    write(disk, segments)
    unreadable, real = files(disk)[2].name, os.open

    def refusing(path: Any, flags: int, *more: Any) -> int:
        if Path(path).name == unreadable and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    with caplog.at_level(logging.WARNING):
        assert fetch(disk, model) == ALL[:2]
    assert len(caplog.records) == 1
    write(disk, segments)
    assert fetch(disk, model) == ALL


def test_a_piece_of_another_shape_is_set_aside(
    disk: Disk, model: Any, segments: list[Segment]
) -> None:
    """Its checksum is right: somebody else's bug, or a model that is not what it was."""
    one = segments[0]
    parts = {**one.parts, WHOLE: one.parts[WHOLE][:2]}
    write(disk, [Segment(one.tokens, parts), *segments[1:]])
    assert fetch(disk, model) == [] and disk.counters().damaged == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}"],
)
def test_what_is_no_safetensors_file(content: bytes) -> None:
    if content.endswith(b"{}"):
        assert decoded(memoryview(content)) == {}
    else:
        with pytest.raises(Damaged):
            decoded(memoryview(content))


class Broken:
    """The files of a disk that says the same to every writer: full, or read-only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.broken, self._real, self._code = True, os.fdopen, code
        monkeypatch.setattr(os, "fdopen", self)

    def __call__(self, opened: int, mode: str = "r", *more: Any, **others: Any) -> Any:
        if self.broken and "w" in mode:
            os.close(opened)
            raise OSError(self._code, os.strerror(self._code))
        return self._real(opened, mode, *more, **others)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_says_so_once_and_is_tried_again(
    disk: Disk,
    model: Any,
    segments: list[Segment],
    code: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(disk, segments[:1])
    monkeypatch.setattr(disks, "PAUSE", 0.1)
    faulty = Broken(monkeypatch, code)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            write(disk, segments)
            time.sleep(0.11)
        assert fetch(disk, model) == ALL[:1]  # what is there is read
        assert len(caplog.records) == 1 and os.strerror(code) in caplog.text
        assert os.strerror(code) in disk.counters().last_error
        assert len(files(disk)) == 1
        faulty.broken = False
        write(disk, segments)
        assert "again" in caplog.records[-1].message and len(caplog.records) == 2
    assert fetch(disk, model) == ALL


def mounted(place: Path, options: str) -> None:
    """A file system of its own in ``place``; where we may mount none, there is no such test."""
    place.mkdir(exist_ok=True)
    if os.geteuid() or os.system(f"mount -t tmpfs -o {options} none {place} 2>/dev/null"):
        pytest.skip("no file system can be mounted here")


def test_a_read_only_file_system_is_no_place(tmp_path: Path, segments: list[Segment]) -> None:
    """At the start. One that turns so while the server runs: see above."""
    mounted(tmp_path / "ssd", "size=16m")
    try:
        disk = Disk(tmp_path / "ssd", PLENTY)
        write(disk, segments[:1])
        disk.close(1.0)
        assert not os.system(f"mount -o remount,ro {tmp_path / 'ssd'}")
        with pytest.raises(disks.Failed):
            Disk(tmp_path / "ssd", PLENTY)
        assert opening.opened(str(tmp_path / "ssd"), 1.0) is None
        assert "cannot be used" in next(opening.found(None))
    finally:
        os.system(f"umount -l {tmp_path / 'ssd'}")


def test_a_really_full_disk(
    tmp_path: Path, model: Any, segments: list[Segment], caplog: pytest.LogCaptureFixture
) -> None:
    """A file system with room for one piece, and the log of the index."""
    small = tmp_path / "small"
    mounted(small, "size=4m")
    try:
        disk = Disk(small, PLENTY)
        write(disk, segments[:1])
        left = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        (small / "others").write_bytes(b"x" * (left - segments[1].nbytes // 2))
        with caplog.at_level(logging.WARNING):
            write(disk, segments)
        assert len(caplog.records) == 1 and disk.counters().paused
        assert fetch(disk, model) == ALL[:1]
        disk.clear()
        assert files(disk) == [] and fetch(disk, model) == []
        disk.close(1.0)
    finally:
        os.system(f"umount -l {small}")


@pytest.mark.parametrize("whole", [True, False])
def test_a_directory_that_is_removed_while_the_server_runs(
    disk: Disk,
    model: Any,
    segments: list[Segment],
    whole: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours alone is made anew. The one that was named is not: a volume may be mounted there."""
    monkeypatch.setattr(disks, "PAUSE", 0.1)
    write(disk, segments)
    shutil.rmtree(disk.directory if whole else disk.directory / DIRECTORY)
    with caplog.at_level(logging.WARNING):
        assert fetch(disk, model) == []
        for _ in range(3):
            write(disk, segments)
            time.sleep(0.11)
        assert fetch(disk, model) == ([] if whole else ALL)
        assert len(caplog.records) == whole
        if whole:
            disk.directory.mkdir()
            write(disk, segments)
            assert fetch(disk, model) == ALL and disk.directory.is_dir()


def test_the_directory_of_pieces_is_made_anew(
    disk: Disk, model: Any, segments: list[Segment], caplog: pytest.LogCaptureFixture
) -> None:
    """What was in it is computed again; turns are elsewhere."""
    write(disk, segments)
    disk.put_turn(b"k", b"turn")
    assert disk.flush(10)
    shutil.rmtree(disk.directory / DIRECTORY / PIECES)
    with caplog.at_level(logging.WARNING):
        assert fetch(disk, model) == [] and disk.turn(b"k") == b"turn"
        write(disk, segments)
        assert fetch(disk, model) == ALL
    assert caplog.records == [] and disk.counters().pieces == 3


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0" + b"\xff" * 5000])
@pytest.mark.parametrize("running", [True, False])
def test_a_damaged_index_is_set_aside(
    open_disk: Open,
    model: Any,
    segments: list[Segment],
    content: bytes,
    running: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = open_disk()
    write(disk, segments)
    path = disk.directory / DIRECTORY / index.NAME
    if not running:
        disk.close(1.0)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(content * 3)
    with caplog.at_level(logging.WARNING):
        again = disk if running else open_disk()
        fetch(again, model)
        for _ in range(2):
            write(again, segments)
    assert fetch(again, model) == ALL
    assert len(caplog.records) <= 2


def test_a_later_version_is_left_alone(open_disk: Open, segments: list[Segment]) -> None:
    disk = open_disk()
    write(disk, segments)
    path = disk.directory / DIRECTORY / index.NAME
    disk.close(1.0)
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA user_version={index.VERSION + 1}")
    file.close()
    with pytest.raises(sqlite3.DatabaseError, match="later version"):
        open_disk()
    assert len(files(disk)) == 3


def test_a_start_writes_nothing_to_an_index_that_is_there(
    open_disk: Open, model: Any, segments: list[Segment]
) -> None:
    """The disk may be full; here, another process is in the middle of a transaction."""
    disk = open_disk()
    write(disk, segments)
    path = disk.directory / DIRECTORY / index.NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        log = path.with_name(f"{index.NAME}-wal").stat().st_size
        again = open_disk()
        assert again.reach([ROOT], pack([*IDS, 1])) == 600
        assert path.with_name(f"{index.NAME}-wal").stat().st_size == log
        other.execute("ROLLBACK")


def test_an_earlier_version_is_replaced(
    open_disk: Open, model: Any, segments: list[Segment]
) -> None:
    disk = open_disk()
    write(disk, segments)
    path = disk.directory / DIRECTORY / index.NAME
    disk.close(1.0)
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version=0")
    file.close()
    again = open_disk()
    assert fetch(again, model) == []
    write(again, segments)
    assert fetch(again, model) == ALL


def test_files_that_nobody_knows_are_swept_when_they_are_old(
    open_disk: Open, segments: list[Segment]
) -> None:
    disk = open_disk()
    write(disk, segments[:1])
    pieces = disk.directory / DIRECTORY / PIECES
    old, new = (pieces / f"{letter * 32}-00000000.safetensors" for letter in "ab")
    foreign = pieces / "notes.txt"
    for path in (old, new, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign, files(disk)[0]):
        os.utime(path, (0, 0))
    again = open_disk()
    write(again, segments)
    deadline = time.monotonic() + 5
    while old.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not old.exists() and new.exists() and foreign.exists()
    assert len(files(again)) == 4


def test_two_processes_share_a_directory(
    open_disk: Open, model: Any, segments: list[Segment]
) -> None:
    """Each finds what the other wrote, and takes what the other threw out for not known."""
    one, other = open_disk(), open_disk()
    write(one, segments[:2])
    write(other, segments)
    assert fetch(one, model) == fetch(other, model) == ALL
    one.clear()
    assert fetch(other, model) == []
    write(other, segments)
    write(other, segments)  # by now it knows that the beginning is gone
    assert fetch(one, model) == ALL


# --- Below the memory


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, disk: Disk, model: Any) -> Iterator[Disk]:
    prefix.keep_on(disk)
    prefix.identify(model, b"weights")
    assert prefix._roots(model, "")
    renew(monkeypatch)
    yield disk
    prefix.keep_on(None)


def renew(monkeypatch: pytest.MonkeyPatch, budget: int = PLENTY) -> Tree[Any]:
    """As after a start: nothing in memory."""
    tree: Tree[Any] = Tree(budget)
    monkeypatch.setattr(prefix, "memory", lambda: tree)
    return tree


def prompted(
    model: Any, disk: Disk, ids: list[int], tenant: str = ""
) -> tuple[int, list[Any] | None]:
    roots = prefix._roots(model, tenant)
    known = prefix.memory().reach(prefix.owner(model, tenant), pack(ids))
    fetched = disk.fetch(roots, pack(ids), known, partial(fits, model))
    return prefix.resume(model, TenantPrompt(ids, tenant, fetched))


def computed(model: Any, ids: list[int], tenant: str = "") -> list[Any]:
    cache: list[Any] = model.make_cache()
    start = 0
    for place in (200, 500, len(ids)):
        model(mx.array([ids[start:place]]), cache=cache)
        prefix.remember(model, tenant, ids[:place], cache)
        start = place
    return cache


def test_what_memory_has_lost_comes_back_from_the_disk(
    kept: Disk, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prompted(model, kept, [*IDS, 1]) == (0, None)
    cache = computed(model, IDS)
    assert kept.flush(10)
    tree = renew(monkeypatch)
    known, again = prompted(model, kept, [*IDS, 1])
    assert known == 600 and again is not None
    after = [model(mx.array([[1, 2, 3]]), cache=one) for one in (cache, again)]
    assert mx.array_equal(*after)
    assert tree.counters().segments == 3
    assert prompted(model, kept, [*IDS, 2])[0] == 600
    assert kept.counters().hits == 1  # the second time it was in memory
    assert prompted(model, kept, [*IDS, 1], "bob") == (0, None)


def test_what_is_read_before_its_turn(
    kept: Disk, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both(tenant: str) -> tuple[int, list[int]]:
        asked = (model, [*IDS, 1], tenant)
        reached = await prefix.reach(*asked)
        return reached, [piece.end for piece in await prefix.fetch(*asked)]

    assert asyncio.run(both("")) == (0, [])
    computed(model, IDS)
    assert kept.flush(10) and asyncio.run(both("")) == (600, [])
    renew(monkeypatch)
    assert asyncio.run(both("")) == (600, [200, 500, 600])
    assert asyncio.run(both("bob")) == (0, [])
    computed(model, IDS, prefix.EVERYBODY)
    assert kept.flush(10)
    renew(monkeypatch)
    assert asyncio.run(both("bob")) == (600, [200, 500, 600])


def test_what_waits_for_its_turn_is_bounded(
    open_disk: Open, kept: Disk, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt is read when one has had its turn, or was given up; in their order."""
    computed(model, IDS)
    for person in range(4):
        computed(model, [person, *IDS])
    assert kept.flush(10)
    renew(monkeypatch)
    prefix.keep_on(open_disk(patience=1000))
    turns: list[int] = []

    async def one(person: int, had_turn: asyncio.Event) -> None:
        prompt = TenantPrompt([person, *IDS, 1])
        prompt.fetched = await prefix.fetch(model, prompt, "")
        assert prompt.fetched
        turns.append(person)
        try:
            await had_turn.wait()
        finally:
            prompt.fetched = ()

    async def four() -> None:
        turn = [asyncio.Event() for _ in range(4)]
        waiting = [asyncio.create_task(one(person, turn[person])) for person in range(4)]
        for person in range(4):
            for _ in range(1000):
                if len(turns) > person:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(2 * disks.RETRY)
            assert turns == [*range(person + 1)]
            if person == 1:
                waiting[person].cancel()
            turn[person].set()
        await asyncio.wait(waiting)

    asyncio.run(four())
    prefix.keep_on(kept)


def test_a_piece_may_begin_before_what_memory_knows(
    kept: Disk, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sequence was cut elsewhere: the rest of the piece is what is taken of it."""
    prompted(model, kept, [1, 2])
    cache = computed(model, IDS)
    assert kept.flush(10)
    renew(monkeypatch)
    prefix.keep_on(None)
    half = model.make_cache()
    model(mx.array([IDS[:350]]), cache=half)
    prefix.remember(model, "", IDS[:350], half)
    prefix.keep_on(kept)
    known, again = prompted(model, kept, [*IDS, 1])
    assert known == 600
    after = [model(mx.array([[1, 2, 3]]), cache=one) for one in (cache, again)]
    assert mx.allclose(*after, atol=1e-4)


def test_a_budget_of_memory_that_is_too_small_costs_only_the_rest(
    kept: Disk, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompted(model, kept, [1, 2])
    computed(model, IDS)
    assert kept.flush(10)
    pieces = prefix.memory().pieces(prefix.owner(model, ""), pack(IDS))
    renew(monkeypatch, sum(held.nbytes for _, held in pieces[:2]))
    assert prompted(model, kept, [*IDS, 1])[0] == 500


@pytest.mark.parametrize("when", ["never", "while it is loaded", "afterwards", "unreadable"])
def test_a_model_is_known_by_the_files_it_came_from(
    kept: Disk, directory: Path, tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other weights are downloaded to the same place: what the old ones compute is theirs."""
    path = shutil.copytree(directory, tmp_path / "model")
    weights = next(path.glob("*.safetensors"))
    if when == "unreadable":
        a_broken_link(path / "more.safetensors")
    known = identity.of_weights(str(path))

    def load(engine: Any) -> None:
        engine._model = load_model(path)[0]
        if when == "while it is loaded":
            os.utime(weights, ns=(0, 0))

    engine = SimpleNamespace(_model=None, _model_path=str(path), is_mllm=False)
    opening.identified(load)(engine)
    if when == "afterwards":
        os.utime(weights, ns=(0, 0))
    models = {root.model for root in prefix._roots(engine._model, "")}
    computed(engine._model, IDS)
    assert kept.flush(10)
    unknown = when in {"while it is loaded", "unreadable"}
    assert models == (set() if unknown else {known})
    assert kept.found().pieces == 3 * len(models)
    assert len(caplog.records) == unknown


def test_without_a_disk_there_is_none(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renew(monkeypatch)
    assert prefix.disk() is None
    computed(model, IDS)
    assert prefix.resume(model, TenantPrompt([*IDS, 1]))[0] == 600


# --- Turns


TURN = GeneratedTurn(
    (Reasoning, Call),
    ((200006, 1, 2), (200006, 3)),
    "content \ud83d of a client",
    (Call("call_1", "weather", '{"city": "Zürich"}'),),
)


@pytest.mark.parametrize(
    "turn", [TURN, GeneratedTurn((Answer,), ((1,),), "", ()), GeneratedTurn((), (), "", ())]
)
def test_turns_are_read_as_they_were_written(turn: GeneratedTurn) -> None:
    assert read(written(turn)) == turn


def test_turns_outlive_the_process(open_disk: Open) -> None:
    disk = open_disk()
    Turns(disk).put(b"key", TURN)
    assert disk.flush(10)
    again = Turns(open_disk())
    assert again.get(b"key") == TURN and again.get(b"other") is None


def test_turns_are_read_beside_what_is_being_written(disk: Disk) -> None:
    """On the event loop; another process writes, for seconds, and our writer waits for it."""
    disk.put_turn(b"k", b"turn")
    disk.put_turn(b"damaged", b"turn")
    assert disk.flush(10)
    other = sqlite3.connect(disk.directory / DIRECTORY / index.NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with closing(other), ThreadPoolExecutor(1) as loop, disk._changing:
        assert loop.submit(disk.turn, b"k").result(5) == b"turn"
        loop.submit(disk.drop_turn, b"damaged").result(5)
        assert disk.turn(b"damaged") is None
        other.execute("ROLLBACK")
    disk.put_turn(b"last", b"turn")
    assert disk.flush(10) and disk.counters().turns == 2


@pytest.mark.parametrize("at", [0, 5, 20, -1])
def test_a_damaged_turn_is_dropped(disk: Disk, at: int) -> None:
    content = bytearray(written(TURN))
    content[at] ^= 1
    disk.put_turn(b"key", bytes(content))
    assert disk.flush(10)
    turns = Turns(disk)
    assert turns.get(b"key") is None and disk.counters().damaged == 1
    assert turns.get(b"key") is None and disk.counters().damaged == 1


# --- Shown


def test_doctor_looks_and_changes_nothing(
    disk: Disk, segments: list[Segment], tmp_path: Path
) -> None:
    write(disk, segments)
    before = {path: path.stat().st_mtime_ns for path in disk.directory.rglob("*.safetensors")}
    group = doctor._cache(disk.directory)
    assert group.ok and "3 pieces of 1 conversations, 0 turns" in group.findings[0].detail
    assert before == {path: path.stat().st_mtime_ns for path in before}
    disk.close(5.0)
    ended = sorted((path, path.stat().st_mtime_ns) for path in disk.directory.rglob("*"))
    assert "3 pieces of 1 conversations" in doctor._cache(disk.directory).findings[0].detail
    assert ended == sorted((path, path.stat().st_mtime_ns) for path in disk.directory.rglob("*"))
    nothing = doctor._cache(tmp_path / "a" / "b")
    assert nothing.ok and not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert not doctor._cache(tmp_path / "file").ok
    other = tmp_path / "damaged" / DIRECTORY
    other.mkdir(parents=True)
    (other / index.NAME).write_bytes(b"not a database" * 100)
    assert not doctor._cache(tmp_path / "damaged").ok


@pytest.mark.parametrize("gigabytes", [0.0, -1.0, float("nan")])
def test_a_size_that_is_none_is_refused(tmp_path: Path, gigabytes: float) -> None:
    with pytest.raises(HostError, match="ssd-cache-max-gb"):
        opening.opened(str(tmp_path / "new"), gigabytes)
    assert not (tmp_path / "new").exists()
