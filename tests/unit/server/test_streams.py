"""Answers between an engine that does not wait and readers that may be slow."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from event_checker import check
from loops import run
from waiting import wait_until_async

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.context import StreamingHarmonyContext
from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Failed,
    Finished,
    Kind,
    Opened,
    Started,
    Text,
    Usage,
)
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo
from vllm_mlx_harmony.protocols import chat, messages, responses
from vllm_mlx_harmony.protocols.events import DONE, HEARTBEAT, Event
from vllm_mlx_harmony.server.answer import Answer
from vllm_mlx_harmony.server.answers import Answers
from vllm_mlx_harmony.server.encryption import ServerCipher
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.host import Deadline
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.streams import send_with_timeout

SEAL = ServerCipher(b"0" * 32, "tenant")
INFO = ResponseInfo("0f1e2d3c4b5a69788796", 1_754_352_000, "m")
USER = [{"role": "user", "content": "Hi"}]
APIS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "chat": (
        lambda body: chat.read(body, Defaults()),
        {"model": "m", "messages": USER, "stream": True},
    ),
    "responses": (
        lambda body: responses.read(body, Defaults(), SEAL),
        {"model": "m", "input": "Hi", "stream": True},
    ),
    "messages": (
        lambda body: messages.read(body, Defaults(), SEAL),
        {"model": "m", "messages": USER, "max_tokens": 9, "stream": True},
    ),
}
WORD = "word " * 20
ANSWERS = Answers()


class Engine:
    """Generates ``words`` words, or endlessly; records its progress and whether it is busy."""

    def __init__(self, words: int | None = None) -> None:
        self.words = words
        self.generated = 0
        self.failure: BaseException | None = None
        self.busy = False

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        self.busy = True
        try:
            yield [Started(3)]
            yield [Opened(0, Kind.ANSWER)]
            while self.words is None or self.generated < self.words:
                self.generated += 1
                yield [Text(WORD)]
                await asyncio.sleep(0)
            yield [Closed(), Finished("stop", None, Usage(3, self.generated))]
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.busy = False


def emitter(api: str) -> Any:
    read, body = APIS[api]
    return read(body).emitter(INFO)


def start_engine(engine: Engine, api: str = "chat", **options: Any) -> Answer:
    return start_answer(engine.deltas(), emitter(api), **options)


def start_answer(
    deltas: Any,
    emitter: Any,
    *,
    remote: bool = False,
    capacity: int | None = None,
    pings_after: float | None = None,
) -> Answer:
    """An answer made of ``deltas``, whose lease and accounting do nothing."""

    async def release() -> None:
        """There is nothing to release."""

    lease = SimpleNamespace(
        engine=SimpleNamespace(remote=remote),
        deadline=Deadline(300, time.monotonic() + 300),
        tenant="somebody",
        release=release,
    )
    tracker: Any = SimpleNamespace(finish=lambda result, usage: None)
    arguments: Any = (lease, None, None)
    settings = ServerSettings.read()
    if capacity is not None:
        settings = replace(settings, stream_bytes=capacity)
    if pings_after is not None:
        settings = replace(settings, ping_seconds=pings_after)
    job = Job(*arguments, emitter, stream=True, id_seed="s", server_settings=settings)
    return Answer(job, tracker, ANSWERS, deltas=deltas)


class Plain:
    """An emitter whose deltas are its events."""

    ping = Event("ping")

    def keep_alive(self) -> Event:
        return self.ping

    def feed(self, delta: Any) -> list[Event]:
        return [delta] if isinstance(delta, Event) else []

    def result(self) -> dict[str, Any]:
        raise AssertionError("it is streamed")


@pytest.mark.parametrize("api", APIS)
def test_stalled_reader_does_not_hold_the_engine(api: str) -> None:
    """The answer ends at the limit; the reader gets what waits, then an error as its API has it."""

    async def test() -> None:
        engine = Engine()
        events = start_engine(engine, api, capacity=10_000)
        await wait_until_async(lambda: engine.failure is not None, "the engine to be stopped")
        assert not engine.busy
        assert engine.generated < 100
        data = [event.data async for event in events if event is not DONE]
        assert sum(map(len, data)) < 40_000
        assert "the client read it too slowly" in data[-1]
        numbers = [json.loads(text).get("sequence_number") for text in data]
        assert numbers[0] is None or numbers == list(range(len(data)))
        assert not ANSWERS.unread

    run(test())


@pytest.mark.parametrize("api", APIS)
def test_late_reader_misses_nothing_within_the_buffer(api: str) -> None:
    async def test() -> None:
        engine = Engine(50)
        events = start_engine(engine, api, capacity=1_000_000)
        await wait_until_async(lambda: engine.generated == 50 and not engine.busy, "its end")
        data = [event.data async for event in events]
        assert sum(f'"{WORD}"' in text for text in data) >= 50
        assert not any('"error":{' in text for text in data)

    run(test())


WORDS = " word é 😀" * 60


@pytest.mark.parametrize("interval", [1, 2, 7, 64])
def test_slow_reader_misses_nothing_of_large_steps(interval: int) -> None:
    """Characters that are split between groups are whole for the reader."""

    async def test() -> None:
        read, body = APIS["responses"]
        request = read(body)
        context = StreamingHarmonyContext(request.turn, INFO)
        generated = f"<|channel|>final<|message|>{WORDS}<|return|>"
        ids = vocab.encoding().encode(generated, allowed_special="all")

        async def deltas() -> AsyncGenerator[list[Delta], None]:
            yield context.start(None)
            for at in range(0, len(ids), interval):
                yield context.append_output(tuple(ids[at : at + interval]))
                await asyncio.sleep(0)
            yield context.finish("stop", 0)

        buffer = start_answer(deltas(), request.emitter(INFO))
        events = []
        async for event in buffer:
            events.append(event)
            await asyncio.sleep(0.001)
        (item,) = check(events)["output"]
        assert item["content"][0]["text"] == WORDS
        deltas_read = [
            json.loads(event.data)["delta"]
            for event in events
            if event.name == "response.output_text.delta"
        ]
        assert "".join(deltas_read) == WORDS
        assert len(deltas_read) > 1

    run(test())


def test_repeated_request_does_not_count() -> None:
    """Neither at the beginning nor at the end, when no engine is held any more."""

    async def test() -> None:
        async def deltas() -> AsyncGenerator[list[Any], None]:
            yield [Event("x" * 50_000)]
            yield [Event("y" * 900)]
            yield [Event("z" * 50_000), Finished("stop", None, Usage(3, 2))]

        answer = start_answer(deltas(), Plain(), capacity=1000)
        assert [len(event.data) async for event in answer] == [50_000, 900, 50_000]

    run(test())


@pytest.mark.parametrize(("size", "fits"), [("1000", False), ("2K", True), ("0.001M", False)])
def test_environment_sets_the_size_of_the_buffer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: str, fits: bool
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("VLLM_MLX_HARMONY_STREAM_BYTES", size)
    failures: list[str | None] = []

    class Noting(Plain):
        def feed(self, delta: Any) -> list[Event]:
            if isinstance(delta, Failed):
                failures.append(delta.error.code)
            return super().feed(delta)

    async def test() -> None:
        async def deltas() -> AsyncGenerator[list[Any], None]:
            for _ in range(3):
                yield [Event("x" * 600)]

        buffer = start_answer(deltas(), Noting())
        await asyncio.sleep(0.01)  # nobody reads
        await buffer.aclose()

    run(test())
    assert failures == ([] if fits else ["reader_too_slow"])
    expected = "closing a stream: the client has not read 1800 bytes"
    assert [record.message for record in caplog.records] == ([] if fits else [expected])


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_closing_at_any_moment_frees_the_engine(steps: int) -> None:
    async def test() -> None:
        engine = Engine()
        events = start_engine(engine)
        for _ in range(steps):
            await asyncio.sleep(0)
        await events.aclose()
        assert not engine.busy
        assert [event async for event in events] == []
        assert not ANSWERS.unread

    run(test())


@pytest.mark.parametrize("after", [0.01, 0])
def test_silent_stream_is_pinged_unless_disabled(after: float) -> None:
    async def test() -> None:
        async def deltas() -> AsyncGenerator[list[Any], None]:
            await asyncio.sleep(0.1)
            yield [Event("late")]

        answer = start_answer(deltas(), Plain(), pings_after=after)
        read = [event async for event in answer]
        assert read[-1] == Event("late")
        assert set(read[:-1]) == ({Plain.ping} if after else set())
        assert len(read) < 15

    run(test())


def test_no_ping_overtakes_an_event() -> None:
    """An event that waits behind a comment has a lower sequence number than a new ping."""

    async def test() -> None:
        engine = asyncio.Event()

        async def deltas() -> AsyncGenerator[list[Any], None]:
            yield [Started(3)]
            await engine.wait()
            yield [Finished("stop", None, Usage(3))]

        async with aclosing(
            start_answer(deltas(), emitter("responses"), pings_after=0.01)
        ) as answer:
            await answer.first_event()
            read = [await anext(answer), await anext(answer), await anext(answer)]
            answer._put([HEARTBEAT])
            engine.set()
            await asyncio.sleep(0.05)
            read += [event async for event in answer]
        numbers = [json.loads(event.data)["sequence_number"] for event in read if event.name]
        assert numbers == list(range(len(numbers))) and len(numbers) > 3

    run(test())


def test_cancelled_reader_can_read_on() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def deltas() -> AsyncGenerator[list[Any], None]:
            await gate.wait()
            yield [Event("a"), Event("b")]

        async with aclosing(start_answer(deltas(), Plain())) as buffer:
            waiting = asyncio.ensure_future(anext(buffer))
            await asyncio.sleep(0.01)
            waiting.cancel()
            gate.set()
            assert [event.data async for event in buffer] == ["a", "b"]

    run(test())


def test_stalled_client_is_disconnected() -> None:
    async def test() -> None:
        aborted: list[bool] = []
        accepted = asyncio.Event()

        async def send(message: float) -> None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(accepted.wait(), message)

        with send_with_timeout(0.05, send, lambda: aborted.append(True)) as sending:
            await sending(0.001)
            await asyncio.sleep(0.1)
            assert not aborted
            await sending(0.2)
            assert aborted == [True]

    run(test())
