"""Real servers for the tests: one of each kind per session, and a way to start others.

Every server has a home of its own and is stopped by its pid, whatever the tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import openai
import pytest
import server_process

from vllm_mlx_harmony import standin

Start = Callable[..., server_process.Server]

AS_SCRIPTED = {"VLLM_MLX_HARMONY_GRAMMAR": "off"}
"""Most scripts contain output that a grammar would forbid, to test that it is parsed anyway.
Enforcement has tests of its own, and is on wherever agents run."""

COMMAND = server_process.HARMONY if server_process.IS_LIGHT else server_process.HOST

GREEDY = ("--default-temperature", "0")
"""For the tiny model; the stand-in is greedy by its configuration. `open_server` samples."""


@pytest.fixture(scope="session")
def standin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in that all session servers run. Each test module gives it its own scripts."""
    return standin.write(tmp_path_factory.mktemp("standin") / "gpt-oss-standin")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real gpt-oss architecture, tiny, with random weights."""
    return standin.write_tiny(tmp_path_factory.mktemp("tiny") / "gpt-oss-tiny", width=16)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, standin_dir: Path) -> Iterator[Start]:
    """Starts servers; see `server_process.start`. Stops those that still run at the end.

    ``start(*flags, model=standin_dir, command=HOST, env=None, ready=True,
    preloaded=True, greedy=True)``
    """
    running: list[server_process.Server] = []

    def start_server(
        *flags: str,
        model: Path | None = None,
        command: Sequence[str] = COMMAND,
        env: Mapping[str, str] | None = None,
        ready: bool = True,
        preloaded: bool = True,
        greedy: bool = True,
    ) -> server_process.Server:
        server = server_process.start(
            model or standin_dir,
            *(GREEDY if greedy else ()),
            *flags,
            home=tmp_path_factory.mktemp("home"),
            command=command,
            env={**AS_SCRIPTED, **(env or {})},
            ready=ready,
            preloaded=preloaded,
        )
        running.append(server)
        return server

    yield start_server
    for server in running:
        server.stop()


@pytest.fixture(scope="session", params=list(server_process.SPELLINGS))
def spelling(request: pytest.FixtureRequest) -> str:
    """The name of each of the host's own engines in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def bare_host(start: Start, spelling: str) -> server_process.Server:
    """The host with the stand-in on one engine, without any Harmony flag: the host's own path."""
    return start(*server_process.SPELLINGS[spelling])


# One server of each kind per session: starting one takes longer than most modules do.
# A module gives it its own scripts (`standin.rescript`), and uses an API key of its own where it
# checks what is reused: keys share nothing.


@pytest.fixture(scope="session")
def open_server(start: Start) -> server_process.Server:
    """Without an API key: every key that is sent is a tenant. A process like any user's, which
    samples as gpt-oss does by default."""
    flags = (*server_process.FLAG, "--default-temperature", "1")
    return start(*flags, command=server_process.HARMONY, preloaded=False, greedy=False)


@pytest.fixture(scope="session")
def keyed_server(start: Start) -> server_process.Server:
    """With an API key. Sends a ping after a second of silence."""
    flags = (*server_process.FLAG, "--api-key", server_process.KEY)
    env = {"VLLM_MLX_HARMONY_PING_SECONDS": "1"}
    return start(*flags, command=server_process.HARMONY, env=env)


@pytest.fixture(scope="session")
def enforcing_server(start: Start) -> server_process.Server:
    """With the default settings of grammars, and aliases of the model."""
    env = {
        "VLLM_MLX_HARMONY_GRAMMAR": "auto",
        "VLLM_MLX_HARMONY_MODEL_NAMES": "claude-*,gpt-4o",
    }
    return start(*server_process.FLAG, command=server_process.HARMONY, env=env)


# For the `server` that a module defines.


@pytest.fixture(scope="module")
def client(server: server_process.Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def model(server: server_process.Server) -> str:
    """The model's name there, its directory."""
    return str(server.model)


@pytest.fixture(scope="session")
def tiny_server(start: Start, tiny_dir: Path) -> server_process.Server:
    """The real architecture with random weights, and a prefix cache."""
    env = {"VLLM_MLX_HARMONY_CACHE": "256M"}
    return start(*server_process.FLAG, model=tiny_dir, command=server_process.HARMONY, env=env)
