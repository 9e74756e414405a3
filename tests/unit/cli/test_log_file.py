"""serve --log-file: all output is in the file and older ones, whose size is limited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mlx_harmony.__main__ import main

PRINTS = """
import os, sys, time
from pathlib import Path
from vllm_mlx_harmony.cli import log_file

log_file.redirect(Path(sys.argv[1]), largest=2_000, interval=0.01)
for number in range(300):
    stream = (sys.stdout, sys.stderr)[number % 2]
    print(f"line {number:03}", file=stream, flush=True)
    time.sleep(0.001)
os.system("echo from a child")
"""


def test_output_is_in_the_files_once(tmp_path: Path) -> None:
    log = tmp_path / "new" / "server.log"
    log.parent.mkdir()
    log.write_text("what was there before\n")
    command = [sys.executable, "-c", PRINTS, str(log)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")
    files = sorted(log.parent.iterdir(), reverse=True)
    assert 1 < len(files) <= 4, "a file and at most three older ones"
    lines = "".join(path.read_text("utf-8") for path in files).splitlines()
    printed = [f"line {number:03}" for number in range(300)]
    assert lines == ["what was there before", *printed, "from a child"]


def test_unusable_log_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").touch()
    assert main(["serve", "gpt-oss", "--log-file", str(tmp_path / "taken" / "log")]) == 2
    assert "cannot be opened" in capsys.readouterr().err
