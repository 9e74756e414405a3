"""Shutdown, without a server: what is refused, what may finish, and what is ended, in order."""

from __future__ import annotations

import asyncio
import importlib
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_mlx")

import httpx
import uvicorn
from loops import run
from vllm_mlx import server

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.host import adapter, contract
from vllm_mlx_harmony.server import shutdown
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.front_end import installed_in

KEY = AnswerKey("a", "t")


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when the process would have been ended. The limit is short."""
    event = threading.Event()
    monkeypatch.setattr(shutdown, "_end_process", event.set)
    monkeypatch.setattr(server, "_default_timeout", 0.3)
    contract.activate()
    yield event
    contract.deactivate()


class Clock:
    """The time of `shutdown`, which passes only while a shutdown sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    async def wait(self, seconds: float) -> None:
        """Waits until the shutdown has slept for ``seconds``."""
        until = self.now + seconds
        while self.now < until:
            await asyncio.sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shutdown, "time", clock)
    sleeping = SimpleNamespace(sleep=clock.sleep, to_thread=asyncio.to_thread)
    monkeypatch.setattr(shutdown, "asyncio", sleeping)
    return clock


def answers() -> Answers:
    return installed_in(server.app).answers


class Running:
    """An answer that waits to be ended."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[HarmonyFailure] = asyncio.get_running_loop().create_future()
        answers().add(KEY, self)

    def end(self, failure: HarmonyFailure) -> None:
        self.failure.set_result(failure)

    def leave(self) -> None:
        answers().remove(KEY, self)


class Uvicorn:
    """Like uvicorn's server; records the running answers and its own limit at its shutdown."""

    def __init__(self, graceful: float | None = None) -> None:
        self.config = SimpleNamespace(timeout_graceful_shutdown=graceful)
        self.should_exit = False
        self.shutdowns: list[Any] = []

    async def shutdown(self, sockets: Any = None) -> None:
        self.shutdowns.append((answers().running, self.config.timeout_graceful_shutdown))

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = True


Draining = adapter.draining(Uvicorn)


def shut_down(stopping: Any, during: Any = None) -> list[Any]:
    """Shuts down while ``during`` runs; returns what uvicorn's own shutdown recorded."""

    async def test() -> None:
        beside = asyncio.ensure_future(during()) if during else None
        await asyncio.sleep(0)
        await stopping.shutdown()
        assert answers().rejection() is None
        if beside is not None:
            await beside

    run(test())
    shutdowns: list[Any] = stopping.shutdowns
    return shutdowns


@pytest.mark.parametrize("graceful", [None, 0.1, 50])
def test_shutdown_without_answers_leaves_uvicorn_the_whole_limit(
    graceful: float | None, clock: Clock
) -> None:
    ((_, limit),) = shut_down(Draining(graceful))
    assert limit == pytest.approx(0.3 if graceful is None else min(graceful, 0.3))
    assert clock.now == 100


def test_pending_writes_are_finished_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn then ends the process by the signal, without the handlers of `atexit`."""
    stopping = Draining()
    closed: list[tuple[float, int]] = []
    disk = SimpleNamespace(
        close=lambda patience: closed.append((patience, len(stopping.shutdowns)))
    )
    monkeypatch.setattr(resources, "disk", disk)
    shut_down(stopping)
    assert closed == [(resources.WRITTEN_WITHIN, 1)]


def test_answer_that_ends_in_time_is_complete(clock: Clock) -> None:
    ended: list[bool] = []

    async def answering() -> None:
        answer = Running()
        await clock.wait(0.15)
        ended.append(answer.failure.done())
        answer.leave()

    shutdowns = shut_down(Draining(), answering)
    assert ended == [False]
    assert shutdowns[0][0] == []


def test_running_answer_is_ended_before_uvicorn_hangs_up(clock: Clock) -> None:
    failures: list[HarmonyFailure] = []

    async def answering() -> None:
        answer = Running()
        failures.append(await answer.failure)
        assert 0.2 < clock.now - 100 < 0.3
        answer.leave()

    shutdowns = shut_down(Draining(), answering)
    assert [(failure.status, failure.code) for failure in failures] == [(503, "shutting_down")]
    assert shutdowns[0][0] == []


def test_limit_counts_from_the_signal(clock: Clock) -> None:
    """uvicorn looks for a signal ten times a second, or less often on a busy machine."""
    failures: list[HarmonyFailure] = []
    stopping = Draining()
    stopping.handle_exit(signal.SIGTERM, None)

    async def answering() -> None:
        answer = Running()
        clock.now += 0.3
        failures.append(await answer.failure)
        assert clock.now < 100.4  # at once
        answer.leave()

    shut_down(stopping, answering)
    assert len(failures) == 1


def test_hanging_engine_does_not_hold_the_process(killed: threading.Event) -> None:
    stopping = Draining()
    stopping.handle_exit(signal.SIGTERM, None)
    shut_down(stopping)
    assert killed.wait(60)


def test_embedded_server_does_not_end_the_process(killed: threading.Event) -> None:
    shut_down(Draining())
    assert not killed.wait(1.5)


def test_answer_is_read_to_its_end_before_uvicorn_hangs_up(clock: Clock) -> None:
    """It has been generated, streamed or whole, but not yet sent to the client."""
    stopping = Draining()
    read: list[bool] = []

    async def reading() -> None:
        with answers().delay_shutdown():
            await clock.wait(0.4)  # longer than the limit
            read.append(not stopping.shutdowns)

    shut_down(stopping, reading)
    assert read == [True]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "error"),
        ("/v1/responses", "error"),
        ("/v1/messages", "type"),
        ("/v1/messages/count_tokens", "type"),
        ("/v1/messagesX", "error"),
        ("/v1/completions", "error"),
    ],
)
def test_new_requests_get_503(path: str, kind: str) -> None:
    async def test() -> httpx.Response:
        answers().reject_new(True)
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.post(path, json={})

    response = asyncio.run(test())
    assert response.status_code == 503
    assert set(response.json()) >= {kind} and ("type" in response.json()) == (kind == "type")
    assert "shutting down" in response.text
    assert response.headers["connection"] == "close"


def test_second_signal_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: raised.append(arguments))
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    stopping = adapter.draining(uvicorn.Server)(uvicorn.Config("nothing:here"))
    stopping.handle_exit(signal.SIGTERM, None)
    assert stopping.should_exit
    assert not raised
    stopping.handle_exit(signal.SIGTERM, None)
    assert raised == [(signal.SIGTERM, signal.SIG_DFL), signal.SIGTERM]


def test_deactivation_restores_uvicorn() -> None:
    main = importlib.import_module("uvicorn.main")
    contract.activate()
    assert main.Server is not uvicorn.Server and issubclass(main.Server, uvicorn.Server)
    contract.deactivate()
    assert main.Server is uvicorn.Server
