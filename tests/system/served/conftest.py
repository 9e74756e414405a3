"""Real servers for the tests: one of each kind per session, and a way to start others.

Every server has a home of its own and is stopped by its pid, whatever the tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import openai
import pytest
import server as served

from vllm_mlx_harmony import standin

Start = Callable[..., served.Server]

AS_SCRIPTED = {"VLLM_MLX_HARMONY_GRAMMAR": "off"}
"""Most scripts say what no grammar lets through: that it is read all the same is what they test.
What is enforced is tested by itself, and wherever agents run."""

GREEDY = ("--default-temperature", "0")
"""Also for the tiny model; the stand-in is greedy by its own configuration. `open_server` draws."""


@pytest.fixture(scope="session")
def standin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in all session servers run. Each test module gives it its own scripts."""
    return standin.write(tmp_path_factory.mktemp("standin") / "gpt-oss-standin")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real gpt-oss architecture, tiny, with random weights."""
    return standin.write_tiny(tmp_path_factory.mktemp("tiny") / "gpt-oss-tiny", width=16)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, standin_dir: Path) -> Iterator[Start]:
    """Starts servers; see `served.start`. Those still running at the end are stopped.

    ``start(*flags, model=standin_dir, command=HOST, env=None, ready=True,
    preloaded=True, greedy=True)``
    """
    running: list[served.Server] = []

    def started(
        *flags: str,
        model: Path | None = None,
        command: Sequence[str] = served.HARMONY if served.IS_LIGHT else served.HOST,
        env: Mapping[str, str] | None = None,
        ready: bool = True,
        preloaded: bool = True,
        greedy: bool = True,
    ) -> served.Server:
        one = served.start(
            model or standin_dir,
            *(GREEDY if greedy else ()),
            *flags,
            home=tmp_path_factory.mktemp("home"),
            command=command,
            env={**AS_SCRIPTED, **(env or {})},
            ready=ready,
            preloaded=preloaded,
        )
        running.append(one)
        return one

    yield started
    for one in running:
        one.stop()


@pytest.fixture(scope="session", params=list(served.SPELLINGS))
def spelling(request: pytest.FixtureRequest) -> str:
    """The name of each of the host's own engines in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def bare_host(start: Start, spelling: str) -> served.Server:
    """The host with the stand-in on one engine, without any Harmony flag: the host's own path."""
    return start(*served.SPELLINGS[spelling])


# One server of each kind per session: starting one takes longer than most modules do.
# A module gives it its own scripts (`standin.rescript`), and asks with an API key of its own where
# it looks at what is reused: keys share nothing.


@pytest.fixture(scope="session")
def open_server(start: Start) -> served.Server:
    """Without an API key: whatever key is sent is a tenant. A process like any user's, which draws
    as gpt-oss does by default."""
    flags = (*served.FLAG, "--default-temperature", "1")
    return start(*flags, command=served.HARMONY, preloaded=False, greedy=False)


@pytest.fixture(scope="session")
def keyed_server(start: Start) -> served.Server:
    """With an API key. It says after a second of silence that it is alive."""
    flags = (*served.FLAG, "--api-key", served.KEY)
    env = {"VLLM_MLX_HARMONY_PING_SECONDS": "1"}
    return start(*flags, command=served.HARMONY, env=env)


@pytest.fixture(scope="session")
def enforcing_server(start: Start) -> served.Server:
    """As it is by default: what is asked for is enforced. It goes by other names, too."""
    env = {
        "VLLM_MLX_HARMONY_GRAMMAR": "auto",
        "VLLM_MLX_HARMONY_MODEL_NAMES": "claude-*,gpt-4o",
    }
    return start(*served.FLAG, command=served.HARMONY, env=env)


# Of a module's own `server`.


@pytest.fixture(scope="module")
def client(server: served.Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def model(server: served.Server) -> str:
    """What the model is called there: by its directory."""
    return str(server.model)


@pytest.fixture(scope="session")
def tiny_server(start: Start, tiny_dir: Path) -> served.Server:
    """The real architecture with random weights, and room for what it computed."""
    env = {"VLLM_MLX_HARMONY_CACHE": "256M"}
    return start(*served.FLAG, model=tiny_dir, command=served.HARMONY, env=env)
