"""What is stored of a response, who may read it, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from event_checker import check
from starlette.applications import Starlette
from starlette.testclient import TestClient
from stored_responses import (
    DELTA_GROUPS,
    ID,
    KEY,
    RESOURCE,
    TENANT,
    application_with,
    begin,
    job,
    storing_emitter,
)

from vllm_mlx_harmony.core.deltas import Delta, Failed, Started
from vllm_mlx_harmony.core.errors import HarmonyFailure, OutputError, RequestError, StoreError
from vllm_mlx_harmony.core.turn import Answer, Defaults, User
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server import answer as answers
from vllm_mlx_harmony.server.front_end import Caller, FrontEnd, installed_in
from vllm_mlx_harmony.server.responses.lookup import References, read
from vllm_mlx_harmony.server.storage.persistence import StoringEmitter
from vllm_mlx_harmony.server.storage.store import MemoryStore, ResourceKey, StoredResponse

RESPONSE_PATH = f"/v1/responses/{ID}"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def app(store: MemoryStore) -> Starlette:
    return application_with(store)


@pytest.fixture
def front_end(app: Starlette) -> FrontEnd:
    return installed_in(app)


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
    app: Starlette, front_end: FrontEnd, store: MemoryStore, groups: int
) -> None:
    """Its reader gets the rest; nobody else finds it, then or later."""

    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    async def test() -> list[Event]:
        deleted = asyncio.Event()

        async def source() -> AsyncIterator[list[Delta]]:
            for number, group in enumerate(DELTA_GROUPS):
                if number == groups:
                    await deleted.wait()
                yield group

        stream = start_answer(storing_emitter(front_end), source())
        assert not await front_end.responses.delete(ResourceKey(ID, "somebody else"))
        for method, status in (("DELETE", 200), ("DELETE", 404), ("GET", 404)):
            assert (await client.request(method, RESPONSE_PATH)).status_code == status
        deleted.set()
        return [event async for event in stream]

    assert check(asyncio.run(test()))["status"] == "completed"
    assert store.get(RESOURCE) is None
    assert asyncio.run(client.delete(RESPONSE_PATH)).status_code == 404


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
    emitter = storing_emitter(installed_in(application_with(store())), stream=stream)
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


# --- The routes of a stored response.


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
    app: Starlette, store: MemoryStore, query: str, status: int, param: str | None
) -> None:
    put(store)
    response = TestClient(app, "http://localhost").get(f"{RESPONSE_PATH}{query}")
    assert response.status_code == status
    if param is not None:
        assert response.json()["error"]["param"] == param


def test_stored_response_belongs_to_its_tenant(app: Starlette, store: MemoryStore) -> None:
    put(store)
    client = TestClient(app, "http://localhost")
    other = {"authorization": "Bearer another"}
    for method, path in (
        ("GET", RESPONSE_PATH),
        ("GET", f"{RESPONSE_PATH}?stream=true"),
        ("GET", f"{RESPONSE_PATH}/input_items"),
        ("POST", f"{RESPONSE_PATH}/cancel"),
        ("DELETE", RESPONSE_PATH),
    ):
        assert client.request(method, path, headers=other).status_code == 404, (method, path)
    body = {"model": "m", "input": "More", "previous_response_id": ID}
    recalls = References(Caller(installed_in(app), "another"))
    with pytest.raises(RequestError) as caught:
        read(body, Defaults(), recalls)
    assert caught.value.status == 404
    assert recalls.item(f"msg_{KEY}8000") is None
    assert client.get(RESPONSE_PATH).status_code == 200
