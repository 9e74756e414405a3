"""The disk cache: what its flags open, what `doctor` and the metrics report, and its keys."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx_lm.utils

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli import doctor
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine.disk import identity, index
from vllm_mlx_harmony.engine.disk.cache import DIRECTORY, DiskCache
from vllm_mlx_harmony.engine.disk.safetensors import Tensor
from vllm_mlx_harmony.engine.prefix_tree import pack
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings
from vllm_mlx_harmony.host import metrics
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine


def filled_disk(directory: Path) -> DiskCache:
    """A disk with one conversation of three pieces."""
    disk = DiskCache(directory, 1 << 30)
    tensor = Tensor("F32", (4,), memoryview(bytes(16)))
    piece = np.zeros(16, np.uint8)
    offered = [(end, piece) for end in (1, 2, 3)]
    disk.offer(b"root", pack([7, 8, 9]), offered, lambda _: {"whole": tensor})
    assert disk.flush(10)
    return disk


def test_doctor_changes_nothing_on_disk(tmp_path: Path) -> None:
    disk = filled_disk(tmp_path / "ssd")
    before = {path: path.stat().st_mtime_ns for path in disk.directory.rglob("*.safetensors")}
    group = doctor._cache(disk.directory)
    assert group.ok and "3 pieces of 1 conversations, 0 turns" in group.findings[0].detail
    assert before == {path: path.stat().st_mtime_ns for path in before}
    disk.close(5.0)
    after = sorted((path, path.stat().st_mtime_ns) for path in disk.directory.rglob("*"))
    assert "3 pieces of 1 conversations" in doctor._cache(disk.directory).findings[0].detail
    assert after == sorted((path, path.stat().st_mtime_ns) for path in disk.directory.rglob("*"))
    nothing = doctor._cache(tmp_path / "a" / "b")
    assert nothing.ok and not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert not doctor._cache(tmp_path / "file").ok
    other = tmp_path / "damaged" / DIRECTORY
    other.mkdir(parents=True)
    (other / index.NAME).write_bytes(b"not a database" * 100)
    assert not doctor._cache(tmp_path / "damaged").ok


@pytest.mark.parametrize("gigabytes", [0.0, -1.0, float("nan")])
def test_invalid_size_is_rejected(tmp_path: Path, gigabytes: float) -> None:
    with pytest.raises(HostError, match="ssd-cache-max-gb"):
        resources.open_disk(str(tmp_path / "new"), gigabytes, 0)
    assert not (tmp_path / "new").exists()


def test_unusable_directory_disables_only_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert resources.open_disk(str(tmp_path / "file"), 1.0, 0) is None
    assert "cannot be used" in caplog.text


@pytest.mark.nightly
def test_without_a_disk_no_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no warning either that the cache is not on disk."""
    path = standin.write_tiny(tmp_path / "model", width=16)
    monkeypatch.setattr(resources, "disk", None)
    monkeypatch.setattr(identity, "of_weights", lambda _: pytest.fail("was read"))
    engine = HarmonyEngine(str(path))
    engine.prepare_for_start()
    asyncio.run(engine.stop())
    assert "prefix cache" not in caplog.text


def test_growing_metrics_are_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = filled_disk(tmp_path)
    monkeypatch.setattr(resources, "disk", disk)
    kinds = {
        metric.name.removeprefix(f"{metrics.DISK}_"): metric.type
        for metric in metrics._Ours().collect()
    }
    gauges = {"bytes", "pieces", "turns", "waiting_bytes", "written_today_bytes", "paused"}
    assert {name for name, kind in kinds.items() if kind == "gauge"} == gauges
    assert kinds["hits"] == kinds["written_bytes"] == kinds["read_seconds"] == "counter"
    disk.close(1.0)


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("changed", [False, True])
def test_disk_identifies_a_model_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    path = standin.write_tiny(tmp_path / "model", width=16)
    disk = DiskCache(tmp_path / "ssd", 1 << 30)
    monkeypatch.setattr(resources, "disk", disk)
    load = mlx_lm.utils.load_model

    def changing(*arguments: Any, **keywords: Any) -> Any:
        loaded = load(*arguments, **keywords)
        if changed:
            os.utime(next(path.glob("*.safetensors")), ns=(0, 0))
        return loaded

    monkeypatch.setattr(mlx_lm.utils, "load_model", changing)
    engine = HarmonyEngine(str(path))
    engine.prepare_for_start()

    async def compute() -> None:
        assert engine.engine is not None
        settings = GenerationSettings(max_tokens=0, temperature=0.0, top_p=1.0)
        async with aclosing(
            engine.engine.generate(GenerationRequest((1, 2, 3), settings, ""))
        ) as steps:
            async for _ in steps:
                pass
        await engine.stop()

    asyncio.run(compute())
    assert disk.flush(10)
    assert disk.counters().pieces == (0 if changed else 1)
    shutil.rmtree(disk.directory)
    disk.close(1.0)
