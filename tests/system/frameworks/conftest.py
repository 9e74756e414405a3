"""A real server with a stand-in whose scripts never conform to what is requested.

Conforming output is due to the grammar alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import server_process
from client_page import ANSWERS, OSLO, PARIS, SUNNY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

MODEL = "gpt-oss-20b"

SCRIPTED = {
    "prose": "<|channel|>analysis<|message|>They want something of me.<|end|><|start|>assistant"
    "<|channel|>final<|message|>I would rather talk about the sea, which is wide.<|return|>",
    "another call": "<|channel|>commentary to=functions.delete_everything <|constrain|>json"
    '<|message|>{"path":"/","sure":"yes, of course"}<|call|>',
}
"""The model's unconstrained output, by the kind named in the last message."""

PAGE_SCRIPTS = {
    OSLO: f"<|channel|>final<|message|>{ANSWERS[OSLO]}<|return|>",
    PARIS: "<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city":"Paris"}<|call|>',
    SUNNY: f"<|channel|>final<|message|>{ANSWERS[PARIS]}<|return|>",
}
"""The model's answers to the examples of docs/clients.md."""

KINDS = ("prose", "another call")
"""The kinds of output that the model prefers, in turn."""


@dataclass(frozen=True)
class Server:
    """A server, and a ``question`` whose scripted answer does not conform. ``root`` is the base URL
    of clients that add the version themselves."""

    root: str
    question: str

    @property
    def v1(self) -> str:
        """The base URL of all other clients."""
        return f"{self.root}/v1"


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host with the plugin, and a model whose scripts do not conform."""
    directory = tmp_path_factory.mktemp("server")
    scripts = [Script(f"Wanted: {name}", output) for name, output in SCRIPTED.items()]
    scripts += [Script(*item) for item in PAGE_SCRIPTS.items()]
    model = standin.write(directory / "model", scripts)
    flags = (*server_process.FLAG, "--served-model-name", MODEL)
    server = server_process.start(
        model, *flags, home=directory / "home", command=server_process.HARMONY
    )
    yield server.base_url
    server.stop()


@pytest.fixture(scope="session", params=KINDS)
def server(request: pytest.FixtureRequest, root: str) -> Server:
    """The server, and a question with a scripted answer of each kind."""
    return Server(root, f"Who is Ada Lovelace? Wanted: {request.param}")


@pytest.fixture(scope="session")
def question(server: Server) -> str:
    """The user's message."""
    return server.question


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps keys, servers and tracing of this machine from the frameworks."""
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
