"""The doctor: it names everything that is missing, and the exit code says if anything is.

What it says of vllm-mlx, mlx and models is in `tests/unit/host/test_doctor.py`.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx_harmony import _startup
from vllm_mlx_harmony.cli import doctor, light
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.host.entry_points import versions


def find(report: doctor.Report, what: str) -> doctor.Finding:
    return next(finding for finding in report.findings if finding.what == what)


@pytest.fixture
def without_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the host and mlx for installed, and leaves out the machine: these rows are about the
    rest."""
    monkeypatch.setattr(doctor, "versions", lambda: {**versions(), "vllm-mlx": "0.6.0"})
    monkeypatch.setattr(light, "is_installed", lambda module: True)
    monkeypatch.setattr(doctor, "_mlx", lambda: doctor.Group("mlx", (), internal=True))
    for name in ("_host", "_machine", "_prefill"):
        monkeypatch.setattr(doctor, name, lambda: iter(()))
    monkeypatch.setattr(doctor, "is_free", lambda port: True)


def test_complete_installation_is_reported(without_host: None, startup_file: Path) -> None:
    report = doctor.doctor()
    assert find(report, "startup file").detail == str(startup_file)
    assert find(report, "import hook").ok
    assert find(report, "vocabulary").ok
    assert find(report, "vllm-mlx-harmony").detail == versions()["vllm-mlx-harmony"]


def test_missing_startup_file_is_reported(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup_file.unlink()
    monkeypatch.setattr(sys, "path", [])
    finding = find(doctor.doctor(), "startup file")
    assert finding.ok is False
    assert "vllm-mlx-harmony serve" in finding.fix


def test_unregistered_import_hook_is_reported(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finders = [finder for finder in sys.meta_path if not isinstance(finder, _startup.Finder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    assert find(doctor.doctor(), "import hook").ok is False


def test_switch_is_reported(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_startup.SWITCH, "0")
    assert "VLLM_MLX_HARMONY=0" in find(doctor.doctor(), "switch").detail


def test_invalid_variable_is_one_problem(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLX_HARMONY_DATE", "tomorrow")
    report = doctor.doctor()
    (problem,) = [finding for finding in report.findings if finding.ok is False]
    assert (problem.what, problem.fix) == ("settings", "correct it, or unset it")
    assert "VLLM_MLX_HARMONY_DATE: 'tomorrow' is not a date" in problem.detail


@pytest.mark.parametrize("name", ["vllm-mlx", "openai-harmony"])
def test_missing_distribution_is_reported(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(doctor, "versions", lambda: {"vllm-mlx-harmony": "0.1.0"})
    finding = find(doctor.doctor(), name)
    assert finding.ok is False
    assert finding.fix.startswith(f"pip install {name}")


def test_fork_of_openai_harmony_is_accepted(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"vllm-mlx": "0.6.0", "oss-harmony": "0.0.11"}
    monkeypatch.setattr(doctor, "versions", lambda: versions)
    assert doctor.doctor().ok


def test_unloadable_vocabulary_is_reported(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise vocab.VocabularyError("no place")

    monkeypatch.setattr(vocab, "encoding", fail)
    assert "no place" in find(doctor.doctor(), "vocabulary").detail


WELL = doctor.Group("parts", (doctor.Finding(True, "a"), doctor.Finding(None, "bcd")), "2 found")
BROKEN = doctor.Group("b", (doctor.Finding(False, "a", "broken", "mend it"), *WELL.findings))


@pytest.mark.parametrize(
    ("group", "arguments", "code", "text"),
    [
        (WELL, [], 0, "✓ parts  2 found\n\nEverything is in place."),
        (WELL, ["--verbose"], 0, "✓ a\n  bcd\n\nEverything"),
        (BROKEN, [], 1, "✗ a  broken\n     → mend it\n\n1 problem"),
        (BROKEN, ["--verbose"], 1, "✗ a    broken\n       → mend it\n✓ a\n  bcd\n\n1 problem"),
    ],
)
def test_main_prints_the_report(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    group: doctor.Group,
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    calls: list[Any] = []

    def report(*options: Any) -> doctor.Report:
        calls.append(options)
        return doctor.Report((group,))

    monkeypatch.setattr(doctor, "doctor", report)
    assert doctor.main(["MODEL", "--port", "9", *arguments]) == code
    assert capsys.readouterr().out.startswith(text)
    assert calls == [("MODEL", 9, None, None)]


def test_every_failure_has_a_fix(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup_file.unlink()
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(doctor, "versions", lambda: {"vllm-mlx-harmony": "0.1.0"})
    report = doctor.doctor("no-such-org/no-such-model")
    wrong = [finding for finding in report.findings if finding.ok is False]
    assert {"startup file", "vllm-mlx", "openai-harmony", "model"} <= {
        finding.what for finding in wrong
    }
    assert [finding for finding in wrong if not finding.fix] == []


def test_clashing_distribution_is_reported(
    without_host: None, startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another distribution, such as a fork, has a package of the host's name."""
    owners = {"vllm_mlx": ["vllm-mlx", "rapid-mlx", "rapid-mlx"], "other": ["other"]}
    monkeypatch.setattr(doctor.metadata, "packages_distributions", lambda: owners)
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(doctor, "versions", lambda: {"vllm-mlx": "0.6.0", "openai-harmony": "1"})
    report = doctor.doctor()
    (clash,) = [finding for finding in report.findings if finding.what == "clash"]
    assert clash.detail == "rapid-mlx 9.9 contains another package vllm_mlx"
    assert "pip uninstall rapid-mlx" in clash.fix
    assert not report.ok


def test_occupied_port_is_reported(startup_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_host", lambda: iter(()))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        monkeypatch.setattr(doctor, "HEALTH_TIMEOUT", 0.1)
        finding = find(doctor.doctor(port=port), "port")
        assert finding.ok is False
        assert f"--port {port + 1}" in finding.fix
        monkeypatch.setattr(doctor, "_server", lambda _: "a server")
        assert find(doctor.doctor(port=port), "port").ok is None
    assert find(doctor.doctor(port=port), "port").ok


@pytest.mark.parametrize("port", ["99999", "65536", "-1", "0", "many", "²", ""])
def test_invalid_port_is_rejected(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main([f"--port={port}"])
    assert ended.value.code == 2
    assert f"{port!r} is not a port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ({"status": "healthy", "model_loaded": True}, "a server"),
        ({"status": "ok", "server": doctor.GATEWAY, "model": "m"}, "a gateway"),
        ({"status": "ok"}, ""),
        ([], ""),
    ],
)
def test_listener_on_a_port_is_identified(health: Any, expected: str) -> None:
    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(health).encode())

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert doctor._server(server.server_address[1]) == expected


@pytest.mark.parametrize("cached", [True, False])
def test_cache_of_the_vocabulary_is_reported(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(vocab.BASE_VARIABLE, raising=False)
    monkeypatch.setattr(vocab, "cache_dir", lambda: tmp_path)
    if cached:
        (tmp_path / vocab.FILE_NAME).touch()
    detail = doctor._vocabulary().findings[0].detail
    assert ("not cached" in detail, f"cached in {tmp_path}" in detail) == (not cached, cached)
