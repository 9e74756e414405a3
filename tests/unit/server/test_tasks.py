"""When a process is prepared for serving."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator

import pytest

from vllm_mlx_harmony import tasks

DEFAULT = 0.005
"""Python's switch interval, in seconds."""


@pytest.fixture
def freezes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of ``gc.freeze`` in an unprepared process; nothing is really frozen."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    tasks.unfreeze()
    calls.clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(DEFAULT)
    yield calls
    sys.setswitchinterval(before)
    tasks.unfreeze()


def requests(number: int) -> None:
    for _ in range(number):
        asyncio.run(tasks.in_thread(gc.isenabled))


def test_requests_freeze_nothing_in_prepared_process(freezes: list[str]) -> None:
    """Otherwise, objects of open connections would never be freed."""
    tasks.prepare_process()
    requests(2)
    assert freezes == ["freeze"]


def test_first_request_prepares_process(freezes: list[str]) -> None:
    """The engine was loaded for that request."""
    requests(2)
    assert freezes == ["freeze"]


def test_process_is_prepared_again_after_engine_stops(freezes: list[str]) -> None:
    tasks.prepare_process()
    tasks.unfreeze()
    requests(2)
    assert freezes == ["freeze", "unfreeze", "freeze"]


@pytest.mark.parametrize(
    ("interval", "expected"), [(DEFAULT, tasks.SWITCH_SECONDS), (0.0005, 0.0005)]
)
@pytest.mark.usefixtures("freezes")
def test_switch_interval_is_never_raised(interval: float, expected: float) -> None:
    sys.setswitchinterval(interval)
    tasks.prepare_process()
    assert sys.getswitchinterval() == pytest.approx(expected)
