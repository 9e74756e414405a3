"""Responses, generated turns and the encryption key, shared in a real Redis; outages of Redis."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from real_redis import RedisServer
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from waiting import wait_until

from vllm_mlx_harmony.core.errors import HostError, StoreError
from vllm_mlx_harmony.core.replay import Output, Replay
from vllm_mlx_harmony.core.turn import Answer, Call, User
from vllm_mlx_harmony.gateway.host import Gateway
from vllm_mlx_harmony.gateway.limits import DAY, KeyLimits
from vllm_mlx_harmony.gateway.settings import load
from vllm_mlx_harmony.gateway.shared_limit import acquire_slot, add, remove, renew
from vllm_mlx_harmony.protocols.events import DONE, Event
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.front_end import FrontEnd
from vllm_mlx_harmony.server.installation import open_sharing
from vllm_mlx_harmony.server.peers import connection as shared
from vllm_mlx_harmony.server.peers import directory as answer_directory
from vllm_mlx_harmony.server.peers.connection import Connection, PeersError, connect
from vllm_mlx_harmony.server.peers.directory import Command, Directory, Heartbeat
from vllm_mlx_harmony.server.peers.sharing import RedisSharing
from vllm_mlx_harmony.server.peers.store import SharedStore
from vllm_mlx_harmony.server.peers.turns import SharedTurns
from vllm_mlx_harmony.server.settings import STORE_VARIABLE, ServerSettings
from vllm_mlx_harmony.server.storage.background import BackgroundResponse
from vllm_mlx_harmony.server.storage.responses import Responses
from vllm_mlx_harmony.server.storage.store import ResourceKey, StoredResponse

KEPT = StoredResponse(
    "resp_1",
    {"id": "resp_1", "output": [{"id": "msg_1", "text": "Täg"}]},
    [{"id": "msg_2", "role": "user"}],
    (User("Hi"), Call("call_1", "f", '{"a":1}'), Answer("Täg")),
    "alice",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis_server:
        yield redis_server


@pytest.fixture
def private_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may stop."""
    with RedisServer(tmp_path) as redis_server:
        yield redis_server


# --- Responses


def test_stored_response_is_found_by_the_other_server(server: RedisServer) -> None:
    first, second = SharedStore(Connection(server.url)), SharedStore(Connection(server.url))
    stored = replace(KEPT, document={"text": "x" * 100_000})
    assert first.put(stored)
    assert second.get(KEPT.key) == stored
    assert second.get(ResourceKey("resp_1", "bob")) is None
    assert not second.delete(ResourceKey("resp_1", "bob"))
    assert second.delete(KEPT.key)
    assert first.get(KEPT.key) is None


@pytest.mark.parametrize(
    "entry", [b"", b"nothing", zlib.compress(b"{"), zlib.compress(b"[1,2]"), zlib.compress(b"null")]
)
def test_unreadable_entry_is_absent(server: RedisServer, entry: bytes) -> None:
    """Another version or another program wrote it."""
    store = SharedStore(Connection(server.url))
    assert store.put(KEPT)
    server.client.set(shared.key_of("response", KEPT.tenant, KEPT.id), entry)
    assert store.get(KEPT.key) is None
    assert store.put(KEPT) and store.get(KEPT.key) == KEPT


def test_unreadable_events_and_commands_are_absent(server: RedisServer) -> None:
    directory, name = Directory(Connection(server.url)), ResourceKey("resp_u", "alice")
    directory.beat([], {name: {0: Event("{}", "a"), 1: Event("{}", "b")}})
    server.client.zadd(shared.key_of("log", "alice", "resp_u"), {b"nonsense": 2, b"3": 3})
    assert directory.events(name, 0) == [Event("{}", "a"), Event("{}", "b")]
    server.client.set(shared.key_of("command", "alice", "resp_u"), b"explode")
    assert directory.beat([], {name: {}}) == {}
    directory.forget(name)


def test_response_larger_than_the_store_is_not_stored(server: RedisServer) -> None:
    assert not SharedStore(Connection(server.url), max_bytes=100).put(KEPT)


def test_redis_keys_reveal_nothing_and_expire(private_server: RedisServer) -> None:
    connection = Connection(private_server.url, 3600)
    SharedStore(connection).put(KEPT)
    Replay(2**20, SharedTurns(connection)).view("model\0alice").remember(OUTPUT)
    directory, response = Directory(connection), ResourceKey("resp_1", "alice")
    directory.beat([], {response: {0: DONE}})

    async def send_cancel() -> dict[str, int]:
        sending = asyncio.ensure_future(directory.send(response, Command.CANCEL, 30.0))
        await asyncio.sleep(0.2)
        lifetimes_by_key = {
            name.decode(): private_server.client.ttl(name)
            for name in private_server.client.scan_iter()
        }
        directory.ended(response)
        assert await sending
        return lifetimes_by_key

    ttls = asyncio.run(send_cancel())
    kinds = {name.split(":")[1] for name in ttls}
    assert kinds == {"encryption-key", "response", "turn", "run", "log", "command"}
    for name in ttls:
        assert "alice" not in name and "resp_1" not in name
        if not name.endswith("encryption-key"):
            assert 0 < ttls[name] <= 3600


# --- Generated turns

IDS = tuple(range(1000, 1010))
OUTPUT = Output((User("Hi"),), (Answer("Hello."),), (200_006, *IDS, 200_002), (0,), 12)


def test_turn_of_other_server_is_replayed(server: RedisServer) -> None:
    views = [
        Replay(2**20, SharedTurns(Connection(server.url))).view(scope)
        for scope in ("model\0alice", "model\0alice", "model\0bob")
    ]
    views[0].remember(OUTPUT)
    history = (User("Hi"), Answer("Hello."), User("And?"))
    turns = [[turn for _, turn in view.history(history)] for view in views]
    assert turns[0] == turns[1] and turns[1][1] is not None
    assert turns[1][1].spans[0][1:-1] == IDS
    assert turns[2] == [None, None, None]
    assert all(view.blocks for view in views)


def test_history_needs_one_redis_request(server: RedisServer) -> None:
    connection = Connection(server.url)
    lookups = 0

    class Counting(SharedTurns):
        def find(self, keys):  # type: ignore[no-untyped-def]
            nonlocal lookups
            lookups += 1
            return super().find(keys)

    view = Replay(2**20, Counting(connection)).view("m")
    messages = [User("a"), Answer("b")] * 100
    assert len(list(view.history(messages))) == 200
    assert lookups == 1


# --- The key of encrypted reasoning


def new_front_end() -> FrontEnd:
    """The front end of a new server."""
    settings = ServerSettings.read()
    host: Any = SimpleNamespace(server_settings=settings)
    return FrontEnd(host, open_sharing(settings, connect(settings)))


def test_servers_with_one_redis_share_the_encryption_key(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, server.url)
    monkeypatch.delenv("VLLM_MLX_HARMONY_SEAL_KEY", raising=False)
    first, second = new_front_end().cipher("alice"), new_front_end().cipher("alice")
    assert second.decrypt(first.encrypt("because")) == "because"
    assert first.decrypt(first.encrypt("because")) == "because"


def test_environment_key_takes_precedence(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, server.url)
    monkeypatch.setenv("VLLM_MLX_HARMONY_SEAL_KEY", "secret")
    encrypted = new_front_end().cipher("alice").encrypt("because")
    monkeypatch.delenv(STORE_VARIABLE)
    assert new_front_end().cipher("alice").decrypt(encrypted) == "because"


# --- The background of other servers


def test_commands_and_events_reach_the_other_server(server: RedisServer) -> None:
    here, there = Directory(Connection(server.url)), Directory(Connection(server.url))
    run, second = ResourceKey("resp_1", "alice"), ResourceKey("resp_2", "alice")
    seed = AnswerKey("0a1b", "alice")
    first = [Event('{"n":0}', "response.created"), Event('{"n":1}', "response.queued")]
    assert not there.runs(run)
    assert here.beat([seed], {run: dict(enumerate(first)), second: {}}) == {}
    assert there.runs(run) and not there.runs(ResourceKey("resp_1", "bob"))
    assert there.events(run, 0) == first

    async def send_commands() -> list[bool]:
        sends = [
            asyncio.ensure_future(there.send(second, Command.DELETE, 30.0)),
            asyncio.ensure_future(there.send(seed, Command.CANCEL, 30.0)),
        ]
        await asyncio.sleep(0.2)
        commands = here.beat([seed], {run: {2: DONE}, second: {}})
        assert commands == {second: Command.DELETE, seed: Command.CANCEL}
        here.forget(second)
        here.ended(seed)
        return await asyncio.gather(*sends)

    assert asyncio.run(send_commands()) == [True, True]
    assert not asyncio.run(there.send(ResourceKey("resp_3", "alice"), Command.CANCEL, 0.1))
    assert there.events(run, 1) == [first[1], DONE]
    here.ended(run)
    assert not there.runs(run) and there.events(run, 2) == [DONE]
    assert here.beat([seed], {second: {}}) == {}
    assert there.events(second, 0) == []
    here.forget(second)
    here.forget(run)
    assert not there.has(run)


class GeneratedResponse:
    """A background response with its first events, and the last one if it is ``done``."""

    numbered_events = BackgroundResponse.numbered_events

    def __init__(self, key: str, *, finished: bool) -> None:
        self.key, self.done, self.deleted = ResourceKey(key, "alice"), finished, False
        self.events = [Event(f'{{"n":{n}}}', "response.created") for n in range(3)]
        self.events += [DONE] * finished


@pytest.mark.parametrize("lost", ["beat", "ended"])
def test_events_are_stored_once_when_reply_is_lost(server: RedisServer, lost: str) -> None:
    """Redis executes the command, but the server does not receive the reply."""
    responses: list[Any] = [
        GeneratedResponse(f"resp_{n}", finished=lost == "ended") for n in range(2)
    ]
    names = [response.key for response in responses]

    class Lossy(Directory):
        def beat(self, *arguments: Any) -> Any:
            reply = super().beat(*arguments)
            if lost == "beat":
                raise PeersError("timed out")
            return reply

        def ended(self, name: Any) -> None:
            raise PeersError("timed out")

    directory = Directory(Connection(server.url))
    heartbeat = Heartbeat(Lossy(Connection(server.url)), Answers())
    heartbeat._sent = dict.fromkeys(responses, 0)
    with pytest.raises(PeersError):
        asyncio.run(heartbeat._beat([]))
    heartbeat._directory = directory
    asyncio.run(heartbeat._beat([]))
    for response, name in zip(responses, names, strict=True):
        assert directory.events(name, 0) == response.events
        assert directory.runs(name) == (not response.done)
        directory.forget(name)


class CountingStore(SharedStore):
    reads = 0

    def get(self, key: ResourceKey) -> StoredResponse | None:
        self.reads += 1
        return super().get(key)


@pytest.mark.parametrize("seconds", [1, 0])
def test_follower_at_another_server_gets_heartbeats(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """A heartbeat has the number of the last event, so that the follower can reconnect after it.
    While nothing is generated, the response is read for heartbeats only."""
    connection = Connection(server.url)
    directory, stored = Directory(connection), CountingStore(connection)
    name = KEPT.key
    created = Event('{"sequence_number":0}', "response.created")
    monkeypatch.setattr(answer_directory, "EXPIRY_SECONDS", 3600)  # however slow the machine is
    sharing = RedisSharing(connection)
    sharing.store = stored
    responses = Responses(sharing, ServerSettings(ping_seconds=seconds))
    stored.put(replace(KEPT, document={**KEPT.document, "status": "in_progress"}))

    async def follow_response() -> list[Event]:
        directory.beat([], {name: {0: created}})
        stream = await responses.follow(replace(KEPT, id=name.id), 0)
        events = [await anext(stream)]
        next_event = asyncio.ensure_future(anext(stream))
        for _ in range(8):
            directory.beat([], {name: {}})
            await asyncio.sleep(0.25)
        if seconds:
            events.append(await next_event)
            next_event = asyncio.ensure_future(anext(stream))
        directory.beat([], {name: {1: DONE}})
        while DONE not in events:
            events.append(await next_event)
            next_event = asyncio.ensure_future(anext(stream))
        with pytest.raises(StopAsyncIteration):
            await next_event
        return events

    events = asyncio.run(follow_response())
    first, *running, last = events
    assert (first, last) == (created, DONE) and bool(running) == bool(seconds)
    assert {event.name for event in running} <= {"response.in_progress"}
    for event in running:
        document = json.loads(event.data)
        assert document["sequence_number"] == 0 and document["response"]["id"] == KEPT.id
    assert stored.reads == len(running)
    directory.forget(name)


@pytest.mark.parametrize(
    ("status", "last"), [("completed", None), ("failed", "response.failed"), (None, "error")]
)
def test_follower_gets_the_end_without_the_last_events(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, status: str | None, last: str | None
) -> None:
    connection = Connection(server.url)
    directory, stored = Directory(connection), SharedStore(connection)
    name = ResourceKey(f"resp_{status}", KEPT.tenant)
    created = Event('{"sequence_number":0}', "response.created")
    sharing = RedisSharing(connection)
    sharing.store = stored
    responses = Responses(sharing, ServerSettings())
    directory.beat([], {name: {0: created}})
    directory.ended(name)
    if status:
        document = {**KEPT.document, "status": status}
        stored.put(replace(KEPT, id=name.id, document=document))

    async def follow_response() -> list[Event]:
        stream = await responses.follow(replace(KEPT, id=name.id), 0)
        return [event async for event in stream]

    events = asyncio.run(follow_response())
    assert events[0] == created and events[-1] == DONE
    assert [event.name for event in events[1:-1]] == ([last] if last else [])
    directory.forget(name)


# --- Rate limits


def test_gateways_count_together(server: RedisServer) -> None:
    first, second = Connection(server.url), Connection(server.url)
    midnight = 500.0 * DAY
    counters = KeyLimits(requests_per_minute=4, tokens_per_day=100).quotas(requests=1, tokens=30)
    rounds = [add(gateway, "carol", counters, midnight + 10) for gateway in (first, second) * 2]
    assert [[budget.remaining for budget in budgets] for budgets in rounds] == [
        [3, 70],
        [2, 40],
        [1, 10],
        [0, 0],
    ]
    assert [bool(budget.wait) for budget in rounds[-1]] == [False, True]
    assert add(second, "dave", counters, midnight + 10)[0].remaining == 3
    # Half of the four requests of the previous minute count, and none of the day's tokens passes.
    budgets = add(first, "carol", counters, midnight + 90)
    assert (budgets[0].remaining, budgets[0].wait, budgets[1].wait) == (1, 0, DAY - 90)
    assert [budget.remaining for budget in add(first, "carol", counters, midnight + DAY)] == [3, 70]


def test_gateways_count_running_requests_together(server: RedisServer) -> None:
    """Slots of a gateway that died expire after a minute; renewed slots stay."""
    first, second = Connection(server.url), Connection(server.url)
    assert [
        acquire_slot(connection, "erin", str(connection is first), 100.0)
        for connection in (first, second)
    ] == [1, 2]
    renew(first, (("True", "erin"),), 150.0)
    assert acquire_slot(second, "erin", "new", 165.0) == 2
    remove(second, "erin", "new")
    renew(second, (("new", "erin"),), 166.0)  # the request ended while renewals were in flight
    assert acquire_slot(first, "erin", "last", 170.0) == 2
    assert acquire_slot(first, "frank", "another", 170.0) == 1


LIMITED = {"keys": {"eve": {"key": "key-of-eve", "requests_per_minute": 2}}}


def test_gateway_counts_alone_while_redis_is_down(
    private_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, private_server.url)
    settings = load({"engines": ["http://nowhere:1"], "model": "m", **LIMITED}, {})
    header = (b"authorization", b"Bearer key-of-eve")
    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": [header]}
    connection = HTTPConnection(scope)

    async def is_refused(gateway: Gateway) -> bool:
        try:
            await gateway.check_rate_limit(connection)
        except HTTPException as error:
            return error.status_code == 429 and int((error.headers or {})["Retry-After"]) > 0
        return False

    async def are_refused(*gateways: Gateway) -> list[bool]:
        return [await is_refused(gateway) for gateway in gateways]

    first, second, single = Gateway(settings), Gateway(settings), Gateway(settings)
    assert asyncio.run(are_refused(first, second, first, second)) == [False, False, True, True]
    private_server.stop()
    assert asyncio.run(are_refused(single, single, single)) == [False, False, True]


# --- Redis away


@pytest.mark.parametrize("fault", ["stopped", "frozen"])
def test_lost_redis_delays_no_request_and_is_found_again(
    private_server: RedisServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(shared, "time", clock)
    connection = Connection(private_server.url)
    responses, turns = SharedStore(connection), SharedTurns(connection)
    view = Replay(2**20, turns).view("m")
    assert responses.put(KEPT)
    private_server.stop() if fault == "stopped" else private_server.freeze()
    with pytest.raises(StoreError) as raised:  # without a limit, this would wait for ever
        responses.get(KEPT.key)
    assert raised.value.status == 503 and raised.value.retry_after == 2
    clock.now += shared.PAUSE - 0.01
    commands: list[object] = []
    for _ in range(100):  # no other request waits
        with pytest.raises(PeersError):
            connection.call(commands.append)
        with pytest.raises(StoreError):
            responses.put(KEPT)
        view.remember(OUTPUT)  # raises nothing
        assert [turn for _, turn in view.history((User("?"), Answer("!")))] == [None, None]
    assert not commands
    private_server.start() if fault == "stopped" else private_server.thaw()
    responses_found: list[StoredResponse | None] = []

    def answers() -> bool:
        clock.now += shared.PAUSE
        with suppress(StoreError):
            responses_found.append(responses.get(KEPT.key))
        return bool(responses_found)

    wait_until(answers, "Redis to be found again")
    assert responses_found == [None if fault == "stopped" else KEPT]
    assert responses.put(KEPT) and responses.get(KEPT.key) == KEPT
    assert Connection(private_server.url).encryption_key == connection.encryption_key


def test_full_redis_does_not_stop_answers(private_server: RedisServer) -> None:
    responses = SharedStore(Connection(private_server.url))
    assert responses.put(KEPT)
    private_server.client.config_set("maxmemory", "1")
    with pytest.raises(StoreError, match="maxmemory"):
        responses.put(KEPT)
    assert responses.get(KEPT.key) == KEPT  # nothing is paused


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://127.0.0.1:1/0", "VLLM_MLX_HARMONY_STORE=redis://127.0.0.1:1/0 cannot be used"),
        ("redis://:secret@127.0.0.1:1/0", "=redis://127.0.0.1:1/0 cannot be used"),
        ("redis://127.0.0.1:no/0", "cannot be used"),
    ],
)
def test_missing_redis_is_reported_at_startup(
    url: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, url)
    with pytest.raises(HostError, match=expected) as raised:
        new_front_end()
    assert "secret" not in raised.value.message


def test_invalid_encryption_key_is_rejected(private_server: RedisServer) -> None:
    private_server.client.set("vllm-mlx-harmony:encryption-key", b"short")
    with pytest.raises(PeersError, match="is not a key"):
        Connection(private_server.url)
