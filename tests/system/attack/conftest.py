"""Servers under attack, with short answers and small buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

pytest.importorskip("vllm_mlx")

import apis
import figures
import inspected
import server_process
from size import size
from target import CACHE_MIB, SECONDS, STREAM_BYTES, Target

from vllm_mlx_harmony import standin

Start = Callable[..., Target]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers that can be inspected. Stops those that still run at the end."""
    directory = standin.write(tmp_path_factory.mktemp("standin") / "gpt-oss-standin")
    standin.rescript(directory, apis.SCRIPTS)
    running: list[server_process.Server] = []

    def start_target(env: Mapping[str, str] | None = None) -> Target:
        home = tmp_path_factory.mktemp("home")
        figures_path = home / "figures.json"
        server = server_process.start(
            directory,
            *server_process.FLAG,
            *("--max-tokens", "64", "--cache-memory-mb", str(CACHE_MIB)),
            *size(("--default-temperature", "1"), ()),  # sampling is two thirds of a step here
            home=home,
            command=inspected.COMMAND,
            env={
                inspected.FIGURES_ENV: str(figures_path),
                "VLLM_MLX_HARMONY_QUEUE": "256",
                "VLLM_MLX_HARMONY_STREAM_BYTES": str(STREAM_BYTES),
                "VLLM_MLX_HARMONY_STREAM_SECONDS": str(SECONDS),
                **(env or {}),
            },
        )
        running.append(server)
        with server.client() as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
        return Target(server, model, inspected.Inspection(server.pid, figures_path))

    yield start_target
    for server in running:
        server.stop()


@pytest.fixture(scope=size("module", "session"))
def target(start: Start) -> Iterator[Target]:
    """A server; with ``ATTACK=full``, a new one for each module."""
    target = start()
    yield target
    target.server.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the measurements, also after failures."""
    if figures.LINES:
        terminalreporter.section("what the attack measured")
        for line in figures.LINES:
            terminalreporter.write_line(line)
