"""The doctor where vllm-mlx is installed: what it says of the host, the machine and models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_mlx")

import vllm_mlx.server
from huggingface_hub import constants

from vllm_mlx_harmony.cli import doctor, prefill
from vllm_mlx_harmony.cli.models import MODELS
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.host import contract, entry_points
from vllm_mlx_harmony.server.settings import ServerSettings


def find(report: doctor.Report, what: str) -> doctor.Finding:
    return next(finding for finding in report.findings if finding.what == what)


@pytest.fixture
def without_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the host and the machine: these rows are about models."""
    monkeypatch.setattr(doctor, "_host", lambda: iter(()))
    monkeypatch.setattr(doctor, "_machine", lambda: iter(()))
    monkeypatch.setattr(doctor, "is_free", lambda port: True)


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
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    finding = find(doctor.doctor(str(tmp_path)), "model")
    assert finding.ok is ok
    assert detail in finding.detail


def test_missing_model_is_reported(without_host: None, startup_file: Path) -> None:
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


@pytest.mark.nightly(sample=5)
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


@pytest.mark.parametrize("occupied", ["", "vllm-mlx-harmony", "vllm-mlx-harmony/pieces"])
def test_unusable_cache_directory_is_reported(occupied: str, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    assert doctor._cache(directory).ok and not directory.exists()
    (directory / occupied).parent.mkdir(parents=True, exist_ok=True)
    (directory / occupied).touch()
    finding = doctor._cache(directory).findings[0]
    assert finding.ok is False and "cannot be used" in finding.detail


def test_report_without_problems_has_ten_lines(
    startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not-there-yet"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    large_machine(monkeypatch, memory=memory, free=free)
    groups = {group.name: group for group in doctor._machine()}
    assert groups.keys() == expected.keys()
    for name, (ok, words) in expected.items():
        (finding,) = groups[name].findings
        assert finding.ok is ok and words in finding.detail


def test_every_row_of_the_real_host_is_listed(startup_file: Path) -> None:
    report = doctor.doctor()
    for row in contract.table(entry_points.in_use(), ServerSettings.read()):
        assert find(report, f"requirement {row.label}").ok, report.text()
    assert find(report, "supported").ok


def test_changed_host_is_reported_by_row(
    startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_mlx.server, "load_model", lambda path: None)
    report = doctor.doctor()
    assert "load_model takes (path)" in find(report, "requirement load_model").detail
    assert not report.ok


def test_unsupported_host_is_still_compared(
    startup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(prefill.vocab, "cache_dir", lambda: tmp_path)
    for damaged in ("", "[]", "[1]", '{"M4": "fast"}', "{", "7"):
        (tmp_path / "prefill.json").write_text(damaged)
        assert prefill.usual(5, "M4") == 5
        assert prefill.usual(4, "M4") == 5


def test_prefill_rate_is_measured() -> None:
    """At a small width, on the CPU: the two layers are a model that mlx-lm can build."""
    assert prefill.rate(width=64, tokens=8) > 0
