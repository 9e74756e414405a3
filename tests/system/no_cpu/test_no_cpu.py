"""mlx has no backend: what needs none works, and the rest says what to install.

Run by the leg `no-cpu`; where mlx can be imported it is skipped, which fails that leg.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

try:
    import mlx.core  # noqa: F401
except ImportError:
    pass
else:
    pytest.skip("mlx can be imported", allow_module_level=True)

REQUEST = '{"model":"m","messages":[{"role":"user","content":"Hi"}]}'


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "vllm_mlx_harmony", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_demo_names_the_extra() -> None:
    ended = run("demo")
    assert ended.returncode == 2
    assert "pip install 'vllm-mlx-harmony-server[cpu]'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("command", "content", "shown"),
    [
        ("render", REQUEST, "<|start|>user<|message|>Hi<|end|><|start|>assistant"),
        ("parse", "<|channel|>final<|message|>Hi<|return|>", "── answer\nHi"),
    ],
)
def test_commands_without_mlx_work(tmp_path: Path, command: str, content: str, shown: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    ended = run(command, str(file))
    assert ended.returncode == 0, ended.stderr
    assert shown in ended.stdout


def test_doctor_has_one_problem_and_its_remedy() -> None:
    ended = run("doctor")
    assert "Traceback" not in ended.stderr
    wrong = [line for line in ended.stdout.splitlines() if line.startswith("✗")]
    assert len(wrong) == 1 and "mlx cannot be imported" in wrong[0], ended.stdout
    assert "→ pip install 'vllm-mlx-harmony-server[cpu]'" in ended.stdout
