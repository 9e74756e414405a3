"""``demo --tools``, run: the real host, a real MCP server, and nothing left of either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mlx_harmony.cli import demo_tools

pytestmark = pytest.mark.served


def test_demo_tools(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "vllm_mlx_harmony", "demo", "--tools"],
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert 'calculator.multiply {"a":119,"b":86400} -> 10281600' in ran.stdout
    assert demo_tools.ANSWER in ran.stdout
    listed = subprocess.run(["ps", "-wwaxo", "args="], check=True, capture_output=True, text=True)
    assert str(tmp_path) not in listed.stdout
