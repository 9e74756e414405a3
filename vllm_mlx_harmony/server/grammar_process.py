"""The process in which grammars are tried before the server compiles them.

llguidance compiles what it is given, and a small text can exhaust its stack (which ends the process
at once), fill the memory, or take minutes. So a text that is new is compiled here first, where the
kernel sets limits, and the server compiles what has passed.

`main` runs in an interpreter of its own, started with ``-I -S``: without site-packages' ``.pth``
files, so that nothing is activated, and without anything but the standard library and llguidance.
It does nothing but fork: each *worker* serves one socket, which it got over the control socket, one
text after the other. A worker that reaches a limit dies, and its socket tells; another one is there
after a few milliseconds, since the library and the tokenizer are loaded already.

The limits of one text:

- **stack**: `STACK` bytes, a quarter of what the server's threads have. Whoever exceeds it gets
  SIGSEGV.
- **memory**: `MEMORY` bytes more than the worker began with. On Linux by ``RLIMIT_AS``; everywhere,
  since macOS does not enforce that, by the worker's main thread, which looks at the resident size
  while llguidance works without the interpreter's lock.
- **time**: of the processor and on the clock, which the main thread looks at as well. Should it be
  kept from that, the signals of interval timers end the worker at twice the time.

A worker ends by itself when the server does, or closes the socket because nobody waits for the
answer any more.

The tokenizer has one token for each byte, and the ids of the real one: it is there in 50 ms, in
place of a second and 170 MB. What explodes does so with it as well, since it explodes in what
llguidance makes of a regular expression, not in the vocabulary; what a larger vocabulary multiplies
is bounded by llguidance's own limits on one mask.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
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
"""Bytes of an output that are tried, of grammars and of single schemas: a regular expression may
grow with each."""

WORN = 32 * 2**20
"""Bytes that a worker has grown by when it is replaced."""

TICK = 0.01
"""Seconds between two looks at a worker's memory."""

HEADER = struct.Struct("!IddB")
"""Before a question, which is JSON, a list of texts and of how each of them has begun: its bytes;
seconds of a processor and on the clock; by how much the worker is nicer than others."""

LENGTH = struct.Struct("!I")
"""Before an answer, which is JSON: a list of each text's problem and of the bytes that the worker
has grown by, and whether the worker should be replaced. Or one of the two below, and no answer."""

CLOCK_OVER, PROCESSOR_OVER = 0, 1
"""A limit was reached. That of the clock comes first where a worker got less than a quarter of a
processor: then nothing is known of the text."""

READY, FORK = b"+", b"f"

LIMITS: dict[str, Any] = {"max_items_in_row": 20_000, "verbose_errors": False}
"""For llguidance, here and in the server. An object with n optional properties takes 4n items; an
error quotes no output."""

_LINUX = sys.platform == "linux"

_VOCABULARY = 201_088
_FIRST_CONTROL = 199_998
_END_OF_TEXT = 199_999
_WORDS = _VOCABULARY // 32


def main() -> None:
    """Forks a worker for each socket that comes over standard input, until that ends."""
    control = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes workers away that have ended
    try:
        tokenizer = _tokenizer()
    except Exception as error:  # noqa: BLE001 - whatever it is, the server's log has it
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
    """What llguidance asks of a tokenizer: every byte is a token, and control tokens have the ids
    that they have."""

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
    """Tries the texts that come over ``connection``. It ends with the process."""

    def __init__(self, connection: socket.socket, tokenizer: LLTokenizer) -> None:
        self._connection = connection
        self._tokenizer = tokenizer
        self._began = self._fresh = resident()
        self._until = self._processor = self._computed_until = 0.0
        self._busy = threading.Event()

    def run(self) -> None:
        """Serves, and never returns."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        threading.stack_size(STACK)
        threading.Thread(target=self._serve, daemon=True).start()
        if _LINUX:
            allowed = _pages(0) + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
        while True:
            self._busy.wait()
            time.sleep(TICK)
            if not self._busy.is_set():
                continue
            if resident() > self._began + MEMORY or self._is_left():
                os._exit(1)
            left = self._computed_until - time.process_time()
            if left < 0:
                self._connection.sendall(LENGTH.pack(PROCESSOR_OVER))
                os._exit(1)
            if time.monotonic() > self._until:
                over = PROCESSOR_OVER if left < self._processor / 2 else CLOCK_OVER
                self._connection.sendall(LENGTH.pack(over))
                os._exit(1)

    def _is_left(self) -> bool:
        """Whether the server has closed the socket: nothing else is sent while a text is tried."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _serve(self) -> None:
        try:
            self._connection.sendall(READY)
            while True:
                length, processor, clock, nice = HEADER.unpack(self._read(HEADER.size))
                question = json.loads(self._read(length))
                os.nice(nice)
                self._began = resident()
                self._until = time.monotonic() + clock
                self._processor = processor
                self._computed_until = time.process_time() + processor
                signal.setitimer(signal.ITIMER_PROF, 2 * processor)
                signal.setitimer(signal.ITIMER_REAL, 2 * clock)
                self._busy.set()
                answers = []
                for text, begun in question:
                    before = resident()
                    problem = _problem(self._tokenizer, text, begun.encode())
                    answers.append((problem, max(0, resident() - before)))
                self._busy.clear()
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                answer = json.dumps([answers, resident() > self._fresh + WORN]).encode()
                self._connection.sendall(LENGTH.pack(len(answer)) + answer)
        finally:
            os._exit(0)

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._connection.recv(min(size, 2**20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _problem(tokenizer: LLTokenizer, text: str, begun: bytes) -> str:
    """Why ``text`` cannot be compiled and followed, in one line; empty when it can."""
    import ctypes

    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    words = (ctypes.c_uint32 * _WORDS)()
    draw = 1
    if begun and not matcher.is_error():
        matcher.try_consume_tokens(list(begun))
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
    """Bytes of memory that this process has; on macOS, the most that it ever had."""
    if _LINUX:
        return _pages(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _pages(field: int) -> int:
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 100).split()[field]) * resource.getpagesize()
    finally:
        os.close(descriptor)
