"""The host as a child process: started on a free port with a home of its own, stopped by its pid.

Knows processes, ports and `/health`. Refuses to know what is asked of the server.
"""

from __future__ import annotations

import os
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from vllm_mlx_harmony import _startup
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core import vocab

POLITE = (signal.SIGTERM, signal.SIGHUP)
ADDRESS = "127.0.0.1"
STARTING = 180.0
"""Seconds a server may take until it is ready; two idle cores need about 12."""
STOPPING = 10.0
"""Seconds a server may take to end when asked to."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers on ``127.0.0.1:port``; ``command`` is how it was started.

    ``log`` is the file it prints to, for as long as it runs.
    """

    pid: int
    port: int
    command: tuple[str, ...]
    log: Path


def command(model: Path, port: int, flags: Sequence[str]) -> list[str]:
    """The command line that serves ``model`` with this plugin.

    The host's own where the plugin's `.pth` file was read at start, ours where it was not.
    """
    where = ["--host", ADDRESS, "--port", str(port), *flags]
    if _startup.registered():
        flag = ["--tool-call-parser", "harmony"]
        return [sys.executable, "-m", _startup.HOST, "serve", str(model), *flag, *where]
    return [sys.executable, "-m", "vllm_mlx_harmony", "serve", str(model), *where]


@contextmanager
def serving(
    model: Path, home: Path, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """A server of ``model`` for as long as the context lasts; gone however that ends.

    ``home`` is an existing directory; it becomes the server's home, because the host keeps a prefix
    cache in it. Raises ``UsageError`` with the end of what it printed when it
    does not start.
    """
    port, log = free_port(), home / "server.log"
    arguments = command(model, port, flags)
    with log.open("wb") as printed, _signals_raise():
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**environment(home), **(env or {})},
            start_new_session=True,  # Ctrl-C is for us; we stop it
        )
        try:
            _wait_until_healthy(process, port, log)
            yield Running(process.pid, port, tuple(arguments), log)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, gently at first."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


def environment(home: Path) -> dict[str, str]:
    """This process's environment with another home, and everything found that was found before."""
    own = {
        "HOME": str(home),
        "PYTHONUSERBASE": site.getuserbase(),  # packages of `pip install --user` are below HOME
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if (vocab.cache_dir() / vocab.FILE_NAME).is_file():
        own[vocab.BASE_VARIABLE] = str(vocab.cache_dir())
    return {**own, **{k: v for k, v in os.environ.items() if k not in ("HOME", "PYTHONUSERBASE")}}


@contextmanager
def _signals_raise() -> Iterator[None]:
    """A closed terminal or a polite kill ends the context like Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in POLITE}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + STARTING
    while time.monotonic() < until:
        if process.poll() is not None:
            raise UsageError(f"the server ended with exit code {process.returncode}:\n{_tail(log)}")
        if _is_healthy(port):
            return
        time.sleep(0.1)
    raise UsageError(f"the server was not ready after {STARTING:.0f} seconds:\n{_tail(log)}")


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection(ADDRESS, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200  # noqa: PLR2004 - the number is its name
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-20:])
