"""Codex, Claude Code and opencode, as npm has them, through a gateway: each runs a command.

`vllm-mlx-harmony connect` sets them up, with a key; the engine is a fake one that writes scripts.
``AGENTS_DIR`` is a directory that they are installed in already.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))  # importlib mode has no test dirs

from fake_engines import FakeEngine, ids, served

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.limits import digest
from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key

KEY = "a-key-of-the-gateway"
MODEL = "gpt-oss-120b"
ASKED = "Please echo the marker"
COMMAND = "echo marker-$((40+2))"
ANSWER = "The command printed marker-42."

AGENTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # its tool for commands, the field of that, how it is started
    "codex": (
        "exec_command",
        "cmd",
        ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"),
    ),
    "claude": (
        "Bash",
        "command",
        ("claude", "--settings", ".claude/vllm-mlx.json", "--allowedTools", "Bash", "-p"),
    ),
    "opencode": ("bash_tool", "command", ("opencode", "run")),
}


INSTALL_SCRIPTS = {"@anthropic-ai/claude-code": "install.cjs", "opencode-ai": "postinstall.mjs"}


class Scripted(FakeEngine):
    """Calls the tool when it is asked, and answers behind the result; without tools (whoever wants
    a title) it says three words."""

    def said(self, prompt: Sequence[int]) -> list[int]:
        text = vocab.encoding().decode(list(prompt))
        if "namespace functions" not in text:
            return ids("<|channel|>final<|message|>Echo a marker<|return|>")
        if "marker-42" in text:
            return ids(f"<|channel|>analysis<|message|>Done.<|end|><|start|>assistant{_FINAL}")
        return super().said(prompt)


_FINAL = f"<|channel|>final<|message|>{ANSWER}<|return|>"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the agents' commands are."""
    if given := os.environ.get("AGENTS_DIR"):
        return Path(given) / "node_modules" / ".bin"
    directory = tmp_path_factory.mktemp("agents")
    shutil.copy(Path(__file__).parent / "package.json", directory)
    installing = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(installing, cwd=directory, check=True, timeout=900)
    for package, script in INSTALL_SCRIPTS.items():  # which npm 11 runs for nobody
        package_directory = directory / "node_modules" / package
        subprocess.run(["node", script], cwd=package_directory, check=True, timeout=300)
    return directory / "node_modules" / ".bin"


@pytest.fixture
def home(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without anything, and nobody else's keys."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("ANTHROPIC_", "OPENAI_"))]:
        monkeypatch.delenv(name)
    variables = {
        "HOME": str(home),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VLLM_API_KEY": KEY,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "OPENCODE_CONFIG": str(home / ".config" / "opencode" / "vllm-mlx.json"),
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_runs_a_command(agent: str, home: Path) -> None:
    tool, field, command = AGENTS[agent]
    call = (
        "<|channel|>analysis<|message|>I should run the shell.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>"
        f'{{"{field}": "{COMMAND}", "description": "Echo"}}<|call|>'
    )
    if agent == "codex":
        call = call.replace(', "description": "Echo"', "")
    engine = Scripted("vllm", {ASKED: call}, name=MODEL, length=131_072)
    with ExitStack() as stack:
        url = stack.enter_context(served(engine.app))
        settings = GatewaySettings(
            engines=(Spec(url),), model=MODEL, keys=(Key("agent", digest(KEY)),)
        )
        base = stack.enter_context(served(gateway(settings)))
        connect = [sys.executable, "-m", "vllm_mlx_harmony", "connect", agent, "--write"]
        subprocess.run([*connect, "--url", base, "--key", KEY], check=True, timeout=120)
        ended = subprocess.run(
            [*command, ASKED],
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ANSWER in ended.stdout, ended.stdout + ended.stderr
    turns = [text for text in map(_text, engine.prompts) if "namespace functions" in text]
    assert any("marker-42" in text for text in turns), "the command was not run"
    assert all(ended in turns[-1] for ended in (call, "marker-42"))


def _text(prompt: Sequence[int]) -> str:
    return vocab.encoding().decode(list(prompt))
