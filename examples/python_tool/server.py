"""A tool server that is gpt-oss's `python`: each call runs in a sandbox of its own.

    pip install mcp
    python3 examples/python_tool/server.py SANDBOX [ARGUMENT …]

`SANDBOX …` is a command that reads a Python program from its standard input and runs it where it
can do no harm, such as `docker run … python:3.13-slim python -I -` (`mcp.json` beside this file has
all of it). It is started once for each call and has to end with it: calls of different people share
no files, no variables and no processes. Without such a command this server does not start: it runs
no code by itself, and no shell.

As in a notebook, the value of the last line is shown. Unlike in one, nothing is kept from one call
to the next; a program that counts on it gets a NameError, which tells the model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import anyio
from anyio.abc import Process
from mcp.server.mcpserver import MCPServer

SECONDS = float(os.environ.get("PYTHON_TOOL_SECONDS", "60"))
"""One call may take so long, the start of its sandbox included."""

LONGEST = 256 * 1024
"""Bytes of output after which a call is ended."""

ENDING = 5.0
"""Seconds that the sandbox has, when asked, to end what it runs."""

PROGRAM = """\
import ast, linecache, sys, traceback
sys.stdout.reconfigure(line_buffering=True)
source = {source!r}
linecache.cache["<code>"] = len(source), None, source.splitlines(True), "<code>"
scope = {{"__name__": "__main__", "__builtins__": __builtins__}}
try:
    body = ast.parse(source, "<code>")
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, "<code>", "exec"), scope)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)
        if value is not None:
            print(repr(value))
except Exception as error:
    sys.stdout.flush()
    inner = error.__traceback__.tb_next
    traceback.print_exception(error.with_traceback(inner))
"""

SANDBOX = tuple(sys.argv[1:])
server = MCPServer("python")


@server.tool()
async def python(code: str) -> str:
    """Runs Python code in a new sandbox, and returns what it prints."""
    output = bytearray()
    process = await anyio.open_process(SANDBOX, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        with anyio.move_on_after(SECONDS) as limit:
            await _run(process, PROGRAM.format(source=code).encode(), output)
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
    note = ""
    if limit.cancelled_caught:
        note = f"\n[ended after {SECONDS:g} seconds]"
    elif len(output) >= LONGEST:
        note = f"\n[ended after {LONGEST} bytes of output]"
    elif process.returncode and not output:
        note = f"[the sandbox ended with exit code {process.returncode}]"
    return output.decode("utf-8", "replace") + note


async def _run(process: Process, program: bytes, output: bytearray) -> None:
    """Collects in ``output`` what ``program`` prints, up to ``LONGEST`` bytes."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(anyio.BrokenResourceError):  # it has ended; what it printed says why
        await process.stdin.send(program)
    await process.stdin.aclose()
    async for read in process.stdout:
        output += read[: LONGEST - len(output)]
        if len(output) >= LONGEST:
            return
    await process.wait()


async def _end(process: Process) -> None:
    """Asks first: `docker run` passes that on, and what it started would outlive it otherwise."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with anyio.move_on_after(ENDING):
            await process.wait()
        os.killpg(process.pid, signal.SIGKILL)
    await process.aclose()


if __name__ == "__main__":
    if not SANDBOX:
        sys.exit("usage: server.py SANDBOX [ARGUMENT ...]; it runs no code outside of a sandbox")
    server.run()
