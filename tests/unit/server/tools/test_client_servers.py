"""MCP servers that requests name by URL: real ones over HTTP, the official clients in process."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("mcp")
pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")


import anthropic
import httpx2
import openai
from local_tool_servers import weather
from loops import run
from mcp_processes import mcp_process
from official_clients import clients
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient
from tool_loop import CALLED, LAST, client, create, outline

from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode
from vllm_mlx_harmony.server.tools import client_servers, guarded_http
from vllm_mlx_harmony.server.tools.client_servers import TOOL_URLS_VARIABLE, ClientServers
from vllm_mlx_harmony.server.tools.config import ServerConfig, ToolsConfig
from vllm_mlx_harmony.server.tools.guarded_http import UrlPattern, is_public
from vllm_mlx_harmony.server.tools.mcp_server import McpServer
from vllm_mlx_harmony.server.tools.tool_server import ToolError
from vllm_mlx_harmony.server.tools.toolbox import REQUEST_SERVERS, Toolbox

pytestmark = pytest.mark.usefixtures("no_grammars")

SECRET = "s3cret-token"
BODY_TEXT = "what it said"
WHO = CALLED.format("caller.who", "{}")
SCRIPTS = {
    "Who am I?": WHO,
    "Bearer s3cret-token": LAST,
    "None None": LAST,
    "Error: ": LAST,
    "Twice?": CALLED.format("caller.who", "{}"),
}


def host_with_urls(
    *patterns: str, scripts: dict[str, str] | None = None, **limits: Any
) -> SingleEngineHost:
    host = SingleEngineHost(
        ScriptedEngine({**SCRIPTS, **(scripts or {})}, 3, context_length=100_000)
    )
    client_tools = ClientServers([UrlPattern.read(pattern) for pattern in patterns], 600.0)
    host.toolbox = Toolbox((weather(),), ToolsConfig(**limits), ToolsMode.ON, client_tools)
    return host


def mcp_tool(port: int, **more: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/{more.pop('path', 'mcp')}"
    tool = {"type": "mcp", "server_label": "caller", "server_url": url, "require_approval": "never"}
    return {**tool, **more}


@pytest.fixture(scope="module", params=["streamable-http", "sse"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """The port of a real server, and the path of its URL."""
    port = free_port()
    with mcp_process(port, request.param, "caller"):
        yield port, "sse" if request.param == "sse" else "mcp"


def run_cleanly(host: SingleEngineHost, body: Callable[[], Any]) -> Any:
    """The result of ``body``, which must leave no task and no connection behind."""

    async def check() -> Any:
        before = len(asyncio.all_tasks())
        result = await body()
        for _ in range(50):
            if len(asyncio.all_tasks()) == before:
                break
            await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) == before, asyncio.all_tasks()
        return result

    result = run(check())
    assert host.leases == 0
    return result


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses_call_server_with_credentials(
    endpoint: tuple[int, str], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    port, path = endpoint
    host = host_with_urls(f"http://127.0.0.1:{port}/*")
    tool = mcp_tool(port, path=path, authorization=SECRET, headers={"X-Team": "red"})
    caplog.set_level(logging.INFO)
    request = {"input": "Who am I?", "tools": [tool], "stream": stream}
    response, _ = run_cleanly(host, lambda: create(host, **request))
    result = f"Bearer {SECRET} red 127.0.0.1:{port}"
    assert outline(response) == [
        ("mcp_list_tools", ["who"], None),
        ("mcp_call", "who", "{}", result, "completed"),
        ("reasoning", "Done."),
        ("message", "It is warm."),
    ]
    # Credentials are neither in the response nor in the log.
    (echoed,) = response.tools
    assert echoed.server_url == f"http://127.0.0.1:{port}/<redacted>"
    assert SECRET not in json.dumps(response.model_dump()["tools"])
    assert SECRET not in caplog.text
    assert host.toolbox is not None
    assert host.toolbox.counts[REQUEST_SERVERS].calls == 1


def test_websocket_calls_server(endpoint: tuple[int, str]) -> None:
    port, path = endpoint
    host = host_with_urls(f"http://127.0.0.1:{port}/*")
    bearer = {"Authorization": f"Bearer {KEY}", "host": "localhost"}
    request = {"model": MODEL, "input": "Who am I?", "tools": [mcp_tool(port, path=path)]}
    with TestClient(application(host)).websocket_connect("/v1/responses", headers=bearer) as socket:
        socket.send_json({"type": "response.create", **request})
        event = socket.receive_json()
        while event["type"] not in ("response.completed", "error"):
            event = socket.receive_json()
    assert event["type"] == "response.completed", event
    kinds = [item["type"] for item in event["response"]["output"]]
    assert kinds == ["mcp_list_tools", "mcp_call", "reasoning", "message"]
    assert host.leases == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_call_server(endpoint: tuple[int, str], stream: bool) -> None:
    port, path = endpoint
    host = host_with_urls(f"http://127.0.0.1:{port}/*")
    server = {"type": "url", "name": "caller", "url": f"http://127.0.0.1:{port}/{path}"}
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Who am I?"}],
        "mcp_servers": [{**server, "authorization_token": SECRET}],
        "betas": ["mcp-client-2025-11-20"],
        "tools": [{"type": "mcp_toolset", "mcp_server_name": "caller"}],
    }

    async def body() -> Any:
        _, client = clients(host)
        counted = await client.beta.messages.count_tokens(
            **{name: value for name, value in request.items() if name != "max_tokens"}
        )
        if stream:
            async with client.beta.messages.stream(**request) as events:
                return counted, await events.get_final_message()
        return counted, await client.beta.messages.create(**request)

    counted, message = run_cleanly(host, body)
    kinds = [block.type for block in message.content]
    assert kinds == ["mcp_tool_use", "mcp_tool_result", "thinking", "text"]
    assert message.content[1].content[0].text.startswith(f"Bearer {SECRET} ")
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_tool_list_is_cached_for_equal_credentials() -> None:
    """Calls still go to the server."""
    port = free_port()
    host = host_with_urls(f"http://127.0.0.1:{port}")

    async def body() -> None:
        with mcp_process(port, "streamable-http", "caller"):
            for _ in range(2):
                await create(host, input="Say hello.", tools=[mcp_tool(port)])
        # The server is gone. The cached list is still used; a call fails.
        response, _ = await create(host, input="Who am I?", tools=[mcp_tool(port)])
        (call,) = [item for item in response.output if item.type == "mcp_call"]
        assert call.status == "failed"
        # Another token is another caller, for whom nothing is cached.
        with pytest.raises(openai.APIStatusError) as caught:
            await create(host, input="Say hello.", tools=[mcp_tool(port, authorization="other")])
        assert caught.value.status_code == 424

    host.engine.scripts["Say hello."] = LAST  # type: ignore[attr-defined]
    run_cleanly(host, body)


def test_cached_tool_list_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_servers, "LIST_MAX_AGE", 0.0)
    port = free_port()
    host = host_with_urls(f"http://127.0.0.1:{port}", scripts={"Say hello.": LAST})

    async def body() -> None:
        with mcp_process(port, "streamable-http", "caller"):
            await create(host, input="Say hello.", tools=[mcp_tool(port)])
        with pytest.raises(openai.APIStatusError) as caught:
            await create(host, input="Say hello.", tools=[mcp_tool(port)])
        assert caught.value.status_code == 424

    run_cleanly(host, body)


def test_background_response_calls_server() -> None:
    """The connection lasts as long as the answer, not only as long as the request for it."""
    port = free_port()
    host = host_with_urls(f"http://127.0.0.1:{port}")

    async def body() -> Any:
        with mcp_process(port, "streamable-http", "caller"):
            tools = [mcp_tool(port, authorization=SECRET)]
            request: dict[str, Any] = {"input": "Who am I?", "tools": tools, "background": True}
            response, _ = await create(host, **request)
            api = client(host)
            for _ in range(200):
                if response.status not in ("queued", "in_progress"):
                    break
                await asyncio.sleep(0.1)
                response = await api.responses.retrieve(response.id)
            return response

    response = run_cleanly(host, body)
    assert [item[0] for item in outline(response)][:2] == ["mcp_list_tools", "mcp_call"]
    assert response.output_text == "It is warm."
    assert SECRET not in json.dumps(response.model_dump()["tools"])


def test_client_disconnect_cancels_the_call() -> None:
    """It closes the connection, too."""
    port = free_port()
    sleeps = CALLED.format("caller.sleep", '{"seconds": 3600}')
    host = host_with_urls(f"http://127.0.0.1:{port}", scripts={"Sleep.": sleeps})

    async def body() -> None:
        with mcp_process(port, "streamable-http", "slow"):
            request = asyncio.ensure_future(create(host, input="Sleep.", tools=[mcp_tool(port)]))
            while not (host.toolbox and host.toolbox.counts.get(REQUEST_SERVERS)):
                await asyncio.sleep(0.1)
            request.cancel()
            await asyncio.wait({request})

    run_cleanly(host, body)
    assert host.toolbox is not None
    assert (
        host.toolbox.counts[REQUEST_SERVERS].calls,
        host.toolbox.counts[REQUEST_SERVERS].errors,
    ) == (1, 1)


# --- What is refused.

REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str, str]] = [
    ((), {}, "tools[0].server_url", TOOL_URLS_VARIABLE),
    (("https://127.0.0.1",), {}, "tools[0].server_url", TOOL_URLS_VARIABLE),
    (("http://127.0.0.1:1",), {}, "tools[0].server_url", TOOL_URLS_VARIABLE),
    (("http://127.0.0.1:9/other",), {}, "tools[0].server_url", TOOL_URLS_VARIABLE),
    (("http://*:9",), {"server_url": "not a url"}, "tools[0].server_url", TOOL_URLS_VARIABLE),
    (("http://*:9",), {"server_url": "http://[::1"}, "tools[0].server_url", "not a URL"),
    (
        ("http://*:9",),
        {"server_url": "http://a@127.0.0.1:9/mcp"},
        "tools[0].server_url",
        TOOL_URLS_VARIABLE,
    ),
    (("http://*:9",), {"server_label": "weather"}, "tools[0].server_url", "by the operator"),
    (("http://*:9",), {"headers": {"Host": "x"}}, "tools[0].headers", "of the connection"),
    (("http://*:9",), {"headers": {"A": "b\r\nc: d"}}, "tools[0].headers", "an invalid header"),
    (("http://*:9",), {"headers": ["A"]}, "tools[0].headers", "an object"),
    (("http://*:9",), {"authorization": "a\nb"}, "tools[0].authorization", "ASCII"),
    (("http://*:9",), {"connector_id": "c"}, "tools[0].connector_id", "is not supported"),
]


@pytest.mark.parametrize(("patterns", "more", "where", "why"), REFUSED)
def test_forbidden_servers_are_rejected(
    patterns: tuple[str, ...], more: dict[str, Any], where: str, why: str
) -> None:
    host = host_with_urls(*patterns)
    if "connector_id" in more:
        more = {**more, "server_url": None}
    with pytest.raises(openai.BadRequestError) as caught:
        run(create(host, input="Say hello.", tools=[mcp_tool(9, **more)]))
    assert caught.value.param == where
    assert why in caught.value.message
    assert host.leases == 0


def test_servers_with_same_name_are_rejected() -> None:
    tools = [mcp_tool(9), mcp_tool(9, path="other")]
    with pytest.raises(openai.BadRequestError) as caught:
        run(create(host_with_urls("http://127.0.0.1:9"), input="Say hello.", tools=tools))
    assert caught.value.param == "tools[1].server_url"


def test_credentials_without_url_are_rejected() -> None:
    tool = {"type": "mcp", "server_label": "weather", "authorization": SECRET}
    with pytest.raises(openai.BadRequestError) as caught:
        run(create(host_with_urls(), input="Say hello.", tools=[tool]))
    assert caught.value.param == "tools[0].authorization"
    assert SECRET not in str(caught.value)


class StrangeServer(ThreadingHTTPServer):
    """A server that does not speak MCP."""

    daemon_threads = True
    elsewhere = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[str] = []
        """The paths of its requests."""


class _Handler(BaseHTTPRequestHandler):
    server: StrangeServer

    def do_POST(self) -> None:
        self.server.seen.append(self.path)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.endswith("/redirect"):
            self.send_response(307)
            self.send_header("location", self.server.elsewhere)
            self.send_header("content-length", "0")
            self.end_headers()
        elif self.path == "/silent":
            time.sleep(8)
        elif self.path == "/no-rpc":
            body = json.dumps({BODY_TEXT: 1}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        elif self.path == "/endless":
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b" " * 2**20)
            except OSError:
                return
        else:
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

    do_GET = do_DELETE = do_POST  # noqa: N815 - as http.server names them

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def strange() -> Iterator[StrangeServer]:
    server = StrangeServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


FAULTS = ["redirect", "silent", "endless", "no-rpc", "denied"]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("path", FAULTS)
def test_unreachable_server_is_an_error(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """424 as from OpenAI, 400 as from Anthropic, and soon. Redirects are not followed.

    Nothing that the server sends is logged.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(client_servers, "START_TIMEOUT", 2.0)
    with strange() as server, strange() as other:
        port = server.server_address[1]
        server.elsewhere = f"http://127.0.0.1:{other.server_address[1]}/stolen"
        host = host_with_urls(f"http://127.0.0.1:{port}")
        began = time.monotonic()

        async def body() -> None:
            tool = mcp_tool(port, path=path, authorization=SECRET)
            with pytest.raises(openai.APIStatusError) as caught:
                await create(host, input="Say hello.", tools=[tool])
            error = caught.value
            assert (error.status_code, error.code, error.param) == (424, "http_error", "tools")
            assert "Error retrieving tool list from MCP server: 'caller'" in error.message
            assert SECRET not in error.message
            _, client = clients(host)
            named = {"type": "url", "name": "caller", "url": tool["server_url"]}
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.beta.messages.create(
                    model=MODEL,
                    max_tokens=9,
                    messages=[{"role": "user", "content": "Say hello."}],
                    mcp_servers=[named],
                )
            assert "Connection error while communicating with MCP server" in str(refused.value)

        run_cleanly(host, body)
    assert time.monotonic() - began < 45
    assert server.seen and not other.seen
    assert SECRET not in caplog.text
    assert BODY_TEXT not in caplog.text


@pytest.mark.parametrize("path", ["sse", "mcp", "redirect"])
@pytest.mark.parametrize("how", ["sse", "streamable-http"])
def test_url_of_operator_server_is_secret(
    how: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may contain a secret; the log says what is wrong with the server all the same."""
    caplog.set_level(logging.INFO)

    async def problem(server: McpServer) -> str:
        await server.start()
        with pytest.raises(ToolError) as failed:
            await server.call("any", {})
        reason = server.problem
        assert reason in str(failed.value)
        await server.stop()
        return reason

    with strange() as strange_server:
        port = strange_server.server_address[1]
        strange_server.elsewhere = f"http://127.0.0.1:{port + 1}/{SECRET}/elsewhere"
        url = f"http://127.0.0.1:{port}/{SECRET}/{path}"
        config = ServerConfig.model_validate({"transport": how, "url": url})
        reason = run(problem(McpServer("there", config, 5.0)))
    assert reason
    assert SECRET not in reason
    assert f"tool server there: {reason}" in caplog.text
    assert SECRET not in caplog.text
    if (how, path) == ("sse", "sse"):
        assert reason == "it responds with 401 Unauthorized"


def test_private_address_needs_explicit_pattern() -> None:
    """Names of private addresses are refused in every spelling, before any connection."""
    with strange() as server:
        port = server.server_address[1]
        for name in ("localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"):
            host = host_with_urls(f"http://*:{port}")
            tool = {**mcp_tool(port), "server_url": f"http://{name}:{port}/mcp"}
            with pytest.raises(openai.APIStatusError) as caught:
                run(create(host, input="Say hello.", tools=[tool]))
            assert caught.value.status_code == 424, name
            assert "no public address" in caught.value.message or "cannot be resolved" in (
                caught.value.message
            )
        assert server.seen == []


PATTERNS: list[tuple[str, str, bool]] = [
    ("https://a.example", "https://a.example/any/path", True),
    ("https://a.example", "https://a.example:443/", True),
    ("https://a.example", "https://a.example:8443/", False),
    ("https://a.example", "http://a.example/", False),
    ("https://a.example", "https://A.EXAMPLE/", True),
    ("https://a.example", "https://a.example.evil/", False),
    ("https://a.example", "https://evil/a.example", False),
    ("https://a.example", "https://a.example@evil/", False),
    ("https://a.example", "https://evil@a.example/", False),
    ("https://a.example", "https://evil\\@a.example/", False),
    ("https://*.example", "https://a.example/", True),
    ("https://*.example", "https://b.a.example/", True),
    ("https://*.example", "https://example/", False),
    ("https://*.example", "https://evil-example/", False),
    ("https://*.example", "https://evil/.example", False),
    ("https://*", "https://anything/", True),
    ("https://a.example:8443", "https://a.example:8443/x", True),
    ("https://a.example/mcp", "https://a.example/mcp", True),
    ("https://a.example/mcp", "https://a.example/mcp?key=1", True),
    ("https://a.example/mcp", "https://a.example/mcp/x", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/x/y", True),
    ("https://a.example/mcp/*", "https://a.example/mcpx", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/../admin", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/%2e%2e/admin", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/..%2fadmin", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/x\\..\\admin", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/..;/admin", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/..;a=b/admin", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/..%3b/admin", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/.;/..;x", False),
    ("https://a.example/mcp/*", "https://a.example/mcp/x;v=1..2/y", True),
]


@pytest.mark.parametrize(("pattern", "url", "allowed"), PATTERNS)
def test_pattern_allows_matching_urls(pattern: str, url: str, allowed: bool) -> None:
    assert str(UrlPattern.read(pattern)) == pattern
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        assert not allowed
        return
    assert UrlPattern.read(pattern).allows(parsed) is allowed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "a.example",
        "ftp://a",
        "https://",
        "https://a*b",
        "https://*.*.b",
        "https://a/*/b",
        "https://a?b",
        "https://a:port",
        "https://u@a",
    ],
)
def test_invalid_patterns_are_rejected(text: str) -> None:
    with pytest.raises(HostError):
        UrlPattern.read(text)
    if text:
        with pytest.raises(HostError):
            ClientServers.of(
                ServerSettings(tools=ToolsMode.ON, tool_urls=("https://a.example", text))
            )


def test_patterns_without_tools_are_rejected() -> None:
    settings = ServerSettings(tools=ToolsMode.ON, tool_urls=("https://a.example",))
    assert ClientServers.of(settings).allowed
    with pytest.raises(HostError, match="VLLM_MLX_HARMONY_TOOLS=on"):
        ClientServers.of(replace(settings, tools=ToolsMode.OFF))


ADDRESSES = {
    "93.184.216.34": True,
    "2606:2800:220:1:248:1893:25c8:1946": True,
    "127.0.0.1": False,
    "10.1.2.3": False,
    "172.16.0.1": False,
    "192.168.0.1": False,
    "169.254.169.254": False,
    "100.64.0.1": False,
    "0.0.0.0": False,
    "224.0.0.1": False,
    "255.255.255.255": False,
    "::": False,
    "::1": False,
    "fe80::1%eth0": False,
    "fc00::1": False,
    "ff02::1": False,
    "::ffff:10.0.0.1": False,
    "::ffff:93.184.216.34": True,
    "64:ff9b::a00:1": False,
    "64:ff9b::5db8:d822": True,
    "2002:a00:1::": False,
    "fec0::1": False,
    "::127.0.0.1": False,
    "::93.184.216.34": False,
    "64:ff9b:1::7f00:1": False,
    "64:ff9b:1:7f00:0:100::": False,
}


@pytest.mark.parametrize(("address", "public"), ADDRESSES.items())
def test_public_addresses_are_recognized(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("encodings", "refused"),
    [((), False), (("identity",), False), (("gzip",), True), (("identity", "Deflate"), True)],
)
def test_compressed_bodies_are_rejected(
    encodings: tuple[str, ...], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are counted as they arrive: decompressed, they could be a thousand times as many."""
    closed: list[bool] = []

    class Body(httpx2.ByteStream):
        async def aclose(self) -> None:
            closed.append(True)

    async def connect(self: Any, request: httpx2.Request) -> httpx2.Response:
        assert request.headers.get_list("accept-encoding") == ["identity"]
        headers = [("content-encoding", encoding) for encoding in encodings]
        body = gzip.compress(b"fine") if refused else b"fine"
        return httpx2.Response(200, headers=headers, stream=Body(body))

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", connect)

    async def body() -> None:
        url = httpx2.URL("http://127.0.0.1/mcp")
        client_headers = [("accept-encoding", "gzip, br")]  # a request may have any headers
        async with guarded_http.client(url, client_headers, private=True) as http:
            if not refused:
                assert (await http.get(url)).text == "fine"
                return
            with pytest.raises(httpx2.ReadError, match="compressed"):
                await http.get(url)

    asyncio.run(body())
    assert closed


def test_size_of_all_responses_together_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(self: Any, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, stream=httpx2.ByteStream(b"four"))

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", connect)
    monkeypatch.setattr(guarded_http, "MAX_TOTAL_BYTES", 10)

    async def body() -> None:
        url = httpx2.URL("http://127.0.0.1/mcp")
        async with guarded_http.client(url, [], private=True) as http:
            for _ in range(2):
                assert (await http.get(url)).text == "four"
            with pytest.raises(httpx2.ReadError, match="total size"):
                await http.get(url)

    asyncio.run(body())


def test_connection_goes_to_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is resolved once: later answers of the DNS have no effect."""
    resolved: list[str] = []
    connected: list[str] = []

    async def addresses(host: str, port: int, *, private: bool) -> list[str]:
        resolved.append(host)
        return ["203.0.113.7"]

    async def connect(self: Any, request: httpx2.Request) -> httpx2.Response:
        connected.append(request.url.host)
        assert request.headers["host"] == "mcp.example"
        assert request.extensions["sni_hostname"] == "mcp.example"
        return httpx2.Response(200, stream=httpx2.ByteStream(b"fine"))

    monkeypatch.setattr(guarded_http, "_addresses", addresses)
    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", connect)

    async def body() -> None:
        url = httpx2.URL("https://mcp.example/mcp")
        async with guarded_http.client(url, [], private=False) as http:
            assert (await http.get(url)).text == "fine"
            with pytest.raises(httpx2.ConnectError):
                await http.get("https://other.example/mcp")

    asyncio.run(body())
    assert (resolved, connected) == (["mcp.example"], ["203.0.113.7"])
