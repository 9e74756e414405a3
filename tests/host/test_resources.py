"""What the prefix cache gets of the environment."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("mlx_lm")

from vllm_mlx_harmony.host import resources


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
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1 << 20}.get)
    if given is None:
        monkeypatch.delenv(resources.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(resources.VARIABLE, given)
    with caplog.at_level(logging.WARNING):
        assert resources.budget() == 1 << 30  # of 16 GiB
    assert bool(caplog.records) == bool(given)
