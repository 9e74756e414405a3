"""Processes with a server's libraries already imported, so that it starts in a second.

A server spends most of its start importing torch, transformers and FastAPI. A process that has
imported only these is forked for each server (`multiprocessing`'s fork server). ``vllm_mlx``,
``mlx`` and this project are imported after the fork, as in any process, since their imports are
under test. Only on Linux: elsewhere a process cannot be forked once it has used system libraries.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

POSSIBLE = sys.platform == "linux" and find_spec("mlx_lm") is not None

LIBRARIES = (
    *("transformers", "transformers.tokenization_utils_fast"),
    "transformers.models.auto.tokenization_auto",
    *("uvicorn", "numpy", "openai_harmony", "pydantic", "starlette.applications"),
)
OF_VLLM_MLX = ("torch", "torch.nn", "fastapi", "httpx")


class Process(Protocol):
    """The part of `subprocess.Popen` that tests use."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class Forked:
    """``command`` in a process forked from one with the libraries."""

    def __init__(
        self, command: Sequence[str], log: Path, cwd: Path, env: Mapping[str, str]
    ) -> None:
        _fork_server(env)
        self._command = [*command]
        self._process = get_context("forkserver").Process(
            target=_run_command, args=(self._command, str(log), str(cwd), dict(env)), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, the negative number of a signal, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same, in a method as ``subprocess.Popen`` has it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one. Raises ``subprocess.TimeoutExpired``."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kills the process."""
        self.send_signal(signal.SIGKILL)


def _fork_server(env: Mapping[str, str]) -> None:
    """Starts the fork server once, with a server's environment, which libraries read on import."""
    context = get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    host_libraries = OF_VLLM_MLX if find_spec("vllm_mlx") else ()
    context.set_forkserver_preload([*LIBRARIES, *host_libraries])
    with patch.dict(os.environ, env):
        forkserver.ensure_running()


def _exit_with_tests() -> None:
    """Exits when the process of the tests has ended, also by a kill."""
    tests = parent_process()
    assert tests is not None
    tests.join()
    os._exit(1)


def _run_command(command: Sequence[str], log: str, cwd: str, env: Mapping[str, str]) -> None:
    """Runs a command of Python's in this process: a script, ``-m module`` or ``-c code``."""
    with open(os.devnull) as nothing, open(log, "ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_exit_with_tests, daemon=True).start()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if command[0] == sys.executable:
        command = command[1:]
    match command:
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *arguments]:
            sys.argv = ["-c", *arguments]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *arguments]:
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
