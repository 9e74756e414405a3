"""Shutdown, without a server: what is refused, what may finish, and what is ended, in order."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from loops import run
from scripted_host import ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.core.errors import HarmonyFailure
from vllm_mlx_harmony.server import shutdown
from vllm_mlx_harmony.server.answers import AnswerKey, Answers

KEY = AnswerKey("a", "t")
LIMIT = 0.3


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the process would have been ended."""
    event = threading.Event()
    monkeypatch.setattr(shutdown, "_end_process", event.set)
    return event


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


class Running:
    """An answer that waits to be ended."""

    def __init__(self, answers: Answers) -> None:
        self.failure: asyncio.Future[HarmonyFailure] = asyncio.get_running_loop().create_future()
        self._answers = answers
        answers.add(KEY, self)

    def end(self, failure: HarmonyFailure) -> None:
        self.failure.set_result(failure)

    def leave(self) -> None:
        self._answers.remove(KEY, self)


class Uvicorn:
    """Like uvicorn's server; records the running answers and its own limit at its shutdown."""

    def __init__(self, answers: Answers, graceful: float | None) -> None:
        self.answers = answers
        self.config = SimpleNamespace(timeout_graceful_shutdown=graceful)
        self.should_exit = False
        self.shutdowns: list[Any] = []

    async def shutdown(self, sockets: Any = None) -> None:
        self.shutdowns.append((self.answers.running, self.config.timeout_graceful_shutdown))

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = True


def draining(graceful: float | None = None, finish: Callable[[], object] = lambda: None) -> Any:
    """``Uvicorn``, which shuts down after its answers."""
    answers = Answers()
    draining_class: Any = shutdown.with_graceful_shutdown(
        Uvicorn, lambda: answers, lambda: LIMIT, finish
    )
    return draining_class(answers, graceful)


def shut_down(stopping: Any, during: Any = None) -> list[Any]:
    """Shuts down while ``during`` runs; returns what uvicorn's own shutdown recorded."""

    async def test() -> None:
        beside = asyncio.ensure_future(during()) if during else None
        await asyncio.sleep(0)
        await stopping.shutdown()
        assert stopping.answers.rejection() is None
        if beside is not None:
            await beside

    run(test())
    shutdowns: list[Any] = stopping.shutdowns
    return shutdowns


@pytest.mark.parametrize("graceful", [None, 0.1, 50])
def test_shutdown_without_answers_leaves_uvicorn_the_whole_limit(
    graceful: float | None, clock: Clock
) -> None:
    ((_, limit),) = shut_down(draining(graceful))
    assert limit == pytest.approx(LIMIT if graceful is None else min(graceful, LIMIT))
    assert clock.now == 100


def test_finish_is_called_last() -> None:
    """uvicorn then ends the process by the signal, without the handlers of `atexit`."""
    shutdowns: list[int] = []
    stopping = draining(finish=lambda: shutdowns.append(len(stopping.shutdowns)))
    shut_down(stopping)
    assert shutdowns == [1]


def test_answer_that_ends_in_time_is_complete(clock: Clock) -> None:
    stopping = draining()
    ended: list[bool] = []

    async def answering() -> None:
        answer = Running(stopping.answers)
        await clock.wait(0.15)
        ended.append(answer.failure.done())
        answer.leave()

    shutdowns = shut_down(stopping, answering)
    assert ended == [False]
    assert shutdowns[0][0] == []


def test_running_answer_is_ended_before_uvicorn_hangs_up(clock: Clock) -> None:
    stopping = draining()
    failures: list[HarmonyFailure] = []

    async def answering() -> None:
        answer = Running(stopping.answers)
        failures.append(await answer.failure)
        assert 0.2 < clock.now - 100 < 0.3
        answer.leave()

    shutdowns = shut_down(stopping, answering)
    assert [(failure.status, failure.code) for failure in failures] == [(503, "shutting_down")]
    assert shutdowns[0][0] == []


def test_limit_counts_from_the_signal(clock: Clock) -> None:
    """uvicorn looks for a signal ten times a second, or less often on a busy machine."""
    failures: list[HarmonyFailure] = []
    stopping = draining()
    stopping.handle_exit(signal.SIGTERM, None)

    async def answering() -> None:
        answer = Running(stopping.answers)
        clock.now += 0.3
        failures.append(await answer.failure)
        assert clock.now < 100.4  # at once
        answer.leave()

    shut_down(stopping, answering)
    assert len(failures) == 1


def test_hanging_engine_does_not_hold_the_process(killed: threading.Event) -> None:
    stopping = draining()
    stopping.handle_exit(signal.SIGTERM, None)
    shut_down(stopping)
    assert killed.wait(60)


def test_embedded_server_does_not_end_the_process(killed: threading.Event) -> None:
    shut_down(draining())
    assert not killed.wait(1.5)


def test_answer_is_read_to_its_end_before_uvicorn_hangs_up(clock: Clock) -> None:
    """It has been generated, streamed or whole, but not yet sent to the client."""
    stopping = draining()
    read: list[bool] = []

    async def reading() -> None:
        with stopping.answers.delay_shutdown():
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
    host = SingleEngineHost(ScriptedEngine({}))
    host.answers.reject_new(True)
    response = TestClient(host.app).post(path, json={})
    assert response.status_code == 503
    assert set(response.json()) >= {kind} and ("type" in response.json()) == (kind == "type")
    assert "shutting down" in response.text
    assert response.headers["connection"] == "close"


def test_second_signal_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: raised.append(arguments))
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    draining_class = shutdown.with_graceful_shutdown(uvicorn.Server, Answers, lambda: LIMIT)
    stopping = draining_class(uvicorn.Config("nothing:here"))
    stopping.handle_exit(signal.SIGTERM, None)
    assert stopping.should_exit
    assert not raised
    stopping.handle_exit(signal.SIGTERM, None)
    assert raised == [(signal.SIGTERM, signal.SIG_DFL), signal.SIGTERM]
