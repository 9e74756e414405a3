"""Responses in the background: who follows one, cancels it or forgets it."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("starlette")

from event_checker import check
from loops import run
from starlette.applications import Starlette
from starlette.websockets import WebSocket
from stored_responses import (
    DELTA_GROUPS,
    ID,
    NEVER,
    RESOURCE,
    TENANT,
    application_with,
    begin,
    job,
    storing_emitter,
)

from vllm_mlx_harmony.core.deltas import Delta, Failed, Finished
from vllm_mlx_harmony.core.errors import HostError, RequestError
from vllm_mlx_harmony.core.turn import Answer, Defaults, ResponseInfo, User
from vllm_mlx_harmony.protocols.events import DONE, Event
from vllm_mlx_harmony.server import answer as answers
from vllm_mlx_harmony.server.errors import retry_headers
from vllm_mlx_harmony.server.front_end import Caller, FrontEnd, installed_in
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.responses.routes import COMPACT, RESPONSES
from vllm_mlx_harmony.server.responses.websocket import ResponsesSocket
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.storage.background import (
    AT_ONCE,
    BackgroundResponse,
    BackgroundResponses,
)
from vllm_mlx_harmony.server.storage.responses import Responses
from vllm_mlx_harmony.server.storage.store import MemoryStore, ResourceKey, StoredResponse


class GatedStore(MemoryStore):
    """A store whose writes wait for ``may_write``, which is set until a test clears it."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()

    def put(self, stored: StoredResponse) -> bool:
        self.writing.set()
        assert self.may_write.wait(60)
        return super().put(stored)


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def app(store: GatedStore) -> Starlette:
    return application_with(store)


@pytest.fixture
def front_end(app: Starlette) -> FrontEnd:
    return installed_in(app)


def background_responses(**limits: int) -> BackgroundResponses:
    return BackgroundResponses(ServerSettings.read(), **limits)


async def start_in(
    background: BackgroundResponses | Responses, background_job: Job
) -> BackgroundResponse:
    emitter: Any = background_job.emitter
    return await background.start(
        emitter, lambda sink: begin(background_job, announced=True, sink=sink)
    )


async def start_background(front_end: FrontEnd) -> BackgroundResponse:
    """A background response that nobody else knows."""
    return await start_in(background_responses(), job(storing_emitter(front_end, background=True)))


@pytest.fixture
def generate_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Replaces what a turn generates."""

    def replace_deltas(source: Any) -> None:
        monkeypatch.setattr(answers, "deltas_of", lambda job, *_: source(job))

    return replace_deltas


async def slowly(job: Any) -> AsyncIterator[list[Delta]]:
    for group in DELTA_GROUPS:
        yield group
        await asyncio.sleep(0.01)
    await job.lease.release()


async def endlessly(job: Any) -> AsyncIterator[list[Delta]]:
    try:
        yield DELTA_GROUPS[0]
        yield DELTA_GROUPS[1]
        await asyncio.sleep(NEVER)
    finally:
        await job.lease.release()


async def at_once(_: Any) -> AsyncIterator[list[Delta]]:
    for group in DELTA_GROUPS:
        yield group


async def no_turn(_: Any) -> AsyncIterator[list[Delta]]:
    await asyncio.sleep(NEVER)
    yield DELTA_GROUPS[0]


async def collect_events(running: BackgroundResponse, start: int = 0) -> list[Event]:
    return [event async for event in running.follow(start)]


def test_replays_do_not_block_the_event_loop(
    front_end: FrontEnd, generate_with: Callable[[Any], None]
) -> None:
    """Twenty readers of a long response, whom no network slows down."""
    generate_with(no_turn)

    async def test() -> None:
        running = await start_background(front_end)
        running.events += [Event(str(number)) for number in range(500)] + [DONE]
        reads = 0
        longest = 0

        async def read() -> None:
            nonlocal reads
            async for _ in running.follow():
                reads += 1

        readers = [asyncio.ensure_future(read()) for _ in range(20)]
        before = 0
        while not all(reader.done() for reader in readers):
            await asyncio.sleep(0)
            longest, before = max(longest, reads - before), reads
        assert reads == 20 * len(running.events) and longest <= 20 * AT_ONCE
        await running.cancel()

    run(test())


@pytest.mark.parametrize("start", [0, 1, 4, 7, 100])
def test_response_is_followed_from_any_event(
    front_end: FrontEnd, generate_with: Callable[[Any], None], start: int
) -> None:
    generate_with(slowly)

    async def test() -> None:
        running = await start_background(front_end)
        live = await collect_events(running, start)
        assert check(running.events)["status"] == "completed"
        assert live == await collect_events(running, start) == running.events[start:]

    run(test())


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("variable", ["", "1", "0"])
def test_readers_are_pinged_during_silence(
    front_end: FrontEnd,
    generate_with: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """While nothing is generated, each reader gets pings, unless the variable is 0."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", variable)
    generate_with(no_turn)
    settings = ServerSettings.read() if variable else ServerSettings(ping_seconds=0.01)

    async def test() -> None:
        background_job = job(storing_emitter(front_end, background=True))
        running = await start_in(BackgroundResponses(settings), background_job)
        for start in (0, 2):
            events = running.follow(start)
            received: list[Event] = []
            with suppress(asyncio.TimeoutError):
                while len(received) < 6:
                    seconds = 0.2 if variable == "0" else 60
                    received.append(await asyncio.wait_for(anext(events), seconds))
            repeated = received[len(running.events) - start :]
            assert bool(repeated) == (variable != "0")
            assert {event.name for event in repeated} <= {"response.queued"}  # no turn has begun
            numbers = [json.loads(event.data)["sequence_number"] for event in received]
            assert numbers == sorted(numbers)  # a client continues after the last one received
        await running.cancel()

    run(test())


def test_running_response_is_cancelled(
    front_end: FrontEnd, generate_with: Callable[[Any], None], store: MemoryStore
) -> None:
    generate_with(endlessly)

    async def test() -> None:
        background_job = job(storing_emitter(front_end, background=True))
        running = await start_in(background_responses(), background_job)
        while len(running.events) < 6:
            await asyncio.sleep(0)
        await asyncio.gather(running.cancel(), running.cancel())
        assert background_job.lease.released
        final = check(running.events)
        assert (final["status"], final["output"][0]["status"]) == ("cancelled", "incomplete")
        assert running.document == final
        response = store.get(RESOURCE)
        assert response is not None
        assert response.document == final

    run(test())


def test_queued_response_is_cancelled(
    front_end: FrontEnd, generate_with: Callable[[Any], None]
) -> None:
    generate_with(endlessly)

    async def test() -> None:
        background_job = job(storing_emitter(front_end, background=True))
        running = await start_in(background_responses(), background_job)
        assert running.document["status"] == "queued"
        await running.cancel()
        assert background_job.lease.released
        assert check(running.events)["status"] == "cancelled"

    run(test())


def test_queued_response_streams_its_events(
    front_end: FrontEnd, generate_with: Callable[[Any], None]
) -> None:
    generate_with(no_turn)

    async def test() -> None:
        running = await start_background(front_end)
        events = running.follow()
        names = [(await anext(events)).name for _ in range(2)]
        assert names == ["response.created", "response.queued"]
        assert running.document["status"] == "queued"
        await running.cancel()
        assert check([event async for event in running.follow()])["status"] == "cancelled"

    run(test())


def test_response_cancelled_during_release_stays_completed(
    front_end: FrontEnd,
    generate_with: Callable[[Any], None],
) -> None:
    generate_with(slowly)

    async def test() -> None:
        may_release = asyncio.Event()
        background_job = job(storing_emitter(front_end, background=True), may_release)
        running = await start_in(background_responses(), background_job)
        await collect_events(running)
        assert not background_job.lease.released
        await running.cancel()
        assert check(running.events)["status"] == "completed"
        may_release.set()
        while not background_job.lease.released:
            await asyncio.sleep(0)

    run(test())


@pytest.mark.parametrize("failing", [(Finished,), (Finished, Failed)])
def test_response_without_last_events_has_failed(
    front_end: FrontEnd,
    generate_with: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    failing: tuple[type[Delta], ...],
) -> None:
    generate_with(at_once)

    async def test() -> None:
        emitter = storing_emitter(front_end, background=True)
        feed = emitter._emitter.feed

        def fail(delta: Delta) -> list[Event]:
            if isinstance(delta, failing):
                raise ArithmeticError
            return feed(delta)

        monkeypatch.setattr(emitter._emitter, "feed", fail)
        running = await start_in(background_responses(), job(emitter))
        events = await asyncio.wait_for(collect_events(running), 10)
        assert (events[-2].name, events[-1]) == ("response.failed", DONE)
        assert running.document["status"] == "failed"

    run(test())


def test_response_whose_cancellation_fails_has_failed(
    front_end: FrontEnd, generate_with: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_with(endlessly)

    async def test() -> None:
        emitter = storing_emitter(front_end, background=True)
        monkeypatch.setattr(emitter._emitter, "cancel", lambda: 1 / 0)
        running = await start_in(background_responses(), job(emitter))
        with pytest.raises(ZeroDivisionError):
            await running.cancel()
        assert running.document["status"] == "failed"

    run(test())


async def start_until_written(front_end: FrontEnd, store: GatedStore) -> BackgroundResponse:
    store.may_write.clear()
    background_job = job(storing_emitter(front_end, background=True))
    running = await start_in(front_end.responses, background_job)
    assert await asyncio.to_thread(store.writing.wait, 60)
    return running


def test_response_completes_after_it_is_stored(
    front_end: FrontEnd, generate_with: Callable[[Any], None], store: GatedStore
) -> None:
    generate_with(at_once)

    async def test() -> None:
        running = await start_until_written(front_end, store)
        assert (running.document["status"], store.get(RESOURCE)) == ("in_progress", None)
        store.may_write.set()
        while running.document["status"] == "in_progress":
            await asyncio.sleep(0)
        response = store.get(RESOURCE)
        assert response is not None
        assert response.document == running.document

    run(test())


@pytest.mark.parametrize("cancelled", [False, True])
def test_response_deleted_while_stored_stays_deleted(
    front_end: FrontEnd, generate_with: Callable[[Any], None], store: GatedStore, cancelled: bool
) -> None:
    generate_with(at_once)

    async def test() -> None:
        running = await start_until_written(front_end, store)
        cancelling = asyncio.ensure_future(running.cancel() if cancelled else asyncio.sleep(0))
        deleting = asyncio.ensure_future(front_end.responses.delete(RESOURCE))
        for _ in range(20):
            await asyncio.sleep(0)
        store.may_write.set()
        assert await deleting
        await cancelling
        assert check(await collect_events(running))["status"] == "completed"
        assert store.get(RESOURCE) is None

    run(test())


def test_unfinished_response_cannot_be_continued(
    app: Starlette,
    front_end: FrontEnd,
    generate_with: Callable[[Any], None],
    store: GatedStore,
) -> None:
    generate_with(at_once)
    caller = Caller(front_end, TENANT)
    socket = WebSocket({"type": "websocket", "app": app}, None, None)  # type: ignore[arg-type]
    body = {"model": "m", "input": "More", "previous_response_id": ID}

    async def test() -> None:
        running = await start_until_written(front_end, store)
        for api in (RESPONSES, COMPACT, ResponsesSocket(socket)._api):
            with pytest.raises(RequestError) as caught:
                await asyncio.to_thread(api.read, body, Defaults(), caller)
            assert (caught.value.status, caught.value.code) == (400, "previous_response_not_ready")
        store.may_write.set()
        await collect_events(running)
        request = await asyncio.to_thread(RESPONSES.read, body, Defaults(), caller)
        assert request.turn.messages == (User("Hi"), Answer("Hello."), User("More"))

    run(test())


def test_completed_response_cannot_be_cancelled(
    front_end: FrontEnd, generate_with: Callable[[Any], None]
) -> None:
    generate_with(slowly)

    async def test() -> None:
        running = await start_background(front_end)
        await collect_events(running)
        await running.cancel()
        assert running.document["status"] == "completed"

    run(test())


def is_remembered(background: BackgroundResponses, number: int) -> bool:
    return background.get(ResourceKey(f"resp_{number:020x}", TENANT)) is not None


def test_oldest_responses_are_forgotten_beyond_max_events(
    front_end: FrontEnd,
    generate_with: Callable[[Any], None],
) -> None:
    generate_with(slowly)

    async def test() -> None:
        background = background_responses(max_events=20)
        for number in range(4):
            emitter = storing_emitter(front_end, background=True)
            emitter._info = ResponseInfo(f"{number:020x}", 0, "m")
            await collect_events(await start_in(background, job(emitter)))
        remembered = [is_remembered(background, number) for number in range(4)]
        assert remembered == [False, False, True, True]
        assert await background.forget(ResourceKey(f"resp_{3:020x}", TENANT)) is True
        assert await background.forget(ResourceKey(f"resp_{3:020x}", TENANT)) is False

    run(test())


def test_oldest_responses_are_forgotten_beyond_max_bytes(
    front_end: FrontEnd,
    generate_with: Callable[[Any], None],
) -> None:
    generate_with(at_once)

    async def test() -> None:
        background = background_responses(max_bytes=300_000)
        for number in range(4):
            emitter = storing_emitter(
                front_end, background=True, instructions="x" * 20_000, input="y" * 50_000
            )
            emitter._info = ResponseInfo(f"{number:020x}", 0, "m")
            running = await start_in(background, job(emitter))
            await collect_events(running)
            assert 130_000 < running.bytes < 150_000
        remembered = [is_remembered(background, number) for number in range(4)]
        assert remembered == [False, True, True, True]

    run(test())


@pytest.mark.parametrize("cancelled", [False, True])
def test_completed_response_keeps_only_its_documents(
    front_end: FrontEnd, generate_with: Callable[[Any], None], cancelled: bool
) -> None:
    generate_with(endlessly if cancelled else at_once)

    async def test() -> None:
        emitter = storing_emitter(front_end, background=True)
        background_job = job(emitter)
        references = [weakref.ref(background_job.lease), weakref.ref(emitter)]
        running = await start_in(background_responses(), background_job)
        del background_job, emitter
        await asyncio.sleep(0.01)
        await running.cancel()
        await collect_events(running)
        for _ in range(500):  # a thread may still hold the last frame
            gc.collect()
            if not any(reference() for reference in references):
                break
            await asyncio.sleep(0.01)
        assert [reference() for reference in references] == [None, None]
        assert running.document == check(running.events)
        (item,) = running.input_items
        assert item["content"] == [{"type": "input_text", "text": "Hi"}]

    run(test())


def test_background_responses_are_bounded_in_total(
    front_end: FrontEnd, generate_with: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended responses do not count."""
    generate_with(slowly)
    monkeypatch.setenv("VLLM_MLX_HARMONY_BACKGROUND_BYTES", "98k")

    async def test() -> None:
        async def start_another(number: int) -> BackgroundResponse:
            emitter = storing_emitter(front_end, background=True)
            emitter._info = ResponseInfo(f"{number:020x}", 0, "m")
            return await start_in(background, job(emitter))

        background = background_responses()
        first = await start_another(1)
        second = await start_another(2)
        with pytest.raises(HostError) as full:
            await start_another(3)
        assert (full.value.status, full.value.code) == (503, "background_full")
        assert retry_headers(full.value)
        await second.cancel()
        await collect_events(first)
        await (await start_another(4)).cancel()

    run(test())
