"""The helper process, in which clients' strict schemas and syntaxes are tried before the server
compiles them.

A small grammar can make llguidance overflow the stack, which ends the process, fill the memory, or
take minutes. So those that contain a schema, a regular expression or a grammar of a client are
compiled here first, under limits set by the kernel.

`main` runs in an interpreter started with ``-I -S``: it reads no ``.pth`` files, so nothing is
activated, and imports only the standard library and llguidance. It forks a *worker* for each socket
that it receives over the control socket, which takes a few milliseconds, since the library and the
tokenizer are already loaded. A worker reads one question, a line of JSON (`_Worker`), answers it
with another, and ends. If it exceeds a limit it dies, which closes the socket:

- **stack**: `STACK` bytes, a quarter of that of the server's threads. An overflow is a SIGSEGV.
- **memory**: `MEMORY` bytes more than the worker had before. On Linux by ``RLIMIT_AS``. macOS does
  not enforce that, so the worker's main thread also checks the resident size, while llguidance
  works without the interpreter lock.
- **time**, CPU and wall-clock: checked by the main thread as well. If that thread cannot run, the
  signals of interval timers end the worker after twice the time.

A worker also ends when the server does, or when the server closes the socket.

The tokenizer has one token per byte, and control tokens with their real ids. It takes 50 ms to
build instead of a second and 170 MB. Explosive grammars are found with it as well: they explode in
llguidance's regular expressions, not in the vocabulary, and llguidance itself limits the cost of a
mask over a larger vocabulary.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK = 2 * 2**20
MEMORY = 256 * 2**20
"""Bytes."""

STEPS, JSON_STEPS = 32, 8
"""Bytes of output that are tried with a grammar and with a single schema: the states of a regular
expression may grow with each byte."""

TICK = 0.01
"""Seconds between two checks of a worker's limits."""

CPU_TIME_EXCEEDED, WALL_TIME_EXCEEDED = "processor", "clock"
"""Answers when a time limit was exceeded. That of wall-clock time is exceeded first if the worker
got less than half of a processor, and then nothing is known about the grammar."""

READY = b"+"

_LINUX = sys.platform == "linux"

_VOCABULARY = 201_088
_FIRST_CONTROL = 199_998
_END_OF_TEXT = 199_999
_WORDS = _VOCABULARY // 32


def main() -> None:
    """Forks a worker for each socket received over standard input, until that is closed."""
    # Ctrl-C ends the server, which still needs this process. A new session would do as well, but
    # Linux shares out its processors by session: the workers' niceness would count for nothing.
    os.setpgid(0, 0)
    control = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    try:
        tokenizer = _tokenizer()
    except Exception as error:  # noqa: BLE001 - the server logs it
        control.sendall(f"{type(error).__name__}: {error}".encode())
        return
    control.sendall(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _Worker(socket.socket(fileno=descriptors[0]), tokenizer).run()
        os.close(descriptors[0])


def _tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Bytes(), slices=[])  # type: ignore[arg-type]


class _Bytes:
    """A tokenizer for llguidance, with a token for each byte, and the control tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = _END_OF_TEXT
    special_token_ids = range(_FIRST_CONTROL, _VOCABULARY)

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [b""] * (_FIRST_CONTROL - len(self.tokens))
        self.tokens += [b"<|%d|>" % token for token in self.special_token_ids]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class _Worker:
    """Tries one grammar, and ends.

    The question: ``text``, the beginning of the output (``begun``), llguidance's ``limits``, the
    seconds of ``processor`` and ``clock``, and the increment of the niceness (``nice``). The
    answer: the problem, empty if there is none, and the growth of the process in bytes; or which
    time was exceeded.
    """

    def __init__(self, connection: socket.socket, tokenizer: LLTokenizer) -> None:
        self._connection = connection
        self._tokenizer = tokenizer

    def run(self) -> None:
        """Never returns."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._connection.sendall(READY)
        question = json.loads(self._connection.makefile("rb").readline() or b"{}")
        if not question:
            os._exit(0)
        os.nice(question["nice"])
        processor, clock = question["processor"], question["clock"]
        began, until = resident(), time.monotonic() + clock
        computed_until = time.process_time() + processor
        signal.setitimer(signal.ITIMER_PROF, 2 * processor)
        signal.setitimer(signal.ITIMER_REAL, 2 * clock)
        threading.stack_size(STACK)
        threading.Thread(target=self._answer, args=(question, began), daemon=True).start()
        if _LINUX:
            allowed = _pages(0) + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
        while True:
            time.sleep(TICK)
            try:  # the server sends nothing more, so this is the end
                is_closed = not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                is_closed = False
            except OSError:
                is_closed = True
            if is_closed or resident() > began + MEMORY:
                os._exit(1)
            left = computed_until - time.process_time()
            if left < 0 or time.monotonic() > until:
                self._send(CPU_TIME_EXCEEDED if left < processor / 2 else WALL_TIME_EXCEEDED)
                os._exit(1)

    def _answer(self, question: dict[str, Any], began: int) -> None:
        try:
            problem = _problem(self._tokenizer, question)
            self._send([problem, max(0, resident() - began)])
        finally:
            os._exit(0)

    def _send(self, answer: object) -> None:
        self._connection.sendall(json.dumps(answer).encode() + b"\n")


def _problem(tokenizer: LLTokenizer, question: dict[str, Any]) -> str:
    """Why the text cannot be compiled and applied to output, in one line; empty if it can."""
    import ctypes

    from llguidance import LLMatcher, LLParserLimits

    text, begun = question["text"], question["begun"].encode()
    limits = LLParserLimits(**question["limits"])
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    words = (ctypes.c_uint32 * _WORDS)()
    draw = 1
    if begun and not matcher.is_error():
        matcher.try_consume_tokens(list(begun))
    # A JSON schema begins with a brace, a Lark grammar does not.
    for _ in range(JSON_STEPS if text.startswith("{") else STEPS):
        if matcher.is_stopped():
            break
        matcher.unsafe_compute_mask_ptr(ctypes.addressof(words), 4 * _WORDS)
        allowed = [at for at in _CANDIDATES if words[at // 32] >> at % 32 & 1]
        if not allowed:
            break
        draw = draw * 69_069 + 1 & 0xFFFF_FFFF  # the same bytes each time
        matcher.consume_token(allowed[draw % len(allowed)])
    problem: str = matcher.get_error() if matcher.is_error() else ""
    return problem.partition("\n")[0]


_CANDIDATES = (*range(256), *range(200_002, 200_013))


def resident() -> int:
    """The resident size of this process in bytes; on macOS, the maximum so far."""
    if _LINUX:
        return _pages(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _pages(field: int) -> int:
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 100).split()[field]) * resource.getpagesize()
    finally:
        os.close(descriptor)
