"""Which origins and host names a server without a key admits, and the headers of its responses."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_host import ScriptedEngine, SingleEngineHost
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocket

from vllm_mlx_harmony.server.app import error_at
from vllm_mlx_harmony.server.installation import install
from vllm_mlx_harmony.server.middleware import HOSTS_VARIABLE, ORIGINS_VARIABLE, Admission
from vllm_mlx_harmony.server.settings import ServerSettings

NAME = "Toms-Mac.fritz.box"
SETTINGS = {"origins": ["https://chat.example.com", "vscode-webview://*"], "hosts": ["*.corp.net"]}


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"hello {(await request.body()).decode()}")


async def talk(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def client(*, requires_key: bool = False, **settings: Any) -> TestClient:
    host = SingleEngineHost(ScriptedEngine({}))
    host.requires_key = requires_key
    paths = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
    routes = [Route(path, hello, methods=["GET", "POST"]) for path in paths]
    options = {"origins": [], "hosts": [], "name": NAME, **settings}
    app = Starlette(
        routes=[*routes, WebSocketRoute("/v1/responses", talk)],
        middleware=[Middleware(Admission, error_at, **options)],
    )
    install(app, host)
    return TestClient(app)


LET_IN = [
    ("127.0.0.1:8000", None),
    ("localhost:8000", None),
    ("localhost.", None),
    ("[::1]:8000", None),
    ("192.168.1.20:8000", None),
    ("[fd12::7]:8000", None),
    ("Toms-Mac.fritz.box:8000", None),
    ("toms-mac.local:8000", None),
    ("host.docker.internal:8000", None),
    ("inference:8000", None),
    ("llm.corp.net", None),
    ("127.0.0.1:8000", "http://127.0.0.1:8000"),
    ("toms-mac.local:8000", "http://toms-mac.local:8000"),
    ("127.0.0.1:8000", "http://localhost:3000"),
    ("127.0.0.1:8000", "http://app.localhost:3000"),
    ("127.0.0.1:8000", "http://[::1]:3000"),
    ("127.0.0.1:8000", "tauri://localhost"),
    ("127.0.0.1:8000", "https://chat.example.com"),
    ("127.0.0.1:8000", "https://Chat.Example.com"),
    ("127.0.0.1:8000", "vscode-webview://0f0m3"),
    ("mac.tail1234.ts.net:8000", None),
    ("127.0.0.1:8000", "app://obsidian.md"),
    ("127.0.0.1:8000", "TAURI://other"),
]

KEPT_OUT = [
    ("evil.example", None),
    ("evil.example:8000", "http://evil.example:8000"),
    ("127.0.0.1.evil.example", None),
    ("localhost.evil.example", None),
    ("local", "http://evil.example"),
    ("corp.net", None),
    ("[", None),
    ("127.0.0.1:8000", "https://evil.example"),
    ("127.0.0.1:8000", "https://chat.example.com.evil.example"),
    ("127.0.0.1:8000", "http://chat.example.com"),
    ("127.0.0.1:8000", "http://localhost.evil.example"),
    ("127.0.0.1:8000", "http://192.168.1.66"),
    ("127.0.0.1:8000", "http://evil.local"),
    ("127.0.0.1:8000", "https://app.evil.example"),
    ("127.0.0.1:8000", "https://evil.tail1234.ts.net"),
    ("mac.tail1234.ts.net:8000", "https://evil.tail1234.ts.net"),
    ("mac.ts.net.evil.example", None),
    ("ts.net.example", "app://obsidian.md"),
    ("127.0.0.1:8000", "chrome-extension://abc"),
    ("127.0.0.1:8000", "null"),
    ("127.0.0.1:8000", "file://"),
    ("127.0.0.1:8000", "http://["),
]


def headers_of(host: str, origin: str | None) -> dict[str, str]:
    return {"host": host} if origin is None else {"host": host, "origin": origin}


@pytest.mark.parametrize(("host", "origin"), LET_IN)
@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_request_is_let_in(host: str, origin: str | None, content_type: str) -> None:
    headers = {**headers_of(host, origin), "content-type": content_type}
    answer = client(**SETTINGS).post("/v1/chat/completions", content="you", headers=headers)
    assert (answer.status_code, answer.text) == (200, "hello you")
    assert answer.headers.get("access-control-allow-origin") == origin


@pytest.mark.parametrize(("host", "origin"), KEPT_OUT)
@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_request_is_kept_out(host: str, origin: str | None, content_type: str) -> None:
    headers = {**headers_of(host, origin), "content-type": content_type}
    answer = client(**SETTINGS).post("/v1/chat/completions", content="you", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/responses/resp_1", "/v1/responses/resp_1"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages", "/v1/messages"),
        ("/models", "/v1/models"),
    ],
)
def test_error_for_wrong_base_url_has_the_right_path(path: str, meant: str) -> None:
    answer = client(**SETTINGS).post(path, headers={"host": "127.0.0.1"})
    error = answer.json()["error"]
    assert answer.status_code == 404
    assert f"It is {meant}: the base URL" in error["message"]
    anthropic = meant.startswith("/v1/messages")
    assert (answer.json().get("type") == "error") == anthropic
    kept_out = client(**SETTINGS).post(path, headers={"host": "evil.example"})
    assert kept_out.status_code == 403


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/models2", "/", "/v1", "/v1/v12"])
def test_other_path_is_left_alone(path: str) -> None:
    answer = client(**SETTINGS).get(path, headers={"host": "127.0.0.1"})
    assert "It is" not in answer.text


@pytest.mark.parametrize(("host", "origin"), KEPT_OUT)
def test_websocket_is_kept_out(host: str, origin: str | None) -> None:
    connect = client(**SETTINGS).websocket_connect(
        "/v1/responses", headers=headers_of(host, origin)
    )
    with pytest.raises(WebSocketDenialResponse) as denied, connect:
        pass
    assert denied.value.status_code == 403


@pytest.mark.parametrize(("host", "origin"), LET_IN)
def test_websocket_is_let_in(host: str, origin: str | None) -> None:
    headers = headers_of(host, origin)
    with client(**SETTINGS).websocket_connect("/v1/responses", headers=headers) as socket:
        assert socket.receive_text() == "hello"


@pytest.mark.parametrize(("host", "origin"), [*LET_IN, *KEPT_OUT])
def test_key_replaces_the_check_of_origins(host: str, origin: str | None) -> None:
    keyed = client(requires_key=True, **SETTINGS)
    answer = keyed.get("/v1/messages", headers=headers_of(host, origin))
    assert answer.status_code == 200


@pytest.mark.parametrize("requires_key", [False, True])
def test_preflight_of_allowed_page_is_answered(requires_key: bool) -> None:
    headers = {
        **headers_of("127.0.0.1:8000", "https://chat.example.com"),
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-lang",
        "access-control-request-private-network": "true",
    }
    answer = client(requires_key=requires_key, **SETTINGS).options("/v1/responses", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-lang"
    assert answer.headers["access-control-allow-private-network"] == "true"


def test_preflight_of_foreign_page_is_rejected() -> None:
    headers = {
        **headers_of("127.0.0.1:8000", "https://evil.example"),
        "access-control-request-method": "POST",
    }
    answer = client(**SETTINGS).options("/v1/responses", headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_every_page_can_be_allowed() -> None:
    answer = client(origins=["*"]).get("/v1/messages", headers={"origin": "null"})
    assert answer.headers["access-control-allow-origin"] == "null"


def test_rejection_has_the_shape_of_messages() -> None:
    answer = client().post("/v1/messages", headers={"origin": "https://evil.example"})
    assert (answer.status_code, answer.json()["type"]) == (403, "error")
    assert answer.json()["error"]["type"] == "permission_error"


def test_request_without_origin_gets_no_more_headers() -> None:
    answer = client().get("/v1/messages")
    assert set(answer.headers) == {"content-length", "content-type"}


def test_rejected_origin_is_logged_once_and_quoted(caplog: pytest.LogCaptureFixture) -> None:
    web = client()
    for _ in range(3):
        web.get("/v1/messages", headers={"origin": "https://evil\x1b[31m.example"})
    assert len(caplog.messages) == 1
    assert "\x1b" not in caplog.text
    for number in range(300):
        web.get("/v1/messages", headers={"origin": f"https://evil{number}.example"})
    assert len(caplog.messages) <= 100


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORIGINS_VARIABLE, " https://A.example , ,null")
    monkeypatch.setenv(HOSTS_VARIABLE, "LLM.example.com")
    settings = ServerSettings.read()
    web = client(origins=settings.origins, hosts=settings.hosts)
    for origin in ("https://a.example", "null"):
        headers = headers_of("llm.example.com", origin)
        assert web.get("/v1/messages", headers=headers).status_code == 200
    assert web.get("/v1/messages", headers={"host": "other.example.com"}).status_code == 403
