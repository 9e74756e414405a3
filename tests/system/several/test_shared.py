"""What servers share in a real Redis: responses, generated turns, a key; and Redis away."""

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
from fake_engines import until
from real_redis import RedisServer
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from vllm_mlx_harmony.core.errors import HostError, StoreError
from vllm_mlx_harmony.core.replay import Output, Replay
from vllm_mlx_harmony.core.turn import Answer, Call, User
from vllm_mlx_harmony.gateway.host import Gateway
from vllm_mlx_harmony.gateway.limits import DAY, KeyLimits
from vllm_mlx_harmony.gateway.settings import load
from vllm_mlx_harmony.gateway.shared_limit import acquire_slot, add, remove, renew
from vllm_mlx_harmony.protocols.events import DONE, Event
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.front_end import FrontEnd, open_sharing
from vllm_mlx_harmony.server.peers import answers as peers_answers
from vllm_mlx_harmony.server.peers import connection as shared
from vllm_mlx_harmony.server.peers.answers import Command, Directory, Heartbeat
from vllm_mlx_harmony.server.peers.connection import Connection, PeersError, connect
from vllm_mlx_harmony.server.peers.sharing import RedisSharing
from vllm_mlx_harmony.server.peers.store import SharedStore
from vllm_mlx_harmony.server.peers.turns import SharedTurns
from vllm_mlx_harmony.server.settings import STORE_VARIABLE, ServerSettings
from vllm_mlx_harmony.server.storage.responses import Responses
from vllm_mlx_harmony.server.storage.store import StoredResponse

KEPT = StoredResponse(
    "resp_1",
    {"id": "resp_1", "output": [{"id": "msg_1", "text": "Täg"}]},
    [{"id": "msg_2", "role": "user"}],
    (User("Hi"), Call("call_1", "f", '{"a":1}'), Answer("Täg")),
    "alice",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may stop."""
    with RedisServer(tmp_path) as started:
        yield started


# --- Responses


def test_stored_response_is_found_by_the_other_server(server: RedisServer) -> None:
    one, other = SharedStore(Connection(server.url)), SharedStore(Connection(server.url))
    kept = replace(KEPT, document={"text": "x" * 100_000})
    assert one.put(kept)
    assert other.get("resp_1", "alice") == kept
    assert other.get("resp_1", "bob") is None
    assert not other.delete("resp_1", "bob")
    assert other.delete("resp_1", "alice")
    assert one.get("resp_1", "alice") is None


@pytest.mark.parametrize(
    "entry", [b"", b"nothing", zlib.compress(b"{"), zlib.compress(b"[1,2]"), zlib.compress(b"null")]
)
def test_unreadable_entry_is_absent(server: RedisServer, entry: bytes) -> None:
    """One of another version, or of another program."""
    store = SharedStore(Connection(server.url))
    assert store.put(KEPT)
    server.client.set(shared.key_of("response", KEPT.tenant, KEPT.id), entry)
    assert store.get(KEPT.id, KEPT.tenant) is None
    assert store.put(KEPT) and store.get(KEPT.id, KEPT.tenant) == KEPT


def test_unreadable_events_and_commands_are_absent(server: RedisServer) -> None:
    known, name = Directory(Connection(server.url)), AnswerKey("resp_u", "alice")
    known.beat([], {name: {0: Event("{}", "a"), 1: Event("{}", "b")}})
    server.client.zadd(shared.key_of("log", "alice", "resp_u"), {b"nonsense": 2, b"3": 3})
    assert known.events(name, 0) == [Event("{}", "a"), Event("{}", "b")]
    server.client.set(shared.key_of("command", "alice", "resp_u"), b"explode")
    assert known.beat([], {name: {}}) == {}
    known.forget(name)


def test_response_larger_than_the_store_is_not_stored(server: RedisServer) -> None:
    assert not SharedStore(Connection(server.url), max_bytes=100).put(KEPT)


def test_keys_say_nothing_and_expire(own: RedisServer) -> None:
    connection = Connection(own.url, 3600)
    SharedStore(connection).put(KEPT)
    Replay(2**20, SharedTurns(connection)).view("model\0alice").remember(OUTPUT)
    directory, response = Directory(connection), AnswerKey("resp_1", "alice")
    directory.beat([], {response: {0: DONE}})

    async def while_sending() -> dict[str, int]:
        sending = asyncio.ensure_future(directory.send(response, Command.CANCEL, 30.0))
        await asyncio.sleep(0.2)
        found = {name.decode(): own.client.ttl(name) for name in own.client.scan_iter()}
        directory.ended(response)
        assert await sending
        return found

    lifetimes = asyncio.run(while_sending())
    kinds = {name.split(":")[1] for name in lifetimes}
    assert kinds == {"encryption-key", "response", "turn", "run", "log", "command"}
    for name in lifetimes:
        assert "alice" not in name and "resp_1" not in name
        if not name.endswith("encryption-key"):
            assert 0 < lifetimes[name] <= 3600


# --- Generated turns

IDS = tuple(range(1000, 1010))
OUTPUT = Output((User("Hi"),), (Answer("Hello."),), (200_006, *IDS, 200_002), (0,), 12)


def test_a_turn_of_another_server_is_placed_again(server: RedisServer) -> None:
    views = [
        Replay(2**20, SharedTurns(Connection(server.url))).view(scope)
        for scope in ("model\0alice", "model\0alice", "model\0bob")
    ]
    views[0].remember(OUTPUT)
    history = (User("Hi"), Answer("Hello."), User("And?"))
    found = [[turn for _, turn in view.history(history)] for view in views]
    assert found[0] == found[1] and found[1][1] is not None
    assert found[1][1].spans[0][1:-1] == IDS
    assert found[2] == [None, None, None]
    assert all(view.blocks for view in views)


def test_a_history_asks_redis_once(server: RedisServer) -> None:
    connection = Connection(server.url)
    asked = 0

    class Counting(SharedTurns):
        def find(self, keys):  # type: ignore[no-untyped-def]
            nonlocal asked
            asked += 1
            return super().find(keys)

    view = Replay(2**20, Counting(connection)).view("m")
    messages = [User("a"), Answer("b")] * 100
    assert len(list(view.history(messages))) == 200
    assert asked == 1


# --- The key of encrypted reasoning


def started() -> FrontEnd:
    """That of a server that has just started."""
    settings = ServerSettings.read()
    host: Any = None
    return FrontEnd(host, settings, open_sharing(settings, connect(settings)))


def test_servers_with_one_redis_share_the_encryption_key(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, server.url)
    monkeypatch.delenv("VLLM_MLX_HARMONY_SEAL_KEY", raising=False)
    one, other = started().cipher("alice"), started().cipher("alice")
    assert other.decrypt(one.encrypt("because")) == "because"
    assert one.decrypt(one.encrypt("because")) == "because"


def test_the_environments_key_comes_first(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, server.url)
    monkeypatch.setenv("VLLM_MLX_HARMONY_SEAL_KEY", "secret")
    encrypted = started().cipher("alice").encrypt("because")
    monkeypatch.delenv(STORE_VARIABLE)
    assert started().cipher("alice").decrypt(encrypted) == "because"


# --- The background of other servers


def test_commands_and_events_reach_the_other_server(server: RedisServer) -> None:
    here, there = Directory(Connection(server.url)), Directory(Connection(server.url))
    run, second = AnswerKey("resp_1", "alice"), AnswerKey("resp_2", "alice")
    seed = AnswerKey("0a1b", "alice")
    first = [Event('{"n":0}', "response.created"), Event('{"n":1}', "response.queued")]
    assert not there.runs(run)
    assert here.beat([seed], {run: dict(enumerate(first)), second: {}}) == {}
    assert there.runs(run) and not there.runs(AnswerKey("resp_1", "bob"))
    assert there.events(run, 0) == first

    async def cancelled_and_deleted() -> list[bool]:
        sending = [
            asyncio.ensure_future(there.send(second, Command.DELETE, 30.0)),
            asyncio.ensure_future(there.send(seed, Command.CANCEL, 30.0)),
        ]
        await asyncio.sleep(0.2)
        commands = here.beat([seed], {run: {2: DONE}, second: {}})
        assert commands == {second: Command.DELETE, seed: Command.CANCEL}
        here.forget(second)
        here.ended(seed)
        return await asyncio.gather(*sending)

    assert asyncio.run(cancelled_and_deleted()) == [True, True]
    assert not asyncio.run(there.send(AnswerKey("resp_3", "alice"), Command.CANCEL, 0.1))
    assert there.events(run, 1) == [first[1], DONE]
    here.ended(run)
    assert not there.runs(run) and there.events(run, 2) == [DONE]
    assert here.beat([seed], {second: {}}) == {}
    assert there.events(second, 0) == []
    here.forget(second)
    here.forget(run)
    assert not there.has(run)


class Generated:
    """A background response with its first events, and the last one if it is ``done``."""

    def __init__(self, key: str, *, done: bool) -> None:
        self.key, self.done, self.deleted = AnswerKey(key, "alice"), done, False
        self.events = [Event(f'{{"n":{n}}}', "response.created") for n in range(3)]
        self.events += [DONE] * done


@pytest.mark.parametrize("lost", ["beat", "ended"])
def test_events_are_stored_once_although_a_reply_is_lost(server: RedisServer, lost: str) -> None:
    """Redis carries the command out, but the server does not know."""
    generated: list[Any] = [Generated(f"resp_{n}", done=lost == "ended") for n in range(2)]
    names = [each.key for each in generated]

    class Lossy(Directory):
        def beat(self, *given: Any) -> Any:
            found = super().beat(*given)
            if lost == "beat":
                raise PeersError("timed out")
            return found

        def ended(self, name: Any) -> None:
            raise PeersError("timed out")

    known = Directory(Connection(server.url))
    heartbeat = Heartbeat(Lossy(Connection(server.url)))
    heartbeat._sent = dict.fromkeys(generated, 0)
    with pytest.raises(PeersError):
        asyncio.run(heartbeat._beat(Answers(), []))
    heartbeat._directory = known
    asyncio.run(heartbeat._beat(Answers(), []))
    for each, name in zip(generated, names, strict=True):
        assert known.events(name, 0) == each.events
        assert known.runs(name) == (not each.done)
        known.forget(name)


class CountingStore(SharedStore):
    reads = 0

    def get(self, key: str, tenant: str) -> StoredResponse | None:
        self.reads += 1
        return super().get(key, tenant)


@pytest.mark.parametrize("seconds", [1, 0])
def test_follower_at_another_server_gets_heartbeats(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """With the number of the last event that it got, so that it can reconnect behind that one. And
    while nothing is generated, the response is read for these events alone."""
    connection = Connection(server.url)
    known, stored = Directory(connection), CountingStore(connection)
    name = AnswerKey(KEPT.id, KEPT.tenant)
    created = Event('{"sequence_number":0}', "response.created")
    monkeypatch.setattr(peers_answers, "EXPIRY_SECONDS", 3600)  # however slow the machine is
    sharing = RedisSharing(connection)
    sharing.store = stored
    responses = Responses(sharing)
    stored.put(replace(KEPT, document={**KEPT.document, "status": "in_progress"}))

    async def following() -> list[Event]:
        known.beat([], {name: {0: created}})
        events = await responses.follow(replace(KEPT, id=name.id), 0, seconds)
        found = [await anext(events)]
        more = asyncio.ensure_future(anext(events))
        for _ in range(8):
            known.beat([], {name: {}})
            await asyncio.sleep(0.25)
        if seconds:
            found.append(await more)
            more = asyncio.ensure_future(anext(events))
        known.beat([], {name: {1: DONE}})
        while DONE not in found:
            found.append(await more)
            more = asyncio.ensure_future(anext(events))
        with pytest.raises(StopAsyncIteration):
            await more
        return found

    found = asyncio.run(following())
    first, *running, last = found
    assert (first, last) == (created, DONE) and bool(running) == bool(seconds)
    assert {event.name for event in running} <= {"response.in_progress"}
    for event in running:
        document = json.loads(event.data)
        assert document["sequence_number"] == 0 and document["response"]["id"] == KEPT.id
    assert stored.reads == len(running)
    known.forget(name)


@pytest.mark.parametrize(
    ("status", "last"), [("completed", None), ("failed", "response.failed"), (None, "error")]
)
def test_follower_gets_the_end_without_the_last_events(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, status: str | None, last: str | None
) -> None:
    connection = Connection(server.url)
    known, stored = Directory(connection), SharedStore(connection)
    name = AnswerKey(f"resp_{status}", KEPT.tenant)
    created = Event('{"sequence_number":0}', "response.created")
    sharing = RedisSharing(connection)
    sharing.store = stored
    responses = Responses(sharing)
    known.beat([], {name: {0: created}})
    known.ended(name)
    if status:
        document = {**KEPT.document, "status": status}
        stored.put(replace(KEPT, id=name.id, document=document))

    async def followed() -> list[Event]:
        events = await responses.follow(replace(KEPT, id=name.id), 0, 5)
        return [event async for event in events]

    found = asyncio.run(followed())
    assert found[0] == created and found[-1] == DONE
    assert [event.name for event in found[1:-1]] == ([last] if last else [])
    known.forget(name)


# --- Rate limits


def test_gateways_count_together(server: RedisServer) -> None:
    one, other = Connection(server.url), Connection(server.url)
    midnight = 500.0 * DAY
    counters = KeyLimits(requests_per_minute=4, tokens_per_day=100).quotas(requests=1, tokens=30)
    seen = [add(each, "carol", counters, midnight + 10) for each in (one, other) * 2]
    assert [[each.remaining for each in budgets] for budgets in seen] == [
        [3, 70],
        [2, 40],
        [1, 10],
        [0, 0],
    ]
    assert [bool(each.wait) for each in seen[-1]] == [False, True]
    assert add(other, "dave", counters, midnight + 10)[0].remaining == 3
    # Half of the four requests of the previous minute count, and none of the day's tokens passes.
    later = add(one, "carol", counters, midnight + 90)
    assert (later[0].remaining, later[0].wait, later[1].wait) == (1, 0, DAY - 90)
    assert [each.remaining for each in add(one, "carol", counters, midnight + DAY)] == [3, 70]


def test_running_requests_of_all_gateways(server: RedisServer) -> None:
    """Those of a gateway that died are gone a minute later; those that are renewed are not."""
    one, other = Connection(server.url), Connection(server.url)
    assert [acquire_slot(each, "erin", str(each is one), 100.0) for each in (one, other)] == [1, 2]
    renew(one, (("True", "erin"),), 150.0)
    assert acquire_slot(other, "erin", "new", 165.0) == 2
    remove(other, "erin", "new")
    renew(other, (("new", "erin"),), 166.0)  # it ended while renewals were on their way
    assert acquire_slot(one, "erin", "last", 170.0) == 2
    assert acquire_slot(one, "frank", "another", 170.0) == 1


LIMITED = {"keys": {"eve": {"key": "key-of-eve", "requests_per_minute": 2}}}


def test_a_gateway_counts_by_itself_while_redis_is_away(
    own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, own.url)
    settings = load({"engines": ["http://nowhere:1"], "model": "m", **LIMITED}, {})
    header = (b"authorization", b"Bearer key-of-eve")
    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": [header]}
    connection = HTTPConnection(scope)

    async def refused(gateway: Gateway) -> bool:
        try:
            await gateway.check_rate_limit(connection)
        except HTTPException as error:
            return error.status_code == 429 and int((error.headers or {})["Retry-After"]) > 0
        return False

    async def together(*gateways: Gateway) -> list[bool]:
        return [await refused(gateway) for gateway in gateways]

    one, other, alone = Gateway(settings), Gateway(settings), Gateway(settings)
    assert asyncio.run(together(one, other, one, other)) == [False, False, True, True]
    own.stop()
    assert asyncio.run(together(alone, alone, alone)) == [False, False, True]


# --- Redis away


@pytest.mark.parametrize("fault", ["stopped", "frozen"])
def test_lost_redis_delays_nobody_and_is_found_again(
    own: RedisServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(shared, "time", clock)
    connection = Connection(own.url)
    responses, turns = SharedStore(connection), SharedTurns(connection)
    view = Replay(2**20, turns).view("m")
    assert responses.put(KEPT)
    own.stop() if fault == "stopped" else own.freeze()
    with pytest.raises(StoreError) as raised:  # without a limit, this would wait for ever
        responses.get("resp_1", "alice")
    assert raised.value.status == 503 and raised.value.retry_after == 2
    clock.now += shared.PAUSE - 0.01
    commands: list[object] = []
    for _ in range(100):  # nobody else waits at all
        with pytest.raises(PeersError):
            connection.call(commands.append)
        with pytest.raises(StoreError):
            responses.put(KEPT)
        view.remember(OUTPUT)  # raises nothing
        assert [turn for _, turn in view.history((User("?"), Answer("!")))] == [None, None]
    assert not commands
    own.start() if fault == "stopped" else own.thaw()
    found: list[StoredResponse | None] = []

    def answers() -> bool:
        clock.now += shared.PAUSE
        with suppress(StoreError):
            found.append(responses.get("resp_1", "alice"))
        return bool(found)

    until(answers, "Redis to be found again")
    assert found == [None if fault == "stopped" else KEPT]
    assert responses.put(KEPT) and responses.get("resp_1", "alice") == KEPT
    assert Connection(own.url).encryption_key == connection.encryption_key


def test_full_redis_does_not_stop_answers(own: RedisServer) -> None:
    responses = SharedStore(Connection(own.url))
    assert responses.put(KEPT)
    own.client.config_set("maxmemory", "1")
    with pytest.raises(StoreError, match="maxmemory"):
        responses.put(KEPT)
    assert responses.get("resp_1", "alice") == KEPT  # nothing is paused


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
        started()
    assert "secret" not in raised.value.message


def test_invalid_encryption_key_is_refused(own: RedisServer) -> None:
    own.client.set("vllm-mlx-harmony:encryption-key", b"short")
    with pytest.raises(PeersError, match="is not a key"):
        Connection(own.url)
