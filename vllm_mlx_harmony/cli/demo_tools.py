"""demo --tools: a turn in which the server runs tools of a real MCP server.

The server is vllm-mlx with a scripted stand-in for the model, as in `demo`. It starts the MCP
server as a process, and calls its tools while it answers a single request.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from vllm_mlx_harmony.cli.client import post
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.process import python, serving
from vllm_mlx_harmony.cli.standin import home_directory, written
from vllm_mlx_harmony.standin import Script

QUESTION = "How many seconds do 17 weeks have?"
CALL = (
    "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>commentary "
    "to=calculator.multiply <|constrain|>json<|message|>{}<|call|>"
)
ANSWER = "17 weeks have 10,281,600 seconds."
SCRIPTS = (
    Script(QUESTION, CALL.format("First the days: 17 times 7.", '{"a":17,"b":7}'), delay_ms=10),
    Script(
        "<|message|>119<|end|>",
        CALL.format("119 days, and 86400 seconds a day.", '{"a":119,"b":86400}'),
        delay_ms=10,
    ),
    Script("<|message|>10281600<|end|>", f"<|channel|>final<|message|>{ANSWER}<|return|>"),
)
CALCULATOR = python("vllm_mlx_harmony.standin.calculator")
SERVERS = {
    "mcpServers": {
        "calculator": {
            "command": CALCULATOR[0],
            "args": CALCULATOR[1:],
        }
    }
}
TOOLS = [{"type": "mcp", "server_label": "calculator", "require_approval": "never"}]


def run(*, batched: bool = False) -> int:
    """Shows the answer item by item. Returns 0 if it is as expected, otherwise 1."""
    if find_spec("mcp") is None:
        raise UsageError(
            "tool servers need a package: pip install 'vllm-mlx-harmony-server[tools]'"
        )
    console = Console(highlight=False)
    console.print(
        "[bold]vllm-mlx-harmony demo --tools[/]: the real server, a real MCP server, and in place "
        "of gpt-oss a [bold]scripted stand-in[/], whose output was written by hand.\n"
    )
    with ExitStack() as stack:
        home = stack.enter_context(home_directory())
        configuration = home / "mcp.json"
        configuration.write_text(json.dumps(SERVERS, indent=2))
        model = written("standin-tools", SCRIPTS, home)
        flags = ["--mcp-config", str(configuration)]
        flags += ["--continuous-batching"] if batched else []
        env = {"VLLM_MLX_HARMONY_TOOLS": "on"}
        server = stack.enter_context(serving(model, home, flags, env))
        request: dict[str, object] = {"model": str(model), "input": QUESTION, "tools": TOOLS}
        console.print(f"POST /v1/responses {json.dumps(request)}\n", style="dim", soft_wrap=True)
        with post(server.port, "/v1/responses", request) as answer:
            response = json.loads(answer.read())
        for item in response.get("output", []):
            console.print(_line(item), markup=False, soft_wrap=True)
    usage = response.get("usage")
    console.print(f"\nusage: {json.dumps(usage)}", style="dim", markup=False, soft_wrap=True)
    last = response.get("output", [{}])[-1]
    right = last.get("type") == "message" and last["content"][0]["text"] == ANSWER
    mark = "✓ one request, two calls, one answer" if right else f"✗ not as expected: {response}"
    console.print(f"\n{mark}; the servers are stopped", markup=False)
    return 0 if right else 1


def _line(item: dict[str, Any]) -> str:
    kind = item["type"]
    if kind == "mcp_list_tools":
        names = ", ".join(tool["name"] for tool in item["tools"])
        return f"{kind:<15} {item['server_label']}: {names}"
    if kind == "mcp_call":
        call = f"{item['server_label']}.{item['name']} {item['arguments']}"
        return f"{kind:<15} {call} -> {item['output'] or item['error']}"
    return f"{kind:<15} {item['content'][0]['text']}"
