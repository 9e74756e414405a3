"""Checks in a helper process whether a grammar can be compiled, before the server compiles it.

`grammar_process` is the helper process; here are its clients. Verdicts are cached by tenant. A
grammar that exceeds a limit there is treated as one that cannot be expressed, and is not tried
again.

**Scheduling.** A slow grammar must not delay those of other clients, who may all use the same API
key and so be one tenant. There are two lanes. In the first, a grammar has `QUICK` seconds of
processor time, many times what ordinary tools need; of the waiting requests, the one that has used
the least time goes first. A grammar that needs more moves to the second lane, with `SLOW` seconds
per grammar and one slot per tenant. Both have a lower priority than the server, the second one the
lowest.

In the server, requests take turns in the same order. Writing a grammar is Python, of which only one
thread runs at a time: if several were written at once, each step of the engine would wait for all
of them. Compiling several at once would take the processors from the engine.

**Patience.** A request waits `PATIENCE` seconds for all of its grammars together. A verdict that is
still missing raises `Unchecked` and is not cached, as another request may find the lanes free. A
grammar is tried once for all requests that wait for it, as long as one of them does.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import lru
from vllm_mlx_harmony.server import grammar_process

logger = logging.getLogger(__name__)

QUICK, SLOW = 0.1, 1.0
"""Processor seconds for one grammar. The server then takes as long again to compile it."""

INSTANT = 0.01
"""Processor seconds: grammars that take less are compiled by the server at once, others in turn."""

MAX_ELAPSED = 2.0
"""Elapsed seconds for one grammar, since a process may hang without using a processor."""

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

BATCH = 32
"""Grammars in one question to a worker."""

TOO_MUCH = "it takes too much time, memory or depth to compile"


Text: TypeAlias = "tuple[str, str]"
"""A grammar, and the text with which the output that has to match it begins."""


class Unchecked(Exception):
    """It is not known, at least not in time, whether a grammar can be compiled."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``problem``: why the grammar cannot be compiled, in one line; empty if it can.

    ``size``: its compiled size in bytes. ``seconds``: of the processor, that compiling it takes.
    """

    problem: str
    size: int = 0
    seconds: float = 0.0


class GrammarCheck:
    """Gets the verdicts for one request of ``tenant``. For one thread; ``cancel`` is for any.

    Calling it returns the ``problem`` of a verdict. Raises ``Unchecked``.
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
        """The verdict on ``text``, for output that starts with ``begun``. Raises ``Unchecked``."""
        self._begin()
        return self._checks.verdict((text, begun), self)

    def try_all(self, texts: Sequence[Text]) -> bool:
        """Whether all of ``texts`` can be compiled.

        Much faster than one by one if they are short. False also means that they took too long
        together; each may still be accepted by itself. Raises ``Unchecked``.
        """
        self._begin()
        return self._checks.try_all(texts, self)

    def _begin(self) -> None:
        if self._until is None:
            self._until = time.monotonic() + PATIENCE

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
        with lane.slot(self.tenant, self.spent, lambda: not self.cancelled):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which the server writes a grammar. Raises ``Unchecked``."""
        with self._checks.writing.slot(self.tenant, self.spent, lambda: not self.cancelled):
            began = time.monotonic()
            try:
                yield
            finally:
                self.spent += time.monotonic() - began

    def cancel(self) -> None:
        """The request has ended."""
        self.cancelled = True


@dataclass(slots=True, eq=False)
class _Trial:
    """A grammar that is being tried, and the requests that wait for it."""

    requests: list[GrammarCheck] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    verdict: Verdict | None = None

    @property
    def wanted(self) -> bool:
        return any(request.waits for request in tuple(self.requests))


class GrammarChecks:
    """The verdicts of one server process, and its helper process."""

    def __init__(self) -> None:
        self._helper = _Helper()
        self._lock = threading.Lock()
        self._trials: dict[tuple[str, bytes], _Trial] = {}
        self._verdicts: lru.ByteLRU[tuple[str, bytes], Verdict] = lru.ByteLRU(CACHE_BYTES)
        self._quick = _Lane(self._helper, QUICK, width=2, idle=2, nice=5)
        self.slow = _Lane(self._helper, SLOW, width=2, each_tenant=1, nice=15)
        self.writing, self.compiling = _Slots(1), _Slots(1)

    def start(self) -> None:
        """Starts the helper process unless it runs. Raises ``OSError`` and ``Unchecked``."""
        self._helper.start()

    def close(self) -> None:
        self._quick.close()
        self._helper.close()

    def try_all(self, texts: Sequence[Text], request: GrammarCheck) -> bool:
        new = [text for text in texts if self._verdicts.get(_key(text, request)) is None]
        for first in range(0, len(new), BATCH):
            some = new[first : first + BATCH]
            verdicts = self._try(self._quick, some, request, _Trial([request]))
            if verdicts is None:
                return False
            for text, verdict in zip(some, verdicts, strict=True):
                self._remember(_key(text, request), verdict)
        known = (self._verdicts.get(_key(text, request)) for text in texts)
        return all(verdict is not None and not verdict.problem for verdict in known)

    def _remember(self, key: tuple[str, bytes], verdict: Verdict) -> None:
        self._verdicts.put(key, verdict, 400 + len(verdict.problem))

    def verdict(self, text: Text, request: GrammarCheck) -> Verdict:
        """The verdict on ``text``, for ``request``. Raises ``Unchecked``."""
        key = _key(text, request)
        while (known := self._verdicts.get(key)) is None:
            with self._lock:
                is_first = key not in self._trials
                trial = self._trials.setdefault(key, _Trial())
                trial.requests.append(request)
            try:
                if is_first:
                    self._run(trial, key, text, request)
                else:
                    while not trial.done.wait(POLL) and request.waits:
                        pass
            finally:
                trial.requests.remove(request)
            if trial.verdict is not None and not request.cancelled:
                return trial.verdict
            if not request.waits:
                raise Unchecked("the check took too long")
        return known

    def _run(
        self, trial: _Trial, key: tuple[str, bytes], text: Text, request: GrammarCheck
    ) -> None:
        """Sets the verdict of ``trial``. Raises ``Unchecked``."""
        try:
            found = self._try(self._quick, [text], request, trial)
            found = found or self._try(self.slow, [text], request, trial)
            trial.verdict = found[0] if found else Verdict(TOO_MUCH)
            if trial.verdict.problem == TOO_MUCH:
                size = len(text[0])
                logger.warning("a grammar of %d characters is not enforced: %s", size, TOO_MUCH)
            self._remember(key, trial.verdict)
        finally:
            with self._lock:
                del self._trials[key]
            trial.done.set()

    def _try(
        self, lane: _Lane, texts: Sequence[Text], request: GrammarCheck, trial: _Trial
    ) -> list[Verdict] | None:
        began = time.monotonic()
        try:
            return lane.try_texts(texts, request, trial)
        except OSError as error:
            logger.error("no grammar is enforced: their checker cannot start: %s", error)
            raise Unchecked("the helper process cannot be started") from error
        finally:
            request.spent += time.monotonic() - began


def _key(text: Text, request: GrammarCheck) -> tuple[str, bytes]:
    return request.tenant, sha256("\0".join(text).encode()).digest()


class _Slots:
    """``width`` slots, of which one tenant has at most ``each_tenant``."""

    def __init__(self, width: int, each_tenant: int | None = None) -> None:
        self._width, self._each_tenant = width, each_tenant or width
        self._changed = threading.Condition()
        self._order = count()
        self._waiting: list[tuple[float, int, str]] = []
        self._running: list[str] = []

    @contextmanager
    def slot(self, tenant: str, spent: float, wanted: Callable[[], bool]) -> Iterator[None]:
        """Waits for a slot, which goes to the request that has ``spent`` least.

        Raises ``Unchecked`` if it is no longer ``wanted``.
        """
        ticket = spent, next(self._order), tenant

        def is_next() -> bool:
            if len(self._running) >= self._width:
                return False
            most = self._each_tenant
            allowed = [each for each in self._waiting if self._running.count(each[2]) < most]
            return bool(allowed) and min(allowed) == ticket

        with self._changed:
            self._waiting.append(ticket)
            try:
                while not is_next():
                    if not wanted():
                        raise Unchecked("there was not enough time")
                    self._changed.wait(POLL)
                self._running.append(tenant)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(tenant)
                self._changed.notify_all()


class _Lane(_Slots):
    """Slots in which grammars are tried, with ``processor`` seconds for each.

    Up to ``idle`` workers wait for the next grammar.
    """

    def __init__(
        self,
        helper: _Helper,
        processor: float,
        *,
        width: int,
        each_tenant: int | None = None,
        nice: int = 0,
        idle: int = 0,
    ) -> None:
        super().__init__(width, each_tenant)
        self._helper = helper
        self._processor, self._nice, self._most_idle = processor, nice, idle
        self._idle: list[socket.socket] = []

    def try_texts(
        self, texts: Sequence[Text], request: GrammarCheck, trial: _Trial
    ) -> list[Verdict] | None:
        """The verdicts; ``None`` after a timeout, or if one of several texts ended the worker.

        Raises ``Unchecked`` if no request waits any more, and ``OSError`` without a worker.
        """
        question = json.dumps(texts).encode()
        with self.slot(request.tenant, request.spent, lambda: trial.wanted):
            while True:
                with self._changed:
                    used = bool(self._idle)
                    worker = self._idle.pop() if used else None
                worker = worker or self._helper.worker()
                keep = False
                try:
                    answers, worn = self._ask(worker, question, trial)
                    keep = not worn
                    return [
                        Verdict(TOO_MUCH if "panic" in problem else problem[:500], size, seconds)
                        for problem, size, seconds in answers
                    ]
                except TimeoutError:
                    return None
                except (EOFError, ConnectionError):
                    if used:
                        continue  # it may have died while it was idle
                    return None if len(texts) > 1 else [Verdict(TOO_MUCH)]
                finally:
                    with self._changed:
                        keep = keep and len(self._idle) < self._most_idle
                        if keep:
                            self._idle.append(worker)
                    if not keep:
                        worker.close()

    def _ask(self, worker: socket.socket, question: bytes, trial: _Trial) -> Any:
        header = grammar_process.HEADER.pack(
            len(question), self._processor, MAX_ELAPSED, self._nice
        )
        until = time.monotonic() + 2 * MAX_ELAPSED
        worker.settimeout(MAX_ELAPSED)
        worker.sendall(header + question)
        worker.settimeout(POLL)

        def read(size: int) -> bytes:
            parts = b""
            while len(parts) < size:
                try:
                    part = worker.recv(size - len(parts))
                except TimeoutError:
                    if not trial.wanted:
                        raise Unchecked("the check took too long") from None
                    if time.monotonic() > until:
                        raise
                    continue
                if not part:
                    raise EOFError
                parts += part
            return parts

        (length,) = grammar_process.LENGTH.unpack(read(grammar_process.LENGTH.size))
        if length == grammar_process.PROCESSOR_OVER:
            raise TimeoutError
        if length == grammar_process.CLOCK_OVER:
            raise Unchecked("the machine is too busy to check it")
        return json.loads(read(length))

    def close(self) -> None:
        with self._changed:
            for worker in self._idle:
                worker.close()
            self._idle.clear()


class _Helper:
    """The helper process, which is started when it is needed, and again if it has died.

    Methods raise ``OSError`` if it fails to start, and ``Unchecked`` during the pause after that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pause, self._paused_until = 0.0, 0.0

    def start(self) -> None:
        """Starts it unless it runs."""
        with self._lock:
            self._running()

    def worker(self) -> socket.socket:
        """A socket to a new worker."""
        with self._lock:
            for left in (True, False):
                control = self._running()
                ours, theirs = socket.socketpair()
                try:
                    with theirs:
                        socket.send_fds(control, [grammar_process.FORK], [theirs.fileno()])
                    ours.settimeout(MAX_ELAPSED)
                    if ours.recv(1) == grammar_process.READY:
                        self._pause = 0.0
                        return ours
                    raise ConnectionError("a new worker of the helper process has died")
                except OSError:
                    ours.close()
                    self._end()
                    if not left:
                        self._pause_after_failure()
                        raise
        raise AssertionError("unreachable")

    def _running(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        if time.monotonic() < self._paused_until:
            raise Unchecked("the helper process cannot be started")
        try:
            return self._started()
        except OSError:
            self._end()
            self._pause_after_failure()
            raise

    def _pause_after_failure(self) -> None:
        self._pause = min(2 * self._pause or FIRST_PAUSE, MAX_PAUSE)
        self._paused_until = time.monotonic() + self._pause

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._control = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic message quotes the grammar
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        atexit.register(self.close)
        ours.settimeout(START_TIMEOUT)
        message = ours.recv(1_000)
        if message != grammar_process.READY:
            raise OSError(f"the helper process did not start: {message.decode() or 'it ended'}")
        return ours

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


# --- one for each process ---

_checks: GrammarChecks | None = None
_lock = threading.Lock()


def checks() -> GrammarChecks:
    global _checks
    with _lock:
        if _checks is None:
            _checks = GrammarChecks()
        return _checks


def check_for(tenant: str) -> GrammarCheck:
    return GrammarCheck(checks(), tenant)


def _forget() -> None:
    """Called in a forked process: the helper process belongs to its parent."""
    global _checks, _lock
    _checks, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
