"""However a turn ends, its engine is released, it is counted, and nothing of it remains."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette")

from loops import run
from scripted_host import ScriptedEngine, SingleEngineHost
from starlette.requests import ClientDisconnect, Request

from vllm_mlx_harmony.core.deltas import Delta, Finished, Started, Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError
from vllm_mlx_harmony.engine_api.engine import GenerationSettings, Step
from vllm_mlx_harmony.protocols.events import HEARTBEAT, Event
from vllm_mlx_harmony.server.answer import Answer
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.host import Deadline
from vllm_mlx_harmony.server.streams import EventStream

ANSWERS = Answers()
NEVER = 3600.0
"""Seconds of a wait that a test must end itself."""

SILENCE = 0.1
"""Seconds after which the request to a silent engine fails."""


class FakeLease:
    """A lease on a fake engine, which counts its releases. Only silence has a limit."""

    tenant = "somebody"

    def __init__(self, engine: Engine, total: float) -> None:
        self.engine = engine
        self.deadline = Deadline(total, time.monotonic() + NEVER)
        self.released = 0
        self.tracker = FakeTracker()

    async def release(self) -> None:
        self.released += 1


class FakeTracker:
    """The host's metrics of a request; the first result counts."""

    def __init__(self) -> None:
        self.results: list[str] = []
        self.tokens: tuple[int, int] | None = None

    def observe_ttft(self) -> None:
        pass

    def reasoning_ended(self, reason: str) -> None:
        raise AssertionError("nothing is held to anything")

    def finish(self, result: str, usage: Usage) -> None:
        if not self.results:
            self.tokens = (usage.prompt_tokens, usage.completion_tokens)
        self.results.append(result)


class Context:
    """A context whose only deltas are those at the beginning and end of a turn."""

    done = False
    generated = False

    def render_for_completion(self) -> tuple[int, ...]:
        return (1, 2, 3)

    def start(self, cached_tokens: int | None = None) -> list[Delta]:
        return [Started(3, cached_tokens)]

    def append_output(self, ids: tuple[int, ...], logprobs: Any = ()) -> list[Delta]:
        self.generated = True
        self.done = 99 in ids
        return []

    def finish(self, reason: Any, cached_tokens: int) -> list[Delta]:
        return [Finished(reason, None, Usage(3, 2, cached_tokens=cached_tokens))]


Generate = Callable[..., AsyncIterator[Step]]


class Engine:
    """An engine that generates with a given function."""

    model = "nobody"
    context_length = None

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.remote = False


def job(engine: Engine, total: float = NEVER, emitter: Any = None) -> Job:
    settings = GenerationSettings(max_tokens=10, temperature=0.0, top_p=1.0)
    lease: Any = FakeLease(engine, total)
    return Job(lease, Context(), settings, emitter or RecordingEmitter(), True, "seed")  # type: ignore[arg-type]


def start_answer(turn: Job) -> Answer:
    return Answer(turn, turn.lease.tracker, ANSWERS)  # type: ignore[attr-defined]


async def two_steps(*_: Any) -> AsyncIterator[Step]:
    yield Step((7,), cached_tokens=2)
    yield Step((8,), "length")


async def endless(*_: Any) -> AsyncIterator[Step]:
    while True:
        yield Step((7,))
        await asyncio.sleep(0)


async def stopped(*_: Any) -> AsyncIterator[Step]:
    yield Step((99,))
    raise AssertionError("nobody asked for more")


async def failing(*_: Any) -> AsyncIterator[Step]:
    yield Step((7,))
    raise OutputError("out of memory")


async def stopped_from_outside(*_: Any) -> AsyncIterator[Step]:
    """Like an engine that cancels all its work."""
    yield Step((7,))
    raise asyncio.CancelledError


async def stopped_before(*_: Any) -> AsyncIterator[Step]:
    raise asyncio.CancelledError
    yield


async def silent(*_: Any) -> AsyncIterator[Step]:
    yield Step((7,))
    await asyncio.sleep(NEVER)


async def silent_at_once(*_: Any) -> AsyncIterator[Step]:
    await asyncio.sleep(NEVER)
    yield Step(())


async def swallowing(*_: Any) -> AsyncIterator[Step]:
    """Ends when it is cancelled, as the host's iterator does."""
    yield Step((7,))
    try:
        await asyncio.sleep(NEVER)
    except asyncio.CancelledError:
        return


class RecordingEmitter:
    """An emitter whose result is the deltas that it was fed; it sends nothing."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def feed(self, delta: Delta) -> list[Event]:
        self.deltas.append(delta)
        return []

    def keep_alive(self) -> Event:
        raise AssertionError("it is not streamed")

    def result(self) -> Any:
        return self.deltas


def start_whole_answer(turn: Job) -> Answer:
    return start_answer(replace(turn, stream=False))


def stubborn(computing: asyncio.Event, computed: asyncio.Event) -> Generate:
    """An engine that is ``computing`` a step, and cannot be stopped until it is ``computed``."""

    async def generate(*_: Any) -> AsyncIterator[Step]:
        try:
            yield Step((7,))
            computing.set()
            await asyncio.sleep(NEVER)
        finally:
            await computed.wait()

    return generate


async def settle() -> None:
    """Runs everything that is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


async def count_releases(turn: Any) -> int:
    """Waits until the engine is released; returns the number of releases."""
    while not turn.lease.released:
        await asyncio.sleep(0)
    await settle()
    return int(turn.lease.released)


async def read_all(turn: Job) -> list[Delta]:
    deltas: Any = await start_whole_answer(turn).document()
    return deltas


async def read_remote(turn: Job) -> list[Delta]:
    """A remote engine starts the turn only when it has accepted the request."""
    turn.lease.engine.remote = True  # type: ignore[misc]
    return await read_all(turn)


async def read_one_event(turn: Job) -> None:
    reading = start_answer(replace(turn, emitter=EventPerDelta()))
    await anext(reading)
    await asyncio.sleep(0)
    await reading.aclose()


async def close_before_reading(turn: Job) -> None:
    reading = start_answer(replace(turn, emitter=EventPerDelta()))
    await reading.first_event()
    await reading.aclose()


async def close_at_once(turn: Job) -> None:
    await start_whole_answer(turn).aclose()


async def cancel_reading(turn: Job) -> None:
    answering = start_whole_answer(turn)
    reading = asyncio.ensure_future(answering.document())
    while not turn.context.generated:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()
    await answering.aclose()


ENDINGS = [
    pytest.param(two_steps, read_all, None, "success", (3, 2), id="to its end"),
    pytest.param(stopped, read_all, None, "success", (3, 2), id="a stop string"),
    pytest.param(failing, read_all, OutputError, "error", (0, 0), id="a failing engine"),
    pytest.param(stopped_from_outside, read_all, OutputError, "error", (0, 0), id="stopped"),
    pytest.param(stopped_before, read_all, OutputError, "error", (0, 0), id="stopped before"),
    pytest.param(silent, read_all, HostError, "timeout", (0, 0), id="silence"),
    pytest.param(silent_at_once, read_remote, HostError, "timeout", (0, 0), id="never accepted"),
    pytest.param(swallowing, read_all, HostError, "timeout", (0, 0), id="silence, swallowed"),
    pytest.param(endless, read_one_event, None, "client_closed", (0, 0), id="closed"),
    pytest.param(
        endless,
        close_before_reading,
        None,
        "client_closed",
        (0, 0),
        id="closed before the first id",
    ),
    pytest.param(
        endless, close_at_once, None, "client_closed", (0, 0), id="closed before it began"
    ),
    pytest.param(endless, cancel_reading, None, "client_closed", (0, 0), id="cancelled"),
    pytest.param(
        swallowing, cancel_reading, None, "client_closed", (0, 0), id="cancelled, quietly"
    ),
]


def silence_limit(result: str) -> float:
    """The seconds of silence before a turn ends, where ``result`` is its end."""
    return SILENCE if result == "timeout" else NEVER


@pytest.mark.parametrize(("generated", "read", "error", "result", "tokens"), ENDINGS)
def test_every_ended_turn_is_counted(
    generated: Generate,
    read: Callable[[Job], Awaitable[Any]],
    error: type[Exception] | None,
    result: str,
    tokens: tuple[int, int],
) -> None:
    async def test() -> None:
        engine = Engine(generated)
        turn = job(engine, total=silence_limit(result))
        if error is None:
            await read(turn)
        else:
            with pytest.raises(error):
                await read(turn)
        await settle()  # a silent engine is stopped after its client was told
        assert turn.lease.released == 1  # type: ignore[attr-defined]
        assert turn.lease.tracker.results[0] == result  # type: ignore[attr-defined]
        assert turn.lease.tracker.tokens == tokens  # type: ignore[attr-defined]
        engine.generate = two_steps
        assert len(await read_all(job(engine))) == 2  # the next turn can use it

    run(test())


@pytest.mark.parametrize(
    ("generated", "read", "result"),
    [
        pytest.param(generated, read, result, id=row.id)
        for row in ENDINGS
        for generated, read, _, result, _ in [row.values]
    ],
)
def test_ended_answer_is_freed_without_the_collector(
    generated: Generate, read: Callable[[Job], Awaitable[Any]], result: str
) -> None:
    """It holds a prompt, and a failure holds the frames that it passed through."""

    async def test() -> None:
        turn = job(Engine(generated), total=silence_limit(result))
        held = weakref.ref(turn.context)
        with suppress(HarmonyFailure):
            await read(turn)
        del turn
        await settle()
        assert held() is None

    gc.collect()
    gc.disable()
    try:
        run(test())
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["cancelled", "the server ends", "silence"])
def test_client_does_not_wait_for_a_running_step(how: str) -> None:
    """Whoever unloads the model does wait for it."""

    async def test() -> None:
        computing, computed = asyncio.Event(), asyncio.Event()
        engine = Engine(stubborn(computing, computed))
        turn = replace(job(engine, total=SILENCE if how == "silence" else NEVER), id_seed="a")
        reading = asyncio.ensure_future(read_all(turn))
        await computing.wait()
        if how == "cancelled":
            assert ANSWERS.cancel(AnswerKey("a", turn.lease.tenant))
        elif how == "the server ends":
            ANSWERS.end_all(HostError("the server is shutting down", code="shutting_down"))
        done, _ = await asyncio.wait({reading}, timeout=30)
        state = ANSWERS.running, turn.lease.released  # type: ignore[attr-defined]
        computed.set()  # before any assertion, because the step must end
        assert done and state == ([], 0)
        with pytest.raises((HostError, OutputError)):
            await reading
        assert await count_releases(turn) == 1

    run(test())


@pytest.mark.parametrize("read", [True, False])
def test_engine_is_released_after_its_reader_leaves(
    read: bool,
) -> None:
    """The request timed out just when the answer was ended."""

    async def test() -> None:
        computing, computed = asyncio.Event(), asyncio.Event()
        turn = job(Engine(stubborn(computing, computed)))
        answering = start_whole_answer(turn)
        await computing.wait()
        answering.end(HostError("late", status=504))
        if read:
            with pytest.raises(HostError):
                await answering.document()
        closing = asyncio.ensure_future(answering.aclose())
        await settle()
        assert closing.done() is read
        computed.set()
        await closing
        assert await count_releases(turn) == 1

    run(test())


def test_request_waiting_for_its_first_step_is_cancellable() -> None:
    async def test() -> None:
        arrived = asyncio.Event()

        async def queued(*_: Any) -> AsyncIterator[Step]:
            arrived.set()
            await asyncio.sleep(NEVER)
            yield Step((7,))

        turn = replace(job(Engine(queued)), id_seed="a")
        waiting = asyncio.ensure_future(read_all(turn))
        await arrived.wait()
        assert ANSWERS.cancel(AnswerKey("a", turn.lease.tenant))
        with pytest.raises(OutputError):
            await asyncio.wait_for(waiting, 60)
        assert turn.lease.released == 1  # type: ignore[attr-defined]

    run(test())


def test_finished_delta_has_the_cached_tokens() -> None:
    deltas = asyncio.run(read_all(job(Engine(two_steps))))
    assert deltas == [Started(3), Finished("length", None, Usage(3, 2, cached_tokens=2))]


def test_answers_of_one_engine_do_not_wait_for_each_other() -> None:
    async def test() -> None:
        engine = Engine(two_steps)
        turns = [start_answer(job(engine, emitter=EventPerDelta())) for _ in range(3)]
        for turn in turns:
            await turn.first_event()
        for turn in turns:
            await turn.aclose()

    run(test())


# --- A stream that nobody reads to its end.


class EventPerDelta:
    """An emitter that writes one event per delta."""

    def keep_alive(self) -> Event:
        return HEARTBEAT

    def feed(self, delta: Delta) -> list[Event]:
        return [Event(type(delta).__name__)]

    def result(self) -> dict[str, Any]:
        raise AssertionError("it is streamed")


async def receive() -> dict[str, Any]:
    await asyncio.sleep(NEVER)
    return {"type": "http.disconnect"}


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("sent", [0, 1, 2])
def test_stream_of_failing_reader_releases_the_engine(sent: int) -> None:
    """At once, without the garbage collector."""

    async def test() -> None:
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)
            if len(messages) > sent:
                raise OSError("the client has gone")

        turn = job(Engine(endless))
        app = SingleEngineHost(ScriptedEngine({})).app
        request = Request({"type": "http", "headers": [], "app": app}, receive)
        events = start_answer(replace(turn, emitter=EventPerDelta()))
        await events.first_event()
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with pytest.raises(ClientDisconnect):
            await EventStream(request, events)(scope, receive, send)
        assert await count_releases(turn) == 1

    gc.disable()
    try:
        run(test())
    finally:
        gc.enable()
