"""The shutdown of vllm-mlx's server: its limit, and the prefix cache on disk."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_mlx")

import uvicorn
from loops import run
from vllm_mlx import server

from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.host import adapter, contract
from vllm_mlx_harmony.server import shutdown
from vllm_mlx_harmony.server.settings import ServerSettings


@pytest.fixture(autouse=True)
def _active() -> Iterator[None]:
    contract.activate(ServerSettings.read())
    yield
    contract.deactivate()


class Uvicorn:
    """Like uvicorn's server; records its own limit at its shutdown."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(timeout_graceful_shutdown=None)
        self.limits: list[float | None] = []

    async def shutdown(self, sockets: Any = None) -> None:
        self.limits.append(self.config.timeout_graceful_shutdown)


@pytest.mark.parametrize(("timeout", "limit"), [(7.0, 7.0), (300.0, shutdown.MAX_GRACE)])
def test_timeout_of_requests_limits_the_shutdown(
    timeout: float, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_default_timeout", timeout)
    stopping: Any = adapter.with_graceful_shutdown(Uvicorn)()
    run(stopping.shutdown())
    assert stopping.limits == [pytest.approx(limit, abs=1)]


def test_pending_writes_are_finished_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn then ends the process by the signal, without the handlers of `atexit`."""
    stopping: Any = adapter.with_graceful_shutdown(Uvicorn)()
    closed: list[tuple[float, int]] = []
    disk = SimpleNamespace(close=lambda timeout: closed.append((timeout, len(stopping.limits))))
    monkeypatch.setattr(resources, "disk", disk)
    run(stopping.shutdown())
    assert closed == [(resources.CLOSE_TIMEOUT, 1)]


def test_deactivation_restores_uvicorn() -> None:
    main = importlib.import_module("uvicorn.main")
    contract.activate(ServerSettings.read())
    assert main.Server is not uvicorn.Server and issubclass(main.Server, uvicorn.Server)
    contract.deactivate()
    assert main.Server is uvicorn.Server
