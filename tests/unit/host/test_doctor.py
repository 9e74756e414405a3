"""The doctor: it names everything that is missing, and the exit code says if anything is."""

from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mlx_harmony import _startup
from vllm_mlx_harmony.cli import doctor
from vllm_mlx_harmony.cli.models import MODELS
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.host.entry_points import versions


def find(report: doctor.Report, what: str) -> doctor.Finding:
    return next(finding for finding in report.findings if finding.what == what)


@pytest.fixture
def without_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the host and the machine: these rows are about the rest."""
    monkeypatch.setattr(doctor, "_host", lambda: iter(()))
    monkeypatch.setattr(doctor, "_machine", lambda: iter(()))
    monkeypatch.setattr(doctor, "is_free", lambda port: True)


@pytest.fixture
def startup_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An interpreter as after an installation, which has read the startup file of its site."""
    file = tmp_path / doctor.STARTUP_FILE
    file.write_text("import vllm_mlx_harmony._startup; vllm_mlx_harmony._startup.register()\n")
    monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [_startup.Finder(), *sys.meta_path])
    monkeypatch.delenv(_startup.SWITCH, raising=False)
    return file


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


@pytest.mark.parametrize(
    ("files", "detail", "ok"),
    [
        ({}, "not on this machine", False),
        ({"tokenizer.json": "{"}, "cannot be read", False),
        (
            {"tokenizer.json": json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}})},
            "is not a Harmony model",
            False,
        ),
    ],
    ids=["no tokenizer", "broken", "another one"],
)
def test_unusable_model_directory_is_reported(
    without_host: None,
    startup_file: Path,
    tmp_path: Path,
    files: dict[str, str],
    detail: str,
    ok: bool,
) -> None:
    pytest.importorskip("tokenizers")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    finding = find(doctor.doctor(str(tmp_path)), "model")
    assert finding.ok is ok
    assert detail in finding.detail


def test_missing_model_is_reported(without_host: None, startup_file: Path) -> None:
    pytest.importorskip("huggingface_hub")
    assert "not on this machine" in find(doctor.doctor("no-such-org/no-such-model"), "model").detail
    assert "not on this machine" in find(doctor.doctor("/no/such/directory"), "model").detail
    assert MODELS["120b"].source in find(doctor.doctor("120b"), "model").detail


GIB = 1 << 30

GPT_OSS_20B = {
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
}
"""24,576 bytes of keys and values for each token, and 3 MiB of windows."""


@pytest.mark.parametrize(
    ("config", "memory", "ok", "expected"),
    [
        (
            GPT_OSS_20B,
            16 * GIB,
            True,
            "all of its 131,072 tokens fit beside 11.2 GiB of weights in 14.4 GiB",
        ),
        (
            GPT_OSS_20B,
            14 * GIB,
            True,
            "about 61,952 tokens fit beside 11.2 GiB of weights in 12.6 GiB",
        ),
        (GPT_OSS_20B, 12 * GIB, False, "nothing fits beside 11.2 GiB of weights in 10.8 GiB"),
        (
            {**GPT_OSS_20B, "max_position_embeddings": 32_768},
            14 * GIB,
            True,
            "all of its 32,768 tokens fit beside 11.2 GiB of weights in 12.6 GiB",
        ),
        ({"max_position_embeddings": 131_072}, 16 * GIB, None, ""),  # layers of unknown size
    ],
)
def test_longest_prompt_that_fits_in_memory_is_reported(
    without_host: None,
    startup_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: dict[str, Any],
    memory: int,
    ok: bool | None,
    expected: str,
) -> None:
    device = pytest.importorskip("vllm_mlx_harmony.engine.device")
    monkeypatch.setattr(device, "memory", lambda *_: memory)
    monkeypatch.setattr("vllm_mlx_harmony.model_files.is_harmony_model", lambda model: True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(6_000_000_000)  # sparse: occupies no disk space
    report = doctor.doctor(str(tmp_path))
    findings = [finding for finding in report.findings if finding.what == "memory"]
    assert [(finding.ok, finding.detail) for finding in findings] == (
        [] if ok is None else [(ok, expected)]
    )
    assert all(bool(finding.fix) is not finding.ok for finding in findings)
    assert report.ok is (ok is not False)
    assert expected in report.text()


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
def test_invalid_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("occupied", ["", "vllm-mlx-harmony", "vllm-mlx-harmony/pieces"])
def test_unusable_cache_directory_is_reported(occupied: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx")
    directory = tmp_path / "cache"
    assert doctor._cache(directory).ok and not directory.exists()
    (directory / occupied).parent.mkdir(parents=True, exist_ok=True)
    (directory / occupied).touch()
    finding = doctor._cache(directory).findings[0]
    assert finding.ok is False and "cannot be used" in finding.detail


def test_report_without_problems_has_ten_lines(
    startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm_mlx")
    monkeypatch.setattr(doctor, "is_free", lambda port: True)
    large_machine(monkeypatch, memory=77, free=100)
    report = doctor.doctor()
    assert report.ok, report.text()
    lines = report.text().splitlines()
    assert len(lines) == 10
    assert lines[-1] == "Everything is in place. Next: vllm-mlx-harmony launch codex"
    assert max(map(len, lines)) <= 100 or str(startup_file) in report.text()
    assert len(report.text(verbose=True).splitlines()) > 50


def large_machine(monkeypatch: pytest.MonkeyPatch, *, memory: int, free: int) -> None:
    """A machine with ``memory`` GB for models, and ``free`` GB on its disk."""
    from vllm_mlx_harmony.engine import device

    monkeypatch.setattr(device, "memory", lambda *_: memory * 10**9)
    usage = SimpleNamespace(free=free * 10**9)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize(
    ("memory", "free", "expected"),
    [
        (77, 100, {"memory": (True, "enough for gpt-oss-120b"), "disk": (True, "100 GB free")}),
        (17, 5, {"memory": (True, "enough for gpt-oss-20b"), "disk": (False, "5 GB free")}),
        (11, 100, {"memory": (None, "gpt-oss-20b needs 15 GB")}),
    ],
)
def test_small_machine_is_reported(
    memory: int,
    free: int,
    expected: dict[str, tuple[bool | None, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("mlx")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not-there-yet"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    large_machine(monkeypatch, memory=memory, free=free)
    groups = {group.name: group for group in doctor._machine()}
    assert groups.keys() == expected.keys()
    for name, (ok, words) in expected.items():
        (finding,) = groups[name].findings
        assert finding.ok is ok and words in finding.detail


def test_every_row_of_the_real_host_is_listed(startup_file: Path) -> None:
    pytest.importorskip("vllm_mlx")
    from vllm_mlx_harmony.host import contract, entry_points

    report = doctor.doctor()
    for row in contract.table(entry_points.in_use()):
        assert find(report, f"requirement {row.label}").ok, report.text()
    assert find(report, "supported").ok


def test_changed_host_is_reported_by_row(
    startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm_mlx")
    import vllm_mlx.server

    monkeypatch.setattr(vllm_mlx.server, "load_model", lambda path: None)
    report = doctor.doctor()
    assert "load_model takes (path)" in find(report, "requirement load_model").detail
    assert not report.ok


def test_unsupported_host_is_still_compared(
    startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm_mlx")
    from vllm_mlx_harmony.host import entry_points

    monkeypatch.setattr(entry_points, "versions", lambda: {"vllm-mlx": "0.9.0"})
    report = doctor.doctor()
    assert "0.9.0 is not supported" in find(report, "supported").detail
    # The rows that do not fit are those that must be changed for it.
    assert find(report, "requirement load_model").ok
    assert not report.ok


@pytest.mark.parametrize(
    ("now", "before", "ok"),
    [(100, None, True), (70, 100, True), (59, 100, False), (120, 100, True)],
)
def test_slow_gpu_is_reported(
    now: float, before: float | None, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = pytest.importorskip("vllm_mlx_harmony.cli.prefill")
    monkeypatch.setattr(prefill.vocab, "cache_dir", lambda: tmp_path / "cache")
    if before is not None:
        assert prefill.usual(before, "M4") == before
    assert prefill.usual(1_000_000, "M5") == 1_000_000, "another chip is another machine"
    usual = prefill.usual(now, "M4")
    group = doctor._rate(now, usual)
    assert group.ok is ok
    assert ("100 before on this chip" in group.findings[0].detail) is not ok
    assert prefill.usual(0, "M4") == max(now, before or 0)


def test_damaged_rates_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = pytest.importorskip("vllm_mlx_harmony.cli.prefill")
    monkeypatch.setattr(prefill.vocab, "cache_dir", lambda: tmp_path)
    for damaged in ("", "[]", "[1]", '{"M4": "fast"}', "{", "7"):
        (tmp_path / "prefill.json").write_text(damaged)
        assert prefill.usual(5, "M4") == 5
        assert prefill.usual(4, "M4") == 5


def test_prefill_rate_is_measured() -> None:
    """At a small width, on the CPU: the two layers are a model that mlx-lm can build."""
    prefill = pytest.importorskip("vllm_mlx_harmony.cli.prefill")
    assert prefill.rate(width=64, tokens=8) > 0
