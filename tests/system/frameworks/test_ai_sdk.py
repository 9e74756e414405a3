"""The unmodified AI SDK (JavaScript), with a model whose scripts never conform."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Server

pytestmark = pytest.mark.served

HERE = Path(__file__).parent / "ai_sdk"

PROVIDERS = ("openai-compatible", "openai, chat", "openai, responses", "anthropic")
CHECKS = (
    "generateObject",
    "generateText with an output",
    "streamText with an output",
    "toolChoice required",
    "toolChoice of a tool",
)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checks and their packages."""
    directory = shutil.copytree(HERE, tmp_path_factory.mktemp("node") / "checks")
    install_command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(install_command, cwd=directory, check=True, timeout=300)
    return directory


@pytest.fixture(scope="session")
def problems(packages: Path, server: Server, question: str) -> dict[str, str]:
    """The problem of each check. One process runs them all, because starting one takes seconds."""
    process = subprocess.run(
        ["node", "checks.mjs", server.root, question],
        cwd=packages,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["problem"] for line in lines}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_ai_sdk_check_finds_no_problem(problems: dict[str, str], provider: str, check: str) -> None:
    assert problems[f"{provider}: {check}"] == ""
