"""Responses around the engine, without a model: what is kept, who is told, who is refused."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm_mlx")

from event_checker import check
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
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
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
from vllm_mlx_harmony.server.storage.store import MemoryStore, StoredResponse
from vllm_mlx_harmony.server.streams import TRANSPORT

KEY = "0f1e2d3c4b5a69788796"
INFO = ResponseInfo(KEY, 1_754_352_000, "gpt-oss-20b")
ID = f"resp_{KEY}"
REQUEST = Request({"type": "http", "method": "GET", "headers": []})
TENANT = tenant_of(REQUEST)
NEVER = 3600.0
"""Seconds after which what a test must bring about would come by itself."""
SAID: list[list[Delta]] = [
    [Started(3)],
    [Opened(0, Kind.ANSWER), Text("Hel")],
    [Text("lo."), Closed()],
    [Finished("stop", None, Usage(3, 2))],
]


@pytest.fixture(autouse=True)
def store() -> MemoryStore:
    store = MemoryStore()
    serve_with(store)
    return store


NOW: list[FrontEnd] = []
"""The front end of the current test."""


def serve_with(store: Any) -> None:
    NOW[:] = [FrontEnd(VllmMlx(), ServerSettings(), SingleServer(store))]


def caller(tenant: str = TENANT) -> Caller:
    return Caller(NOW[0], tenant)


def answer(**fields: Any) -> StoringEmitter:
    body = {"model": "m", "input": "Hi", "stream": True, "instructions": "Be kind.", **fields}
    context = SimpleNamespace(messages=(Instructions("Be kind."), User("Hi"), Answer("Hello.")))
    asked = read(body, Defaults(), References(caller()))
    return NOW[0].responses.emitter(asked, INFO, context, TENANT)


async def deltas(
    groups: list[list[Delta]] = SAID, error: Exception | None = None
) -> AsyncIterator[list[Delta]]:
    for group in groups:
        yield group
        await asyncio.sleep(0.001)
    if error is not None:
        raise error


async def events_of(
    kept: StoringEmitter, groups: list[list[Delta]] = SAID, error: Exception | None = None
) -> list[Event]:
    return [event async for event in answered(kept, deltas(groups, error))]


def answered(kept: StoringEmitter, source: Any, **options: Any) -> answers.Answer:
    """What reads the deltas of ``source`` for a client that streams."""
    return begin(job(kept), deltas=source, **options)


# --- StoredResponse before anybody is told.


def test_kept_before_the_last_event(store: MemoryStore) -> None:
    async def test() -> list[bool]:
        return [store.get(ID, TENANT) is not None async for _ in answered(answer(), deltas())]

    known = asyncio.run(test())
    assert known[-2:] == [True, True]  # the last event, and [DONE]
    assert not any(known[:-2])
    kept = store.get(ID, TENANT)
    assert kept is not None
    assert kept.messages == (User("Hi"), Answer("Hello."))
    assert (kept.document["status"], kept.document["id"]) == ("completed", ID)
    assert kept.input_items[0]["content"] == [{"type": "input_text", "text": "Hi"}]


def test_not_kept_unless_it_is_to_be(store: MemoryStore) -> None:
    assert check(asyncio.run(events_of(answer(store=False))))["store"] is False
    assert store.get(ID, TENANT) is None


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_response_deleted_while_streamed_is_not_stored(store: MemoryStore, groups: int) -> None:
    """Who reads it reads on; nobody else finds it, then or later."""

    async def test() -> list[Event]:
        deleted = asyncio.Event()

        async def source() -> AsyncIterator[list[Delta]]:
            for number, group in enumerate(SAID):
                if number == groups:
                    await deleted.wait()
                yield group

        told_of = answered(answer(), source())
        assert not await NOW[0].responses.delete(AnswerKey(ID, "somebody else"))
        statuses = [
            (await asyncio.to_thread(send, method, f"/v1/responses/{ID}")).status_code
            for method in ("DELETE", "DELETE", "GET")
        ]
        assert statuses == [200, 404, 404]
        deleted.set()
        return [event async for event in told_of]

    assert check(asyncio.run(test()))["status"] == "completed"
    assert store.get(ID, TENANT) is None
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
    serve_with(store())
    kept = answer(stream=stream)
    events = asyncio.run(events_of(kept))
    final = check(events) if stream else kept.result()
    assert (final["status"], final["store"]) == ("completed", False)
    assert why in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OutputError("out of memory"), "out of memory"),
        (KeyError("a bug"), "internal error: see the server's log"),
    ],
)
def test_a_failed_answer_is_kept(store: MemoryStore, error: Exception, message: str) -> None:
    final = check(asyncio.run(events_of(answer(), SAID[:2], error)))
    assert (final["status"], final["error"]["message"]) == ("failed", message)
    assert final["output"][0]["status"] == "incomplete"
    kept = store.get(ID, TENANT)
    assert kept is not None
    assert kept.document == final


@pytest.mark.parametrize(
    ("stream", "groups", "known", "expected"),
    [
        pytest.param(True, [], False, False, id="refused before it began"),
        pytest.param(True, SAID[:1], False, True, id="begun"),
        pytest.param(False, SAID[:2], False, False, id="nobody knows its id"),
        pytest.param(True, [], True, True, id="known from the start"),
    ],
)
def test_a_failed_answer_is_kept_if_a_client_knows_it(
    store: MemoryStore, stream: bool, groups: list[list[Delta]], known: bool, expected: bool
) -> None:
    async def test() -> None:
        given = answered(
            answer(stream=stream),
            deltas(groups, OutputError("x")),
            announced=known,
        )
        if not stream:
            await given.document()
        await given.first_event()
        events = [event async for event in given]
        assert check(events)["status"] == "failed"

    if expected:
        asyncio.run(test())
    else:
        with pytest.raises(HarmonyFailure):
            asyncio.run(test())
    assert (store.get(ID, TENANT) is not None) is expected


def test_the_last_delta_is_written_once() -> None:
    async def test() -> tuple[list[Event], list[Event]]:
        kept = answer()
        kept.feed(Started(3))
        last = await kept.write_last(Failed(OutputError("first")))
        return last, await kept.write_last(Failed(OutputError("second")))

    first, second = asyncio.run(test())
    assert first is second


# --- What a request refers to.


def put(store: MemoryStore, key: str = KEY) -> StoredResponse:
    items = [{"id": f"msg_{key}8000", "type": "message", "role": "user", "content": "Hi"}]
    output = [{"id": f"msg_{key}0000", "type": "message", "role": "assistant", "content": "Ho"}]
    turn_messages = (User("Hi"), Answer("Ho"))
    kept = StoredResponse(f"resp_{key}", {"output": output}, items, turn_messages, TENANT)
    store.put(kept)
    return kept


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
def test_items_are_found_by_their_id(store: MemoryStore, item: str, text: str | None) -> None:
    put(store)
    found = References(caller()).item(item)
    assert (found and found["content"]) == text


def test_a_connection_remembers_more_than_the_store(store: MemoryStore) -> None:
    kept = put(MemoryStore())
    recall = References(caller(), {kept.id: kept})
    body = {"model": "m", "input": "More", "previous_response_id": kept.id}
    assert read(body, Defaults(), recall).turn.messages == (*kept.messages, User("More"))
    with pytest.raises(RequestError) as caught:
        read(body, Defaults(), References(caller()))
    assert (caught.value.status, caught.value.code) == (404, "previous_response_not_found")


# --- In the background.


class Lent:
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
    """The engine is not given back before ``may_release`` is set."""
    given: Any = (Lent(may_release), None, None)
    settings = ServerSettings.read()
    stream = emitter.request.stream
    job = Job(*given, emitter, stream=stream, id_seed=KEY, server_settings=settings)
    return replace(job, write_last=emitter.write_last)


async def running_in(background: BackgroundResponses, job: Job) -> BackgroundResponse:
    emitter: Any = job.emitter
    return await background.start(job, emitter, begin)


def begin(job: Job, **options: Any) -> answers.Answer:
    tracker: Any = SimpleNamespace(finish=lambda result, usage: None)
    return answers.Answer(job, tracker, Answers(), **options)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Puts what a turn generates in the place of the real thing."""

    def put_in(source: Any) -> None:
        monkeypatch.setattr(answers, "run", lambda job, *_: source(job))

    return put_in


def asynchronous(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def slowly(given: Any) -> AsyncIterator[list[Delta]]:
    for group in SAID:
        yield group
        await asyncio.sleep(0.01)
    await given.lease.release()


async def for_ever(given: Any) -> AsyncIterator[list[Delta]]:
    try:
        yield SAID[0]
        yield SAID[1]
        await asyncio.sleep(NEVER)
    finally:
        await given.lease.release()


async def at_once(_: Any) -> AsyncIterator[list[Delta]]:
    for group in SAID:
        yield group


async def no_turn(_: Any) -> AsyncIterator[list[Delta]]:
    await asyncio.sleep(NEVER)
    yield SAID[0]


async def collected(running: BackgroundResponse, start: int = 0) -> list[Event]:
    return [event async for event in running.follow(start)]


def test_replays_leave_the_event_loop_to_others(turns: Callable[[Any], None]) -> None:
    """Twenty readers of a long response, which are not slowed down by a network."""
    turns(no_turn)

    async def test() -> None:
        running = await running_in(BackgroundResponses(), job(answer(background=True)))
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

    asynchronous(test)


@pytest.mark.parametrize("start", [0, 1, 4, 7, 100])
def test_followed_from_anywhere(turns: Callable[[Any], None], start: int) -> None:
    turns(slowly)

    async def test() -> None:
        running = await running_in(BackgroundResponses(), job(answer(background=True)))
        live = await collected(running, start)
        assert check(running.events)["status"] == "completed"
        assert live == await collected(running, start) == running.events[start:]

    asynchronous(test)


@pytest.mark.parametrize("variable", ["", "1", "0"])
def test_silence_is_broken(
    turns: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """While nothing is generated, for each of its readers, unless the variable is 0."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", variable)
    turns(no_turn)
    given = job(answer(background=True))
    if not variable:
        given = replace(given, server_settings=ServerSettings(ping_seconds=0.01))

    async def test() -> None:
        running = await running_in(BackgroundResponses(), given)
        for start in (0, 2):
            events = running.follow(start)
            read: list[Event] = []
            with suppress(asyncio.TimeoutError):
                while len(read) < 6:
                    seconds = 0.2 if variable == "0" else 60
                    read.append(await asyncio.wait_for(anext(events), seconds))
            repeated = read[len(running.events) - start :]
            assert bool(repeated) == (variable != "0")
            assert {event.name for event in repeated} <= {"response.queued"}  # no turn has begun
            numbers = [json.loads(event.data)["sequence_number"] for event in read]
            assert numbers == sorted(numbers)  # a client continues behind the last one it got
        await running.cancel()

    asynchronous(test)


def test_cancelled_while_it_runs(turns: Callable[[Any], None], store: MemoryStore) -> None:
    turns(for_ever)

    async def test() -> None:
        given = job(answer(background=True))
        running = await running_in(BackgroundResponses(), given)
        while len(running.events) < 6:
            await asyncio.sleep(0)
        await asyncio.gather(running.cancel(), running.cancel())
        assert given.lease.released
        final = check(running.events)
        assert (final["status"], final["output"][0]["status"]) == ("cancelled", "incomplete")
        assert running.document == final
        kept = store.get(ID, TENANT)
        assert kept is not None
        assert kept.document == final

    asynchronous(test)


def test_cancelled_before_it_began(turns: Callable[[Any], None]) -> None:
    turns(for_ever)

    async def test() -> None:
        given = job(answer(background=True))
        running = await running_in(BackgroundResponses(), given)
        assert running.document["status"] == "queued"
        await running.cancel()
        assert given.lease.released
        assert check(running.events)["status"] == "cancelled"

    asynchronous(test)


def test_queued_response_has_its_events(turns: Callable[[Any], None]) -> None:
    turns(no_turn)

    async def test() -> None:
        running = await running_in(BackgroundResponses(), job(answer(background=True)))
        events = running.follow()
        names = [(await anext(events)).name for _ in range(2)]
        assert names == ["response.created", "response.queued"]
        assert running.document["status"] == "queued"
        await running.cancel()
        assert check([event async for event in running.follow()])["status"] == "cancelled"

    asynchronous(test)


def test_cancelled_while_it_gives_the_engine_back(turns: Callable[[Any], None]) -> None:
    turns(slowly)

    async def test() -> None:
        may_release = asyncio.Event()
        given = job(answer(background=True), may_release)
        running = await running_in(BackgroundResponses(), given)
        await collected(running)
        assert not given.lease.released
        await running.cancel()
        assert check(running.events)["status"] == "completed"
        may_release.set()
        while not given.lease.released:
            await asyncio.sleep(0)

    asynchronous(test)


class Slow(MemoryStore):
    """A disk that writes when it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.may_write = threading.Event(), threading.Event()

    def put(self, kept: StoredResponse) -> bool:
        self.writing.set()
        assert self.may_write.wait(60)
        return super().put(kept)


@pytest.fixture
def slow() -> Slow:
    store = Slow()
    serve_with(store)
    return store


async def while_it_is_kept(slow: Slow) -> BackgroundResponse:
    given = job(answer(background=True))
    emitter: Any = given.emitter
    running = await NOW[0].responses.start(given, emitter, begin)
    assert await asyncio.to_thread(slow.writing.wait, 60)
    return running


def test_it_has_not_ended_before_it_is_kept(turns: Callable[[Any], None], slow: Slow) -> None:
    turns(at_once)

    async def test() -> None:
        running = await while_it_is_kept(slow)
        assert (running.document["status"], slow.get(ID, TENANT)) == ("in_progress", None)
        slow.may_write.set()
        while running.document["status"] == "in_progress":
            await asyncio.sleep(0)
        kept = slow.get(ID, TENANT)
        assert kept is not None
        assert kept.document == running.document

    asynchronous(test)


@pytest.mark.parametrize("cancelled", [False, True])
def test_response_deleted_while_stored_stays_deleted(
    turns: Callable[[Any], None], slow: Slow, cancelled: bool
) -> None:
    turns(at_once)

    async def test() -> None:
        running = await while_it_is_kept(slow)
        cancelling = asyncio.ensure_future(running.cancel() if cancelled else asyncio.sleep(0))
        deleting = asyncio.ensure_future(NOW[0].responses.delete(AnswerKey(ID, TENANT)))
        for _ in range(20):
            await asyncio.sleep(0)
        slow.may_write.set()
        assert await deleting
        await cancelling
        assert check(await collected(running))["status"] == "completed"
        assert slow.get(ID, TENANT) is None

    asynchronous(test)


@pytest.mark.usefixtures("_active")
def test_unfinished_response_cannot_be_continued(turns: Callable[[Any], None], slow: Slow) -> None:
    turns(at_once)
    body = {"model": "m", "input": "More", "previous_response_id": ID}

    async def test() -> None:
        running = await while_it_is_kept(slow)
        for api in (routes.RESPONSES, COMPACT, ResponsesSocket(Socket())._api):
            with pytest.raises(RequestError) as caught:
                await asyncio.to_thread(api.read, body, Defaults(), caller())
            assert (caught.value.status, caught.value.code) == (400, "previous_response_not_ready")
        slow.may_write.set()
        await collected(running)
        asked = await asyncio.to_thread(routes.RESPONSES.read, body, Defaults(), caller())
        assert asked.turn.messages == (User("Hi"), Answer("Hello."), User("More"))

    asynchronous(test)


def test_completed_response_cannot_be_cancelled(turns: Callable[[Any], None]) -> None:
    turns(slowly)

    async def test() -> None:
        running = await running_in(BackgroundResponses(), job(answer(background=True)))
        await collected(running)
        await running.cancel()
        assert running.document["status"] == "completed"

    asynchronous(test)


def there(background: BackgroundResponses, number: int) -> bool:
    return background.get(AnswerKey(f"resp_{number:020x}", TENANT)) is not None


def test_old_events_make_room(turns: Callable[[Any], None]) -> None:
    turns(slowly)

    async def test() -> None:
        background = BackgroundResponses(max_events=20)
        for number in range(4):
            kept = answer(background=True)
            kept._info = ResponseInfo(f"{number:020x}", 0, "m")
            await collected(await running_in(background, job(kept)))
        remembered = [there(background, number) for number in range(4)]
        assert remembered == [False, False, True, True]
        assert await background.forget(AnswerKey(f"resp_{3:020x}", TENANT)) is True
        assert await background.forget(AnswerKey(f"resp_{3:020x}", TENANT)) is False

    asynchronous(test)


def test_old_bytes_make_room(turns: Callable[[Any], None]) -> None:
    turns(at_once)

    async def test() -> None:
        background = BackgroundResponses(max_bytes=300_000)
        for number in range(4):
            kept = answer(background=True, instructions="x" * 20_000, input="y" * 50_000)
            kept._info = ResponseInfo(f"{number:020x}", 0, "m")
            running = await running_in(background, job(kept))
            await collected(running)
            assert 130_000 < running.bytes < 150_000
        remembered = [there(background, number) for number in range(4)]
        assert remembered == [False, True, True, True]

    asynchronous(test)


@pytest.mark.parametrize("cancelled", [False, True])
def test_completed_response_keeps_only_its_documents(
    turns: Callable[[Any], None], cancelled: bool
) -> None:
    turns(for_ever if cancelled else at_once)

    async def test() -> None:
        kept = answer(background=True)
        given = job(kept)
        held = [weakref.ref(given.lease), weakref.ref(kept)]
        running = await running_in(BackgroundResponses(), given)
        del given, kept
        await asyncio.sleep(0.01)
        await running.cancel()
        await collected(running)
        for _ in range(500):  # a thread may still hold the last frame
            gc.collect()
            if not any(one() for one in held):
                break
            await asyncio.sleep(0.01)
        assert [one() for one in held] == [None, None]
        assert running.document == check(running.events)
        (item,) = running.input_items
        assert item["content"] == [{"type": "input_text", "text": "Hi"}]

    asynchronous(test)


# --- Shorter.


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
def test_a_compaction_is_what_was_answered(output: list[Delta], text: str | None) -> None:
    asked: Any = COMPACT.read({"model": "m", "input": "Hi", "stream": True}, Defaults(), caller())
    assert (asked.stream, asked.store) == (False, False)
    assert isinstance(asked.turn.messages[-1], User)
    emitter = COMPACT.emitter(asked, INFO, None, caller())
    for delta in [*output, Finished("stop", None, Usage(3, 2))]:
        assert emitter.feed(delta) == []
    if text is None:
        with pytest.raises(OutputError):
            emitter.result()
        return
    document = emitter.result()
    user, encrypted = document["output"]
    assert (user["role"], document["usage"]["output_tokens"]) == ("user", 2)
    again = read({"model": "m", "input": [encrypted]}, Defaults(), References(caller()))
    assert again.turn.messages == (Summary(text),)


def test_a_compaction_is_text_whatever_the_conversation_wants() -> None:
    update = {"type": "configuration_update", "text": {"format": {"type": "json_object"}}}
    hello = {"role": "user", "content": "Hi"}
    tools = [{"type": "function", "name": "f"}]
    body = {"model": "m", "input": [hello, update], "tools": tools, "tool_choice": "required"}
    turn = COMPACT.read(body, Defaults(), caller()).turn
    assert turn.answer_format is None
    assert (turn.tool_choice, len(turn.tools)) == (ToolChoice(names=()), 1)
    plain = {"format": {"type": "json_object"}}
    turn = COMPACT.read({"model": "m", "input": "Hi", "text": plain}, Defaults(), caller()).turn
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
def _active(store: MemoryStore) -> Iterator[None]:
    contract.activate()
    install(server.app, VllmMlx(), sharing=NOW[0].sharing)
    NOW[:] = [installed_in(server.app)]
    yield
    contract.deactivate()


def send(method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    async def sending() -> httpx.Response:
        transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(sending())


@pytest.mark.usefixtures("_foreign")
def test_the_host_answers_for_its_other_models() -> None:
    body = {"model": "foreign", "input": "Bonjour ?", "previous_response_id": None}
    theirs = send("POST", "/v1/responses", body).json()
    contract.activate()
    try:
        ours = send("POST", "/v1/responses", body).json()
        # What continues one of the host's own answers is for the host to find.
        more = send("POST", "/v1/responses", {**body, "previous_response_id": ours["id"]})
    finally:
        contract.deactivate()
    assert ours.keys() == theirs.keys()
    assert [item["content"] for item in ours["output"]] == [
        item["content"] for item in theirs["output"]
    ]
    assert more.status_code == 200


ONE = f"/v1/responses/{ID}"
PATHS = [
    pytest.param("POST", "/v1/responses", {"model": "foreign", "input": "Hi"}, id="create"),
    pytest.param("POST", "/v1/responses/compact", {"model": "x", "input": "Hi"}, id="compact"),
    pytest.param("POST", "/v1/responses/input_tokens", {"model": "x", "input": "Hi"}, id="count"),
    pytest.param("GET", ONE, None, id="retrieve"),
    pytest.param("DELETE", ONE, None, id="delete"),
    pytest.param("GET", f"{ONE}/input_items", None, id="input items"),
    pytest.param("POST", f"{ONE}/cancel", None, id="cancel"),
    pytest.param("POST", "/v1/conversations", {"items": []}, id="conversations"),
    pytest.param("DELETE", "/v1/conversations/conv_1/items/msg_1", None, id="a conversation's"),
]


@pytest.mark.usefixtures("_foreign", "_active")
@pytest.mark.parametrize(("method", "path", "body"), PATHS)
def test_the_key_and_the_limit_hold_everywhere(
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


@pytest.mark.usefixtures("_active")
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
def test_queries(store: MemoryStore, query: str, status: int, param: str | None) -> None:
    put(store)
    response = send("GET", f"{ONE}{query}")
    assert response.status_code == status
    if param is not None:
        assert response.json()["error"]["param"] == param


@pytest.mark.usefixtures("_active")
def test_stored_response_belongs_to_its_tenant(store: MemoryStore) -> None:
    put(store)
    other = {"authorization": "Bearer another"}
    for method, path in (
        ("GET", ONE),
        ("GET", f"{ONE}?stream=true"),
        ("GET", f"{ONE}/input_items"),
        ("POST", f"{ONE}/cancel"),
        ("DELETE", ONE),
    ):
        assert send(method, path, **other).status_code == 404, (method, path)
    body = {"model": "m", "input": "More", "previous_response_id": ID}
    recalls = References(caller("another"))
    with pytest.raises(RequestError) as caught:
        read(body, Defaults(), recalls)
    assert caught.value.status == 404
    assert recalls.item(f"msg_{KEY}8000") is None
    assert send("GET", ONE).status_code == 200


# --- The WebSocket, without one.


def limited(**limits: Any) -> None:
    """The application has these limits, as long as it is active."""
    installed_in(server.app).settings = ServerSettings(**limits)


class Socket:
    """Sends what it was told to send, and is silent then, or hangs up."""

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


@pytest.mark.usefixtures("_active")
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
def test_websocket_access(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], key: str | None, status: int | None
) -> None:
    monkeypatch.setattr(server, "_api_key", key)
    socket: Any = Socket(hangs_up=True)
    socket.headers = Headers(headers)
    asyncio.run(serve_socket(socket))
    assert socket.denied == status
    assert socket.accepted is (status is None)


@pytest.mark.usefixtures("_active")
def test_a_connection_does_not_last_for_ever() -> None:
    async def test() -> None:
        socket: Any = Socket()
        await ResponsesSocket(socket, lifetime=0.01).serve()
        assert [event["error"]["code"] for event in socket.sent] == [
            "websocket_connection_limit_reached"
        ]
        assert socket.code == 1000

    asynchronous(test)


@pytest.mark.usefixtures("_active")
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
def test_a_flood_ends_the_connection(messages: list[str], code: int | None) -> None:
    limited(max_body=10_000)

    async def test() -> None:
        socket: Any = Socket(*messages, hangs_up=True)
        await ResponsesSocket(socket).serve()
        assert socket.code == code

    asynchronous(test)


@pytest.mark.usefixtures("_active")
def test_stalled_websocket_is_aborted() -> None:
    """Not closed, which would wait until what was written has been read."""
    limited(stream_seconds=0.05)
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

    asynchronous(test)


@pytest.mark.usefixtures("_foreign", "_active")
def test_other_model_has_no_websocket() -> None:
    async def test() -> None:
        message = {"type": "response.create", "model": "foreign", "input": "Bonjour ?"}
        socket: Any = Socket(json.dumps(message))
        talking = asyncio.ensure_future(ResponsesSocket(socket, lifetime=5).serve())
        while not socket.sent:
            await asyncio.sleep(0.01)
        talking.cancel()
        assert (socket.sent[0]["type"], socket.sent[0]["error"]["param"]) == ("error", "model")

    asynchronous(test)


def test_route_is_added_and_removed() -> None:
    route = mount.front_end(VllmMlx())
    before = list(server.app.router.routes)
    assert route.problem() is None
    undo = route.apply()
    assert server.app.router.routes[:-1] == before
    undo()
    after = server.app.router.routes
    assert len(after) == len(before)
    assert all(one is other for one, other in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("message", "traceback"),
    [
        ("Invalid UTF-8 sequence received from client.", False),
        ("Exception in an app", True),
    ],
)
def test_message_that_is_not_utf_8_makes_no_traceback(
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


def test_answers_in_the_background_are_bounded_in_all(
    turns: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has ended takes no room away from what is to come."""
    turns(slowly)
    monkeypatch.setenv("VLLM_MLX_HARMONY_BACKGROUND_BYTES", "98k")

    async def test() -> None:
        async def another(number: int) -> BackgroundResponse:
            kept = answer(background=True)
            kept._info = ResponseInfo(f"{number:020x}", 0, "m")
            return await running_in(background, job(kept))

        background = BackgroundResponses()
        first = await another(1)
        second = await another(2)
        with pytest.raises(HostError) as full:
            await another(3)
        assert (full.value.status, full.value.code) == (503, "background_full")
        assert full.value.retry_after
        await second.cancel()
        await collected(first)
        await (await another(4)).cancel()

    asynchronous(test)
