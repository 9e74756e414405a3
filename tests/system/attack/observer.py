"""Another client of a server: how long it waits, and how much of that is due to the server.

A process of its own requests `/health` every 10 ms and reads one streamed answer after the other.
Each *wait* (from a request to its response; from one part of a stream to the next) has two figures:

- ``wall``: milliseconds on the clock;
- ``held``: those in which the server worked on something else. On an overloaded machine every
  process waits for a processor, which is not the server's fault. So this is the wall time without
  the time of the event loop's thread in the kernel's run queue, and at most the processor time of
  all threads of the server. It includes threads that release the interpreter lock, so it is an
  upper bound.

Only Linux has these clocks (``schedstat``: https://docs.kernel.org/scheduler/sched-stats.html);
elsewhere the whole wait is ``held``.
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

INTERVAL = 0.01
"""Seconds between two requests of `/health`."""

MESSAGES = [{"role": "user", "content": "Go on."}]
"""The prompt of the streamed answer."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds so far: on the clock, of all threads on processors, of the loop in the run queue."""

    wall: float
    processor: float
    queued: float

    @classmethod
    def of(cls, pid: int) -> Clocks:
        """The clocks of process ``pid``, whose main thread runs the event loop."""
        now = time.perf_counter()
        try:
            processor = time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) computes it
            with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
                queued = int(file.read().split()[1]) / 1e9
        except OSError:
            return cls(now, now, 0.0)
        return cls(now, processor, queued)


@dataclass(slots=True)
class Longest:
    """The longest waits in milliseconds: on the clock, and the server's part."""

    wall: float = 0.0
    held: float = 0.0

    def record(self, before: Clocks, after: Clocks) -> None:
        """Adds a wait."""
        wall = after.wall - before.wall
        held = min(wall - (after.queued - before.queued), after.processor - before.processor)
        self.wall = max(self.wall, wall * 1e3)
        self.held = max(self.held, held * 1e3)


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest waits for `/health` and for the next part of a stream."""

    health: Longest
    stream: Longest


class Observer:
    """Another client of the server at ``base_url`` with process id ``pid``. Must be closed."""

    def __init__(self, base_url: str, pid: int, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, base_url, str(pid), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def waits(self) -> Waits:
        """The longest waits since the last call, or since the start.

        Raises ``RuntimeError`` when the observer has died, as it does when the server dies.
        """
        stdin, stdout = self._pipes()
        stdin.write("\n")
        stdin.flush()
        line = stdout.readline()
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
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the observer was started without pipes")
        return stdin, stdout


class _Client:
    """Both connections, and the longest waits since the last report."""

    def __init__(self, base_url: str, pid: int, model: str) -> None:
        address = urlsplit(base_url)
        head = f"HTTP/1.1\r\nHost: {address.netloc}\r\n"
        fields = {"model": model, "messages": MESSAGES, "max_tokens": 1_000, "stream": True}
        body = json.dumps(fields)
        self._address = address.hostname or "", address.port or 80
        self._health_request = f"GET /health {head}\r\n".encode()
        self._stream_request = (
            f"POST /v1/chat/completions {head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        self._pid = pid
        self._health = socket.create_connection(self._address)
        self._sent_at: Clocks | None = None
        self._next_request_at = 0.0
        self._until_report = 0
        self._longest = Waits(Longest(), Longest())
        self._open_stream()

    def _open_stream(self) -> None:
        self._stream = socket.create_connection(self._address)
        self._stream.sendall(self._stream_request)
        self._last_part: Clocks | None = None

    def run(self) -> None:
        """Prints the longest waits for each line of stdin, until stdin ends."""
        while True:
            if self._sent_at is None and time.perf_counter() >= self._next_request_at:
                self._sent_at = Clocks.of(self._pid)
                self._next_request_at = self._sent_at.wall + INTERVAL
                self._health.sendall(self._health_request)
            ready, _, _ = select.select([self._health, self._stream, sys.stdin], [], [], INTERVAL)
            now = Clocks.of(self._pid)
            if self._health in ready and self._sent_at is not None:
                self._read_health(self._sent_at, now)
            if self._stream in ready:
                self._read_stream(now)
            if sys.stdin in ready:
                if not sys.stdin.readline():
                    return
                # Current waits are not recorded yet, and the last answer is still being cleaned up.
                self._until_report = 3

    def _read_health(self, sent_at: Clocks, now: Clocks) -> None:
        self._health.recv(65_536)
        self._longest.health.record(sent_at, now)
        self._sent_at = None
        if self._until_report == 1:
            if self._last_part is not None:
                self._longest.stream.record(self._last_part, now)
            print(json.dumps(astuple(self._longest)), flush=True)
            self._longest = Waits(Longest(), Longest())
        self._until_report = max(self._until_report - 1, 0)

    def _read_stream(self, now: Clocks) -> None:
        part = self._stream.recv(65_536)
        if self._last_part is not None:
            self._longest.stream.record(self._last_part, now)
        self._last_part = now if b"data: {" in part else None
        if not part or b"data: [DONE]" in part:
            self._stream.close()
            self._open_stream()


if __name__ == "__main__":
    _Client(sys.argv[1], int(sys.argv[2]), sys.argv[3]).run()
