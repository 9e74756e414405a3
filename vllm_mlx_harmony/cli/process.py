"""The server as a child process, on a free port and with a home directory of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

from vllm_mlx_harmony import _startup
from vllm_mlx_harmony.cli import light
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core import vocab

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
ADDRESS = "127.0.0.1"
LOCAL = f"http://{ADDRESS}"
STARTING = 180.0
"""Seconds within which a server must be ready; two idle cores take about 12."""
STOPPING = 10.0
"""Seconds after SIGTERM within which a server must end."""
STOPPED_WITHIN = 35.0
"""Seconds after SIGTERM within which any server has ended by itself (`server.shutdown`), with some
to spare. Whoever stops one waits so long before SIGKILL: a killed process can leave wired memory
behind on a Mac."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server on ``127.0.0.1:port``. ``log`` is the file that has its output while it runs."""

    pid: int
    port: int
    command: tuple[str, ...]
    log: Path

    @property
    def url(self) -> str:
        return f"{LOCAL}:{self.port}"


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` with this Python. Nothing is imported from the directory in
    which it is started, as ``-m`` alone does (semantics E6)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def command(model: Path, port: int, flags: Sequence[str]) -> list[str]:
    """The command that serves ``model`` with this plugin.

    It is the host's if that is installed and Python has read the plugin's `.pth` file, otherwise
    ``vllm-mlx-harmony``.
    """
    where = ["--host", ADDRESS, "--port", str(port), *flags]
    if _startup.registered() and not light.replaces_host():
        flag = ["--tool-call-parser", "harmony"]
        return python(_startup.HOST, "serve", str(model), *flag, *where)
    return python("vllm_mlx_harmony", "serve", str(model), *where)


@contextmanager
def serving(
    model: Path,
    home: Path,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    command: Callable[[Path, int, Sequence[str]], list[str]] = command,
) -> Iterator[Running]:
    """Runs a server of ``model``, and stops it at the end of the block.

    ``home`` is an existing directory, which becomes the server's home directory because the host
    has a prefix cache there. Raises ``UsageError`` with the end of the log if it does not start.
    """
    port, log = free_port(), home / "server.log"

    def problem() -> str:
        code = process.poll()
        return "" if code is None else f"the server ended with exit code {code}"

    arguments = command(model, port, flags)
    with _signals_raise():
        process = start(arguments, log, {**environment(home), **(env or {})})
        try:
            wait_until_ready(port, log, STARTING, problem)
            yield Running(process.pid, port, tuple(arguments), log)
        finally:
            stop(process)


def start(
    command: Sequence[str], log: Path, env: Mapping[str, str], *handles: int
) -> subprocess.Popen[bytes]:
    """Starts a server, whose output is in ``log``, with its own session: Ctrl-C is not for it.

    It runs in the directory of ``log``, since libraries read settings from where they are started
    (`.env`, `sitecustomize`), and inherits ``handles``.
    """
    log.write_bytes(b"")
    with log.open("ab") as printed:  # several processes may write to it
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**env, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            pass_fds=handles,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates a process, and kills it if it does not end in time."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port for a server that listens on it some seconds later.

    Systems pick the ports of outgoing connections from 32,768 (Linux) or 49,152 (macOS) on, so none
    takes this one meanwhile. Raises ``UsageError`` if none is free.
    """
    chance = random.SystemRandom()  # processes that begin together may be seeded alike
    for port in chance.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((ADDRESS, port))
            return port
    raise UsageError(f"no free port was found on {ADDRESS}")


def environment(home: Path) -> dict[str, str]:
    """The environment of this process, with another home directory but the same packages."""
    own = {"HF_HUB_OFFLINE": "1", **os.environ, "HOME": str(home)}
    own["PYTHONUSERBASE"] = site.getuserbase()  # `pip install --user` installs below HOME
    if (vocab.cache_dir() / vocab.FILE_NAME).is_file():
        own.setdefault(vocab.BASE_VARIABLE, str(vocab.cache_dir()))
    return own


def send(url: str, body: object = None, *, key: str | None = None, timeout: float) -> HTTPResponse:
    """The response to a GET, or with ``body`` to a POST; not by a proxy for a `LOCAL` server.

    Raises ``HTTPError`` for any status but 2xx, or another ``OSError``, or ``HTTPException``.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    opener = build_opener(ProxyHandler({} if url.startswith(LOCAL) else None))
    response: HTTPResponse = opener.open(Request(url, data, headers), timeout=timeout)
    return response


def is_free(port: int) -> bool:
    """Whether a server can listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
    return True


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise ``KeyboardInterrupt`` within the block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def wait_until_ready(port: int, log: Path, timeout: float, problem: Callable[[], str]) -> None:
    """Returns when the server on ``port`` is ready.

    Raises ``UsageError`` with the end of its log as soon as ``problem`` returns one, or after
    ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    while True:
        ready = False
        with suppress(OSError, HTTPException), send(f"{LOCAL}:{port}/health", timeout=5):
            ready = True
        failed = problem()
        if ready:
            return
        if time.monotonic() > until:
            failed = failed or f"the server was not ready after {timeout:.0f} seconds"
        if failed:
            tail = log.read_text("utf-8", "replace").splitlines()[-20:]
            raise UsageError("\n".join([f"{failed}:", *tail]))
        time.sleep(0.1)
