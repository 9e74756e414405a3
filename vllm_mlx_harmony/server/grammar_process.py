"""The helper process, in which clients' strict schemas and syntaxes are tried before the server
compiles them.

A small grammar can make llguidance overflow the stack, which ends the process, fill the memory, or
take minutes, when it is compiled or when output reaches it. So grammars that contain a strict
schema, a regular expression or a grammar of a client are compiled here first, and outputs that lead
to each of these parts are tried, under limits set by the kernel.

`main` runs in an interpreter started with ``-I -S``: it reads no ``.pth`` files, so nothing is
activated, and imports only the standard library and llguidance. Standard input and output are one
socket. For each question, a line of JSON, it forks a child that answers with another (`_answer`):
that takes a few milliseconds, since the library and the tokenizer are already loaded, and leaves
nothing behind. A child that exceeds a limit dies, and this process answers in its place:

- **stack**: `STACK` bytes, a quarter of that of the server's threads. An overflow is a SIGSEGV.
- **memory**: `MEMORY` bytes more than the child had before, on Linux by ``RLIMIT_AS``. macOS does
  not enforce that, so the main thread also watches the size: llguidance releases the interpreter
  lock.
- **time**, CPU and wall-clock: signals of interval timers.

The process ends when the server does, which closes the socket.

The tokenizer has one token per byte, and control tokens with their real ids. It takes 50 ms to
build instead of a second and 170 MB. Explosive grammars are found with it as well: they explode in
llguidance's regular expressions, not in the vocabulary, and llguidance itself limits the cost of a
mask over a larger vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK = 2 * 2**20
MEMORY = 256 * 2**20
"""Bytes."""

STEPS, MIN_STEPS = 32, 2
"""Bytes that are tried behind all starts of a grammar together, and the least behind each. The
states of a regular expression may grow with each byte."""

TICK = 0.01
"""Seconds between two checks of a child's size."""

DIED, TIMED_OUT = "died", "timed out"
"""In place of a child's answer. Wall-clock time is exceeded first if the child got less than half
of a processor, and then nothing is known about the grammar."""

# As in `core.vocab`, which is not imported here; `_HARMONY` has the ids of Harmony's own tokens.
_VOCABULARY = 201_088
_FIRST_CONTROL = 199_998
_END_OF_TEXT = 199_999
_HARMONY = range(200_002, 200_013)


def main(nice: int) -> None:
    """Answers the questions of standard input, until that is closed."""
    # Ctrl-C ends the server, which still needs this process. A new session would do as well, but
    # Linux shares out its processors by session: the niceness would count for nothing.
    os.setpgid(0, 0)
    os.nice(nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = _tokenizer()
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            _answer(json.loads(line), tokenizer)
        _, status = os.waitpid(child, 0)
        if status:
            _say(TIMED_OUT if status == signal.SIGALRM else DIED)


def _say(answer: object) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _answer(question: dict[str, Any], tokenizer: LLTokenizer) -> None:
    """Tries one grammar, and ends the process.

    The question: ``text``, ``starts``, the beginnings of outputs, llguidance's ``limits``, and the
    limits of CPU (``cpu_seconds``) and wall-clock time (``seconds``). The answer: the problem,
    empty if there is none, and the growth of the process in bytes.
    """
    before, problems = max_resident(), []
    signal.setitimer(signal.ITIMER_PROF, question["cpu_seconds"])
    signal.setitimer(signal.ITIMER_REAL, question["seconds"])
    threading.stack_size(STACK)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    trial = threading.Thread(target=lambda: problems.append(_problem(tokenizer, question)))
    trial.start()
    while trial.is_alive():
        trial.join(TICK)
        if max_resident() > before + MEMORY:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF, signal.SIGALRM})
    if problems:
        _say([problems[0][:500], max_resident() - before])
    os._exit(not problems)


def _problem(tokenizer: LLTokenizer, question: dict[str, Any]) -> str:
    """Why the text cannot be compiled and applied to output, in one line; empty if it can."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**question["limits"])
    matcher = LLMatcher(tokenizer, question["text"], log_level=0, limits=limits)
    starts, output = sorted(question["starts"]), list[int]()
    draws = random.Random(1)  # the same bytes each time
    for start in starts:
        if matcher.is_error():
            break
        # What a start shares with the one before is read once: beside many tools, it takes long.
        shared = len(commonprefix([output, start]))  # noqa: RUF071 - of lists
        matcher.rollback(len(output) - shared)
        output = start[: shared + matcher.try_consume_tokens(start[shared:])]
        for _ in range(max(MIN_STEPS, STEPS // len(starts))):
            bias = matcher.compute_logit_bias()
            allowed = [token for token in _CANDIDATES if bias[token]]
            if not allowed:  # the output is complete
                break
            output.append(draws.choice(allowed))
            matcher.consume_token(output[-1])
    problem: str = matcher.get_error() if matcher.is_error() else ""
    return problem.partition("\n")[0]


_CANDIDATES = (*range(256), *_HARMONY)


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


def max_resident() -> int:
    """The largest size of this process so far, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size
