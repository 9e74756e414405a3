"""What the prefix cache gets of the environment."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from vllm_mlx_harmony.engine import device, resources


@pytest.mark.parametrize(("given", "expected"), [("0", 0), ("1.5 GiB", 3 << 29)])
def test_budget_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: int
) -> None:
    monkeypatch.setenv(resources.VARIABLE, given)
    assert resources.budget() == expected


@pytest.mark.parametrize("given", ["", None, "lots", "-1", "2X", "1G2"])
def test_otherwise_it_is_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str | None
) -> None:
    monkeypatch.setattr(device, "_CONTAINERS", ())
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}.get)
    if given is None:
        monkeypatch.delenv(resources.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(resources.VARIABLE, given)
    with caplog.at_level(logging.WARNING):
        assert resources.budget() == 1 << 30  # of 16 GiB
    assert bool(caplog.records) == bool(given)


@pytest.mark.parametrize(("limit", "share"), [("8589934592", 1 << 29), ("max", 1 << 30)])
def test_in_a_container_it_is_a_share_of_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, share: int
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(device, "_CONTAINERS", (str(tmp_path / "memory.max"),))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}.get)
    monkeypatch.delenv(resources.VARIABLE, raising=False)
    assert resources.budget() == share
