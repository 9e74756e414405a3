"""Routes on the host's real application, without a model: who answers, with what, and cleanup."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm_mlx")

from fastapi import HTTPException
from loops import run
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from vllm_mlx import server
from vllm_mlx.engine.base import GenerationOutput

from vllm_mlx_harmony.core.deltas import Delta, Finished, Started, Usage
from vllm_mlx_harmony.core.errors import HarmonyFailure, HostError, OutputError, RequestError
from vllm_mlx_harmony.engine_api.engine import GenerationSettings, Step
from vllm_mlx_harmony.host import adapter, contract
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.protocols.events import HEARTBEAT, Event
from vllm_mlx_harmony.server import serving
from vllm_mlx_harmony.server.answer import Answer
from vllm_mlx_harmony.server.answers import AnswerKey, Answers
from vllm_mlx_harmony.server.endpoint import CLIENT_CLOSED, error_response, failure_of
from vllm_mlx_harmony.server.front_end import install
from vllm_mlx_harmony.server.generation import Job
from vllm_mlx_harmony.server.host import Deadline
from vllm_mlx_harmony.server.streams import EventStream

PATH = "/v1/chat/completions"
ANSWERS = Answers()


class Foreign:
    """A model that is not Harmony, as an engine."""

    is_mllm = False
    model_name = "foreign"
    tokenizer = SimpleNamespace()
    preserve_native_tool_format = False

    async def chat(self, **_: Any) -> GenerationOutput:
        return GenerationOutput("Bonjour.", prompt_tokens=3, completion_tokens=2)

    async def stream_chat(self, **_: Any) -> AsyncIterator[GenerationOutput]:
        for n, word in enumerate(("Bon", "jour", "."), start=1):
            done = n == 3
            yield GenerationOutput(
                word, new_text=word, completion_tokens=n, finished=done, prompt_tokens=3
            )


@pytest.fixture
def _foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_engine", Foreign())
    monkeypatch.setattr(server, "_model_name", "foreign")
    monkeypatch.setattr(server.time, "time", lambda: 1_754_352_000.0)
    monkeypatch.setattr(server.uuid, "uuid4", lambda: SimpleNamespace(hex="f" * 32))


@pytest.fixture
def _active() -> Iterator[None]:
    contract.activate()
    yield
    contract.deactivate()


@asynccontextmanager
async def application() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        yield client


def send(content: bytes, path: str = PATH, **headers: str) -> httpx.Response:
    async def post() -> httpx.Response:
        async with application() as client:
            kind = {"content-type": "application/json"}
            return await client.post(path, content=content, headers={**kind, **headers})

    return asyncio.run(post())


def get(path: str, **headers: str) -> httpx.Response:
    async def fetch() -> httpx.Response:
        async with application() as client:
            return await client.get(path, headers=headers)

    return asyncio.run(fetch())


def chat_body(**fields: Any) -> bytes:
    user = {"role": "user", "content": "Bonjour ?"}
    return json.dumps({"model": "foreign", "messages": [user], **fields}).encode()


# --- Models that are not Harmony.

BODIES = [
    pytest.param(chat_body(), id="whole"),
    pytest.param(chat_body(stream=True), id="streamed"),
    pytest.param(chat_body(stream=True, stream_options={"include_usage": True}), id="with usage"),
    pytest.param(chat_body(messages="x"), id="not valid"),
    pytest.param(chat_body(temperature="hot"), id="a field that is not valid"),
    pytest.param(chat_body(n=9, echo=True), id="what ours would refuse"),
    pytest.param(chat_body(max_tokens=10**9), id="over the limit"),
    pytest.param(b'  {"model" : "foreign", "messages":[] }\n', id="white space"),
]


def without_id(response: httpx.Response) -> bytes:
    """The body without the id, which is new in each response."""
    return b"".join(
        part for part in response.content.split(b'"') if not part.startswith(b"chatcmpl-")
    )


@pytest.mark.usefixtures("_foreign")
@pytest.mark.parametrize("body", BODIES)
def test_host_answers_for_its_other_models_unchanged(body: bytes) -> None:
    theirs = send(body)
    contract.activate()
    try:
        ours = send(body)
    finally:
        contract.deactivate()
    assert ours.status_code == theirs.status_code
    assert ours.headers.items() == theirs.headers.items()
    assert without_id(ours) == without_id(theirs)


@pytest.mark.usefixtures("_foreign", "_active")
@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/responses/compact"])
def test_our_routes_are_404_for_other_models(path: str) -> None:
    response = send(json.dumps({"model": "foreign", "input": "Bonjour ?"}).encode(), path)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


@pytest.mark.usefixtures("_foreign", "_active")
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", PATH, "POST"),
        ("GET", "/v1/responses", "POST"),
        ("PATCH", "/v1/responses/resp_1", "DELETE, GET"),
        ("GET", "/v1/requests/chatcmpl-1/cancel", "POST"),
        ("GET", "/v1/requests/chatcmpl-1", "DELETE"),
        ("DELETE", "/v1/models/a", "GET"),
        ("GET", "/v1/messages", "POST"),
        ("DELETE", "/v1/messages/count_tokens", "POST"),
    ],
)
def test_wrong_method_is_refused_in_the_shape_of_its_api(
    method: str, path: str, allowed: str
) -> None:
    async def send_request() -> httpx.Response:
        async with application() as client:
            return await client.request(method, path)

    response = asyncio.run(send_request())
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    document = response.json()
    assert method in document["error"]["message"]
    assert document["error"]["type"] == "invalid_request_error"
    messages = path.startswith("/v1/messages")
    assert document.get("type") == ("error" if messages else None)
    assert ("code" in document["error"]) is not messages


RESP = "/v1/responses"
HALF = b"\\ud83d"
"""Half of a surrogate pair, escaped as in JSON."""


@pytest.mark.usefixtures("_foreign", "_active")
@pytest.mark.parametrize("half", [HALF, b"\xed\xa0\xbd"])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (PATH, b'{"model":"HALF","messages":[{"role":"user","content":"Hi"}]}', 404),
        ("/v1/messages", b'{"model":"HALF","max_tokens":9,"messages":[]}', 404),
        ("/v1/responses", b'{"model":"HALF","input":"Hi"}', 404),
        ("/v1/responses", b'{"model":"foreign","previous_response_id":"HALF","input":""}', 404),
        ("/v1/responses", b'{"model":"foreign","input":[{"type":"HALF"}]}', 400),
        (RESP, b'{"model":"foreign","input":[{"type":"item_reference","id":"HALF"}]}', 400),
        (
            RESP,
            b'{"model":"foreign","input":"","tools":[{"type":"function","name":[]}],"user":"HALF"}',
            400,
        ),
        ("/v1/responses/compact", b'{"model":"HALF","input":"Hi"}', 404),
        ("/v1/responses/input_tokens", b'{"model":"HALF","input":"Hi"}', 404),
        (PATH, b'{"model":"foreign","messages":[{"role":"HALF"}]}', 400),
        (PATH, b'{"model":"foreign","HALF":1e999,"messages":[]}', 400),
    ],
)
def test_half_a_surrogate_pair_gets_an_error_response(
    path: str, body: bytes, status: int, half: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as U+FFFD: a response that repeated it could not be encoded."""
    ours = SimpleNamespace(model="foreign", context_length=None, remote=False)
    monkeypatch.setattr(adapter, "engine_of", lambda _: ours)
    response = send(body.replace(b"HALF", half), path)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


@pytest.mark.usefixtures("_foreign", "_active")
def test_forwarded_request_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = server.RateLimiter(requests_per_minute=2, enabled=True)
    monkeypatch.setattr(server, "_rate_limiter", limiter)
    assert [send(chat_body()).status_code for _ in range(3)] == [200, 200, 429]


class Registry:
    """A registry of several models, which counts the leases that are held."""

    registered_model_names = ("foreign", "other")

    def __init__(self) -> None:
        self.leases = 0
        self.most_leases = 0
        self.acquired: list[str] = []
        self._loaded: dict[str, object] = {}
        self._registry = {
            name: SimpleNamespace(source=f"/models/{name}") for name in self.registered_model_names
        }

    def has_model(self, name: str) -> bool:
        return name in self.registered_model_names

    async def acquire(self, name: str) -> Any:
        self.acquired.append(name)
        self.leases += 1
        self.most_leases = max(self.most_leases, self.leases)
        return SimpleNamespace(engine=Foreign(), release=self.release)

    async def release(self) -> None:
        self.leases -= 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry()
    monkeypatch.setattr(server, "_model_manager", registry)
    monkeypatch.setattr(server, "_model_name", None)
    return registry


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("stream", [False, True])
def test_request_holds_one_lease_at_a_time(registry: Registry, stream: bool) -> None:
    assert send(chat_body(model="other", stream=stream)).status_code == 200
    assert (registry.acquired, registry.most_leases, registry.leases) == (["other", "other"], 1, 0)


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"model": 3}, 400, "model"),
    ],
)
def test_request_for_invalid_model_loads_nothing(
    registry: Registry, fields: dict[str, Any], status: int, param: str
) -> None:
    response = send(chat_body(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert registry.acquired == []


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATH, {"messages": []}),
        (PATH, {"messages": [{"role": "user", "content": "Hi"}], "temperature": "hot"}),
        (RESP, {"input": "Hi", "previous_response_id": "resp_0"}),
        ("/v1/responses/input_tokens", {"input": [{"type": "unknown"}]}),
        ("/v1/messages", {"messages": [], "max_tokens": 1}),
    ],
)
@pytest.mark.parametrize(
    ("harmony", "loaded", "loads"),
    [(True, False, False), (True, True, True), (False, False, True), (None, False, True)],
)
def test_invalid_request_loads_no_model(
    registry: Registry,
    path: str,
    fields: dict[str, Any],
    harmony: bool | None,
    loaded: bool,
    loads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it is a Harmony model: vllm-mlx has its own rules for others."""
    monkeypatch.setattr(adapter, "is_harmony_model", lambda source: harmony)
    registry._loaded = {"other": object()} if loaded else {}
    response = send(json.dumps({"model": "other", **fields}).encode(), path)
    assert loads or response.status_code in (400, 404)
    assert bool(registry.acquired) is loads


# --- Errors have the shape of the API, even those that the host raises.


@pytest.mark.usefixtures("_active")
def test_request_before_a_model_is_loaded_gets_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_engine", None)
    monkeypatch.setattr(server, "_model_name", None)
    response = send(chat_body())
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.usefixtures("_foreign", "_active")
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
def test_key_is_checked_first(monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]) -> None:
    monkeypatch.setattr(server, "_api_key", "sesame")
    for response in (send(b"{", **headers), get("/v1/models/foreign", **headers)):
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    right = {"authorization": "Bearer sesame"}
    assert get("/v1/models/foreign", **right).json()["id"] == "foreign"


@pytest.mark.parametrize(
    ("timeout", "used"), [(2, 2), (0.5, 0.5), (0, None), (10**400, None), (1e9, None), ("2", None)]
)
def test_invalid_timeout_is_ignored(timeout: object, used: float | None) -> None:
    assert serving._routing({"model": "m", "timeout": timeout}) == ("m", used)


def test_disconnect_while_sending_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    answer = error_response(chat.error_body, ClientDisconnect())
    assert answer.status_code == CLIENT_CLOSED
    assert not caplog.records


@pytest.mark.usefixtures("_foreign", "_active")
def test_models_path_may_end_in_a_slash() -> None:
    assert get("/v1/models/").json() == get("/v1/models").json()


@pytest.mark.usefixtures("_foreign", "_active")
def test_internal_error_is_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(adapter.VllmMlx, "acquire", broken)
    response = send(chat_body())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "a bug" not in response.text


ERRORS = [
    pytest.param(HTTPException(404, "no model"), 404, "model_not_found", "model", None, id="404"),
    pytest.param(HTTPException(504, "late"), 504, "timeout", None, None, id="504"),
    pytest.param(HTTPException(503, "not yet"), 503, "server_unavailable", None, "5", id="503"),
    pytest.param(
        HTTPException(429, "slow down", {"Retry-After": "7"}), 429, None, None, "7", id="429"
    ),
    pytest.param(
        HTTPException(503, {"error": "busy", "message": "later"}),
        503,
        "server_unavailable",
        None,
        "5",
        id="a detail with parts",
    ),
    pytest.param(RequestError("x", param="y"), 400, None, "y", None, id="ours"),
    pytest.param(HostError("x", retry_after=3), 503, "server_unavailable", None, "3", id="later"),
]


@pytest.mark.parametrize(("error", "status", "code", "param", "retry_after"), ERRORS)
def test_error_is_mapped_to_status_and_headers(
    error: Any, status: int, code: str | None, param: str | None, retry_after: str | None
) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.code, failure.param) == (status, code, param)
    response = error_response(chat.error_body, failure)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert json.loads(response.body)["error"]["message"]


# --- However a turn ends, its engine is released and the turn is counted.


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
        application = Starlette()
        install(application, adapter.VllmMlx())
        request = Request({"type": "http", "headers": [], "app": application}, receive)
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


# --- The list of models.


@pytest.mark.usefixtures("_foreign", "_active")
@pytest.mark.parametrize(
    ("configuration", "expected"),
    [({"max_position_embeddings": 131072}, {"max_model_len": 131072}), ({}, {}), (None, {})],
)
def test_models_are_listed_with_their_context(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    configuration: dict[str, int] | None,
    expected: dict[str, int],
) -> None:
    if configuration is not None:
        (tmp_path / "config.json").write_text(json.dumps(configuration))
    monkeypatch.setattr(server, "_model_path", str(tmp_path))
    listed = get("/v1/models").json()
    (entry,) = listed["data"]
    assert listed["object"] == "list"
    assert {name: entry[name] for name in entry if name == "max_model_len"} == expected
    assert entry["id"] == "foreign"
    assert get("/v1/models/foreign").json() == entry
    assert get("/v1/models/").json() == listed
