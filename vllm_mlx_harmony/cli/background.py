"""The server that `launch` starts in the background and `stop` stops: at most one for each user.

The server has a parent that starts it again when it crashes (`supervise`). This process inherits a
lock on `server.lock` and holds it until it ends. So no other process is mistaken for the server,
however it ended. `server.json` describes the server, and `server.log` has its output (see
`log_file`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_mlx_harmony.cli import process
from vllm_mlx_harmony.cli.process import (
    ADDRESS,
    STOPPED_WITHIN,
    STOPPING,
    free_port,
    is_free,
    wait_until_ready,
)
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.files import write_atomically

PORT = 8000
"""vllm-mlx's default port, which is used if it is free."""

BAR = re.compile(rb"Loading: +([0-9]+)%")
"""The progress bar of `engine.mlx_lm_compat.load`, which is not imported here, in the log."""

BAR_WITHIN = 1_000
"""Bytes at the end of the log that have the bar while the weights are read."""

SUPERVISOR = "vllm_mlx_harmony.cli.supervise"

STARTING = 900.0
"""Seconds within which a server must be ready: weights may be read from a slow disk."""


@dataclass(frozen=True, slots=True)
class Background:
    """A server in the background. ``model`` is the name under which it serves its model.

    ``pid`` is the process that starts it, and their process group.
    """

    pid: int
    port: int
    model: str
    standin: bool = False

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}"


def directory() -> Path:
    """Where the files are; it may not exist yet."""
    return vocab.cache_dir() / "server"


def log() -> Path:
    return directory() / "server.log"


def running() -> Background | None:
    """The server, which may not be ready yet."""
    with _lock(fcntl.LOCK_SH) as lock:
        if lock is not None:
            return None
    until = time.monotonic() + 5  # it is described just after its start
    while time.monotonic() < until:
        with suppress(OSError, ValueError, TypeError):
            return Background(**json.loads((directory() / "server.json").read_bytes()))
        time.sleep(0.05)
    return None


def start(
    source: str, name: str, flags: Sequence[str] = (), *, standin: bool = False
) -> Background:
    """The running server, or one of the model ``source`` as ``name``, which starts now."""
    with _lock(fcntl.LOCK_EX) as lock:
        if lock is None:  # another command has started one, or is looking for it
            return running() or start(source, name, flags, standin=standin)
        (directory() / "server.json").unlink(missing_ok=True)
        port = PORT if is_free(PORT) else free_port()
        arguments = command(source, port, ["--served-model-name", name, *flags])
        supervised = process.python(SUPERVISOR, str(log()), *arguments)
        pid = process.start(supervised, log(), os.environ, lock).pid
        server = Background(pid, port, name, standin)
        write_atomically(directory() / "server.json", json.dumps(asdict(server)).encode())
        return server


def command(source: str, port: int, flags: Sequence[str]) -> list[str]:
    """The command of a server, whose output is in `log`."""
    serve = process.python("vllm_mlx_harmony", "serve", source)
    where = ["--host", ADDRESS, "--port", str(port), "--log-file", str(log())]
    return [*serve, *where, *flags]


def wait(server: Background, progress: Callable[[int], object] = lambda _: None) -> None:
    """Returns when the server is ready. Raises ``UsageError`` with the end of its log.

    ``progress`` is called with the percentage of the weights that the server has read.
    """

    def problem() -> str:
        with suppress(OSError):  # while the log is rotated
            for percentage in BAR.findall(log().read_bytes()[-BAR_WITHIN:])[-1:]:
                progress(int(percentage))
        return "" if running() else "the server could not start"

    wait_until_ready(server.port, log(), STARTING, problem)


def stop() -> Background | None:
    """Stops the server, and returns it if there was one."""
    server = running()
    if server is None:
        return None
    for send, sign, timeout in (
        (os.kill, signal.SIGTERM, STOPPED_WITHIN),  # it passes the signal on
        (os.killpg, signal.SIGKILL, STOPPING),
    ):
        with suppress(ProcessLookupError):
            send(server.pid, sign)
        until = time.monotonic() + timeout
        while running() is not None and time.monotonic() < until:
            time.sleep(0.1)
    return server


@contextmanager
def _lock(kind: int) -> Iterator[int | None]:
    """The locked file, or None if another process holds a lock that excludes this one."""
    directory().mkdir(parents=True, exist_ok=True)
    handle = os.open(directory() / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield handle
    finally:
        os.close(handle)  # a child that has inherited it still holds the lock
