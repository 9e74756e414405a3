"""mlx has no backend: commands that need none work, and the others name the package to install.

The leg `no-cpu` runs this; where mlx can be imported it is skipped, which fails that leg.
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
    """Runs the program in a process of its own."""
    command = [sys.executable, "-m", "vllm_mlx_harmony", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_demo_names_the_extra() -> None:
    process = run("demo")
    assert process.returncode == 2
    assert "pip install 'vllm-mlx-harmony-server[cpu]'" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("command", "content", "expected"),
    [
        ("render", REQUEST, "<|start|>user<|message|>Hi<|end|><|start|>assistant"),
        ("parse", "<|channel|>final<|message|>Hi<|return|>", "── answer\nHi"),
    ],
)
def test_commands_without_mlx_print_their_results(
    tmp_path: Path, command: str, content: str, expected: str
) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    process = run(command, str(file))
    assert process.returncode == 0, process.stderr
    assert expected in process.stdout


def test_doctor_reports_one_problem_and_its_fix() -> None:
    process = run("doctor")
    assert "Traceback" not in process.stderr
    problems = [line for line in process.stdout.splitlines() if line.startswith("✗")]
    assert len(problems) == 1 and "mlx cannot be imported" in problems[0], process.stdout
    assert "→ pip install 'vllm-mlx-harmony-server[cpu]'" in process.stdout
