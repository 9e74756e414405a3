"""In front of the real host: routes with their dependencies, what they forward, and middleware."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="needs the host")

import vllm_mlx.server
from fastapi.testclient import TestClient
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_mlx_harmony.host import mount, patching
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.host.mount import Route, forward_to_host
from vllm_mlx_harmony.server.endpoint import Endpoint
from vllm_mlx_harmony.server.settings import ServerSettings

APP = vllm_mlx.server.app


@pytest.fixture(autouse=True)
def same_routes() -> Iterator[None]:
    """Every test leaves the same routes in the same order."""
    before = list(APP.router.routes)
    yield
    after = list(APP.router.routes)
    assert list(map(id, after)) == list(map(id, before))


TOKEN = "secret"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host with an API key and a limit of three requests a minute."""
    server = vllm_mlx.server
    monkeypatch.setattr(server, "_api_key", TOKEN)
    limiter = server.RateLimiter(requests_per_minute=3, enabled=True)
    monkeypatch.setattr(server, "_rate_limiter", limiter)


def client() -> TestClient:
    return TestClient(APP)  # not as a context manager, which would run the host's lifespan


def post(path: str, key: str | None = TOKEN, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return client().post(path, json=body, headers=headers)


async def answer(request: Request) -> JSONResponse:
    return JSONResponse({"ours": (await request.body()).decode()})


async def retrieve(model_id: str) -> str:
    return model_id


async def forward(request: Request) -> Response:
    await request.body()
    return await forward_to_host(request)


@pytest.fixture
def mount_routes() -> Iterator[Callable[..., None]]:
    undos: list[patching.Undo] = []
    yield lambda *routes: undos.extend(patching.apply_all(routes))
    patching.undo_all(undos)


CHAT = "/v1/chat/completions"
NEW = "/v1/models/{model_id:path}"


@pytest.mark.parametrize(
    "route",
    [
        Route(Endpoint(CHAT, ("POST",), answer)),
        Route(Endpoint("/v1/new", ("POST",), answer, dependencies_of=(CHAT, "POST"))),
    ],
    ids=["in front", "new"],
)
def test_api_key_and_rate_limit_hold_on_our_routes(
    guarded: None, mount_routes: Callable[..., None], route: Route
) -> None:
    mount_routes(route)
    assert post(route.endpoint.path, None).status_code == 401
    assert post(route.endpoint.path, "wrong").status_code == 401
    statuses = [post(route.endpoint.path, n=n).status_code for n in range(5)]
    assert statuses == [200, 200, 200, 429, 429]


def test_our_route_answers_and_others_do_not_change(mount_routes: Callable[..., None]) -> None:
    schema = client().get("/openapi.json").content
    APP.openapi_schema = None
    mount_routes(
        Route(Endpoint(CHAT, ("POST",), answer)),
        Route(Endpoint(NEW, ("GET",), retrieve, dependencies_of=("/v1/models", "GET"))),
    )
    assert post(CHAT, a="é").json() == {"ours": '{"a":"é"}'}
    assert client().get("/v1/models/org/name").json() == "org/name"
    assert client().get("/v1/models").json()["object"] == "list"
    assert client().get("/openapi.json").content == schema


def test_our_route_has_the_dependencies_of_the_original(
    mount_routes: Callable[..., None],
) -> None:
    original = next(route for route in APP.router.routes if route.path == CHAT)  # type: ignore[attr-defined]
    at = APP.router.routes.index(original)
    mount_routes(Route(Endpoint(CHAT, ("POST",), answer)))
    ours = APP.router.routes[at]
    assert isinstance(ours, mount.Mounted)
    assert APP.router.routes[at + 1] is original
    assert [d.dependency for d in ours.dependencies] == [
        d.dependency
        for d in original.dependencies  # type: ignore[attr-defined]
    ]
    assert ours.dependencies


BODIES: Mapping[str, bytes] = {
    "no model": b'{"messages":[{"role":"user","content":"hi"}]}',
    "unknown model": b'{"model":"nope","messages":[{"role":"user","content":"h\\u00e9"}]}',
    "invalid": b'{"model":1,"messages":{}}',
    "not json": b"{",
    "empty": b"",
    "large": json.dumps(
        {"model": "x", "messages": [{"role": "user", "content": "a" * 10**6}]}
    ).encode(),
}


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_forwarded_request_is_answered_as_without_us(
    mount_routes: Callable[..., None], path: str, body: bytes
) -> None:
    def post_body() -> tuple[int, bytes, str | None]:
        web = TestClient(APP, raise_server_exceptions=False)
        response = web.post(path, content=body, headers={"content-type": "application/json"})
        return response.status_code, response.content, response.headers.get("content-type")

    alone = post_body()
    mount_routes(Route(Endpoint(path, ("POST",), forward)))
    assert post_body() == alone


def test_forwarded_request_counts_once_against_the_rate_limit(
    guarded: None, mount_routes: Callable[..., None]
) -> None:
    mount_routes(Route(Endpoint("/v1/embeddings", ("POST",), forward)))
    statuses = [post("/v1/embeddings", x=1).status_code for _ in range(4)]
    assert statuses == [422, 422, 422, 429]  # the host rejects the body three times


def test_new_path_has_no_original_endpoint(mount_routes: Callable[..., None]) -> None:
    mount_routes(Route(Endpoint("/v1/new", ("POST",), forward, dependencies_of=(CHAT, "POST"))))
    with pytest.raises(LookupError, match="/v1/new"):
        post("/v1/new")


@pytest.fixture
def protected() -> Iterator[TestClient]:
    row = mount.front_end(VllmMlx(ServerSettings.read()))
    assert row.problem() is None
    undo = row.apply()
    yield client()
    undo()


def test_middleware_protects_the_whole_host(
    protected: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own routes run tools and load models: foreign pages must not use them either."""
    evil = {"origin": "https://evil.example"}
    for path in ("/v1/mcp/execute", "/v1/completions", "/v1/nowhere"):
        answer = protected.post(path, content=json.dumps({}), headers=evil)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert protected.get("/v1/models").status_code == 200
    monkeypatch.setattr(vllm_mlx.server, "_api_key", TOKEN)
    assert protected.post("/v1/completions", headers=evil).status_code == 401


def test_undo_removes_the_middleware() -> None:
    before = list(APP.user_middleware)
    mount.front_end(VllmMlx(ServerSettings.read())).apply()()
    assert APP.user_middleware == before
    answer = client().get("/v1/models", headers={"origin": "https://evil.example"})
    assert answer.status_code == 200


def test_route_is_added_and_removed() -> None:
    route = mount.front_end(VllmMlx(ServerSettings.read()))
    before = list(APP.router.routes)
    assert route.problem() is None
    undo = route.apply()
    assert APP.router.routes[:-1] == before
    undo()
    after = APP.router.routes
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
    undo = mount.front_end(VllmMlx(ServerSettings.read())).apply()
    try:
        b"\xd2".decode()
    except UnicodeDecodeError:
        logging.getLogger("uvicorn.error").exception(message)
    finally:
        undo()
    (record,) = caplog.records
    assert record.message == message
    assert bool(record.exc_info) is traceback
