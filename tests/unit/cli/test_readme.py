"""The README and other pages: examples print what is shown, and what is named exists."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path

import pytest

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.__main__ import COMMANDS
from vllm_mlx_harmony.cli.process import Running
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.standin import Script

Serving = Callable[..., AbstractContextManager[Running]]

REPOSITORY = Path(__file__).resolve().parents[3]
README = (REPOSITORY / "README.md").read_text("utf-8")
EXAMPLES_PAGE = (REPOSITORY / "docs" / "examples.md").read_text("utf-8")
SETTINGS = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")

SCRIPTS = (
    Script(
        "<|start|>user<|message|>What is the weather in Paris?",
        "<|channel|>analysis<|message|>The user wants the weather. There is a tool for that.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city":"Paris"}<|call|>',
    ),
    Script(
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>18 °C, sunny",
        "<|channel|>analysis<|message|>18 degrees, sunny.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 18 °C and sunny in Paris.<|return|>",
    ),
    Script(
        "<|start|>user<|message|>How is it in Paris?",
        '<|channel|>final<|message|>{"city":"Paris","celsius":"about 18","sky":"lovely"}<|return|>',
    ),
    Script(
        "<|start|>user<|message|>And in London?",
        "<|channel|>final<|message|>It rains there, as always.<|return|>",
    ),
    Script(
        "What time is it in Tokyo?<|end|>",
        "<|channel|>analysis<|message|>Nine o'clock in Kolkata, seen from Tokyo: I can convert "
        "that.<|end|><|start|>assistant<|channel|>commentary to=time.convert_time "
        '<|constrain|>json<|message|>{"source_timezone":"Asia/Kolkata","time":"09:00",'
        '"target_timezone":"Asia/Tokyo"}<|call|>',
    ),
    Script(
        '"time_difference": "+3.5h"',
        "<|channel|>final<|message|>It is 12:30 in Tokyo, three and a half hours later.<|return|>",
    ),
)


def blocks(language: str) -> list[str]:
    """All blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", EXAMPLES_PAGE, re.MULTILINE | re.DOTALL)


EXAMPLES = dict(zip(("chat", "responses", "tools", "typed"), blocks("python"), strict=True))
OUTPUTS = dict(zip(EXAMPLES, blocks("text"), strict=True))


@pytest.mark.served
@pytest.mark.parametrize("flags", [(), ("--continuous-batching",)], ids=["simple", "batched"])
def test_examples_print_what_is_shown(
    tmp_path: Path, forked: Serving, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    model = standin.write(tmp_path / "model", SCRIPTS)
    (tmp_path / "home").mkdir()
    named = ("--served-model-name", "gpt-oss-20b")
    printed = {}
    with forked(model, tmp_path / "home", [*named, *flags]) as server:
        for name, code in EXAMPLES.items():
            if name != "tools":
                (tmp_path / "example.py").write_text(code.replace(":8000/", f":{server.port}/"))
                runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
                printed[name], errors = capsys.readouterr()
                assert errors == ""
    assert printed == {name: text for name, text in OUTPUTS.items() if name != "tools"}


TIME = ("uvx", "mcp-server-time")
"""The tool server of the README, as it is published."""


@pytest.mark.served
def test_example_with_tool_server_prints_what_is_shown(tmp_path: Path, forked: Serving) -> None:
    """Except for the date, which changes."""
    pytest.importorskip("mcp")
    # Downloaded before the server waits for it.
    subprocess.run([*TIME, "--help"], stdin=subprocess.DEVNULL, timeout=120, check=True)
    (home := tmp_path / "home").mkdir()
    # What uv needs to find and trust its index; a tool server gets nothing of the environment.
    own = {name: value for name, value in os.environ.items() if name.startswith(("UV_", "SSL_"))}
    clock = {"command": TIME[0], "args": TIME[1:], "env": own}
    (home / "mcp.json").write_text(json.dumps({"mcpServers": {"time": clock}}))
    model = standin.write(tmp_path / "model", SCRIPTS)
    flags = ("--served-model-name", "gpt-oss-20b", "--mcp-config", str(home / "mcp.json"))
    with forked(model, home, flags, {"VLLM_MLX_HARMONY_TOOLS": "on"}) as server:
        printed = run(EXAMPLES["tools"].replace(":8000/", f":{server.port}/"))
        log = server.log.read_text("utf-8")
    day = re.compile(r"\d{4}-\d\d-\d\d|[A-Z]\w+day")
    assert day.sub("…", printed) == day.sub("…", OUTPUTS["tools"])
    (line,) = re.findall(r"^  tools  .*$", EXAMPLES_PAGE, re.MULTILINE)
    assert line in log


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert result.stderr == ""
    return result.stdout


def test_documented_variables_exist() -> None:
    sources = (REPOSITORY / "vllm_mlx_harmony").rglob("*.py")
    code = "".join(path.read_text("utf-8") for path in sources)
    code += "".join(f'"VLLM_MLX_HARMONY_{field.name.upper()}"' for field in fields(ServerSettings))
    named = set(re.findall(r"^\| `([A-Z_]+)` \|", SETTINGS, re.MULTILINE))
    assert named
    assert {name for name in named if f'"{name}"' not in code} == set()


def test_documented_commands_exist() -> None:
    named = set(re.findall(r"^\| `vllm-mlx-harmony (\w+)", SETTINGS, re.MULTILINE))
    assert named == set(COMMANDS)


def test_ci_runs_the_command_of_the_readme() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text("utf-8")
    (line,) = re.findall(r"^exec (.*) </dev/null$", script, re.MULTILINE)
    assert re.search(rf"^{re.escape(line)} +#", README, re.MULTILINE)


PAGES = ("README.md", *(f"docs/{name}.md" for name in ("README", "agents", "configuration", "mac")))


@pytest.mark.parametrize("page", [*PAGES, "docs/examples.md"])
def test_targets_of_links_exist(page: str) -> None:
    place = REPOSITORY / page
    links = re.findall(r"\]\(([^)]+)\)", place.read_text("utf-8"))
    for link in (href for href in links if "://" not in href):
        path, _, anchor = link.partition("#")
        target = place.parent / path if path else place
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, link


def test_readme_is_short() -> None:
    assert len(README.split()) <= 1_300
