"""The prefix cache on disk: a restart, decode while it is written, the start, sizes.

The server of an engine is a child process, this file with arguments, that is killed with -9 and
started again. Real architecture, tiny, random weights; a prompt of 20,000 tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench_reuse import (
    ANSWER,
    OURS,
    ask,
    filler,
    generate,
    make,
    opening,
    plugged,
    result,
    tiny_model,
)
from bench_table import Row, printed

from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine.disk import index
from vllm_mlx_harmony.engine.disk.cache import DIRECTORY, PIECES, DiskCache
from vllm_mlx_harmony.engine.prefix_tree import pack

TOKENS = 20_000
PLENTY = 100 << 30
STREAMS = 8
ROUNDS = 6
NEW, FASTER, SLOWER, LATER = 0.02, 0.1, 1.01, 100.0
"""Goals: part of a prompt that is computed after a restart; time to its first token, against
computing it; time of a decoding step while pieces are written; milliseconds of a later start."""


def rows(model: Path) -> Iterator[Row]:
    """All rows, each as soon as it is there."""
    yield from restart(model)
    yield from decode(model)
    yield from start()
    yield from sizes()


def restart(model: Path) -> Iterator[Row]:
    """A long prompt, kill -9, and the next turn: of the same server, and of one started again."""
    with tempfile.TemporaryDirectory() as directory:
        unbroken = _child("before", model, directory)
        again = _child("after", model, directory, unbroken["answer"])
        raw = _raw(Path(directory), again["bytes_read"])
    name = f"{unbroken['tokens']} tokens, kill -9"
    part = again["computed"] / again["tokens"]
    yield Row(f"{name}, computed", "x", None, part, f"<= {NEW}", part <= NEW)
    same = again["said"] == unbroken["said"]
    yield Row("same ids as of an unbroken server", "ids", None, ANSWER, "all", same)
    fresh, read = again["fresh_seconds"] * 1e3, again["seconds"] * 1e3
    met = read <= FASTER * fresh
    what = "time to first token, computed and read"
    yield Row(what, "ms", fresh, read, f"<= {FASTER} of computed", met)
    for what, nbytes, seconds, disk in (
        ("written", unbroken["bytes_written"], unbroken["write_seconds"], raw[0]),
        ("read", again["bytes_read"], again["read_seconds"], raw[1]),
    ):
        yield Row(f"{what}, the disk and ours", "MB/s", disk, nbytes / seconds / 1e6)


def _child(what: str, model: Path, directory: str, *more: Any) -> dict[str, Any]:
    """What a server of its own says of ``what``; it is killed when it has said it."""
    arguments = [what, str(model), directory, json.dumps(more)]
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(b"{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        finally:
            process.send_signal(signal.SIGKILL)
    raise RuntimeError(f"{what} said nothing")


def _raw(directory: Path, nbytes: int) -> tuple[float, float]:
    """Megabytes per second that a plain file of this size is written and read with."""
    path, block = directory / "raw", os.urandom(1 << 20)
    count = max(1, nbytes >> 20)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(block)
    written = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(bytearray(1 << 20)):
            pass
    read = time.perf_counter()
    return count * 1.048 / (written - began), count * 1.048 / (read - written)


async def _before(model: Path, directory: str) -> None:
    """A long prompt, written; then the next turn, from memory and not written."""
    with plugged(PLENTY), _on(DiskCache(Path(directory), PLENTY)) as disk:
        engine = make(OURS, model)
        await engine.start()
        first = [*opening()[:-2], *filler(1, TOKENS), *opening()[-2:]]
        answer = await generate(engine, first)
        disk.flush()
        counters = disk.counters()
        _put_below(engine, None)
        again = [*first, *answer, *result(0)[:100], *result(0)[-3:]]
        _say(
            {
                "tokens": len(first),
                "answer": answer,
                "said": await generate(engine, again),
                "bytes_written": counters.bytes_written,
                "write_seconds": counters.write_seconds,
            }
        )


async def _after(model: Path, directory: str, answer: list[int]) -> None:
    """The next turn, from the disk; and computed, without it."""
    with plugged(PLENTY) as tree, _on(DiskCache(Path(directory), PLENTY)) as disk:
        engine = make(OURS, model)
        await engine.start()
        for _ in range(2):
            await ask(engine, OURS, filler(99, 40))
        first = [*opening()[:-2], *filler(1, TOKENS), *opening()[-2:]]
        again = [*first, *answer, *result(0)[:100], *result(0)[-3:]]
        asked = await ask(engine, OURS, again)
        counters = disk.counters()
        _put_below(engine, None)
        spoken = await generate(engine, again)
        tree.forget(lambda _: True)
        fresh = await ask(engine, OURS, again)
        _say(
            {
                "tokens": len(again),
                "computed": asked.computed,
                "seconds": asked.seconds,
                "fresh_seconds": fresh.seconds,
                "said": spoken,
                "bytes_read": counters.bytes_read,
                "read_seconds": counters.read_seconds,
            }
        )


def _say(found: dict[str, Any]) -> None:
    """Tells who started us, who kills us for it: nothing is closed, nothing is written any more."""
    print(json.dumps(found), flush=True)
    time.sleep(60)


@contextmanager
def _on(disk: DiskCache) -> Iterator[DiskCache]:
    resources.disk = disk
    yield disk
    resources.disk = None
    disk.close(5)


def _put_below(engine: Any, disk: DiskCache | None) -> None:
    """Has ``engine``, which was started with a disk, use another one, or none."""
    engine.engine.cache._disk = disk


def decode(model: Path) -> Iterator[Row]:
    """Eight streams, with and without pieces being written behind them, in turns."""
    with tempfile.TemporaryDirectory() as directory, plugged():
        seconds = asyncio.run(_streams(model, Path(directory)))
    without, with_ = (median(times) * 1e3 for times in seconds)
    met = with_ <= SLOWER * without
    what = f"{STREAMS} streams, a step while written"
    yield Row(what, "ms", without, with_, f"<= {SLOWER} of without", met)


async def _streams(model: Path, directory: Path) -> tuple[list[float], list[float]]:
    """Seconds per step of each round without, and with, a writer that always has something."""
    import mlx.core as mx

    from vllm_mlx_harmony.engine.pieces import WHOLE, Piece, exported

    engine = make(OURS, model)
    with _on(DiskCache(directory / "first", PLENTY)):
        await engine.start()
    part = mx.zeros((4, 8, 4096, 64), dtype=mx.bfloat16)
    mx.eval(part)
    piece = Piece(4096, {WHOLE: part})
    found: tuple[list[float], list[float]] = [], []
    for number in range(2 * ROUNDS):
        with _on(DiskCache(directory / str(number), PLENTY)) as disk:
            if number % 2:
                _put_below(engine, disk)
                for n in range(200):
                    disk.offer(b"%d" % n, pack(range(4096)), [(4096, piece)], exported)
            else:
                _put_below(engine, None)
            prompts = [filler(seed, 40) for seed in range(STREAMS)]
            began = time.perf_counter()
            await asyncio.gather(*(generate(engine, prompt) for prompt in prompts))
            found[number % 2].append((time.perf_counter() - began) / ANSWER)
            disk.clear()
    await engine.stop()
    return found


def start() -> Iterator[Row]:
    """Opening a directory with ten gigabytes in it, and an empty one."""
    times = []
    for count in (0, 3000):
        with tempfile.TemporaryDirectory() as directory:
            _fill(Path(directory), count, (10 << 30) // 3000)
            began = time.perf_counter()
            disk = DiskCache(Path(directory), PLENTY)
            found = disk.counters()
            times.append((time.perf_counter() - began) * 1e3)
            assert found.pieces == count
            disk.close(5)
    met = times[1] - times[0] <= LATER
    empty, full = times
    yield Row("start, empty and 10 GB", "ms", empty, full, f"<= {LATER:.0f} more", met)


def _fill(directory: Path, count: int, size: int) -> None:
    """``count`` sparse files of ``size`` bytes, ten to a conversation, with their rows."""
    pieces = directory / DIRECTORY / PIECES
    pieces.mkdir(parents=True)
    rows, parent = index.Index(directory / DIRECTORY), b""
    with rows.writing() as file:
        for n in range(count):
            key = index.key_of(b"%d" % n)
            parent = key if n % 10 else b"root"
            name = f"{key.hex()}-00000000.safetensors"
            with (pieces / name).open("wb") as sparse:
                sparse.truncate(size)
            values = (key, parent, 100, 100 * (n % 10), name, size, 0, n)
            file.execute("INSERT INTO entries VALUES (?,?,?,?,?,?,?,?,NULL)", values)
    rows.close()


def sizes() -> Iterator[Row]:
    """Of a thousand tokens and of a window, as computed from the shapes and as one layer has it."""
    import mlx.core as mx

    from vllm_mlx_harmony.engine.disk.safetensors import encoded
    from vllm_mlx_harmony.engine.pieces import WHOLE, Piece, exported

    keys = mx.zeros((2, 8, 1000, 64), dtype=mx.bfloat16)  # one full layer, and one sliding
    window = mx.zeros((2, 8, 128, 64), dtype=mx.bfloat16)
    mx.eval(keys, window)
    for name, layers in (("20b", 24), ("120b", 36)):
        half = layers // 2
        for what, segment, tokens in (
            ("1k tokens", Piece(1000, {WHOLE: keys}), 1000),
            ("a piece's windows", Piece(128, {128: window}), 128),
        ):
            computed = half * 2 * 8 * tokens * 64 * 2
            size = half * sum(part.nbytes for part in encoded(exported(segment), {}))
            met = abs(size - computed) <= half * 200  # the header
            yield Row(
                f"gpt-oss-{name}, {what}: computed, and as files",
                "MB",
                computed / 1e6,
                size / 1e6,
                "the same",
                met,
            )


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 1 when a goal is not met. With arguments: what a child process does."""
    if not arguments:
        with tiny_model() as model:
            return printed(rows(model))
    what, path, directory, more = arguments
    measure: Any = {"before": _before, "after": _after}[what]
    asyncio.run(measure(Path(path), directory, *json.loads(more)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
