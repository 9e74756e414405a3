"""What engines get of flags and the environment."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("mlx_lm")

from vllm_mlx_harmony.host import resources
from vllm_mlx_harmony.host.resources import Flags


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


def test_engines_run_as_flags_and_the_environment_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(resources.PAUSE_VARIABLE, "100")
    flags = Flags(
        max_num_seqs=7,
        prefill_batch_size=3,
        completion_batch_size=5,
        prefill_step_size=512,
        chunked_prefill_tokens=64,
        stream_interval=9,
        gpu_memory_utilization=0.5,
    )
    options = resources.options(flags)
    limits = options.limits
    assert (limits.sequences, limits.prompts, limits.answers) == (7, 3, 5)
    assert (limits.chunk, limits.chunk_beside, limits.pause) == (512, 64, 0.1)
    assert (options.interval, options.utilization) == (9, 0.5)
