"""verify --stand-in: our own server passes every check that other servers get."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli import process


@pytest.mark.served
def test_standin_passes_every_check(
    forked: Callable[..., AbstractContextManager[process.Running]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process, "serving", forked)
    monkeypatch.setenv("COLUMNS", "60")
    file = tmp_path / "results.json"
    code = main(["verify", "--stand-in", "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 60
    checks = json.loads(file.read_text("utf-8"))["checks"]
    assert len(checks) > 50 and {check["state"] for check in checks} == {"passed"}
