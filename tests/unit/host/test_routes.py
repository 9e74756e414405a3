"""Routes on the host's real application, without a model: who answers, and with what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm_mlx")

from starlette.testclient import TestClient, WebSocketDenialResponse
from vllm_mlx import server
from vllm_mlx.engine.base import GenerationOutput

from vllm_mlx_harmony.host import adapter, contract
from vllm_mlx_harmony.server.settings import ServerSettings

PATH = "/v1/chat/completions"
RESPONSES = "/v1/responses"
RESPONSE = f"{RESPONSES}/resp_0"


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


@pytest.fixture
def _constant_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.time, "time", lambda: 1_754_352_000.0)
    monkeypatch.setattr(server.uuid, "uuid4", lambda: SimpleNamespace(hex="f" * 32))


@pytest.fixture
def _active() -> Iterator[None]:
    contract.activate(ServerSettings.read())
    yield
    contract.deactivate()


@asynccontextmanager
async def application() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        yield client


def request(method: str, path: str, **options: Any) -> httpx.Response:
    async def send_request() -> httpx.Response:
        async with application() as client:
            return await client.request(method, path, **options)

    return asyncio.run(send_request())


def send(content: bytes, path: str = PATH, **headers: str) -> httpx.Response:
    kind = {"content-type": "application/json"}
    return request("POST", path, content=content, headers={**kind, **headers})


def get(path: str, **headers: str) -> httpx.Response:
    return request("GET", path, headers=headers)


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


@pytest.mark.usefixtures("_foreign", "_constant_ids")
@pytest.mark.parametrize("body", BODIES)
def test_host_answers_for_its_other_models_unchanged(body: bytes) -> None:
    theirs = send(body)
    contract.activate(ServerSettings.read())
    try:
        ours = send(body)
    finally:
        contract.deactivate()
    assert ours.status_code == theirs.status_code
    assert ours.headers.items() == theirs.headers.items()
    assert without_id(ours) == without_id(theirs)


@pytest.mark.usefixtures("_foreign")
def test_host_continues_responses_of_its_other_models() -> None:
    body = {"model": "foreign", "input": "Bonjour ?", "previous_response_id": None}
    theirs = request("POST", RESPONSES, json=body).json()
    contract.activate(ServerSettings.read())
    try:
        ours = request("POST", RESPONSES, json=body).json()
        # The host itself finds the answer that this one continues.
        continued = {**body, "previous_response_id": ours["id"]}
        more = request("POST", RESPONSES, json=continued)
    finally:
        contract.deactivate()
    assert ours.keys() == theirs.keys()
    assert [item["content"] for item in ours["output"]] == [
        item["content"] for item in theirs["output"]
    ]
    assert more.status_code == 200


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
def test_wrong_method_is_rejected_in_the_shape_of_its_api(
    method: str, path: str, allowed: str
) -> None:
    response = request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    document = response.json()
    assert method in document["error"]["message"]
    assert document["error"]["type"] == "invalid_request_error"
    messages = path.startswith("/v1/messages")
    assert document.get("type") == ("error" if messages else None)
    assert ("code" in document["error"]) is not messages


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


@pytest.mark.nightly(sample=3)
@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (PATH, {"messages": []}, 400),
        (PATH, {"messages": [{"role": "user", "content": "Hi"}], "temperature": "hot"}, 400),
        (RESPONSES, {"input": "Hi", "previous_response_id": "resp_0"}, 404),
        ("/v1/responses/input_tokens", {"input": [{"type": "unknown"}]}, 400),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, 400),
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
    status: int,
    harmony: bool | None,
    loaded: bool,
    loads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it is a Harmony model: vllm-mlx has its own rules for others."""
    monkeypatch.setattr(adapter, "is_harmony_model", lambda source: harmony)
    registry._loaded = {"other": object()} if loaded else {}
    response = send(json.dumps({"model": "other", **fields}).encode(), path)
    assert loads or response.status_code == status
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


ROUTES = [
    pytest.param("POST", "/v1/responses", {"model": "foreign", "input": "Hi"}, 200, id="create"),
    pytest.param("POST", "/v1/responses/compact", {"model": "x", "input": "Hi"}, 404, id="compact"),
    pytest.param(
        "POST", "/v1/responses/input_tokens", {"model": "x", "input": "Hi"}, 404, id="count"
    ),
    pytest.param("GET", RESPONSE, None, 404, id="retrieve"),
    pytest.param("DELETE", RESPONSE, None, 404, id="delete"),
    pytest.param("GET", f"{RESPONSE}/input_items", None, 404, id="input items"),
    pytest.param("POST", f"{RESPONSE}/cancel", None, 404, id="cancel"),
    pytest.param("POST", "/v1/conversations", {"items": []}, 200, id="conversations"),
    pytest.param(
        "DELETE", "/v1/conversations/conv_1/items/msg_1", None, 404, id="a conversation's"
    ),
]


@pytest.mark.usefixtures("_foreign", "_active")
@pytest.mark.parametrize(("method", "path", "body", "status"), ROUTES)
def test_key_and_rate_limit_apply_to_every_route(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any, status: int
) -> None:
    monkeypatch.setattr(server, "_api_key", "sesame")
    right = {"authorization": "Bearer sesame"}
    limiter = server.RateLimiter(requests_per_minute=1, enabled=True)
    monkeypatch.setattr(server, "_rate_limiter", limiter)
    refused = request(method, path, json=body, headers={"authorization": "Bearer wrong"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert request(method, path, json=body, headers=right).status_code == status
    limited = request(method, path, json=body, headers=right)
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(limited.headers["retry-after"]) > 0


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize(
    ("headers", "key", "status"),
    [
        ({}, None, None),
        ({"authorization": "Bearer s\xe9cret".encode("latin-1")}, "secret", 401),
        ({}, "sesame", 401),
        ({"authorization": "Bearer wrong"}, "sesame", 401),
        ({"Authorization": "Bearer sesame"}, "sesame", None),
    ],
)
def test_websocket_requires_the_key(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, Any], key: str | None, status: int | None
) -> None:
    monkeypatch.setattr(server, "_api_key", key)
    client = TestClient(server.app, "http://localhost")
    denied = None
    try:
        with client.websocket_connect(RESPONSES, headers=headers):
            pass
    except WebSocketDenialResponse as response:
        denied = response.status_code
    assert denied == status


@pytest.mark.usefixtures("_foreign", "_active")
def test_models_path_may_end_in_a_slash() -> None:
    assert get("/v1/models/").json() == get("/v1/models").json()


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
