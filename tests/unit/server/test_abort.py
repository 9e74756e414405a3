"""What a process does between SIGABRT and its exit."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, ctypes, os, signal, threading, time
from vllm_mlx_harmony.server.abort import before_abort

abort = threading.Thread(target=ctypes.CDLL(None).abort).start

async def work():
    print("work", flush=True)

async def never_ends():
    print("work", flush=True)
    await asyncio.Event().wait()

async def keeps_the_interpreter_lock():
    print("work", flush=True)
    ctypes.PyDLL(None).sleep(20)

async def serve():
{body}
    await asyncio.sleep(20)

asyncio.run(serve())
"""
ROWS: dict[str, tuple[tuple[str, ...], str, int]] = {
    "another thread": (("before_abort(work, 1)", "abort()"), "work\n", signal.SIGABRT),
    "never ends": (("before_abort(never_ends, 0.2)", "abort()"), "work\n", signal.SIGABRT),
    "interpreter is stuck": (
        ("before_abort(keeps_the_interpreter_lock, 0.2)", "abort()"),
        "work\n",
        signal.SIGALRM,
    ),
    "thread of the loop": (
        ("before_abort(work, 1)", "os.kill(os.getpid(), signal.SIGABRT)"),
        "",
        signal.SIGABRT,
    ),
    "loop is stuck": (("before_abort(work, 0.2)", "abort()", "time.sleep(20)"), "", signal.SIGABRT),
    "restored": (("before_abort(work, 1)()", "abort()"), "", signal.SIGABRT),
    "replaced": (
        ("before_abort(never_ends, 1)", "before_abort(work, 1)", "abort()"),
        "work\n",
        signal.SIGABRT,
    ),
}
"""Statements run on the event loop, the expected output, and the signal that ends the process."""


@pytest.mark.parametrize("name", ROWS)
def test_process_aborts_after_work(name: str) -> None:
    lines, printed, signum = ROWS[name]
    program = PROGRAM.format(body="\n".join(f"    {line}" for line in lines))
    command = [sys.executable, "-c", program]
    completed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (completed.stdout, completed.returncode) == (printed, -signum), completed.stderr
