"""The thread that writes to the disk: one job at a time, slowly while an engine computes.

What waits to be written stays in memory. That is limited, and pieces that are in memory for nothing
else can be given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Queue
from weakref import ReferenceType

from vllm_mlx_harmony.engine.prefix_tree import Sized

WRITE_DUTY_CYCLE = 0.02
"""Part of a processor's time that writing takes while an engine computes."""

LINGER = 0.1
"""Seconds after a step of an engine in which another is expected."""


@dataclass(slots=True, eq=False)
class WriteJob:
    """Work of the writer. Until it is done, ``nbytes`` bytes under ``key`` stay in memory.

    ``piece`` refers to the piece that has these bytes, if it is one.
    """

    run: Callable[[], object]
    key: bytes = b""
    nbytes: int = 0
    piece: ReferenceType[Sized] | None = None

    @property
    def is_evicted(self) -> bool:
        """Whether the piece is in memory only to be written."""
        return self.piece is not None and self.piece() is None


def _nothing() -> None:
    """What is left of a job that was given up."""


class Writer:
    """Calls ``work``, which must not raise, with one job after another, in their order.

    No more than ``buffer`` bytes wait. All methods but `throttle` may be called on any thread.
    """

    def __init__(self, work: Callable[[WriteJob], None], buffer: int) -> None:
        self._work, self._buffer = work, buffer
        self.queue: Queue[WriteJob | None] = Queue()
        self.waiting = 0
        self._jobs: set[WriteJob] = set()
        """Queued and running jobs; ``waiting`` is the sum of their ``nbytes``."""
        self._running: WriteJob | None = None
        self._engines_busy, self._last_busy = 0, 0.0
        self._lock = threading.Lock()
        """Guards changes of what is above. Engines' threads take it: it is held only briefly."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="prefix-cache-writer", daemon=True)
        self._thread.start()

    def enqueue(self, job: WriteJob, known: set[bytes] | None = None) -> bool:
        """Queues ``job`` and adds its key to ``known``; ``False`` if too much waits."""
        with self._lock:
            if self.waiting + job.nbytes > self._buffer:
                return False
            self.waiting += job.nbytes
            self._jobs.add(job)
        if known is not None:
            known.add(job.key)  # first: ``work`` removes it when the job fails
        self.queue.put(job)
        return True

    def keys(self) -> set[bytes]:
        """Keys of the jobs that are not done."""
        with self._lock:
            return {job.key for job in self._jobs}

    @property
    def evicted(self) -> int:
        """Bytes of pieces that are in memory only to be written."""
        with self._lock:
            jobs = [job for job in self._jobs if job.is_evicted]
        return sum(job.nbytes for job in jobs)

    def give_up_evicted(self) -> list[tuple[bytes, int]]:
        """Gives up writing these pieces, but for the one that is being written; returns their keys
        and bytes."""
        given_up = []
        with self._lock:
            for job in self._jobs - {self._running}:
                if job.is_evicted:
                    given_up.append((job.key, job.nbytes))
                    self.waiting -= job.nbytes
                    job.run, job.nbytes, job.piece = _nothing, 0, None
        return given_up

    @contextmanager
    def writing_slowly(self) -> Iterator[None]:
        """To be held while an engine computes, which the writer would slow down."""
        with self._lock:
            self._engines_busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._engines_busy -= 1
                self._last_busy = time.monotonic()

    def throttle(self, seconds: float) -> None:
        """To be called by a job after each part, which took ``seconds``: sleeps if an engine
        computes."""
        busy = self._engines_busy > 0 or time.monotonic() - self._last_busy < LINGER
        if busy and not self._closing:
            time.sleep(min(seconds / WRITE_DUTY_CYCLE, 1.0))

    def _run(self) -> None:
        while (job := self.queue.get()) is not None:
            with self._lock:
                self._running = job
            self._work(job)
            with self._lock:
                self._running = None
                self.waiting -= job.nbytes
                self._jobs.discard(job)
            del job  # its buffers are the engine's memory
            self.queue.task_done()

    def flush(self, timeout: float | None) -> bool:
        """Waits until all jobs are done, at most ``timeout`` seconds; returns whether they are."""
        with (done := self.queue.all_tasks_done):
            return done.wait_for(lambda: not self.queue.unfinished_tasks, timeout)

    def close(self, timeout: float) -> bool:
        """For up to ``timeout`` seconds, works on what still waits, at full speed; returns
        whether all is done."""
        self._closing = True
        self.queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()
