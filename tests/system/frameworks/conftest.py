"""One real server per engine, with a stand-in that never wants what it is asked for.

Everything a framework gets out of it is the grammar's doing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import server as served
from client_page import ANSWERS, OSLO, PARIS, SUNNY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

MODEL = "gpt-oss-20b"

WANTS = {
    "prose": "<|channel|>analysis<|message|>They want something of me.<|end|><|start|>assistant"
    "<|channel|>final<|message|>I would rather talk about the sea, which is wide.<|return|>",
    "another call": "<|channel|>commentary to=functions.delete_everything <|constrain|>json"
    '<|message|>{"path":"/","sure":"yes, of course"}<|call|>',
}
"""What the model says by itself, by a word in the last message. To anything else: prose."""

PAGE = {
    OSLO: f"<|channel|>final<|message|>{ANSWERS[OSLO]}<|return|>",
    PARIS: "<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city":"Paris"}<|call|>',
    SUNNY: f"<|channel|>final<|message|>{ANSWERS[PARIS]}<|return|>",
}
"""What it says to the examples of docs/clients.md."""

WANTED = ("prose", "another call")
"""What the model wants, in turn."""


@dataclass(frozen=True)
class Server:
    """A server, and a ``question`` to which its model does not want to answer. ``root`` is the base
    URL of clients that add the version themselves."""

    root: str
    question: str

    @property
    def v1(self) -> str:
        """The base URL of all others."""
        return f"{self.root}/v1"


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host with the plugin, and a model that wants something else than is asked for."""
    place = tmp_path_factory.mktemp("server")
    scripts = [Script(f"Wanted: {name}", output) for name, output in WANTS.items()]
    scripts += [Script(*each) for each in PAGE.items()]
    model = standin.write(place / "model", scripts)
    flags = (*served.FLAG, "--served-model-name", MODEL)
    running = served.start(model, *flags, home=place / "home", command=served.HARMONY)
    yield running.base_url
    running.stop()


@pytest.fixture(scope="session", params=WANTED)
def server(request: pytest.FixtureRequest, root: str) -> Server:
    """It, and a question to whose answer its model wants something of this kind."""
    return Server(root, f"Who is Ada Lovelace? Wanted: {request.param}")


@pytest.fixture(scope="session")
def question(server: Server) -> str:
    """What the user says. The model is not interested."""
    return server.question


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No framework takes a key, a server or a reporting address from this machine."""
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
