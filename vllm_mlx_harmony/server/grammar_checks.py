"""Checks in a helper process whether a grammar can be compiled, before the server compiles it.

`grammar_process` is the helper process; here are its clients. Verdicts are cached by tenant. A
grammar that exceeds a limit there is treated as one that cannot be expressed, and is not tried
again.

**Scheduling.** A slow grammar must not delay those of other clients, who may all use the same API
key and so be one tenant. There are two lanes. In the first, a grammar has `QUICK` seconds of CPU
time, many times what ordinary tools need; of the waiting requests, the one that has used the least
time goes first. A grammar that needs more moves to the second lane, with `SLOW` seconds per grammar
and one slot per tenant. Both have a lower priority than the server, the second one the lowest.

In the server, requests take turns in the same order. Writing a grammar is Python, of which only one
thread runs at a time: if several were written concurrently, each step of the engine would wait for
all of them. Compiling several concurrently would take the processors from the engine.

**Patience.** A request waits `PATIENCE` seconds for all of its grammars together. A verdict that is
still missing raises `CheckUnavailable` and is not cached, as another request may find the lanes
free. Requests that wait for a lane with the same grammar get the verdict of the first.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import count
from multiprocessing.connection import wait
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.server import grammar_process

logger = logging.getLogger(__name__)

QUICK, SLOW = 0.1, 1.0
"""CPU seconds to check one grammar; compiling it in the server takes about as long."""

INSTANT = 0.01
"""CPU seconds: grammars that take less are compiled by the server immediately, others in turn."""

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

LANE_WIDTH = 2
"""Grammars that are checked concurrently in one lane."""

BATCH = 32
"""Grammars in one question to a worker."""

TOO_MUCH = "it takes too much time, memory or depth to compile"


Text: TypeAlias = "tuple[str, str]"
"""A grammar, and the text with which the output that has to match it begins."""


class CheckUnavailable(Exception):
    """It is not known, at least not in time, whether a grammar can be compiled."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``problem``: why the grammar cannot be compiled, in one line; empty if it can.

    ``size``: its compiled size in bytes. ``seconds``: the CPU time that compiling it takes.
    """

    problem: str
    size: int = 0
    seconds: float = 0.0


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
        one = [(text, begun)]
        found = self._tried(one, self._checks.quick) or self._tried(one, self._checks.slow)
        return found[0] if found else Verdict(TOO_MUCH)

    def try_all(self, texts: Sequence[Text]) -> bool:
        """Whether all of ``texts`` can be compiled.

        Much faster than one by one if they are short. False also means that they took too long
        together; each may still be accepted by itself. Raises ``CheckUnavailable``.
        """
        verdicts: list[Verdict] = []
        for first in range(0, len(texts), BATCH):
            found = self._tried(texts[first : first + BATCH], self._checks.quick)
            if found is None:
                return False
            verdicts += found
        return not any(verdict.problem for verdict in verdicts)

    def _tried(self, texts: Sequence[Text], lane: _Lane) -> list[Verdict] | None:
        """The verdicts, tried in ``lane`` where they are not known; ``None`` as in `try_texts`."""
        if self._until is None:
            self._until = time.monotonic() + PATIENCE
        known = [self._known(text) for text in texts]
        if None not in known:
            return known  # type: ignore[return-value]
        began = time.monotonic()
        try:
            with lane.slot(self, lambda: self.waits):
                # Another request may have tried them while this one waited.
                known = [self._known(text) for text in texts]
                new = [text for text, verdict in zip(texts, known, strict=True) if verdict is None]
                tried = lane.try_texts(new, lambda: self.waits) if new else []
                if tried is None and lane is self._checks.slow:
                    tried = [Verdict(TOO_MUCH)]
                for text, verdict in zip(new, tried or (), strict=False):
                    self._remember(text, verdict)
        except OSError as error:
            logger.error("no grammar is enforced: their checker cannot start: %s", error)
            raise CheckUnavailable("the helper process cannot be started") from error
        finally:
            self.spent += time.monotonic() - began
        if tried is None:
            return None
        left = iter(tried)
        return [verdict or next(left) for verdict in known]

    def _known(self, text: Text) -> Verdict | None:
        return self._checks.verdicts.get(self._key(text))

    def _remember(self, text: Text, verdict: Verdict) -> None:
        if verdict.problem == TOO_MUCH:
            size = len(text[0])
            logger.warning("a grammar of %d characters is not enforced: %s", size, TOO_MUCH)
        self._checks.verdicts.put(self._key(text), verdict, 400 + len(verdict.problem))

    def _key(self, text: Text) -> tuple[str, bytes]:
        return self.tenant, sha256("\0".join(text).encode()).digest()

    @property
    def waits(self) -> bool:
        """Whether the request still waits for verdicts."""
        late = self._until is not None and time.monotonic() > self._until
        return not self.cancelled and not late

    @contextmanager
    def compiling(self, verdict: Verdict) -> Iterator[None]:
        """A context in which the server compiles a grammar. All but the fastest take turns."""
        if verdict.seconds <= INSTANT:
            yield
            return
        lane = self._checks.slow if verdict.seconds > QUICK else self._checks.compiling
        with lane.slot(self, lambda: not self.cancelled):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which the server writes a grammar. Raises ``CheckUnavailable``."""
        with self._checks.writing.slot(self, lambda: not self.cancelled):
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
        self.quick = _Lane(self._helper, QUICK, nice=5, keeps_workers=True)
        self.slow = _Lane(self._helper, SLOW, each_tenant=1, nice=15)
        self.writing, self.compiling = _Slots(1), _Slots(1)

    def start(self) -> None:
        """Starts the helper process unless it runs. Raises ``OSError`` and ``CheckUnavailable``."""
        self._helper.worker().close()

    def close(self) -> None:
        self.quick.close()
        self._helper.close()


class _Slots:
    """``width`` slots, of which one tenant has at most ``each_tenant``."""

    def __init__(self, width: int, each_tenant: int | None = None) -> None:
        self._width, self._each_tenant = width, each_tenant or width
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
            most = self._each_tenant
            allowed = [each for each in self._waiting if self._running.count(each[2]) < most]
            return bool(allowed) and min(allowed, key=rank) == ticket

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


class _Lane(_Slots):
    """Slots in which grammars are tried, with ``processor`` CPU seconds for each.

    ``keeps_workers``: a worker, whose niceness cannot be reduced, waits for the next grammar.
    """

    def __init__(
        self,
        helper: _Helper,
        processor: float,
        *,
        each_tenant: int | None = None,
        nice: int,
        keeps_workers: bool = False,
    ) -> None:
        super().__init__(LANE_WIDTH, each_tenant)
        self._helper = helper
        self._processor, self._nice, self._keeps_workers = processor, nice, keeps_workers
        self._idle: list[socket.socket] = []

    def try_texts(self, texts: Sequence[Text], wanted: Callable[[], bool]) -> list[Verdict] | None:
        """The verdicts; ``None`` after a timeout, or if one of several texts ended the worker.

        For the holder of a slot. Raises ``CheckUnavailable`` if it is no longer ``wanted``, and
        ``OSError`` without a worker.
        """
        while True:
            idle = self._idle.pop() if self._idle else None
            with ExitStack() as closing:
                worker = closing.enter_context(idle or self._helper.worker())
                try:
                    answers, worn = self._ask(worker, texts, wanted)
                except TimeoutError:
                    return None
                except (EOFError, ConnectionError):
                    if idle is not None:
                        continue  # it may have died while it was idle
                    return None if len(texts) > 1 else [Verdict(TOO_MUCH)]
                if self._keeps_workers and not worn:
                    closing.pop_all()
                    self._idle.append(worker)
                return [
                    Verdict(TOO_MUCH if "panic" in problem else problem[:500], size, seconds)
                    for problem, size, seconds in answers
                ]

    def _ask(self, worker: socket.socket, texts: Sequence[Text], wanted: Callable[[], bool]) -> Any:
        until = time.monotonic() + 2 * MAX_ELAPSED
        question = json.dumps([texts, self._processor, MAX_ELAPSED, self._nice])
        worker.settimeout(MAX_ELAPSED)
        worker.sendall(question.encode() + b"\n")
        while not wait([worker], POLL):
            if not wanted():
                raise CheckUnavailable("the check timed out")
            if time.monotonic() > until:
                raise TimeoutError
        with worker.makefile("rb") as reading:
            line = reading.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer = json.loads(line)
        if answer == grammar_process.CPU_TIME_EXCEEDED:
            raise TimeoutError
        if answer == grammar_process.WALL_TIME_EXCEEDED:
            raise CheckUnavailable("the server is too busy to check it")
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Helper:
    """The helper process, which is started when it is needed, and again if it has died or hangs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pause, self._paused_until = 0.0, 0.0

    def worker(self) -> socket.socket:
        """A socket to a new worker.

        Raises ``OSError`` if the process fails to start, and ``CheckUnavailable`` in the pause
        after that.
        """
        with self._lock:
            if self._control is not None:
                with suppress(OSError):
                    return self._forked(self._control)
                self._end()
            if time.monotonic() < self._paused_until:
                raise CheckUnavailable("the helper process cannot be started")
            try:
                worker = self._forked(self._started())
            except OSError:
                self._end()
                self._pause = min(2 * self._pause or FIRST_PAUSE, MAX_PAUSE)
                self._paused_until = time.monotonic() + self._pause
                raise
            self._pause = 0.0
            return worker

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
