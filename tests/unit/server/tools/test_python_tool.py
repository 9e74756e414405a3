"""The shipped `python` tool server, as a real process with real sandboxes of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp")


from mcp_processes import call_tool, toolbox, within
from waiting import wait_until

from vllm_mlx_harmony.server.tools.config import read
from vllm_mlx_harmony.server.tools.toolbox import NOTHING

EXAMPLE = Path(__file__).parents[4] / "examples" / "python_tool"
PLAIN = (sys.executable, "-I", "-")
"""No sandbox: for tests of how a program is run and ended."""


def interpreter(*sandbox: str, seconds: float = 20) -> dict[str, dict[str, Any]]:
    arguments = [str(EXAMPLE / "server.py"), *sandbox]
    limit = {"PYTHON_TOOL_SECONDS": str(seconds)}
    return {"python": {"command": sys.executable, "args": arguments, "env": limit}}


ROWS: list[tuple[str, str]] = [
    ("6 * 7", "42"),
    ("a = 6\na * 7", "42"),
    ("print('one')\nprint('two')", "one\ntwo"),
    ("import sys\nprint('out')\nsys.stderr.write('err')\nNone", "out\nerr"),
    ("def f():\n    return [x for x in range(3)]\nf()", "[0, 1, 2]"),
    ("'{}' '\"' \"\"\"'''\"\"\"", "'{}\"\\'\\'\\''"),
    ("x = 1", NOTHING),
    ("", NOTHING),
    ("é = 'ü'\né", "'ü'"),
    (
        "def f():\n    1 / 0\nf()",
        "Traceback (most recent call last):\n"
        '  File "<code>", line 3, in <module>\n    f()\n'
        '  File "<code>", line 2, in f\n    1 / 0\n',
    ),
    ("import os; os._exit(3)", "[the sandbox ended with exit code 3]"),
    ("import sys; print(1); sys.exit(2)", "1"),
]


def test_code_output_is_returned() -> None:
    box = toolbox(interpreter(*PLAIN))

    async def body() -> list[str]:
        codes = [*(code for code, _ in ROWS), "1 +"]
        return [(await call_tool(box, "python", code)).text.rstrip("\n") for code in codes]

    *outputs, syntax = within(box, body)
    for (code, expected), text in zip(ROWS, outputs, strict=True):
        output = "\n".join(line for line in text.splitlines() if set(line) - set(" ^~"))
        assert output.startswith(expected.rstrip("\n")), code
    assert "SyntaxError: invalid syntax" in syntax


def test_calls_share_no_state() -> None:
    box = toolbox(interpreter(*PLAIN))

    async def body() -> str:
        await call_tool(box, "python", "kept = 1")
        return (await call_tool(box, "python", "kept")).text

    assert "NameError: name 'kept' is not defined" in within(box, body)


@pytest.mark.nightly
def test_hanging_call_is_killed(tmp_path: Path) -> None:
    """So are its child processes, even if they ignore SIGTERM."""
    box = toolbox(interpreter(*PLAIN, seconds=3))
    note = tmp_path / "pid"
    code = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)"
    )
    result = within(box, lambda: call_tool(box, "python", code))
    assert result.text == "begun\n\n[ended after 3 seconds]"
    wait_until(lambda: not any(map(runs, map(int, note.read_text().split()))), "their end")


@pytest.mark.nightly
def test_endless_output_is_cut() -> None:
    box = toolbox(interpreter(*PLAIN))
    code = "while True: print('x' * 1000)"
    result = within(box, lambda: call_tool(box, "python", code, room=1_000_000))
    assert "more characters were cut off" in result.text or "bytes of output]" in result.text


@pytest.mark.nightly
def test_failing_sandbox_is_an_error() -> None:
    box = toolbox(interpreter("sh", "-c", "echo no such image >&2; exit 125"))
    assert within(box, lambda: call_tool(box, "python", "1")).text == "no such image\n"
    box = toolbox(interpreter(str(EXAMPLE / "no-such-program")))
    result = within(box, lambda: call_tool(box, "python", "1"))
    assert result.failure is not None


def test_server_without_sandbox_does_not_start() -> None:
    command = [sys.executable, str(EXAMPLE / "server.py")]
    completed = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert completed.returncode == 1
    assert "runs no code outside of a sandbox" in completed.stderr


@pytest.mark.nightly
@pytest.mark.needs("namespaces")
def test_sandbox_has_no_network() -> None:
    """Linux namespaces: no network, no outside processes, and all its own end with the sandbox."""
    box = toolbox(interpreter("unshare", "-Urnpf", "--kill-child", *PLAIN))

    async def body() -> list[str]:
        fetch = "import socket; socket.create_connection(('127.0.0.1', 53), 5)"
        own_pid = "import os; os.getpid()"
        return [(await call_tool(box, "python", code)).text for code in (fetch, own_pid)]

    refused, pid = within(box, body)
    assert "OSError" in refused
    assert "Network is unreachable" in refused
    assert pid == "1\n"


def test_shipped_configuration_isolates_sandbox() -> None:
    """It is valid and names the server beside it; the sandbox has neither network nor disk."""
    config = read(EXAMPLE / "mcp.json").servers["python"]
    server, *sandbox = config.args
    assert (EXAMPLE.parents[1] / server).is_file()
    assert sandbox[:2] == ["docker", "run"]
    assert {"--rm", "--init", "--read-only", "--interactive"} <= set(sandbox)
    assert sandbox[sandbox.index("--network") + 1] == "none"
    assert json.loads((EXAMPLE / "mcp.json").read_text("utf-8"))["mcpServers"].keys() == {"python"}


def runs(pid: int) -> bool:
    """Whether the process is there, and was not killed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
