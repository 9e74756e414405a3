"""Another client of a server: how long it waits for answers, and how much of that is the server's.

A process of its own asks for `/health` every 10 ms and reads one streamed answer after the other.
Each *wait* (from a question to its answer; from one part of a stream to the next) has two figures:

- ``wall``: milliseconds on the clock;
- ``held``: those of them in which the server was at work on something else. On a machine that has
  more to do than its processors can, everybody waits for a processor, which is no server's fault:
  so this is the wall time less what the event loop's thread stood in the kernel's run queue, and
  no more than the processor time of all of the server's threads. Work of a thread that leaves the
  interpreter to others counts, too, so that it is an upper bound.

Linux alone has these clocks (``schedstat``: https://docs.kernel.org/scheduler/sched-stats.html);
elsewhere all of a wait is ``held``.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from typing import TextIO
from urllib.parse import urlsplit

EVERY = 0.01
"""Seconds between two questions."""

MESSAGES = [{"role": "user", "content": "Go on."}]
"""What the streamed answer is an answer to."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds so far: on the clock, of all threads on processors, of the loop in the run queue."""

    wall: float
    processor: float
    queued: float

    @classmethod
    def of(cls, pid: int) -> Clocks:
        """Those of process ``pid``, whose main thread runs the event loop."""
        now = time.perf_counter()
        try:
            processor = time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it
            with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
                queued = int(file.read().split()[1]) / 1e9
        except OSError:
            return cls(now, now, 0.0)
        return cls(now, processor, queued)


@dataclass(slots=True)
class Longest:
    """The longest waits of many, in milliseconds: on the clock, and the server's part."""

    wall: float = 0.0
    held: float = 0.0

    def note(self, before: Clocks, after: Clocks) -> None:
        """A wait."""
        wall = after.wall - before.wall
        held = min(wall - (after.queued - before.queued), after.processor - before.processor)
        self.wall = max(self.wall, wall * 1e3)
        self.held = max(self.held, held * 1e3)


@dataclass(frozen=True, slots=True)
class Waits:
    """Of who asked for `/health`, and of who read an answer."""

    health: Longest
    stream: Longest


class Observer:
    """The other client of the server at ``base_url`` with process id ``pid``. Close it."""

    def __init__(self, base_url: str, pid: int, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, base_url, str(pid), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def waits(self) -> Waits:
        """The longest since the last call, or since the start.

        Raises ``RuntimeError`` when the other client has died, as of a server that has.
        """
        asking, answer = self._pipes()
        asking.write("\n")
        asking.flush()
        line = answer.readline()
        if not line:
            raise RuntimeError("nobody observes the server any more")
        return Waits(*(Longest(*figures) for figures in json.loads(line)))

    def close(self) -> None:
        """Ends the process."""
        for pipe in self._pipes():
            with contextlib.suppress(OSError):  # it has died
                pipe.close()
        self._process.wait(10)

    def _pipes(self) -> tuple[TextIO, TextIO]:
        asking, answer = self._process.stdin, self._process.stdout
        if asking is None or answer is None:
            raise RuntimeError("the observer was started without pipes")
        return asking, answer


class _Client:
    """Both of its connections, and what it has waited since it was asked last."""

    def __init__(self, base_url: str, pid: int, model: str) -> None:
        address = urlsplit(base_url)
        head = f"HTTP/1.1\r\nHost: {address.netloc}\r\n"
        fields = {"model": model, "messages": MESSAGES, "max_tokens": 1_000, "stream": True}
        body = json.dumps(fields)
        self._to = address.hostname or "", address.port or 80
        self._ask = f"GET /health {head}\r\n".encode()
        self._begin = (
            f"POST /v1/chat/completions {head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        self._pid = pid
        self._health = socket.create_connection(self._to)
        self._asked: Clocks | None = None
        self._due = 0.0
        self._until_report = 0
        self._longest = Waits(Longest(), Longest())
        self._go_on()

    def _go_on(self) -> None:
        self._stream = socket.create_connection(self._to)
        self._stream.sendall(self._begin)
        self._last_part: Clocks | None = None

    def run(self) -> None:
        """For each line that comes in writes the longest waits, until nobody asks any more."""
        while True:
            if self._asked is None and time.perf_counter() >= self._due:
                self._asked = Clocks.of(self._pid)
                self._due = self._asked.wall + EVERY
                self._health.sendall(self._ask)
            ready, _, _ = select.select([self._health, self._stream, sys.stdin], [], [], EVERY)
            now = Clocks.of(self._pid)
            if self._health in ready and self._asked is not None:
                self._answered(self._asked, now)
            if self._stream in ready:
                self._read(now)
            if sys.stdin in ready:
                if not sys.stdin.readline():
                    return
                # What waits now has not been noted, and what was answered is not cleared away yet.
                self._until_report = 3

    def _answered(self, asked: Clocks, now: Clocks) -> None:
        self._health.recv(65_536)
        self._longest.health.note(asked, now)
        self._asked = None
        if self._until_report == 1:
            if self._last_part is not None:
                self._longest.stream.note(self._last_part, now)
            print(json.dumps(astuple(self._longest)), flush=True)
            self._longest = Waits(Longest(), Longest())
        self._until_report = max(self._until_report - 1, 0)

    def _read(self, now: Clocks) -> None:
        part = self._stream.recv(65_536)
        if self._last_part is not None:
            self._longest.stream.note(self._last_part, now)
        self._last_part = now if b"data: {" in part else None
        if not part or b"data: [DONE]" in part:
            self._stream.close()
            self._go_on()


if __name__ == "__main__":
    _Client(sys.argv[1], int(sys.argv[2]), sys.argv[3]).run()
