"""The newest versions of coding agents over a gateway: each runs a command.

`vllm-mlx-harmony launch` starts them, with a key; the gateway's engine is a scripted fake.
``AGENTS_DIR`` is a directory for installed agents, which later runs reuse.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

import fake_web
from app_server import run_server
from fake_engines import EngineFault, FakeEngine
from harmony_text import ids_of
from leg import find_python

from vllm_mlx_harmony.cli import agents as launch_agents
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key

KEY = "a-key-of-the-gateway"
MODEL = "gpt-oss-120b"
REQUEST = "Please echo the marker"
COMMAND = "echo marker-$((40+2))"
ANSWER = "The command printed marker-42."

AGENTS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    # the tool that runs commands, its arguments, the agent's arguments
    "codex": (
        "exec_command",
        {"cmd": COMMAND},
        ("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"),
    ),
    "claude": ("Bash", {"command": COMMAND}, ("--allowedTools", "Bash", "-p")),
    "opencode": ("bash_tool", {"command": COMMAND, "description": "Echo"}, ("run",)),
    "qwen": ("run_shell_command", {"command": COMMAND, "is_background": False}, ("--yolo",)),
    "pi": ("bash_tool", {"command": COMMAND}, ("-p",)),
    "cn": ("Bash", {"command": COMMAND}, ("--auto", "-p")),
    "cline": ("run_commands", {"commands": [COMMAND]}, ()),
    "copilot": (
        "bash_tool",
        {"command": COMMAND, "description": "Echo"},
        ("--allow-all-tools", "-p"),
    ),
    "kilo": ("bash_tool", {"command": COMMAND, "description": "Echo"}, ("run", "--auto")),
    "goose": ("shell", {"command": COMMAND}, ("run", "--text")),
    "hermes": ("terminal", {"command": COMMAND}, ("chat", "--yolo", "-Q", "-q")),
    "grok": (
        "run_terminal_command",
        {"command": COMMAND, "description": "Echo"},
        ("--always-approve", "-p"),
    ),
    "kimi": ("Bash", {"command": COMMAND}, ("-p",)),
    "vibe": ("bash_tool", {"command": COMMAND}, ("--trust", "--yolo", "-p")),
    "droid": (
        "Execute",
        {"command": COMMAND, "riskLevel": "low", "riskLevelReason": "It prints a word."},
        ("exec", "--auto", "low"),
    ),
    "openclaw": ("exec", {"command": COMMAND}, ("agent", "exec")),
    "nanocoder": (
        "execute_bash",
        {"command": COMMAND},
        ("--trust-directory", "--mode", "yolo", "run"),
    ),
}


EARLIER_VERSIONS = 3
"""The number of earlier versions to try if the newest one cannot be installed."""


class ScriptedEngine(FakeEngine):
    """Calls the tool, and answers after its result. A request without tools, for a title, gets
    three words."""

    def output_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        text = vocab.encoding().decode(list(prompt))
        if "namespace functions" not in text:
            return ids_of("<|channel|>final<|message|>Echo a marker<|return|>")
        if "marker-42" in text:
            return ids_of(f"<|channel|>analysis<|message|>Done.<|end|><|start|>assistant{_FINAL}")
        return super().output_ids(prompt)


_FINAL = f"<|channel|>final<|message|>{ANSWER}<|return|>"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which each agent has one of its own."""
    directory = os.environ.get("AGENTS_DIR")
    return Path(directory) if directory else tmp_path_factory.mktemp("agents")


def install(agent: launch_agents.Agent, directory: Path) -> tuple[Path, str]:
    """Installs an agent's newest version. Returns the directory of its command, and the version.

    Packages with a program per platform are published in parts, and a mirror may lack some of them:
    if the newest version cannot be installed, an earlier one is.
    """
    if agent.python:
        programs, environment = directory / "venv" / "bin", str(directory / "venv")
        uv = ["uv", "pip", "install", "--quiet", "--python", environment, agent.package]
        if not (programs / agent.command).exists():
            output_of(["uv", "venv", "--quiet", "--python", find_python(agent.python), environment])
            output_of(uv)
        listed = json.loads(
            output_of(["uv", "pip", "list", "--format=json", "--python", environment])
        )
        (version,) = (entry["version"] for entry in listed if entry["name"] == agent.package)
        return programs, version
    programs = directory / "node_modules" / ".bin"
    npm = ["npm", "install", "--prefix", str(directory), "--no-audit", "--no-fund"]
    versions: list[str] = []
    missing = ""
    while not (programs / agent.command).exists():
        directory.mkdir(parents=True, exist_ok=True)
        wanted = versions.pop() if versions else "latest"
        try:
            output_of([*npm, "--loglevel=error", f"{agent.package}@{wanted}"])
        except subprocess.CalledProcessError as error:
            print(f"{agent.package}@{wanted} cannot be installed:", error.stderr)
            if wanted == "latest":
                published = json.loads(
                    output_of(["npm", "view", agent.package, "versions", "--json"])
                )
                *versions, newest = [release for release in published if "-" not in release][
                    -EARLIER_VERSIONS - 1 :
                ]
                missing = f", {newest} cannot be installed"
            if not versions:
                raise
    package = directory / "node_modules" / agent.package / "package.json"
    return programs, json.loads(package.read_text("utf-8"))["version"] + missing


def output_of(command: Sequence[str]) -> str:
    """The output of a command."""
    process = subprocess.run(command, check=True, timeout=1800, capture_output=True, text=True)
    return process.stdout


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, without the user's API keys in the environment."""
    home = tmp_path / "home"
    home.mkdir()
    foreign_prefixes = ("ANTHROPIC_", "OPENAI_", "CLAUDE", "XDG_", "CODEX_")
    for name in [name for name in os.environ if name.startswith(foreign_prefixes)]:
        monkeypatch.delenv(name)
    variables = {
        "HOME": str(home),
        "PWD": str(home),
        "VLLM_API_KEY": KEY,
        "IS_SANDBOX": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "KILO_DISABLE_MODELS_FETCH": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return home


def test_every_agent_is_run() -> None:
    assert {*AGENTS, "aider"} == set(launch_agents.AGENTS)


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_runs_command(
    agent: str,
    installed: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    tool, arguments, command = AGENTS[agent]
    launched = launch_agents.AGENTS[agent]
    record_property("agent", f"{launched.title} ({launched.package})")
    programs, version = install(launched, installed / agent)
    record_property("agent", f"{launched.title} ({launched.package} {version})")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    call = (
        "<|channel|>analysis<|message|>I should run the shell.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
    )
    engine = ScriptedEngine("vllm", {REQUEST: call}, name=MODEL, length=131_072)
    with gateway_to(engine) as url:
        assert_agent_answers(agent, url, home, *command, REQUEST)
    turns = [text for text in map(_text, engine.prompts) if "namespace functions" in text]
    assert any("marker-42" in text for text in turns), "the command was not run"
    call_text = call.rpartition("<|start|>assistant")[2]  # Copilot sends the reasoning twice
    assert any(call_text in text and "marker-42" in text for text in turns), turns[-1][-1500:]


def test_aider_edits_file(
    installed: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """aider has no tools; it edits files as the answer's text describes."""
    aider = launch_agents.AGENTS["aider"]
    record_property("agent", f"{aider.title} ({aider.package})")
    programs, version = install(aider, installed / "aider")
    record_property("agent", f"{aider.title} ({aider.package} {version})")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    text = f"{ANSWER}\n\nmarker.txt\n```\nmarker-42\n```\n"
    engine = FakeEngine(
        "vllm",
        {REQUEST: f"<|channel|>final<|message|>{text}<|return|>"},
        name=MODEL,
        length=131_072,
    )
    with gateway_to(engine) as url:
        assert_agent_answers("aider", url, home, "--yes-always", "--no-git", "--message", REQUEST)
    assert (home / "marker.txt").read_text("utf-8") == "marker-42\n"


def test_codex_waits_for_slow_prompt(
    installed: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codex gives up on a stream without events after five seconds; the engine takes 15."""
    programs, _ = install(launch_agents.AGENTS["codex"], installed / "codex")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "2")
    engine = ScriptedEngine(
        "vllm", {REQUEST: _FINAL}, name=MODEL, length=131_072, wait_seconds=15.0
    )
    engine.faults += [EngineFault(then="wait")] * 3
    idle_timeout = ("-c", f"model_providers.{launch_agents.NAME}.stream_idle_timeout_ms=5000")
    _, _, command = AGENTS["codex"]
    with gateway_to(engine) as url:
        assert_agent_answers("codex", url, home, *idle_timeout, *command, REQUEST)
    turns = [text for text in map(_text, engine.prompts) if "namespace functions" in text]
    assert len(turns) == 1, "it gave up and tried again"


SEARCH = "How many live in Rome? Search the web."


class SearchingEngine(FakeEngine):
    """Searches the web as Codex declares it, or with Claude Code's tool WebSearch, which sends a
    request of its own; then answers."""

    def output_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        text = _text(prompt)
        call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
        if "[0] rome inhabitants" in text or "Links: [" in text:
            return ids_of(f"<|channel|>final<|message|>{ANSWER}【0†L2】<|return|>")
        if "namespace browser {" in text:
            browse = "<|channel|>analysis to=browser.search code<|message|>{}<|call|>"
            return ids_of(browse.format('{"query": "rome inhabitants"}'))
        if "type WebSearch = (" in text:
            return ids_of(call.format("WebSearch", '{"query": "rome inhabitants"}'))
        if "type ToolSearch = (" in text:
            return ids_of(call.format("ToolSearch", '{"query": "select:WebSearch"}'))
        return ids_of("<|channel|>final<|message|>Inhabitants of Rome<|return|>")


@pytest.mark.parametrize(
    ("agent", "flags"),
    [("codex", AGENTS["codex"][2]), ("claude", ("--allowedTools", "WebSearch", "-p"))],
)
def test_agent_searches_the_web(
    agent: str,
    flags: tuple[str, ...],
    installed: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs, _ = install(launch_agents.AGENTS[agent], installed / agent)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    engine = SearchingEngine("vllm", {}, name=MODEL, length=131_072)
    with fake_web.run_site() as site:
        site.search(("Rome", "https://a.example/rome", "It has 2.8 million people."))
        with gateway_to(engine, web_search=f"searxng:{site.url}") as url:
            assert_agent_answers(agent, url, home, *flags, SEARCH)
    assert site.queries() == ["rome inhabitants"]


@contextmanager
def gateway_to(engine: FakeEngine, web_search: str = "") -> Iterator[str]:
    """The URL of a gateway in front of ``engine``."""
    with run_server(engine.app) as url:
        settings = GatewaySettings(
            engines=(Spec(url),),
            model=MODEL,
            keys=(Key("agent", digest(KEY)),),
            web_search=web_search,
        )
        with run_server(gateway(settings)) as base:
            yield base


def assert_agent_answers(agent: str, url: str, home: Path, *arguments: str) -> None:
    """Launches ``agent`` with the server at ``url``, and checks its answer."""
    launch = [sys.executable, "-m", "vllm_mlx_harmony", "launch", agent, "--url", url, "--"]
    process = subprocess.run(
        [*launch, *arguments],
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert ANSWER in process.stdout, process.stdout + process.stderr


def _text(prompt: Sequence[int]) -> str:
    return vocab.encoding().decode(list(prompt))
