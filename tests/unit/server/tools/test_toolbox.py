"""Running tool servers: a tool call from its text to its result, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")


from local_tool_servers import LocalServer
from mcp_processes import RAW, call_tool, mcp_process, stdio, toolbox, within
from mcp_types import methods
from waiting import wait_until_async

from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import ToolFinished
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.server.settings import ToolsMode
from vllm_mlx_harmony.server.tools import mcp_server
from vllm_mlx_harmony.server.tools.config import ServerConfig, ToolsConfig, read
from vllm_mlx_harmony.server.tools.mcp_server import McpServer, malformed_tools
from vllm_mlx_harmony.server.tools.tool_server import ToolResult
from vllm_mlx_harmony.server.tools.toolbox import NOTHING, Toolbox

CALLS: list[tuple[str, str, str, bool | None]] = [
    # recipient, arguments, beginning of the result, whether a failure is the tool's own
    ("weather.now", '{"city": "Rome"}', "Rome: 20 °C", None),
    ("weather.nothing", "{}", '{"result": null}', None),
    ("weather.fails", '{"why": "broken"}', "Error executing tool fails", True),
    ("weather.now", '{"city": 3}', "Error executing tool now: 1 validation error", True),
    ("weather.now", '{"city": ', "Error: the arguments are not valid JSON", False),
    ("weather.now", "[1]", "Error: the arguments are not a JSON object", False),
    ("weather.unknown", "{}", "Error: unknown tool weather.unknown; available tools: ", False),
    ("python", "1 + 1", "2", None),
    ("browser.search", '{"query": "x"}', "[0] Results for x", None),
    ("big.big", "{}", "0123456789abcdef", None),
    ("slow.sleep", '{"seconds": 60}', "Error: the tool did not answer within 1 seconds", False),
]


def test_calls_return_results_and_errors() -> None:
    kinds = ("weather", "python", "browser", "big")
    servers = {kind: stdio(kind) for kind in kinds} | {"slow": stdio("slow", timeout=1)}
    box = toolbox(servers, max_output_tokens=1000)

    async def all_of_them() -> list[ToolFinished]:
        return [await call_tool(box, name, arguments) for name, arguments, _, _ in CALLS]

    for result, (name, _, begins, by_tool) in zip(within(box, all_of_them), CALLS, strict=True):
        assert result.text.startswith(begins), name
        assert (result.failure and result.failure.by_tool) == by_tool, name
    counts = box.counts["weather", "now"]
    assert (counts.calls, counts.errors) == (4, 3)
    assert box.counts["slow", "sleep"].seconds >= 1


@pytest.mark.nightly
def test_result_is_cut_to_room() -> None:
    box = toolbox({"big": stdio("big")}, max_output_tokens=1000, max_output_bytes=100_000)

    async def cut() -> list[str]:
        return [
            (await call_tool(box, "big.big", "{}", room=room)).text for room in (10_000, 100, 0)
        ]

    many, some, none = within(box, cut)
    notes = [text.rpartition("\n") for text in (many, some)]
    assert [len(vocab.encode(beginning)) for beginning, _, _ in notes] == [1000, 100]
    assert none.startswith("[… 5242880 more characters")
    assert all(note.endswith("more characters were cut off]") for _, _, note in notes)


def test_dead_server_is_restarted() -> None:
    box = toolbox({"crash": stdio("crash")})

    async def dying() -> tuple[ToolFinished, ToolFinished, str]:
        died = await call_tool(box, "crash.die", "{}")
        await wait_until_async(lambda: bool(box.servers[0].problem), "the server to fail")
        away = await call_tool(box, "crash.live", "{}")
        await wait_until_async(lambda: not box.servers[0].problem, "the server to start")
        return died, away, (await call_tool(box, "crash.live", "{}")).text

    died, away, alive = within(box, dying)
    assert died.failure is not None and not died.failure.by_tool
    assert away.failure is not None
    assert alive == "alive"


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [600.0, 1.0], ids=["the server's limit", "the turn's"])
def test_hanging_server_is_restarted(seconds: float) -> None:
    """A call that takes too long is no proof: a server that still lists its tools is kept."""
    box = toolbox(
        {"crash": {**stdio("crash"), "timeout": 2}, "slow": {**stdio("slow"), "timeout": 2}}
    )

    async def hanging() -> list[str]:
        hung = await call_tool(box, "crash.hang", "{}", seconds=seconds)
        problem = box.servers[0].problem
        await wait_until_async(lambda: not box.servers[0].tools, "the tools to go")
        await wait_until_async(lambda: not box.servers[0].problem, "the server to start")
        client = box.servers[1]._client  # type: ignore[attr-defined]
        await call_tool(box, "slow.sleep", '{"seconds": 3600}')
        await wait_until_async(lambda: not box.servers[1].problem, "the server to start")
        assert box.servers[1]._client is client  # type: ignore[attr-defined]
        return [hung.text, problem, (await call_tool(box, "crash.live", "{}")).text]

    hung, problem, alive = within(box, hanging)
    assert f"did not answer within {min(seconds, 2):.0f} seconds" in hung
    assert problem == "it does not respond"
    assert alive == "alive"


class SlowServer:
    """Each call takes most of its time limit."""

    label, description, timeout, problem = "slow", "", 1.0, ""
    tools = (Tool("wait"),)
    timed_out = 0

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        await asyncio.sleep(0.7)
        return ToolResult("done")

    def call_timed_out(self) -> None:
        self.timed_out += 1


def test_time_in_the_queue_does_not_count_as_silence() -> None:
    server = SlowServer()
    box = Toolbox([server], ToolsConfig(max_concurrent_calls=1), ToolsMode.ON)

    async def calls() -> list[str]:
        several = (call_tool(box, "slow.wait", "{}") for _ in range(2))
        return [result.text for result in await asyncio.gather(*several)]

    assert within(box, calls) == ["done", "Error: the tool did not answer within 1 seconds"]
    assert not server.timed_out


def test_start_returns_while_a_silent_server_is_still_closed() -> None:
    config = ServerConfig(command=sys.executable, args=["-c", "import time; time.sleep(60)"])
    server = McpServer("silent", config, 600.0, start_timeout=0.2)
    box = Toolbox([server], ToolsConfig(), ToolsMode.ON)

    async def problem() -> str:
        return server.problem

    assert within(box, problem) == "it does not respond"


@pytest.mark.parametrize(
    ("connects", "pauses"),
    [(False, [0.01, 0.02, 0.04]), (True, [0.01, 0.01, 0.01])],
    ids=["attempts", "connections"],
)
def test_only_a_steady_connection_resets_the_pause(
    connects: bool,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An attempt to connect may take longer than a connection that counts as steady."""
    monkeypatch.setattr(mcp_server, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(mcp_server, "STEADY_SECONDS", 0.01)
    server = McpServer("short", ServerConfig(command=sys.executable), 600.0)

    async def connected(ready: asyncio.Future[float]) -> None:
        if connects:
            ready.set_result(asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)

    monkeypatch.setattr(server, "_connected", connected)

    def logged() -> list[Any]:
        return [record.args[-1] for record in caplog.records if record.args]

    async def several_attempts() -> None:
        await wait_until_async(lambda: len(logged()) >= 3, "the third pause")

    with caplog.at_level("WARNING", mcp_server.__name__):
        within(Toolbox([server], ToolsConfig(), ToolsMode.ON), several_attempts)
    assert logged()[:3] == pauses


@pytest.mark.nightly
def test_changed_tool_list_is_read_again() -> None:
    box = toolbox({"changing": stdio("changing")})

    async def changing() -> tuple[Any, Any, str]:
        before = box.namespaces
        await call_tool(box, "changing.grow", "{}")
        await wait_until_async(lambda: len(box.servers[0].tools) == 2, "the second tool")
        after = box.namespaces
        return before, after, (await call_tool(box, "changing.grown", "{}")).text

    before, after, grown = within(box, changing)
    assert [tool.name for tool in before[0].tools] == ["grow"]
    assert [tool.name for tool in after[0].tools] == ["grow", "grown"]
    assert grown == "grown"


def test_cancellation_cancels_tool(tmp_path: Path) -> None:
    box = toolbox({"slow": stdio("slow")})
    note = tmp_path / "note"

    async def cancelled() -> None:
        arguments = json.dumps({"seconds": 3600, "note": str(note)})
        running = asyncio.ensure_future(call_tool(box, "slow.sleep", arguments))
        await wait_until_async(lambda: note.exists() and note.read_text() == "begun", "the call")
        running.cancel()
        await asyncio.wait({running})
        await wait_until_async(lambda: note.read_text() == "cancelled", "its end")

    within(box, cancelled)


def test_concurrent_calls_are_limited() -> None:
    box = toolbox({"slow": stdio("slow")}, max_concurrent_calls=2)
    call, running, counts = box.servers[0].call, set[object](), list[int]()

    async def counted(*arguments: Any, **options: Any) -> Any:
        running.add(this := object())
        counts.append(len(running))
        try:
            return await call(*arguments, **options)
        finally:
            running.remove(this)

    async def many() -> None:
        box.servers[0].call = counted  # type: ignore[method-assign]
        calls = [call_tool(box, "slow.sleep", '{"seconds": 0.1}') for _ in range(6)]
        results = await asyncio.gather(*calls)
        assert {result.text for result in results} == {"slept 0.1"}

    within(box, many)
    assert len(counts) == 6 and max(counts) == 2


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
def test_http_server_is_reconnected(transport: str) -> None:
    port = free_port()
    path = "mcp" if transport == "streamable-http" else "sse"
    url = f"http://127.0.0.1:{port}/{path}"
    config: dict[str, Any] = {"url": url, "transport": transport}
    box = toolbox({"weather": config, "nowhere": {"url": "http://127.0.0.1:9/mcp"}})

    async def away_and_back() -> list[str]:
        texts = [(await call_tool(box, "weather.now", '{"city": "Rome"}')).text]
        server.kill()
        server.wait()
        texts.append((await call_tool(box, "weather.now", '{"city": "Rome"}')).text)
        await wait_until_async(lambda: bool(box.servers[0].problem), "the server to fail")
        with mcp_process(port, transport):
            await wait_until_async(lambda: not box.servers[0].problem, "the server to start")
            texts.append((await call_tool(box, "weather.now", '{"city": "Oslo"}')).text)
        return texts

    with mcp_process(port, transport) as server:
        first, second, third = within(box, away_and_back)
    assert (first, third) == ("Rome: 20 °C", "Oslo: 20 °C")
    assert second.startswith("Error: ")
    nowhere = box.namespaces[1]
    assert nowhere.tools == () and nowhere.problem


@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
def test_malformed_tools_and_half_surrogates_are_tolerated(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    over_http = {"url": f"http://127.0.0.1:{port}/mcp", "transport": transport}
    over_stdio = {"command": sys.executable, "args": [str(RAW)]}
    box = toolbox({"raw": over_stdio if transport == "stdio" else over_http})

    async def collect() -> tuple[Any, str]:
        return box.namespaces[0].tools, (await call_tool(box, "raw.good", "{}")).text

    with caplog.at_level("WARNING", "vllm_mlx_harmony"), ExitStack() as stack:
        if transport != "stdio":
            stack.enter_context(mcp_process(port, transport, "raw"))
        (good, better), text = within(box, collect)
    assert (good.name, good.description, better.name) == ("good", "Half \ufffd of it.", "better")
    assert text == "\ufffd of it, \U0001f600 whole, \\ud83d written out \ufffd"
    messages = [
        record.getMessage() for record in caplog.records if "malformed" in record.getMessage()
    ]
    assert len(messages) == 11  # one line for each, however often the list is read
    assert messages[0].startswith("tool server raw: the tool 'type' (inputSchema.type: ")
    assert any("the tool number 7 (name: " in message for message in messages)


def test_rest_of_tool_list_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte beside a thousand tools took minutes, in which the server did nothing else."""
    checked: list[Any] = []
    check = methods.validate_server_result
    monkeypatch.setattr(
        methods,
        "validate_server_result",
        lambda method, version, data: (checked.append(data), check(method, version, data))[1],
    )
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("a", "b")]
    result = {"tools": [*tools, {"name": "c"}], "_meta": {"a": 1}, "nextCursor": "d"}
    ((place, _),) = malformed_tools(result, "2025-06-18")
    assert place == 2
    assert [data.keys() for data in checked] == [{"tools", "nextCursor"}] * 3
    newer = {**result, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
    assert [place for place, _ in malformed_tools(newer, "2026-07-28")] == [2]


async def cut_in_two() -> ToolResult:
    return ToolResult("half \ud83d")


def test_half_surrogate_of_local_server_is_replaced() -> None:
    box = Toolbox([LocalServer("own", {"cut": (None, cut_in_two)})], ToolsConfig(), ToolsMode.ON)
    assert within(box, lambda: call_tool(box, "own.cut", "{}")).text == "half \ufffd"


# --- The operator's file.

SOUND: dict[str, dict[str, Any]] = {
    "the host's": {"servers": {"a": {"transport": "stdio", "command": "x", "args": ["y"]}}},
    "that of MCP clients": {"mcpServers": {"a": {"command": "x"}}},
    "http by another name": {"mcpServers": {"a": {"type": "http", "url": "https://a/mcp"}}},
    "the host's other fields": {"servers": {}, "allowed_high_risk_tools": []},
}


@pytest.mark.parametrize("document", SOUND.values(), ids=SOUND)
def test_valid_files_are_read(tmp_path: Path, document: dict[str, Any]) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps(document))
    assert isinstance(read(file), ToolsConfig)


WRONG: list[tuple[str, str]] = [
    ("{", "Expecting property name"),
    ('{"servers": []}', "servers: "),
    ('{"servers": {"a": {}}}', "requires `command`"),
    ('{"servers": {"a": {"url": "ftp://x"}}}', "needs a url"),
    ('{"servers": {"a": {"command": "x", "comand": 1}}}', "servers.a.comand: "),
    ('{"servers": {"a": {"transport": "pigeon"}}}', "servers.a.transport: "),
    ('{"max_tool_calls": 0}', "max_tool_calls: "),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_invalid_files_are_rejected(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(HostError, match=problem):
        read(file)
    with pytest.raises(HostError, match="No such file"):
        read(tmp_path / "none.json")


def test_invalid_server_names_are_replaced() -> None:
    servers = {name: stdio("weather", enabled=True) for name in ("a.b c", "functions", "a_b_c")}
    box = toolbox(servers)
    assert [namespace.name for namespace in box.namespaces] == ["a_b_c", "functions_2", "a_b_c_2"]
    assert [namespace.problem for namespace in box.namespaces] == ["it is not started"] * 3


@pytest.mark.nightly
def test_other_server_named_browser_gets_an_alias() -> None:
    """A server that merely has the name does not get the description gpt-oss was trained with."""
    box = toolbox({"browser": stdio("weather"), "python": stdio("slow")})

    async def names() -> list[str]:
        return [namespace.name for namespace in box.namespaces]

    assert within(box, names) == ["browser_tools", "python_tools"]


def test_text_for_empty_output_is_bracketed() -> None:
    assert NOTHING.startswith("[")


def test_server_with_command_uses_stdio() -> None:
    assert ServerConfig.model_validate({"command": "x"}).transport == "stdio"
