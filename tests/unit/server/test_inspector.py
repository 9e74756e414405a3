"""The inspector's data: what it shows of a request, to whom, and what it must not keep."""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from dataclasses import dataclass, field
from json import dumps
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from harmony_text import ids_of
from scripted_host import KEY, ObedientEngine, ScriptedEngine, SingleEngineHost
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.testclient import TestClient

from vllm_mlx_harmony import inspector
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.deltas import Progress, Usage
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, Step, Steps
from vllm_mlx_harmony.inspector import record, routes
from vllm_mlx_harmony.inspector.record import Log
from vllm_mlx_harmony.protocols.events import Event
from vllm_mlx_harmony.server.answers import shutdown_error
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.body import Document
from vllm_mlx_harmony.server.front_end import front_end_of, installed_in
from vllm_mlx_harmony.server.observer import ObservedRequest
from vllm_mlx_harmony.server.settings import ServerSettings

SCRIPT = (
    "<|channel|>analysis<|message|>A greeting.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Grüß Gott 👋🏽<|return|>"
)
OTHER = "another key"
SECTION = ("Engine", [("in use", 5, "bytes"), ("problem", None, "")])
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat_completions": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello!"}]},
    ),
    "responses": ("/v1/responses", {"input": "Hello!"}),
    "anthropic_messages": (
        "/v1/messages",
        {"max_tokens": 100, "messages": [{"role": "user", "content": "Hello!"}]},
    ),
}
DATA = ("requests", "events", "server", "requests/x", "requests/x/output")


class TwoKeys(SingleEngineHost):
    """A host with two keys."""

    async def authenticate(self, connection: HTTPConnection) -> None:
        keys = {f"Bearer {key}" for key in (KEY, OTHER)}
        if connection.headers.get("authorization") not in keys:
            raise HTTPException(401, "Invalid API key")


@dataclass
class Site:
    """A server with the inspector, and a browser without a key."""

    host: SingleEngineHost
    app: Starlette = field(init=False)
    browser: TestClient = field(init=False)

    def __post_init__(self) -> None:
        self.app = application(self.host)
        self.undo = inspector.install(self.app, lambda: [SECTION])
        self.browser = TestClient(self.app, base_url="http://localhost")

    def post(self, api: str = "chat_completions", key: str = KEY, **fields: Any) -> Any:
        path, body = BODIES[api]
        headers = {"authorization": f"Bearer {key}"}
        client = TestClient(self.app, base_url="http://localhost")
        return client.post(path, json={"model": "gpt-oss-20b", **body, **fields}, headers=headers)

    def get(self, path: str, key: str = KEY) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        client = TestClient(self.app, base_url="http://localhost")
        return client.get(f"/harmony/inspector/{path}", headers=headers)

    def log_in(self, key: str = KEY, **headers: str) -> Any:
        return self.browser.post("/harmony/inspector/login", json={"key": key}, headers=headers)

    def shut_down_after(self, monkeypatch: pytest.MonkeyPatch, checks: int) -> None:
        """Begins the shutdown after one check by the middleware and ``checks`` by the inspector."""
        answers = installed_in(self.app).answers
        results = iter([None] * (1 + checks))
        monkeypatch.setattr(answers, "rejection", lambda: next(results, shutdown_error()))

    @property
    def rows(self) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = self.get("requests").json()["requests"]
        return requests


@pytest.fixture
def site() -> Site:
    return Site(TwoKeys(ScriptedEngine({"Hello!": SCRIPT})))


# --- What it shows


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", BODIES)
def test_request_is_shown_with_prompt_and_all_ids(site: Site, api: str, stream: bool) -> None:
    answer = site.post(api, stream=stream)
    assert answer.status_code == 200, answer.text
    (row,) = site.rows
    assert (row["api"], row["state"], row["stream"]) == (api, "success", stream)
    assert row["generated"] == len(ids_of(SCRIPT))
    assert row["seconds"] >= row["first"] > 0
    details = site.get(f"requests/{row['id']}").json()
    assert json.loads(details["body"])["model"] == "gpt-oss-20b"
    assert details["path"] == BODIES[api][0]
    assert tuple(details["prompt"]["ids"]) == site.host.engine.prompts[0]  # type: ignore[attr-defined]
    assert "".join(details["prompt"]["texts"]) == vocab.encoding().decode(details["prompt"]["ids"])
    output = site.get(f"requests/{row['id']}/output").json()
    assert tuple(output["ids"]) == ids_of(SCRIPT)
    assert "".join(output["texts"]) == SCRIPT
    assert output["times"] == sorted(output["times"])
    events = "".join(output["events"])
    assert events == answer.text if stream else json.loads(events) == answer.json()


def test_unstarted_background_response_is_not_listed() -> None:
    """Only ended requests are dropped from the list, so it would stay for ever."""
    host = SingleEngineHost(ScriptedEngine({}))
    host.server_settings = ServerSettings(background_bytes=-1)
    site = Site(host)
    assert site.post("responses", background=True).status_code == 503
    assert site.rows == []


@dataclass
class Reporting(ScriptedEngine):
    """Reports that all ids were copied, if origins are requested."""

    async def generate(self, request: GenerationRequest) -> Steps:
        async for step in super().generate(request):
            yield step._replace(origins="c" * len(step.ids) if request.settings.origins else "")


@pytest.mark.parametrize(("engine", "origin"), [(ScriptedEngine, "?"), (Reporting, "c")])
def test_each_id_has_its_origin(engine: Any, origin: str) -> None:
    site = Site(TwoKeys(engine({"Hello!": SCRIPT})))
    site.post()
    output = site.get(f"requests/{site.rows[0]['id']}/output?tokens=2").json()
    assert output["origins"] == origin * (len(ids_of(SCRIPT)) - 2)


def test_known_records_are_not_sent_again(site: Site) -> None:
    site.post(stream=True)
    path = f"requests/{site.rows[0]['id']}/output"
    whole = site.get(path).json()
    rest = site.get(f"{path}?tokens=3&events=2").json()
    assert rest["ids"] == whole["ids"][3:] and rest["times"] == whole["times"][3:]
    assert rest["events"] == whole["events"][2:]
    assert site.get(f"{path}?tokens=x").status_code == 400
    assert site.get(f"{path}?tokens=-1").json()["ids"] == whole["ids"]


def test_changes_are_sent_as_events(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.post()
    site.shut_down_after(monkeypatch, 3)
    monkeypatch.setattr(routes, "SECONDS", 0)
    answer = site.get("events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    name, data = answer.text.strip().split("\n")
    assert name == "event: all"
    assert [row["state"] for row in json.loads(data.removeprefix("data: "))] == ["success"]


def test_silent_stream_has_comments(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.shut_down_after(monkeypatch, 5)
    monkeypatch.setattr(routes, "SECONDS", 0.01)
    monkeypatch.setattr(routes, "MAX_SILENCE", 0.02)
    assert site.get("events").text == "event: all\ndata: []\n\n" + ": \n\n" * 2


@pytest.mark.parametrize("by", ["header", "cookie"])
def test_stream_ends_when_its_key_is_revoked(
    site: Site, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    authenticate, calls = TwoKeys.authenticate, 0

    async def revoked(host: TwoKeys, connection: HTTPConnection) -> None:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise HTTPException(401, "Invalid API key")
        await authenticate(host, connection)

    site.log_in()
    monkeypatch.setattr(TwoKeys, "authenticate", revoked)
    monkeypatch.setattr(routes, "SECONDS", 0.01)
    events = site.browser.get if by == "cookie" else site.get
    path = "/harmony/inspector/events" if by == "cookie" else "events"
    assert events(path).text == "event: all\ndata: []\n\n"


def test_server_figures_are_shown(site: Site) -> None:
    site.post()
    refused = site.post(messages="none")
    server = site.get("server").json()
    assert server["sections"][1] == [SECTION[0], [list(entry) for entry in SECTION[1]]]
    figures = {name: value for name, value, _ in server["sections"][0][1]}
    assert (figures["finished"], figures["running"], figures["waiting"]) == (1, 0, 0)
    assert sum(server["minutes"]) == len(ids_of(SCRIPT)) and len(server["minutes"]) == 60
    (error,) = server["errors"]
    assert (error["what"], error["status"]) == ("POST /v1/chat/completions", 400)
    assert error["message"] == refused.json()["error"]["message"]


def test_engine_failure_is_shown_with_reason() -> None:
    class Broken(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Steps:
            async for step in super().generate(request):
                yield step
                raise OutputError("the cable was cut")

    site = Site(SingleEngineHost(Broken({"Hello!": SCRIPT})))
    site.post(stream=True)
    assert (site.rows[0]["state"], site.rows[0]["failure"]) == ("error", "the cable was cut")
    assert "the cable was cut" in [
        error["message"] for error in site.get("server").json()["errors"]
    ]


# --- Who may see it


def test_page_is_public_and_data_is_not(site: Site) -> None:
    page = site.browser.get("/harmony")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    for name in DATA:
        answer = site.browser.get(f"/harmony/inspector/{name}")
        assert answer.status_code == 401, name
    assert site.browser.post("/harmony/inspector/requests/x/end").status_code == 401
    assert site.get("requests", key="wrong").status_code == 401


def test_login_opens_session_and_logout_ends_it(site: Site) -> None:
    site.post()
    assert site.log_in("wrong").status_code == 401
    assert site.log_in("schlüssel").status_code == 401
    cookie = site.log_in().headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/harmony;" in cookie
    assert "Secure" not in cookie and KEY not in cookie
    assert len(site.browser.get("/harmony/inspector/requests").json()["requests"]) == 1
    cookies = dict(site.browser.cookies)
    site.browser.post("/harmony/inspector/logout")
    for name, value in cookies.items():
        site.browser.cookies.set(name, value)  # a copy of the cookie
    assert site.browser.get("/harmony/inspector/requests").status_code == 401


def test_https_cookie_is_secure(site: Site) -> None:
    browser = TestClient(site.app, base_url="https://localhost")
    assert (
        "Secure"
        in browser.post("/harmony/inspector/login", json={"key": KEY}).headers["set-cookie"]
    )


def test_session_ends_with_its_key_or_expires(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.log_in(OTHER)
    assert site.browser.get("/harmony/inspector/requests").status_code == 200
    monkeypatch.setattr(
        TwoKeys, "authenticate", SingleEngineHost.authenticate
    )  # only one key is left
    assert site.browser.get("/harmony/inspector/requests").status_code == 401
    site.log_in()
    assert site.browser.get("/harmony/inspector/requests").status_code == 200
    monkeypatch.setattr(inspector.access.time, "monotonic", lambda: 1e12)
    assert site.browser.get("/harmony/inspector/requests").status_code == 401


def test_sessions_are_bounded(site: Site) -> None:
    for _ in range(inspector.access.MAX_SESSIONS + 5):
        site.log_in()
    assert site.browser.get("/harmony/inspector/requests").status_code == 200
    assert site.browser.post("/harmony/inspector/login", content=b"x" * 5000).status_code == 413
    for body in (b"", b"[]", b'{"key": 1}', b"\xff"):
        assert site.browser.post("/harmony/inspector/login", content=body).status_code == 400


def test_key_sees_only_its_own_requests(site: Site) -> None:
    site.post()
    site.post(messages="none")
    row = site.rows[0]
    assert site.get("requests", OTHER).json()["requests"] == []
    assert site.get("server", OTHER).json()["errors"] == []
    for path in (f"requests/{row['id']}", f"requests/{row['id']}/output"):
        assert site.get(path, OTHER).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxy.example"}, 200),
        ({"sec-fetch-site": "none"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_other_origins_are_forbidden(site: Site, headers: dict[str, str], status: int) -> None:
    assert site.log_in(**headers).status_code == status
    site.log_in()
    cross = {name: value for name, value in headers.items() if value != "none"}
    answer = site.browser.get("/harmony/inspector/requests", headers=cross)
    assert answer.status_code == (200 if headers.get("sec-fetch-site") == "none" else status)


def test_keyless_inspector_is_open_to_own_pages_only() -> None:
    host = SingleEngineHost(ScriptedEngine({"Hello!": SCRIPT}))
    host.requires_key = False
    site = Site(host)
    site.post()
    listing = site.browser.get("/harmony/inspector/requests").json()
    assert not listing["keyed"] and len(listing["requests"]) == 1
    for headers in ({"host": "evil.example"}, {"origin": "http://localhost:3000"}):
        assert site.browser.get("/harmony/inspector/requests", headers=headers).status_code == 403


def test_responses_have_security_headers(site: Site) -> None:
    names = [file.name for file in routes._STATIC.iterdir() if file.name != "index.html"]
    paths = ["/harmony", *(f"/harmony/inspector/{name}" for name in (*names, *DATA))]
    for path in paths:
        headers = site.browser.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    assert site.browser.get("/harmony/inspector/../record.py").status_code == 404


def test_pages_load_nothing_external_and_set_no_markup() -> None:
    for file in routes._STATIC.iterdir():
        text = file.read_text("utf-8")
        addresses = set(re.findall(r"https?://[^\s'\"]+", text))
        assert addresses <= {
            "http://www.w3.org/2000/svg",
            "https://cookbook.openai.com/articles/openai-harmony",  # in a comment
        }
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|style=", text
        )


# --- Ending


async def _post_during_answer(
    engine: ScriptedEngine, action: str, **fields: Any
) -> tuple[list[httpx.Response], httpx.Response]:
    """The responses to ``action``, during the answer and after it, and the answer."""
    site = Site(SingleEngineHost(engine))
    path, body = BODIES["chat_completions"]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=site.app),
        base_url="http://localhost",
        headers={"authorization": f"Bearer {KEY}"},
    ) as client:
        body = {"model": "gpt-oss-20b", **body, **fields}
        request = asyncio.ensure_future(client.post(path, json=body))
        row: dict[str, Any] = {}
        while row.get("generated", 0) < 5:
            assert not request.done(), request.result().text
            await asyncio.sleep(0)
            rows = (await client.get("/harmony/inspector/requests")).json()["requests"]
            row = rows[0] if rows else {}
        assert row["state"] == "answer"
        url = f"/harmony/inspector/requests/{row['id']}/{action}"
        first, answer = await client.post(url), await request
        return [first, await client.post(url)], answer


def test_page_ends_request() -> None:
    class Endless(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Steps:
            yield Step(ids_of("<|channel|>final<|message|>"))
            while True:
                yield Step(ids_of("so "))
                await asyncio.sleep(0.01)

    responses, answer = asyncio.run(_post_during_answer(Endless({"Hello!": SCRIPT}), "end"))
    assert [response.json() for response in responses] == [{"ended": True}, {"ended": False}]
    assert answer.status_code == 499 and "cancelled" in answer.text


def test_page_ends_reasoning() -> None:
    thinks = f"<|channel|>analysis<|message|>{'so ' * 5_000}<|end|>"
    engine = ObedientEngine({"Hello!": thinks}, context_length=None)
    responses, answer = asyncio.run(_post_during_answer(engine, "answer", reasoning_effort="high"))
    assert [response.status_code for response in responses] == [200, 409]
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == "Well."
    assert choice["message"]["reasoning_ended_by"] == "request"


# --- What a record holds


def observed(key: str = "a", raw: bytes = b"{}", value: object = None) -> ObservedRequest:
    document = Document({} if value is None else value, raw=raw)
    return ObservedRequest("responses", "/v1/responses", document, "m", True, key, "t", "o")


def test_tool_results_are_marked() -> None:
    entry = Log().observe(observed())
    entry.prompt((1, 2), None)
    entry.step(Step((3, 4, 99)))  # the last one is beyond the end of the output
    entry.prompt((1, 2, 3, 4, 50, 51), None)
    entry.step(Step((5,), "length"))
    assert list(entry.output) == [3, 4, 50, 51, 5]
    assert entry.results == [(2, 4)] and entry.generated == 3 and len(entry.times) == 5
    assert entry.origins == b"?????"
    assert entry.summary()["finish"] == "length"


@pytest.mark.parametrize(
    ("steps", "state", "cached"),
    [
        ([], "waiting", 0),
        ([Step((), progress=Progress(10, 0, 0, 0.0, 2))], "waiting", 0),
        ([Step((), progress=Progress(10, 4, 6))], "prompt", 4),
        ([Step((7,), cached_tokens=6)], "answer", 6),
    ],
)
def test_steps_determine_state_of_request(steps: list[Step], state: str, cached: int) -> None:
    entry = Log().observe(observed())
    entry.prompt((1, 2), None)
    for step in steps:
        entry.step(step)
    assert (entry.summary()["state"], entry.cached) == (state, cached)


TOKEN = "c2VjcmV0"


@pytest.mark.parametrize(
    "document",
    [
        {"tools": [{"type": "mcp", "server_url": "https://x", "authorization": TOKEN}, 5]},
        {"tools": [{"type": "mcp", "headers": {"x-key": TOKEN}}]},
        {"mcp_servers": [{"type": "url", "authorization_token": TOKEN}]},
    ],
)
def test_credentials_of_tool_servers_are_not_kept(document: dict[str, Any]) -> None:
    entry = Log().observe(observed(raw=dumps(document).encode(), value=document))
    assert entry.body is not None and TOKEN.encode() not in entry.body
    assert TOKEN in dumps(document)
    assert json.loads(entry.body).keys() == document.keys()


def test_record_holds_neither_parsed_body_nor_grammar() -> None:
    class Value(dict[str, Any]):
        """A dictionary that can have weak references."""

    value, constraint = Value(), Constraint(ConstraintSpec(min_tokens=1))
    references = weakref.ref(value), weakref.ref(constraint)
    entry = Log().observe(observed(value=value))
    entry.prompt((1,), constraint)
    entry.ended("success", Usage(), None)
    del value, constraint
    assert [reference() for reference in references] == [None, None]


def test_body_is_shown_as_sent() -> None:
    tool = b'{"name": "f", "parameters": {"headers": 1}}'
    raw = b'{"input" : "headers, authorization", "tools": [%s]}' % tool
    assert Log().observe(observed(raw=raw, value=json.loads(raw))).body == raw


def test_log_is_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    running = log.observe(observed("running"))
    for number in range(record.MAX_RECORDS + 50):
        log.observe(observed(str(number))).ended("success", Usage(), None)
    assert len(list(log.of(None))) == record.MAX_RECORDS
    assert log.find("running", None) is running and log.find("0", None) is None
    monkeypatch.setattr(record, "MAX_BYTES", 100_000)
    for number in range(20):
        last = log.observe(observed(f"long {number}"))
        last.prompt(tuple(range(5000)), None)
        last.ended("success", Usage(), None)
    assert sum(entry.nbytes for entry in log.of(None)) <= 100_000
    assert log.find("long 19", None) is last


def test_long_answers_and_bodies_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_ANSWER", 1000)
    monkeypatch.setattr(record, "MAX_BODY", 10)
    entry = Log().observe(observed(raw=b"x" * 11))
    assert entry.body is None
    for _ in range(100):
        entry.events([Event("x" * 100)])
    assert len(entry.frames) + entry.dropped == 100 and 10 <= len(entry.frames) <= 12
    entry.whole({"text": "y" * 2000})
    assert entry.dropped


def test_undo_removes_inspector(site: Site) -> None:
    site.undo()
    assert front_end_of(HTTPConnection({"type": "http", "app": site.app})).observer_factories == []
    assert site.browser.get("/harmony").status_code == 404
    assert site.post().status_code == 200


def test_page_is_missing_without_inspector() -> None:
    client = TestClient(
        application(SingleEngineHost(ScriptedEngine({}))), base_url="http://localhost"
    )
    assert client.get("/harmony").status_code == 404
