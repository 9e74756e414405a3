"""The size of the prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from vllm_mlx_harmony.engine import device, resources


def test_default_size_is_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CONTAINERS", ())
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}.get)
    assert resources.cache_bytes() == 1 << 30  # of 16 GiB


@pytest.mark.parametrize(("limit", "share"), [("8589934592", 1 << 29), ("max", 1 << 30)])
def test_container_size_is_share_of_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, share: int
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(device, "_CONTAINERS", (str(tmp_path / "memory.max"),))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}.get)
    assert resources.cache_bytes() == share
