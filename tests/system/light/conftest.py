"""The light server as a process, on a free port and with a home directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

pytest.importorskip("mlx_lm")

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli.process import free_port

STARTING = 120.0
"""Seconds that a server may take to be ready."""

PROGRAM = ("-m", "vllm_mlx_harmony")


@dataclass(frozen=True)
class Server:
    """A running server; ``url`` has no path."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def stop(self) -> int:
        """Ends the process; returns its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


Start = Callable[..., Server]


@pytest.fixture(scope="session", autouse=True)
def light() -> None:
    """With vllm-mlx, `serve` is its own: a command that is to fail here would start its server."""
    if find_spec("vllm_mlx"):
        pytest.skip("vllm-mlx is installed")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in. Each test module gives it its own scripts."""
    return standin.write(tmp_path_factory.mktemp("model") / "gpt-oss-standin")


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """``start(*arguments, options=(), program=PROGRAM)`` starts a command of ``vllm-mlx-harmony``
    that serves, and waits until it is ready. ``options`` are Python's."""
    running: list[Server] = []

    def start_server(
        *arguments: str, options: tuple[str, ...] = (), program: tuple[str, ...] = PROGRAM
    ) -> Server:
        home = tmp_path_factory.mktemp("home")
        port = str(free_port())
        command = [sys.executable, *options, *program, *arguments, "--port", port]
        environment = {**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1"}
        environment |= {"XDG_CACHE_HOME": str(home / ".cache")}
        log = home / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=home, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        server = Server(process, f"http://127.0.0.1:{port}", log)
        running.append(server)
        end = time.monotonic() + STARTING
        while not is_ready(server):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.1)
        return server

    yield start_server
    for server in running:
        if server.process.poll() is None:
            server.stop()


def is_ready(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
