"""`vllm-mlx serve` with a leak report: on SIGUSR1 it writes a snapshot to a file.

Tasks, buffers and leases that a request leaves behind cannot be seen from outside. As a command
(``COMMAND``), this module is the server; ``Inspection`` takes snapshots of it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

FIGURES_ENV = "ATTACK_FIGURES"
"""Environment variable with the path of the snapshot."""

COMMAND = (sys.executable, __file__, "serve")


@dataclass(frozen=True)
class Snapshot:
    """A server's resident memory in MiB, and counts of everything that may leak.

    ``objects`` counts instances of classes that live as long as a request or a connection. A server
    is ``busy`` while an answer is generated, is queued, or has unread bytes.
    """

    number: int
    rss: float
    files: int
    threads: int
    tasks: int
    busy: bool
    objects: dict[str, int]

    def more_than(self, before: Snapshot) -> dict[str, int]:
        """The increase over ``before``, without a few connections that are being closed."""
        own_counts, earlier_counts = (
            {**snapshot.objects, "tasks": snapshot.tasks} for snapshot in (self, before)
        )
        more = {
            name: own_counts[name] - earlier_counts[name]
            for name in own_counts
            if own_counts[name] > earlier_counts[name]
        }
        if self.files > before.files + 5:
            more["files"] = self.files - before.files
        return more


def serve() -> int:
    """Runs the server, which writes a snapshot on every signal."""
    from vllm_mlx_harmony.__main__ import main

    signals = 0

    def write(_signal: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        path = Path(os.environ[FIGURES_ENV])
        new_file = path.with_suffix(".new")
        new_file.write_text(json.dumps(_snapshot(signals)))
        new_file.replace(path)

    signal.signal(signal.SIGUSR1, write)
    return main()


def _snapshot(number: int) -> dict[str, object]:
    import psutil

    from vllm_mlx_harmony.server.answer import Answer
    from vllm_mlx_harmony.server.front_end import FrontEnd
    from vllm_mlx_harmony.server.generation import Job
    from vllm_mlx_harmony.server.responses.websocket import ResponsesSocket
    from vllm_mlx_harmony.server.storage.background import BackgroundResponse
    from vllm_mlx_harmony.server.storage.persistence import StoringEmitter

    kinds = {Answer, Job, ResponsesSocket, StoringEmitter, BackgroundResponse}
    gc.collect()
    objects = gc.get_objects()
    names = Counter(type(instance).__name__ for instance in objects if type(instance) in kinds)
    registries = [instance.answers for instance in objects if type(instance) is FrontEnd]
    del objects
    process = psutil.Process()
    try:
        tasks = len(asyncio.all_tasks())
    except RuntimeError:  # the loop is not running
        tasks = 0
    return {
        "number": number,
        "rss": process.memory_info().rss / 2**20,
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "tasks": tasks,
        "busy": any(registry.running or registry.unread for registry in registries),
        "objects": {kind.__name__: names[kind.__name__] for kind in kinds},
    }


class Inspection:
    """Takes snapshots of the server with this process id, which writes them to ``path``."""

    def __init__(self, pid: int, path: Path) -> None:
        self._pid, self._path = pid, path
        self._number = 0

    def read(self, patience: float = 30.0) -> Snapshot:
        """A new snapshot. Raises ``TimeoutError`` after ``patience`` seconds."""
        os.kill(self._pid, signal.SIGUSR1)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            try:
                snapshot = Snapshot(**json.loads(self._path.read_text()))
            except FileNotFoundError:
                snapshot = None
            if snapshot is not None and snapshot.number > self._number:
                self._number = snapshot.number
                return snapshot
            time.sleep(0.02)
        raise TimeoutError(f"the server does not say what is in it for {patience:.0f} s")

    def wait_until_idle(self, before: Snapshot | None = None, patience: float = 60.0) -> Snapshot:
        """A snapshot of the idle server with no more of anything than ``before``.

        After ``patience`` seconds, the last snapshot is returned as it is.
        """
        deadline = time.monotonic() + patience
        while True:
            snapshot = self.read()
            busy = snapshot.busy or snapshot.objects["Answer"] or snapshot.objects["Job"]
            if not busy and not (before and snapshot.more_than(before)):
                return snapshot
            if time.monotonic() > deadline:
                return snapshot
            time.sleep(0.2)

    def baseline(self, readings: int = 3) -> Snapshot:
        """The largest counts of several snapshots of the idle server.

        A single one may fall between two periodic tasks of vllm-mlx.
        """
        snapshots = [self.wait_until_idle()]
        while len(snapshots) < readings:
            time.sleep(0.3)
            snapshots.append(self.wait_until_idle())
        return replace(
            snapshots[-1],
            files=max(snapshot.files for snapshot in snapshots),
            tasks=max(snapshot.tasks for snapshot in snapshots),
            objects={
                name: max(snapshot.objects[name] for snapshot in snapshots)
                for name in snapshots[0].objects
            },
        )


if __name__ == "__main__":
    raise SystemExit(serve())
