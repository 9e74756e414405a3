"""Responses without a model: what is stored, who may read it, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm_mlx")

from event_checker import check
from loops import run
from starlette.datastructures import Headers
from starlette.requests import Request
from vllm_mlx import server
from vllm_mlx.engine.base import GenerationOutput

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
from vllm_mlx_harmony.core.errors import (
    HarmonyFailure,
    HostError,
    OutputError,
    RequestError,
    StoreError,
)
from vllm_mlx_harmony.core.turn import (
    Answer,
    Defaults,
    Instructions,
    ResponseInfo,
    Summary,
    ToolChoice,
    User,
)
from vllm_mlx_harmony.host import contract, mount
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.protocols.events import DONE, Event
from vllm_mlx_harmony.server import answer as answers
from vllm_mlx_harmony.server.answers import Answers
from vllm_mlx_harmony.server.front_end import Caller, FrontEnd, install, installed_in
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.host import Deadline, tenant_of
from vllm_mlx_harmony.server.responses import routes
from vllm_mlx_harmony.server.responses.lookup import References, read
from vllm_mlx_harmony.server.responses.routes import COMPACT
from vllm_mlx_harmony.server.responses.websocket import (
    MAX_WAITING,
    ResponsesSocket,
    serve_socket,
)
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.storage.background import (
    AT_ONCE,
    BackgroundResponse,
    BackgroundResponses,
)
from vllm_mlx_harmony.server.storage.persistence import StoringEmitter
from vllm_mlx_harmony.server.storage.single_server import SingleServer
from vllm_mlx_harmony.server.storage.store import MemoryStore, ResourceKey, StoredResponse
from vllm_mlx_harmony.server.streams import TRANSPORT

KEY = "0f1e2d3c4b5a69788796"
INFO = ResponseInfo(KEY, 1_754_352_000, "gpt-oss-20b")
ID = f"resp_{KEY}"
REQUEST = Request({"type": "http", "method": "GET", "headers": []})
TENANT = tenant_of(REQUEST)
RESOURCE = ResourceKey(ID, TENANT)
NEVER = 3600.0
"""Seconds of a wait that a test must end itself."""
DELTA_GROUPS: list[list[Delta]] = [
    [Started(3)],
    [Opened(0, Kind.ANSWER), Text("Hel")],
    [Text("lo."), Closed()],
    [Finished("stop", None, Usage(3, 2))],
]


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
def front_end(store: GatedStore) -> FrontEnd:
    return front_end_with(store)


def front_end_with(store: Any) -> FrontEnd:
    return FrontEnd(VllmMlx(), ServerSettings(), SingleServer(store))


def storing_emitter(front_end: FrontEnd, **fields: Any) -> StoringEmitter:
    body = {"model": "m", "input": "Hi", "stream": True, "instructions": "Be kind.", **fields}
    context = SimpleNamespace(messages=(Instructions("Be kind."), User("Hi"), Answer("Hello.")))
    request = read(body, Defaults(), References(Caller(front_end, TENANT)))
    return front_end.responses.emitter(request, INFO, context, TENANT)


async def stream_deltas(
    groups: list[list[Delta]] = DELTA_GROUPS, error: Exception | None = None
) -> AsyncIterator[list[Delta]]:
    for group in groups:
        yield group
        await asyncio.sleep(0.001)
    if error is not None:
        raise error


async def events_of(
    emitter: StoringEmitter,
    groups: list[list[Delta]] = DELTA_GROUPS,
    error: Exception | None = None,
) -> list[Event]:
    return [event async for event in start_answer(emitter, stream_deltas(groups, error))]


def start_answer(emitter: StoringEmitter, source: Any, **options: Any) -> answers.Answer:
    """An answer that streams the deltas of ``source``."""
    return begin(job(emitter), deltas=source, **options)


# --- A response is stored before its last event.


def test_response_is_stored_before_its_last_event(front_end: FrontEnd, store: MemoryStore) -> None:
    async def test() -> list[bool]:
        return [
            store.get(RESOURCE) is not None
            async for _ in start_answer(storing_emitter(front_end), stream_deltas())
        ]

    stored = asyncio.run(test())
    assert stored[-2:] == [True, True]  # the last event, and [DONE]
    assert not any(stored[:-2])
    response = store.get(RESOURCE)
    assert response is not None
    assert response.messages == (User("Hi"), Answer("Hello."))
    assert (response.document["status"], response.document["id"]) == ("completed", ID)
    assert response.input_items[0]["content"] == [{"type": "input_text", "text": "Hi"}]


def test_response_with_store_false_is_not_stored(front_end: FrontEnd, store: MemoryStore) -> None:
    assert check(asyncio.run(events_of(storing_emitter(front_end, store=False))))["store"] is False
    assert store.get(RESOURCE) is None


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_response_deleted_while_streamed_is_not_stored(
    installed: FrontEnd, store: MemoryStore, groups: int
) -> None:
    """Its reader gets the rest; nobody else finds it, then or later."""

    async def test() -> list[Event]:
        deleted = asyncio.Event()

        async def source() -> AsyncIterator[list[Delta]]:
            for number, group in enumerate(DELTA_GROUPS):
                if number == groups:
                    await deleted.wait()
                yield group

        stream = start_answer(storing_emitter(installed), source())
        assert not await installed.responses.delete(ResourceKey(ID, "somebody else"))
        statuses = [
            (await asyncio.to_thread(send, method, f"/v1/responses/{ID}")).status_code
            for method in ("DELETE", "DELETE", "GET")
        ]
        assert statuses == [200, 404, 404]
        deleted.set()
        return [event async for event in stream]

    assert check(asyncio.run(test()))["status"] == "completed"
    assert store.get(RESOURCE) is None
    assert send("DELETE", f"/v1/responses/{ID}").status_code == 404


class Full:
    def put(self, _: StoredResponse) -> bool:
        raise StoreError("database or disk is full")


class Small:
    def put(self, _: StoredResponse) -> bool:
        return False


@pytest.mark.parametrize(("store", "why"), [(Full, "disk is full"), (Small, "larger than the sto")])
@pytest.mark.parametrize("stream", [True, False])
def test_response_of_failed_store_is_marked(
    caplog: pytest.LogCaptureFixture,
    store: type[Any],
    why: str,
    stream: bool,
) -> None:
    emitter = storing_emitter(front_end_with(store()), stream=stream)
    events = asyncio.run(events_of(emitter))
    final = check(events) if stream else emitter.result()
    assert (final["status"], final["store"]) == ("completed", False)
    assert why in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OutputError("out of memory"), "out of memory"),
        (KeyError("a bug"), "internal error: see the server's log"),
    ],
)
def test_failed_answer_is_stored(
    front_end: FrontEnd, store: MemoryStore, error: Exception, message: str
) -> None:
    final = check(asyncio.run(events_of(storing_emitter(front_end), DELTA_GROUPS[:2], error)))
    assert (final["status"], final["error"]["message"]) == ("failed", message)
    assert final["output"][0]["status"] == "incomplete"
    response = store.get(RESOURCE)
    assert response is not None
    assert response.document == final


@pytest.mark.parametrize(
    ("stream", "groups", "announced", "expected"),
    [
        pytest.param(True, [], False, False, id="refused before it began"),
        pytest.param(True, DELTA_GROUPS[:1], False, True, id="begun"),
        pytest.param(False, DELTA_GROUPS[:2], False, False, id="nobody knows its id"),
        pytest.param(True, [], True, True, id="known from the start"),
    ],
)
def test_failed_answer_is_stored_if_its_id_was_sent(
    front_end: FrontEnd,
    store: MemoryStore,
    stream: bool,
    groups: list[list[Delta]],
    announced: bool,
    expected: bool,
) -> None:
    async def test() -> None:
        answer = start_answer(
            storing_emitter(front_end, stream=stream),
            stream_deltas(groups, OutputError("x")),
            announced=announced,
        )
        if not stream:
            await answer.document()
        await answer.first_event()
        events = [event async for event in answer]
        assert check(events)["status"] == "failed"

    if expected:
        asyncio.run(test())
    else:
        with pytest.raises(HarmonyFailure):
            asyncio.run(test())
    assert (store.get(RESOURCE) is not None) is expected


def test_last_delta_is_written_once(front_end: FrontEnd) -> None:
    async def test() -> tuple[list[Event], list[Event]]:
        emitter = storing_emitter(front_end)
        emitter.feed(Started(3))
        last = await emitter.write_last(Failed(OutputError("first")))
        return last, await emitter.write_last(Failed(OutputError("second")))

    first, second = asyncio.run(test())
    assert first is second


# --- References of a request.


def put(store: MemoryStore, key: str = KEY) -> StoredResponse:
    items = [{"id": f"msg_{key}8000", "type": "message", "role": "user", "content": "Hi"}]
    output = [{"id": f"msg_{key}0000", "type": "message", "role": "assistant", "content": "Ho"}]
    turn_messages = (User("Hi"), Answer("Ho"))
    response = StoredResponse(f"resp_{key}", {"output": output}, items, turn_messages, TENANT)
    store.put(response)
    return response


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (f"msg_{KEY}0000", "Ho"),
        (f"msg_{KEY}8000", "Hi"),
        (f"msg_{KEY}0001", None),
        (f"msg_{'0' * 20}0000", None),
        ("msg_of_somebody_else", None),
        ("", None),
    ],
)
def test_items_are_found_by_their_id(
    front_end: FrontEnd, store: MemoryStore, item: str, text: str | None
) -> None:
    put(store)
    found = References(Caller(front_end, TENANT)).item(item)
    assert (found and found["content"]) == text


def test_connection_remembers_response_missing_from_store(
    front_end: FrontEnd, store: MemoryStore
) -> None:
    response = put(MemoryStore())
    recall = References(Caller(front_end, TENANT), {response.id: response})
    body = {"model": "m", "input": "More", "previous_response_id": response.id}
    assert read(body, Defaults(), recall).turn.messages == (*response.messages, User("More"))
    with pytest.raises(RequestError) as caught:
        read(body, Defaults(), References(Caller(front_end, TENANT)))
    assert (caught.value.status, caught.value.code) == (404, "previous_response_not_found")


# --- In the background.


class FakeLease:
    engine = SimpleNamespace(remote=False)
    tenant = TENANT

    def __init__(self, may_release: asyncio.Event | None) -> None:
        self.deadline = Deadline(NEVER, time.monotonic() + NEVER)
        self._may_release = may_release
        self.released = False

    async def release(self) -> None:
        if self._may_release is not None:
            await self._may_release.wait()
        self.released = True


def job(emitter: StoringEmitter, may_release: asyncio.Event | None = None) -> Job:
    """A job whose engine is not released before ``may_release`` is set."""
    arguments: Any = (FakeLease(may_release), None, None)
    settings = ServerSettings.read()
    stream = emitter.request.stream
    job = Job(*arguments, emitter, stream=stream, id_seed=KEY, server_settings=settings)
    return replace(job, write_last=emitter.write_last)


async def start_in(background: BackgroundResponses, job: Job) -> BackgroundResponse:
    emitter: Any = job.emitter
    return await background.start(job, emitter, begin)


def begin(job: Job, **options: Any) -> answers.Answer:
    tracker: Any = SimpleNamespace(finish=lambda result, usage: None)
    return answers.Answer(job, tracker, Answers(), **options)


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
        running = await start_in(
            BackgroundResponses(), job(storing_emitter(front_end, background=True))
        )
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
        running = await start_in(
            BackgroundResponses(), job(storing_emitter(front_end, background=True))
        )
        live = await collect_events(running, start)
        assert check(running.events)["status"] == "completed"
        assert live == await collect_events(running, start) == running.events[start:]

    run(test())


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
    background_job = job(storing_emitter(front_end, background=True))
    if not variable:
        background_job = replace(background_job, server_settings=ServerSettings(ping_seconds=0.01))

    async def test() -> None:
        running = await start_in(BackgroundResponses(), background_job)
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
        running = await start_in(BackgroundResponses(), background_job)
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
        running = await start_in(BackgroundResponses(), background_job)
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
        running = await start_in(
            BackgroundResponses(), job(storing_emitter(front_end, background=True))
        )
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
        running = await start_in(BackgroundResponses(), background_job)
        await collect_events(running)
        assert not background_job.lease.released
        await running.cancel()
        assert check(running.events)["status"] == "completed"
        may_release.set()
        while not background_job.lease.released:
            await asyncio.sleep(0)

    run(test())


async def start_until_written(front_end: FrontEnd, store: GatedStore) -> BackgroundResponse:
    store.may_write.clear()
    background_job = job(storing_emitter(front_end, background=True))
    emitter: Any = background_job.emitter
    running = await front_end.responses.start(background_job, emitter, begin)
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
    installed: FrontEnd, generate_with: Callable[[Any], None], store: GatedStore
) -> None:
    generate_with(at_once)
    body = {"model": "m", "input": "More", "previous_response_id": ID}

    async def test() -> None:
        running = await start_until_written(installed, store)
        for api in (routes.RESPONSES, COMPACT, ResponsesSocket(Socket())._api):
            with pytest.raises(RequestError) as caught:
                await asyncio.to_thread(api.read, body, Defaults(), Caller(installed, TENANT))
            assert (caught.value.status, caught.value.code) == (400, "previous_response_not_ready")
        store.may_write.set()
        await collect_events(running)
        request = await asyncio.to_thread(
            routes.RESPONSES.read, body, Defaults(), Caller(installed, TENANT)
        )
        assert request.turn.messages == (User("Hi"), Answer("Hello."), User("More"))

    run(test())


def test_completed_response_cannot_be_cancelled(
    front_end: FrontEnd, generate_with: Callable[[Any], None]
) -> None:
    generate_with(slowly)

    async def test() -> None:
        running = await start_in(
            BackgroundResponses(), job(storing_emitter(front_end, background=True))
        )
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
        background = BackgroundResponses(max_events=20)
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
        background = BackgroundResponses(max_bytes=300_000)
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
        running = await start_in(BackgroundResponses(), background_job)
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


# --- Compaction.


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([Opened(0, Kind.REASONING), Text("Hm."), Closed()], None),
        (
            [Opened(0, Kind.REASONING), Text("Hm."), Closed(), Opened(1, Kind.ANSWER), Text("So.")],
            "So.",
        ),
    ],
)
def test_compaction_contains_the_answer(
    front_end: FrontEnd, output: list[Delta], text: str | None
) -> None:
    request: Any = COMPACT.read(
        {"model": "m", "input": "Hi", "stream": True}, Defaults(), Caller(front_end, TENANT)
    )
    assert (request.stream, request.store) == (False, False)
    assert isinstance(request.turn.messages[-1], User)
    emitter = COMPACT.emitter(request, INFO, None, Caller(front_end, TENANT))
    for delta in [*output, Finished("stop", None, Usage(3, 2))]:
        assert emitter.feed(delta) == []
    if text is None:
        with pytest.raises(OutputError):
            emitter.result()
        return
    document = emitter.result()
    user, encrypted = document["output"]
    assert (user["role"], document["usage"]["output_tokens"]) == ("user", 2)
    again = read(
        {"model": "m", "input": [encrypted]}, Defaults(), References(Caller(front_end, TENANT))
    )
    assert again.turn.messages == (Summary(text),)


def test_compaction_ignores_answer_format_and_tool_choice(front_end: FrontEnd) -> None:
    update = {"type": "configuration_update", "text": {"format": {"type": "json_object"}}}
    hello = {"role": "user", "content": "Hi"}
    tools = [{"type": "function", "name": "f"}]
    body = {"model": "m", "input": [hello, update], "tools": tools, "tool_choice": "required"}
    turn = COMPACT.read(body, Defaults(), Caller(front_end, TENANT)).turn
    assert turn.answer_format is None
    assert (turn.tool_choice, len(turn.tools)) == (ToolChoice(names=()), 1)
    plain = {"format": {"type": "json_object"}}
    turn = COMPACT.read(
        {"model": "m", "input": "Hi", "text": plain}, Defaults(), Caller(front_end, TENANT)
    ).turn
    assert (turn.answer_format, len(turn.messages)) == (None, 3)


# --- The routes, on the host's application.


class Foreign:
    """A model that is not Harmony, as an engine."""

    is_mllm = False
    model_name = "foreign"
    tokenizer = SimpleNamespace()
    preserve_native_tool_format = False

    async def chat(self, **_: Any) -> GenerationOutput:
        return GenerationOutput("Bonjour.", prompt_tokens=3, completion_tokens=2)


@pytest.fixture
def _foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_engine", Foreign())
    monkeypatch.setattr(server, "_model_name", "foreign")


@pytest.fixture
def installed(front_end: FrontEnd) -> Iterator[FrontEnd]:
    """The front end that is installed in the host, with the store of ``front_end``."""
    contract.activate()
    install(server.app, VllmMlx(), sharing=front_end.sharing)
    yield installed_in(server.app)
    contract.deactivate()


def send(method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    async def sending() -> httpx.Response:
        transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(sending())


@pytest.mark.usefixtures("_foreign")
def test_host_answers_for_its_other_models() -> None:
    body = {"model": "foreign", "input": "Bonjour ?", "previous_response_id": None}
    theirs = send("POST", "/v1/responses", body).json()
    contract.activate()
    try:
        ours = send("POST", "/v1/responses", body).json()
        # The host itself finds the answer that this one continues.
        more = send("POST", "/v1/responses", {**body, "previous_response_id": ours["id"]})
    finally:
        contract.deactivate()
    assert ours.keys() == theirs.keys()
    assert [item["content"] for item in ours["output"]] == [
        item["content"] for item in theirs["output"]
    ]
    assert more.status_code == 200


RESPONSE_PATH = f"/v1/responses/{ID}"
PATHS = [
    pytest.param("POST", "/v1/responses", {"model": "foreign", "input": "Hi"}, id="create"),
    pytest.param("POST", "/v1/responses/compact", {"model": "x", "input": "Hi"}, id="compact"),
    pytest.param("POST", "/v1/responses/input_tokens", {"model": "x", "input": "Hi"}, id="count"),
    pytest.param("GET", RESPONSE_PATH, None, id="retrieve"),
    pytest.param("DELETE", RESPONSE_PATH, None, id="delete"),
    pytest.param("GET", f"{RESPONSE_PATH}/input_items", None, id="input items"),
    pytest.param("POST", f"{RESPONSE_PATH}/cancel", None, id="cancel"),
    pytest.param("POST", "/v1/conversations", {"items": []}, id="conversations"),
    pytest.param("DELETE", "/v1/conversations/conv_1/items/msg_1", None, id="a conversation's"),
]


@pytest.mark.usefixtures("_foreign", "installed")
@pytest.mark.parametrize(("method", "path", "body"), PATHS)
def test_key_and_rate_limit_apply_to_every_route(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    monkeypatch.setattr(server, "_api_key", "sesame")
    right = {"authorization": "Bearer sesame"}
    limiter = server.RateLimiter(requests_per_minute=1, enabled=True)
    monkeypatch.setattr(server, "_rate_limiter", limiter)
    refused = send(method, path, body, authorization="Bearer wrong")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert send(method, path, body, **right).status_code in (200, 404)
    limited = send(method, path, body, **right)
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(limited.headers["retry-after"]) > 0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("", 200, None),
        ("?stream=false", 200, None),
        ("?include=reasoning.encrypted_content", 200, None),
        ("?stream=true", 400, "stream"),
        ("?stream=true&starting_after=x", 400, "starting_after"),
        ("?stream=true&starting_after=-1", 400, "starting_after"),
    ],
)
def test_query_of_stored_response_is_validated(
    store: MemoryStore, query: str, status: int, param: str | None
) -> None:
    put(store)
    response = send("GET", f"{RESPONSE_PATH}{query}")
    assert response.status_code == status
    if param is not None:
        assert response.json()["error"]["param"] == param


def test_stored_response_belongs_to_its_tenant(installed: FrontEnd, store: MemoryStore) -> None:
    put(store)
    other = {"authorization": "Bearer another"}
    for method, path in (
        ("GET", RESPONSE_PATH),
        ("GET", f"{RESPONSE_PATH}?stream=true"),
        ("GET", f"{RESPONSE_PATH}/input_items"),
        ("POST", f"{RESPONSE_PATH}/cancel"),
        ("DELETE", RESPONSE_PATH),
    ):
        assert send(method, path, **other).status_code == 404, (method, path)
    body = {"model": "m", "input": "More", "previous_response_id": ID}
    recalls = References(Caller(installed, "another"))
    with pytest.raises(RequestError) as caught:
        read(body, Defaults(), recalls)
    assert caught.value.status == 404
    assert recalls.item(f"msg_{KEY}8000") is None
    assert send("GET", RESPONSE_PATH).status_code == 200


# --- The WebSocket protocol, over a fake socket.


def set_limits(**limits: Any) -> None:
    """Sets limits of the application until it is deactivated."""
    installed_in(server.app).settings = ServerSettings(**limits)


class Socket:
    """Sends ``texts``, then stays silent or hangs up."""

    scope: dict[str, Any] = {  # noqa: RUF012
        "type": "websocket",
        "path": "/v1/responses",
        "headers": [],
        "app": server.app,
    }
    headers: dict[str, str] = {}  # noqa: RUF012
    client = None
    app = server.app

    def __init__(self, *texts: str, hangs_up: bool = False) -> None:
        self._texts = list(texts)
        self._hangs_up = hangs_up
        self._closed = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.code: int | None = None
        self.accepted = False
        self.denied: int | None = None

    async def accept(self) -> None:
        self.accepted = True

    async def send_denial_response(self, response: Any) -> None:
        self.denied = response.status_code

    async def receive(self) -> dict[str, Any]:
        if self._texts:
            return {"type": "websocket.receive", "text": self._texts.pop(0)}
        if not self._hangs_up:
            await self._closed.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send_text(self, text: str) -> None:
        self.sent.append(json.loads(text))

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self.code = code
        self._closed.set()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("headers", "key", "status"),
    [
        ({}, None, None),
        ({"authorization": "Bearer s\xe9cret"}, "secret", 401),
        ({}, "sesame", 401),
        ({"authorization": "Bearer wrong"}, "sesame", 401),
        ({"Authorization": "Bearer sesame"}, "sesame", None),
    ],
)
def test_websocket_requires_the_key(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], key: str | None, status: int | None
) -> None:
    monkeypatch.setattr(server, "_api_key", key)
    socket: Any = Socket(hangs_up=True)
    socket.headers = Headers(headers)
    asyncio.run(serve_socket(socket))
    assert socket.denied == status
    assert socket.accepted is (status is None)


@pytest.mark.usefixtures("installed")
def test_websocket_connection_has_a_lifetime() -> None:
    async def test() -> None:
        socket: Any = Socket()
        await ResponsesSocket(socket, lifetime=0.01).serve()
        assert [event["error"]["code"] for event in socket.sent] == [
            "websocket_connection_limit_reached"
        ]
        assert socket.code == 1000

    run(test())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (["{}"] * MAX_WAITING, None),
        (["{}"] * (MAX_WAITING + 1), 1013),
        ([" " * 4000] * 2, None),
        ([" " * 4000] * 3, 1013),
        (["\U0001f600" * 1000] * 3, 1013),
        ([" " * 20_000], None),
        ([" " * 20_000, "{}"], 1013),
    ],
)
def test_too_many_waiting_messages_close_the_connection(
    messages: list[str], code: int | None
) -> None:
    set_limits(max_body=10_000)

    async def test() -> None:
        socket: Any = Socket(*messages, hangs_up=True)
        await ResponsesSocket(socket).serve()
        assert socket.code == code

    run(test())


@pytest.mark.usefixtures("installed")
def test_stalled_websocket_is_aborted() -> None:
    """Closing it would wait until the client has read what was written."""
    set_limits(stream_seconds=0.05)
    aborted: list[bool] = []

    transport = SimpleNamespace(abort=lambda: aborted.append(True))

    class Full(Socket):
        """Its buffers are full."""

        scope = {**Socket.scope, TRANSPORT: transport}  # noqa: RUF012

        async def send_text(self, text: str) -> None:
            await asyncio.sleep(NEVER)

    async def test() -> None:
        socket: Any = Full("{}")
        await ResponsesSocket(socket).serve()
        assert aborted == [True]
        assert not installed_in(server.app).answers.unread

    run(test())


@pytest.mark.usefixtures("_foreign", "installed")
def test_other_model_has_no_websocket() -> None:
    async def test() -> None:
        message = {"type": "response.create", "model": "foreign", "input": "Bonjour ?"}
        socket: Any = Socket(json.dumps(message))
        talking = asyncio.ensure_future(ResponsesSocket(socket, lifetime=5).serve())
        while not socket.sent:
            await asyncio.sleep(0.01)
        talking.cancel()
        assert (socket.sent[0]["type"], socket.sent[0]["error"]["param"]) == ("error", "model")

    run(test())


def test_route_is_added_and_removed() -> None:
    route = mount.front_end(VllmMlx())
    before = list(server.app.router.routes)
    assert route.problem() is None
    undo = route.apply()
    assert server.app.router.routes[:-1] == before
    undo()
    after = server.app.router.routes
    assert len(after) == len(before)
    assert all(new is old for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("message", "traceback"),
    [
        ("Invalid UTF-8 sequence received from client.", False),
        ("Exception in an app", True),
    ],
)
def test_non_utf_8_message_is_logged_without_traceback(
    caplog: pytest.LogCaptureFixture, message: str, traceback: bool
) -> None:
    undo = mount.front_end(VllmMlx()).apply()
    try:
        b"\xd2".decode()
    except UnicodeDecodeError:
        logging.getLogger("uvicorn.error").exception(message)
    finally:
        undo()
    (record,) = caplog.records
    assert record.message == message
    assert bool(record.exc_info) is traceback


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

        background = BackgroundResponses()
        first = await start_another(1)
        second = await start_another(2)
        with pytest.raises(HostError) as full:
            await start_another(3)
        assert (full.value.status, full.value.code) == (503, "background_full")
        assert full.value.retry_after
        await second.cancel()
        await collect_events(first)
        await (await start_another(4)).cancel()

    run(test())
