"""Tool loops on the real host, with real MCP servers and the official clients."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import psutil
import pytest
from server_process import FLAG, HARMONY
from waiting import wait_for_port, wait_until

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

pytestmark = [pytest.mark.served, pytest.mark.nightly]  # in process the gate tests it, too
pytest.importorskip("mcp")

SERVERS = Path(__file__).parents[2] / "support" / "mcp_servers.py"
WEATHER_CALL = (
    "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant<|channel|>commentary "
    'to=weather.now <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
)
PYTHON_CALL = "<|channel|>analysis to=python code<|message|>6 * 7<|call|>"
ANSWER = "<|channel|>final<|message|>It is warm.<|return|>"
SLEEP_CALL = "<|channel|>commentary to=slow.sleep <|constrain|>json<|message|>%s<|call|>"
WHO_CALL = "<|channel|>commentary to=caller.who <|constrain|>json<|message|>{}<|call|>"
SCRIPTS = [
    Script("Where is it warm?<|end|>", WEATHER_CALL),
    Script("Rome: 20 °C<|end|>", PYTHON_CALL),
    Script("<|message|>42<|end|>", ANSWER),
    Script("Error: ", ANSWER),
    Script("Who am I?<|end|>", WHO_CALL),
    Script("Bearer s3cret", ANSWER),
]
CALLER_PORT = free_port()


@pytest.fixture(scope="module")
def server(
    start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A host that runs tools for every request, with a stand-in of its own."""
    directory = tmp_path_factory.mktemp("tools")
    sleeps = SLEEP_CALL % json.dumps({"seconds": 3600, "note": str(directory / "note")})
    model = standin.write(directory / "model", [*SCRIPTS, Script("Sleep.<|end|>", sleeps)])
    servers: dict[str, dict[str, Any]] = {
        kind: {"command": sys.executable, "args": [str(SERVERS), kind]}
        for kind in ("weather", "python", "slow")
    }
    servers["slow"]["timeout"] = 3600
    servers["away"] = {"url": "http://127.0.0.1:9/mcp"}
    file = directory / "mcp.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    server = start(
        *FLAG,
        "--mcp-config",
        str(file),
        "--enable-metrics",
        model=model,
        command=HARMONY,
        env={
            "VLLM_MLX_HARMONY_TOOLS": "all",
            "VLLM_MLX_HARMONY_TOOL_URLS": f"http://127.0.0.1:{CALLER_PORT}",
            "VLLM_MLX_HARMONY_GRAMMAR": "auto",
        },
    )
    yield server
    tools = tool_servers(server.pid)
    assert len(tools) == 3
    server.stop()
    assert psutil.wait_procs(tools, 10)[1] == []


def tool_servers(pid: int) -> list[psutil.Process]:
    """The tool servers of process ``pid``."""
    return [child for child in psutil.Process(pid).children() if str(SERVERS) in child.cmdline()]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_responses_runs_tools(server: Server, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0)
    tools: Any = [
        {"type": "mcp", "server_label": "weather", "require_approval": "never"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ]
    request: Any = {"model": str(server.model), "input": "Where is it warm?", "tools": tools}
    if stream:
        with client.responses.stream(**request) as events:
            for _ in events:
                pass
            response = events.get_final_response()
    else:
        response = client.responses.create(**request)
    assert [item.type for item in response.output] == [
        "mcp_list_tools",
        "reasoning",
        "mcp_call",
        "code_interpreter_call",
        "message",
    ]
    assert response.output_text == "It is warm."


def test_server_of_request_is_called(server: Server) -> None:
    """In both APIs. Its credentials are neither in the response nor in the log."""
    command = [sys.executable, str(SERVERS), "caller", str(CALLER_PORT)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as caller:
        try:
            wait_for_port(CALLER_PORT)
            url = f"http://127.0.0.1:{CALLER_PORT}/mcp"
            tool = {"type": "mcp", "server_label": "caller", "server_url": url}
            client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0)
            response = client.responses.create(
                model=str(server.model),
                input="Who am I?",
                tools=[{**tool, "authorization": "s3cret", "require_approval": "never"}],  # type: ignore[list-item]
            )
            kinds = [item.type for item in response.output]
            assert kinds == ["mcp_list_tools", "mcp_call", "message"]
            assert "s3cret" not in response.model_dump_json(include={"tools"})
            body = {
                "model": str(server.model),
                "max_tokens": 500,
                "messages": [{"role": "user", "content": "Who am I?"}],
                "mcp_servers": [
                    {"type": "url", "name": "caller", "url": url, "authorization_token": "s3cret"}
                ],
            }
            message = httpx.post(f"{server.base_url}/v1/messages", json=body, timeout=60).json()
            kinds = [block["type"] for block in message["content"]]
            assert kinds == ["mcp_tool_use", "mcp_tool_result", "text"]
        finally:
            caller.kill()
    assert "s3cret" not in server.log
    assert re.search(rf"tools +requests may name http://127.0.0.1:{CALLER_PORT}\b", server.log)


def test_tool_loop_computes_each_token_once(server: Server) -> None:
    """Prefill of the whole loop is at most 1.05 times its last prompt."""
    before = computed_tokens(server)
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=os.urandom(4).hex())
    padding = "word " * 2000
    response = client.responses.create(
        model=str(server.model), input=f"{padding}Where is it warm?", max_output_tokens=500
    )
    usage = response.usage
    assert usage is not None
    final_prompt = usage.input_tokens + usage.output_tokens + 40
    new_tokens = computed_tokens(server) - before
    assert new_tokens <= 1.05 * final_prompt


def computed_tokens(server: Server) -> int:
    """The number of prompt tokens computed so far."""
    document = httpx.get(f"{server.base_url}/v1/cache/stats").json()
    counters = list(values_of(document, "harmony_prefix_reuse"))
    return int(counters[0]["tokens_new"])


def values_of(value: Any, name: str) -> Iterator[Any]:
    """The values with the key ``name``, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == name:
                yield inner
            yield from values_of(inner, name)


def test_client_disconnect_cancels_tool(server: Server) -> None:
    note = server.model.parent / "note"
    metric = 'vllm_mlx_harmony_tool_errors_total{server="slow",tool="sleep"} 1.0'
    body = {"model": str(server.model), "input": "Sleep.", "tools": []}
    with server.open_request("/v1/responses", body):
        wait_until(lambda: note.exists() and note.read_text() == "begun", "the call")
    wait_until(lambda: note.read_text() == "cancelled", "its end")
    wait_until(lambda: metric in httpx.get(f"{server.base_url}/metrics").text, "the metric")


@pytest.mark.of_vllm_mlx
def test_host_lists_tools_and_servers(server: Server) -> None:
    health = httpx.get(f"{server.base_url}/health").json()["mcp"]
    assert (health["servers_connected"], health["servers_total"]) == (3, 4)
    tools = httpx.get(f"{server.base_url}/v1/mcp/tools").json()["tools"]
    assert "weather__now" in [tool["name"] for tool in tools]
    body = {"tool_name": "weather__now", "arguments": {"city": "Oslo"}}
    result = httpx.post(f"{server.base_url}/v1/mcp/execute", json=body).json()
    assert (result["content"], result["is_error"]) == ("Oslo: 20 °C", False)
    assert "tools         weather: now, fails, nothing, pid" in server.log
