"""Servers to be attacked: one per engine and session, with short answers and small buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

pytest.importorskip("vllm_mlx")

import apis
import figures
import inspected
import server as served
from size import size
from target import CACHE_MIB, ROOM, SECONDS, Target

from vllm_mlx_harmony import standin

Start = Callable[..., Target]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers that can be inspected; those still running at the end are stopped."""
    directory = standin.write(tmp_path_factory.mktemp("standin") / "gpt-oss-standin")
    standin.rescript(directory, apis.SCRIPTS)
    running: list[served.Server] = []

    def started(env: Mapping[str, str] | None = None) -> Target:
        home = tmp_path_factory.mktemp("home")
        told = home / "figures.json"
        server = served.start(
            directory,
            *served.FLAG,
            *("--max-tokens", "64", "--cache-memory-mb", str(CACHE_MIB)),
            *size(("--default-temperature", "1"), ()),  # to draw is two thirds of a step here
            home=home,
            command=inspected.COMMAND,
            env={
                inspected.VARIABLE: str(told),
                "VLLM_MLX_HARMONY_QUEUE": "256",
                "VLLM_MLX_HARMONY_STREAM_BYTES": str(ROOM),
                "VLLM_MLX_HARMONY_STREAM_SECONDS": str(SECONDS),
                **(env or {}),
            },
        )
        running.append(server)
        with server.client() as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
        return Target(server, model, inspected.Inspection(server.pid, told))

    yield started
    for server in running:
        server.stop()


@pytest.fixture(scope=size("module", "session"))
def target(start: Start) -> Iterator[Target]:
    """A server; in full, a new one for each experiment."""
    one = start()
    yield one
    one.server.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures, whether or not anything failed."""
    if figures.LINES:
        terminalreporter.section("what the attack measured")
        for line in figures.LINES:
            terminalreporter.write_line(line)
