"""The light server as a process, on a free port and with a home directory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

import server_process
from server_process import GATEWAY, Server

from vllm_mlx_harmony import standin

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
    """``start(model, *flags, command=GATEWAY)`` starts a server and waits until it is ready."""
    running: list[Server] = []

    def start_server(*arguments: str, command: tuple[str, ...] = GATEWAY) -> Server:
        home = tmp_path_factory.mktemp("home")
        server = server_process.start(
            *arguments, home=home, command=command, preloaded=False, health="/ready"
        )
        running.append(server)
        return server

    yield start_server
    for server in running:
        server.stop()
