"""`vllm-mlx serve` that can be asked what is left in it: SIGUSR1 has it write figures to a file.

A task, a buffer or a lease that a request left behind is seen by nobody outside. Run as a command
(``COMMAND``) it is the server; ``Inspection`` asks one.
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

VARIABLE = "ATTACK_FIGURES"
"""Environment variable: the file that figures are written to."""

COMMAND = (sys.executable, __file__, "serve")


@dataclass(frozen=True)
class Left:
    """What is in a server: resident memory in MiB, and how many of everything that may leak.

    ``objects`` are of classes that live as long as a request or a connection; ``busy``: an answer
    is generated, waits for its turn, or waits to be read.
    """

    number: int
    rss: float
    files: int
    threads: int
    tasks: int
    busy: bool
    objects: dict[str, int]

    def more_than(self, before: Left) -> dict[str, int]:
        """What there is more of than ``before``, beyond connections that are just being closed."""
        mine, others = ({**each.objects, "tasks": each.tasks} for each in (self, before))
        more = {name: mine[name] - others[name] for name in mine if mine[name] > others[name]}
        if self.files > before.files + 5:
            more["files"] = self.files - before.files
        return more


def serve() -> int:
    """The server, which writes what is left in it whenever it gets the signal."""
    from vllm_mlx_harmony.__main__ import main

    asked = 0

    def write(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        path = Path(os.environ[VARIABLE])
        written = path.with_suffix(".new")
        written.write_text(json.dumps(_figures(asked)))
        written.replace(path)

    signal.signal(signal.SIGUSR1, write)
    return main()


def _figures(number: int) -> dict[str, object]:
    import psutil

    from vllm_mlx_harmony.server.answer import Answer
    from vllm_mlx_harmony.server.front_end import FrontEnd
    from vllm_mlx_harmony.server.generation import Job
    from vllm_mlx_harmony.server.responses.websocket import Conversation
    from vllm_mlx_harmony.server.storage.background import Running
    from vllm_mlx_harmony.server.storage.persistence import StoringEmitter

    kinds = {Answer, Job, Conversation, StoringEmitter, Running}
    gc.collect()
    objects = gc.get_objects()
    names = Counter(type(one).__name__ for one in objects if type(one) in kinds)
    answers = [one.answers for one in objects if type(one) is FrontEnd]
    del objects
    process = psutil.Process()
    try:
        tasks = len(asyncio.all_tasks())
    except RuntimeError:  # the loop does not run yet, or any more
        tasks = 0
    return {
        "number": number,
        "rss": process.memory_info().rss / 2**20,
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "tasks": tasks,
        "busy": any(each.running or each.unread for each in answers),
        "objects": {kind.__name__: names[kind.__name__] for kind in kinds},
    }


class Inspection:
    """Asks the server with this process id, which writes to ``path``."""

    def __init__(self, pid: int, path: Path) -> None:
        self._pid, self._path = pid, path
        self._number = 0

    def now(self, patience: float = 30.0) -> Left:
        """What is in it now. Raises ``TimeoutError`` when it does not say within ``patience`` s."""
        os.kill(self._pid, signal.SIGUSR1)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            try:
                left = Left(**json.loads(self._path.read_text()))
            except FileNotFoundError:
                left = None
            if left is not None and left.number > self._number:
                self._number = left.number
                return left
            time.sleep(0.02)
        raise TimeoutError(f"the server does not say what is in it for {patience:.0f} s")

    def quiet(self, before: Left | None = None, patience: float = 60.0) -> Left:
        """What is in it once nothing is answered, nor more there than ``before``.

        When that is not so after ``patience`` s, it is what is left by then.
        """
        end = time.monotonic() + patience
        while True:
            left = self.now()
            busy = left.busy or left.objects["Answer"] or left.objects["Job"]
            if not busy and not (before and left.more_than(before)):
                return left
            if time.monotonic() > end:
                return left
            time.sleep(0.2)

    def baseline(self, looks: int = 3) -> Left:
        """What there is when nothing is answered: the most that several looks find.

        One look may come between two tasks of vllm-mlx's own, which are there again afterwards.
        """
        seen = [self.quiet()]
        while len(seen) < looks:
            time.sleep(0.3)
            seen.append(self.quiet())
        return replace(
            seen[-1],
            files=max(each.files for each in seen),
            tasks=max(each.tasks for each in seen),
            objects={name: max(each.objects[name] for each in seen) for name in seen[0].objects},
        )


if __name__ == "__main__":
    raise SystemExit(serve())
