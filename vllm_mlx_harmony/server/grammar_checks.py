"""Checks in a helper process whether a strict schema or a client's syntax can be compiled.

`grammar_process` is the helper process; here are its clients. One starts with the first grammar
that needs it, so most servers have none. Verdicts are cached by tenant. A grammar that exceeds a
limit there is treated as one that cannot be expressed, and is not tried again.

**Places.** Two grammars are checked at a time, each by a process of its own, with a lower priority
than the server's and `CPU_SECONDS` each. In the server, grammars are written and compiled one at a
time. Writing is Python, of which only one thread runs at a time: if several were written
concurrently, each step of the engine would wait for all of them. A tenant has one place at most,
and waits for one at most, so tenants take turns, whatever one of them sends.

**Waiting.** A request waits `REQUEST_WAIT_SECONDS` for all of its verdicts together. One that is
not being computed by then is not known: it raises `CheckUnavailable` and is not cached, as another
request may find a place. Requests of a tenant with the same grammar get the verdict of the first.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from typing import Any, TypeAlias

from vllm_mlx_harmony.core import lru, vocab
from vllm_mlx_harmony.core.grammar import CheckUnavailable
from vllm_mlx_harmony.core.grammar.matching import LIMITS
from vllm_mlx_harmony.server import grammar_process

logger = logging.getLogger(__name__)

CPU_SECONDS = 1.0
"""To check one grammar; compiling it in the server takes about as long."""

MAX_ELAPSED = 2.0
"""Wall-clock seconds for one grammar, since a process may hang without using a processor."""

REQUEST_WAIT_SECONDS = 1.5
ANSWER_TIMEOUT = 20.0
"""Seconds for an answer, including the start of the process: one that needs more hangs."""

WIDTH = 2
"""Grammars that are checked at once. As a tenant has one place at most, the second is for others
while the first is taken by an expensive grammar, for up to `MAX_ELAPSED` seconds."""

NICE = 10
"""Added to the niceness of a helper process: where it competes with the server for a processor,
Linux gives it about a tenth of the time."""

CACHE_BYTES, ENTRY_BYTES = 4 * 2**20, 400
"""Bytes of all verdicts, and of one without its text."""

MAX_THREADS = 256
"""Most of them wait for a helper process, so asyncio's few default threads are not used. There are
many, since a request that gets no thread would wait longer than ``REQUEST_WAIT_SECONDS``."""

LIMIT_EXCEEDED = "it takes too much time, memory or depth to compile"

Trials: TypeAlias = Sequence[Sequence[int]]

Verdict: TypeAlias = tuple[str, int]
"""Why a grammar cannot be compiled, empty if it can; and its compiled size in bytes."""


class GrammarCheck:
    """Gets the verdicts for one request of ``tenant``.

    Calling it returns the problem of a verdict. Raises ``CheckUnavailable``.
    """

    def __init__(self, tenant: str, pool: WorkerPool | None = None) -> None:
        self._pool = pool or POOL
        self._tenant = tenant
        self._until: float | None = None

    def __call__(self, text: str) -> str:
        return self.verdict(text)[0]

    def verdict(self, text: str, trials: Trials = ((),)) -> Verdict:
        """The verdict on ``text``, for outputs that begin as ``trials`` (`Grammar.trials`).

        Raises ``CheckUnavailable``.
        """
        verdicts = self._pool.verdicts
        key = self._tenant, sha256(f"{text}\0{trials}".encode()).digest()
        verdict = verdicts.get(key)
        if verdict is None:
            self._until = self._until or time.monotonic() + REQUEST_WAIT_SECONDS
            with self._pool.checking.place(self._tenant, self._until):
                verdict = verdicts.get(key)  # another request may have tried it meanwhile
                verdict = verdict or self._pool.trial(text, trials)
            verdicts.put(key, verdict, ENTRY_BYTES + len(verdict[0]))
        return verdict

    def writing(self) -> AbstractContextManager[None]:
        """A context in which the server writes or compiles a grammar."""
        return self._pool.writing.place(self._tenant)


class WorkerPool:
    """What the requests of one server process share: verdicts, places, threads, and helper
    processes."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="harmony-grammar")
        self.verdicts: lru.ByteLRU[tuple[str, bytes], Verdict] = lru.ByteLRU(CACHE_BYTES)
        self.checking, self.writing = _Places(WIDTH), _Places(1)
        self.idle: list[_Worker] = []

    def trial(self, text: str, trials: Trials) -> Verdict:
        """The verdict of a helper process, for the holder of a place. Raises
        ``CheckUnavailable``."""
        limits = {"limits": LIMITS, "cpu_seconds": CPU_SECONDS, "seconds": MAX_ELAPSED}
        starts = [_in_bytes(ids) for ids in trials]
        try:
            try:
                worker = self.idle.pop()
            except IndexError:  # another thread may have taken the last one
                worker = _Worker()
            answer = worker.answer({"text": text, "starts": starts, **limits})
        except OSError as error:
            logger.error("strict schemas and syntaxes cannot be checked: %s", error)
            raise CheckUnavailable("the helper process does not answer") from error
        self.idle.append(worker)
        if answer == grammar_process.TIMED_OUT:
            raise CheckUnavailable("the server is too busy to check it")
        if answer == grammar_process.DIED or "panic" in answer[0]:
            logger.warning("a grammar of %d characters: %s", len(text), LIMIT_EXCEEDED)
            return LIMIT_EXCEEDED, 0
        return answer[0], answer[1]

    def close(self) -> None:
        while self.idle:
            self.idle.pop().kill()


def _in_bytes(ids: Sequence[int]) -> list[int]:
    """``ids`` as those of the helper's tokenizer: bytes, and control tokens as they are."""
    return [
        unit
        for token in ids
        for unit in ((token,) if token in vocab.CONTROL else vocab.token_bytes(token))
    ]


class _Worker:
    """A helper process. It ends with the server, which closes the socket. Raises ``OSError``."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_TIMEOUT)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path), str(NICE)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,  # a panic message quotes the grammar
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )

    def answer(self, question: object) -> Any:
        """The answer to ``question``. Raises ``OSError``, and ends the process, if there is none
        in time."""
        try:
            self._socket.sendall(json.dumps(question).encode() + b"\n")
            with self._socket.makefile("rb") as lines:
                line = lines.readline()
            if not line:
                raise ConnectionError("a helper process has ended")
        except OSError:
            self.kill()
            raise
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()


_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm_mlx_harmony.server.grammar_process import main; main(int(sys.argv[2]))"
)


class _Places:
    """``width`` places, of which a tenant has one at most. First come, first served, but the other
    requests of a tenant that gets a place go to the end."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._changed = threading.Condition()
        self.waiting: list[tuple[str, object]] = []
        self.holders: set[str] = set()

    @contextmanager
    def place(self, tenant: str, until: float | None = None) -> Iterator[None]:
        """Waits for a place. Raises ``CheckUnavailable`` if there is none ``until`` that time."""
        ticket = tenant, object()

        def is_next() -> bool:
            first = next((entry for entry in self.waiting if entry[0] not in self.holders), None)
            return first is ticket and len(self.holders) < self._width

        with self._changed:
            self.waiting.append(ticket)
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                if not self._changed.wait_for(is_next, left):
                    raise CheckUnavailable("timed out waiting for the checker")
                self.holders.add(tenant)
                self.waiting.sort(key=lambda entry: entry[0] == tenant)
            finally:
                self.waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.holders.remove(tenant)
                self._changed.notify_all()


POOL = WorkerPool()
