"""service: its files are what launchd and systemd read, and each action calls their commands."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.cli import service
from vllm_mlx_harmony.cli.process import STOPPED_WITHIN

ODD = ["/usr/bin/env", "serve", "a b", "50%", "$HOME", 'say "hi"', "back\\slash", "é"]


@pytest.fixture(autouse=True)
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the service manager, which are not run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(service, "subprocess", type("fake", (), {"run": staticmethod(run)}))
    return commands


def test_plist_has_the_unchanged_command() -> None:
    document = plistlib.loads(service.plist(ODD, Path("/tmp/log")))
    assert document["ProgramArguments"] == ODD
    assert document["KeepAlive"] == {"SuccessfulExit": False}
    assert document["ExitTimeOut"] == STOPPED_WITHIN


def test_unit_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "vllm-mlx-harmony.service"
    file.write_bytes(service.unit(ODD))
    assert f"TimeoutStopSec={STOPPED_WITHIN:.0f}" in file.read_text("utf-8")
    assert '"50%%" "$$HOME" "say \\"hi\\"" "back\\\\slash"' in file.read_text("utf-8")
    if analyze := shutil.which("systemd-analyze"):
        checked = subprocess.run(
            [analyze, "--user", "verify", str(file)], capture_output=True, text=True, check=False
        )
        assert str(file) not in checked.stderr, checked.stderr


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_service_is_installed_controlled_and_uninstalled(
    platform: str, called: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert main(["service", "start"]) == 2
    assert "not installed" in capsys.readouterr().err
    assert main(["service", "install"]) == 2
    assert main(["service", "install", "gpt-oss", "--port", "8000"]) == 0
    written = service.path().read_bytes()
    assert b"gpt-oss" in written
    assert (b"--log-file" in written) == (platform == "darwin"), "systemd has its journal"
    called.clear()
    assert main(["service", "install", "20b"]) == 0
    assert called == [*service.commands("stop"), *service.commands("install")]
    for action in ("stop", "start", "status", "logs", "uninstall"):
        called.clear()
        assert main(["service", action]) == 0
        assert called == service.commands(action)
    assert not service.path().exists()


@pytest.mark.parametrize(
    "line", ["--help", "install --help", "install 20b -h", "status --help"], ids=str
)
def test_help_runs_nothing(line: str, called: list[list[str]], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["service", *line.split()])
    assert ended.value.code == 0
    assert "usage: vllm-mlx-harmony service" in capsys.readouterr().out
    assert called == []
    assert not service.path().exists()
