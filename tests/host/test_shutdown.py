"""The end of a server, without one: who is refused, who may end, and who is ended, in order."""

from __future__ import annotations

import asyncio
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_mlx")

import httpx
import uvicorn
from vllm_mlx import server

from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError
from vllm_mlx_harmony.host import adapter, contract
from vllm_mlx_harmony.server import answer as answers
from vllm_mlx_harmony.server import shutdown


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_default_timeout", 0.3)
    monkeypatch.setattr(answers, "_running", {})


def config(graceful: float | None = None) -> Any:
    limits = SimpleNamespace(timeout_graceful_shutdown=graceful)
    return SimpleNamespace(config=limits, _captured_signals=[])


def end(seen: list[Any], uvicorns: Any, during: Any = None) -> None:
    """Shuts down, with ``during`` beside it; what uvicorn's own shutdown meets goes to ``seen``."""

    async def original(self: Any, sockets: Any = None) -> None:
        seen.append((dict(answers._running), self.config.timeout_graceful_shutdown))

    async def test() -> None:
        beside = asyncio.ensure_future(during()) if during else None
        await asyncio.sleep(0.05)
        await adapter.gracefully(original)(uvicorns)
        assert answers.rejection() is None
        if beside is not None:
            await beside

    asyncio.run(asyncio.wait_for(test(), 10))


@pytest.mark.parametrize("given", [None, 0.1, 50])
def test_with_nothing_to_do_it_does_not_wait(given: float | None) -> None:
    seen: list[Any] = []
    end(seen, config(given))
    ((_, left),) = seen
    assert left <= 1 if given is None else left == min(given, left)


def test_an_answer_that_ends_in_time_is_not_ended() -> None:
    seen: list[Any] = []
    ended: list[bool] = []

    async def answering() -> None:
        future = asyncio.get_running_loop().create_future()
        answers._running["a", "t"] = SimpleNamespace(end=future.set_result)  # type: ignore[assignment]
        await asyncio.sleep(0.2)
        ended.append(future.done())
        del answers._running["a", "t"]

    end(seen, config(), answering)
    assert ended == [False]
    assert seen[0][0] == {}


def test_an_answer_that_does_not_end_is_ended_before_uvicorn_hangs_up() -> None:
    seen: list[Any] = []
    failures: list[HarmonyFailure] = []

    async def answering() -> None:
        future = asyncio.get_running_loop().create_future()
        answers._running["a", "t"] = SimpleNamespace(end=future.set_result)  # type: ignore[assignment]
        failures.append(await future)
        del answers._running["a", "t"]

    end(seen, config(), answering)
    assert [(failure.status, failure.code) for failure in failures] == [(503, "shutting_down")]
    assert seen[0][0] == {}


def test_the_limit_counts_from_the_signal() -> None:
    """uvicorn looks whether it was told to end ten times a second, or later on a busy machine."""
    failures: list[HarmonyFailure] = []
    stopping = config()
    stopping.should_exit = False
    shutdown.at_once(lambda *_: None)(stopping, signal.SIGTERM, None)

    async def answering() -> None:
        future = asyncio.get_running_loop().create_future()
        answers._running["a", "t"] = SimpleNamespace(end=future.set_result)  # type: ignore[assignment]
        time.sleep(0.3)
        began = time.monotonic()
        failures.append(await future)
        assert time.monotonic() - began < 0.15
        del answers._running["a", "t"]

    end([], stopping, answering)
    assert len(failures) == 1


def test_an_answer_is_read_to_its_end_before_uvicorn_hangs_up() -> None:
    """Generated it is already, in words or whole; but not yet on its way to the client."""
    seen: list[Any] = []
    read: list[bool] = []

    async def reading() -> None:
        with answers.counted_as_unread():
            await asyncio.sleep(0.4)  # longer than the limit
            read.append(not seen)

    end(seen, config(), reading)
    assert read == [True]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "error"),
        ("/v1/responses", "error"),
        ("/v1/messages", "type"),
        ("/v1/completions", "error"),
    ],
)
def test_new_requests_get_503(path: str, kind: str) -> None:
    async def test() -> httpx.Response:
        answers.reject_new(HostError("the server is shutting down", code="shutting_down"))
        try:
            transport = httpx.ASGITransport(server.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
                return await client.post(path, json={})
        finally:
            answers.reject_new(None)

    contract.activate()
    try:
        response = asyncio.run(test())
    finally:
        contract.deactivate()
    assert response.status_code == 503
    assert kind in response.json()
    assert "shutting down" in response.text
    assert response.headers["connection"] == "close"


def test_the_second_signal_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *given: raised.append(given))
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    stopping = uvicorn.Server(uvicorn.Config("nothing:here"))
    handle = shutdown.at_once(uvicorn.Server.handle_exit)
    handle(stopping, signal.SIGTERM, None)
    assert stopping.should_exit
    assert not raised
    handle(stopping, signal.SIGTERM, None)
    assert raised == [(signal.SIGTERM, signal.SIG_DFL), signal.SIGTERM]


def test_uvicorn_is_as_it_was() -> None:
    before = (uvicorn.Server.shutdown, uvicorn.Server.handle_exit)
    contract.activate()
    assert uvicorn.Server.shutdown is not before[0]
    contract.deactivate()
    assert (uvicorn.Server.shutdown, uvicorn.Server.handle_exit) == before
