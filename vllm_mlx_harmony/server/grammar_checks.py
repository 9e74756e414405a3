"""Checks in a helper process whether a strict schema or a client's syntax can be compiled.

`grammar_process` is the helper process; here are its clients. It starts with the first grammar that
needs it, so most servers have none. Verdicts are cached by tenant. A grammar that exceeds a limit
there is treated as one that cannot be expressed, and is not tried again.

**Scheduling.** Two grammars are checked at a time, with a lower priority than the server's and
`PROCESSOR` seconds each. Tenants take turns. Clients may all use the same API key and so be one
tenant; of its requests, the one whose grammars have taken the least time goes first, so that slow
grammars do not delay those of others for long.

In the server, grammars are written and compiled in turn, in the same order. Writing one is Python,
of which only one thread runs at a time: if several were written concurrently, each step of the
engine would wait for all of them.

**Patience.** A request waits `PATIENCE` seconds for all of its verdicts together. One that is still
missing raises `CheckUnavailable` and is not cached, as another request may find the lanes free.
Requests that wait for a lane with the same grammar get the verdict of the first.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import count
from multiprocessing.connection import wait

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.core.grammar.matching import LIMITS
from vllm_mlx_harmony.server import grammar_process

logger = logging.getLogger(__name__)

PROCESSOR = 1.0
"""CPU seconds to check one grammar; compiling it in the server takes about as long."""

NICE = 10
"""Added to the niceness of the process that checks it."""

MAX_ELAPSED = 2.0
"""Wall-clock seconds for one grammar, since a process may hang without using a processor."""

PATIENCE = 1.5
"""Seconds that a request waits for its verdicts."""

START_TIMEOUT = 20.0
"""Seconds within which the helper process must be ready."""

FIRST_PAUSE, MAX_PAUSE = 2.0, 60.0
"""Seconds without another attempt after the helper process has failed to start; the pause doubles
with each failure."""

POLL = 0.05
"""Seconds between two checks whether a request still waits."""

CACHE_BYTES = 4 * 2**20
"""Approximate size of the cache of verdicts in bytes."""

WIDTH = 2
"""Grammars that are checked concurrently."""

TOO_MUCH = "it takes too much time, memory or depth to compile"


class CheckUnavailable(Exception):
    """It is not known, at least not in time, whether a grammar can be compiled."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``problem``: why the grammar cannot be compiled, in one line; empty if it can.

    ``size``: its compiled size in bytes.
    """

    problem: str
    size: int = 0


class GrammarCheck:
    """Gets the verdicts for one request of ``tenant``. For one thread; ``cancel`` is for any.

    Calling it returns the ``problem`` of a verdict. Raises ``CheckUnavailable``.
    """

    def __init__(self, checks: GrammarChecks, tenant: str) -> None:
        self._checks = checks
        self._until: float | None = None
        self.tenant = tenant
        self.cancelled = False
        self.spent = 0.0
        """Seconds that its grammars have taken so far."""

    def __call__(self, text: str) -> str:
        return self.verdict(text).problem

    def verdict(self, text: str, begun: str = "") -> Verdict:
        """The verdict on ``text``, for output that starts with ``begun``.

        Raises ``CheckUnavailable``.
        """
        key = self.tenant, sha256(f"{text}\0{begun}".encode()).digest()
        known = self._checks.verdicts.get(key)
        if known is not None:
            return known
        try:
            self._checks.start()  # for which no request is short of patience
            if self._until is None:
                self._until = time.monotonic() + PATIENCE
            with self._slot(self._checks.slots, lambda: self.waits):
                # Another request may have tried it while this one waited.
                known = self._checks.verdicts.get(key)
                verdict = known or self._checks.trial(text, begun, lambda: self.waits)
        except OSError as error:
            logger.error("no strict grammar is enforced: their checker cannot start: %s", error)
            raise CheckUnavailable("the helper process cannot be started") from error
        if verdict.problem == TOO_MUCH:
            logger.warning("a grammar of %d characters is not enforced: %s", len(text), TOO_MUCH)
        self._checks.verdicts.put(key, verdict, 400 + len(verdict.problem))
        return verdict

    @property
    def waits(self) -> bool:
        """Whether the request still waits for verdicts."""
        late = self._until is not None and time.monotonic() > self._until
        return not self.cancelled and not late

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context in which the server writes or compiles a grammar.

        Raises ``CheckUnavailable`` if the request has ended.
        """
        with self._slot(self._checks.turns, lambda: not self.cancelled):
            yield

    @contextmanager
    def _slot(self, slots: _Slots, wanted: Callable[[], bool]) -> Iterator[None]:
        with slots.slot(self, wanted):
            began = time.monotonic()
            try:
                yield
            finally:
                self.spent += time.monotonic() - began

    def cancel(self) -> None:
        """The request has ended."""
        self.cancelled = True


class GrammarChecks:
    """What the requests of one server process share: verdicts, slots, and the helper process."""

    def __init__(self) -> None:
        self._helper = _Helper()
        self.verdicts: lru.ByteLRU[tuple[str, bytes], Verdict] = lru.ByteLRU(CACHE_BYTES)
        self.slots, self.turns = _Slots(WIDTH), _Slots(1)

    def start(self) -> None:
        """Starts the helper process unless it runs. Raises ``OSError`` and ``CheckUnavailable``."""
        self._helper.start()

    def trial(self, text: str, begun: str, wanted: Callable[[], bool]) -> Verdict:
        """The verdict of a new worker, for the holder of a slot.

        Raises ``CheckUnavailable`` if it is no longer ``wanted``, or the machine too busy, and
        ``OSError`` without a worker.
        """
        question = {
            "text": text,
            "begun": begun,
            "limits": LIMITS,
            "processor": PROCESSOR,
            "clock": MAX_ELAPSED,
            "nice": NICE,
        }
        with self._helper.worker() as worker:
            until = time.monotonic() + 2 * MAX_ELAPSED
            try:
                worker.sendall(json.dumps(question).encode() + b"\n")
                while not wait([worker], POLL):
                    if not wanted():
                        raise CheckUnavailable("the check timed out")
                    if time.monotonic() > until:
                        return Verdict(TOO_MUCH)
                with worker.makefile("rb") as answers:
                    line = answers.readline()
            except ConnectionError:
                line = b""
        answer = json.loads(line) if line.endswith(b"\n") else None
        if answer == grammar_process.WALL_TIME_EXCEEDED:
            raise CheckUnavailable("the server is too busy to check it")
        if answer in (None, grammar_process.CPU_TIME_EXCEEDED):  # None: the worker died of it
            return Verdict(TOO_MUCH)
        problem, size = answer
        return Verdict(TOO_MUCH if "panic" in problem else problem[:500], size)

    def close(self) -> None:
        self._helper.close()


class _Slots:
    """``width`` slots."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._changed = threading.Condition()
        self._order = count()
        self._waiting: list[tuple[float, int, str]] = []
        self._running: list[str] = []
        self._turns: dict[str, int] = {}
        """When each tenant that is here last got a slot, in ``_order``."""

    @contextmanager
    def slot(self, request: GrammarCheck, wanted: Callable[[], bool]) -> Iterator[None]:
        """Waits for a slot. Tenants take turns: it goes to one that holds fewest, and of these to
        the one whose last turn is longest ago; of its requests, to the one that has spent least.

        Raises ``CheckUnavailable`` if it is no longer ``wanted``.
        """
        tenant = request.tenant
        ticket = request.spent, next(self._order), tenant

        def is_next() -> bool:
            if len(self._running) >= self._width:
                return False
            return min(self._waiting, key=rank) == ticket

        def rank(waiting: tuple[float, int, str]) -> tuple[int, int, float, int]:
            spent, number, tenant = waiting
            return self._running.count(tenant), self._turns.get(tenant, -1), spent, number

        with self._changed:
            self._waiting.append(ticket)
            try:
                while not is_next():
                    if not wanted():
                        raise CheckUnavailable("timed out waiting for the checker")
                    self._changed.wait(POLL)
                self._running.append(tenant)
                self._turns[tenant] = next(self._order)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(tenant)
                here = {*self._running, *(waiting[2] for waiting in self._waiting)}
                self._turns = {each: turn for each, turn in self._turns.items() if each in here}
                self._changed.notify_all()


class _Helper:
    """The helper process, which is started when it is needed, and again if it has died or hangs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pause, self._paused_until = 0.0, 0.0

    def worker(self) -> socket.socket:
        """A socket to a new worker. Raises as `start`."""
        with self._lock:
            if self._control is not None:
                with suppress(OSError):
                    return self._forked(self._control)
                self._end()
            return self._forked(self._started())

    def start(self) -> None:
        """Starts the process unless it runs.

        Raises ``OSError`` if it fails to, and ``CheckUnavailable`` in the pause after that.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._started()

    def _forked(self, control: socket.socket) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(control, [b"f"], [theirs.fileno()])
            ours.settimeout(MAX_ELAPSED)
            if ours.recv(1) != grammar_process.READY:
                raise ConnectionError("a new worker of the helper process has died")
        except OSError:
            ours.close()
            raise
        return ours

    def _started(self) -> socket.socket:
        if time.monotonic() < self._paused_until:
            raise CheckUnavailable("the helper process cannot be started")
        try:
            control = self._launched()
        except OSError:
            self._end()
            self._pause = min(2 * self._pause or FIRST_PAUSE, MAX_PAUSE)
            self._paused_until = time.monotonic() + self._pause
            raise
        self._pause = 0.0
        return control

    def _launched(self) -> socket.socket:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic message quotes the grammar
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        atexit.register(self.close)
        self._control.settimeout(START_TIMEOUT)
        message = self._control.recv(1_000)
        if message != grammar_process.READY:
            raise OSError(f"the helper process did not start: {message.decode() or 'it ended'}")
        return self._control

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        atexit.unregister(self.close)
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()
            self._process.wait()
            self._process = None


_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm_mlx_harmony.server.grammar_process import main; main()"
)


@lru_cache(maxsize=1)
def checks() -> GrammarChecks:
    """Those of this process. In a forked one, the helper process belongs to its parent."""
    return GrammarChecks()


os.register_at_fork(after_in_child=checks.cache_clear)


def check_for(tenant: str) -> GrammarCheck:
    return GrammarCheck(checks(), tenant)
