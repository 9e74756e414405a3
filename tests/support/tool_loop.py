"""A scripted loop over three tools that the server runs, and requests that start it."""

from __future__ import annotations

from typing import Any

import openai
from local_tool_servers import LocalServer, browser, interpreter, weather
from official_clients import clients
from scripted_host import MODEL, ScriptedEngine, SingleEngineHost

from vllm_mlx_harmony.server.settings import ToolsMode
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

FIRST = (
    "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant<|channel|>commentary "
    'to=weather.now <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)
SECOND = (
    "<|channel|>analysis<|message|>Compute.<|end|><|start|>assistant<|channel|>analysis "
    "to=python code<|message|>6 * 7<|call|>"
)
THIRD = (
    "<|channel|>analysis<|message|>Search.<|end|><|start|>assistant<|channel|>analysis "
    'to=browser.search code<|message|>{"query": "Rome"}<|call|>'
)
LAST = (
    "<|channel|>analysis<|message|>Done.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is warm.<|return|>"
)
CALLED = "<|channel|>commentary to={} <|constrain|>json<|message|>{}<|call|>"
SCRIPTS = {
    "Where is it warm?": FIRST,
    "Rome: 20 °C": SECOND,
    "<|message|>42<|end|>": THIRD,
    "[0] Results for Rome": LAST,
    "Say hello.": LAST,
    "Ask something that fails.": CALLED.format("weather.fails", "{}"),
    "It is broken.": LAST,
    "Ask something that dies.": CALLED.format("weather.dies", "{}"),
    "Error: the server has died": LAST,
    "Ask something unknown.": CALLED.format("weather.later", "{}"),
    "unknown tool weather.later": LAST,
    "Ask with bad JSON.": CALLED.format("weather.now", '{"city": '),
    "not valid JSON": LAST,
    "Ask me.": CALLED.format("functions.mine", "{}"),
    "Ask it, then me.": FIRST,
    "no more tools can be called": LAST,
    "did not approve": LAST,
    "Sleep.": CALLED.format("weather.sleep", "{}"),
    "did not answer within": LAST,
    "this is mine": LAST,
}
OPENING = "<|start|>assistant"
RESULTS = (
    "<|start|>weather.now to=assistant<|channel|>commentary<|message|>Rome: 20 °C<|end|>",
    "<|start|>python to=assistant<|channel|>analysis<|message|>42<|end|>",
    "<|start|>browser.search to=assistant<|channel|>analysis<|message|>[0] Results for Rome<|end|>",
)
TOOLS: list[dict[str, Any]] = [
    {"type": "mcp", "server_label": "weather", "require_approval": "never"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "web_search"},
]


def host_with_tools(
    *servers: LocalServer,
    use: ToolsMode = ToolsMode.ON,
    at_once: int = 3,
    scripts: dict[str, str] | None = None,
    **limits: Any,
) -> SingleEngineHost:
    host = SingleEngineHost(
        ScriptedEngine({**SCRIPTS, **(scripts or {})}, at_once, context_length=100_000)
    )
    chosen = servers or (weather(), interpreter(), browser())
    host.toolbox = Toolbox(chosen, ToolsConfig(**limits), use)
    return host


def client(host: SingleEngineHost) -> openai.AsyncOpenAI:
    return clients(host)[0]


async def create(
    host: SingleEngineHost, stream: bool = False, **request: Any
) -> tuple[Any, list[Any]]:
    """The response, and the events if it was streamed."""
    request = {"model": MODEL, "tools": TOOLS, **request}
    if not stream:
        return await client(host).responses.create(**request), []
    events = [event async for event in await client(host).responses.create(**request, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response, events


def outline(response: Any) -> list[tuple[Any, ...]]:
    """The relevant fields of each output item."""
    return [_item(item) for item in response.output]


def _item(item: Any) -> tuple[Any, ...]:
    if item.type in ("message", "reasoning"):
        return item.type, item.content[0].text
    if item.type == "mcp_list_tools":
        return item.type, [tool.name for tool in item.tools], item.error
    if item.type == "mcp_call":
        return item.type, item.name, item.arguments, item.output, item.status
    if item.type == "code_interpreter_call":
        logs = None if item.outputs is None else item.outputs[0].logs
        return item.type, item.code, logs, item.status
    if item.type == "web_search_call":
        return item.type, item.action.query, item.status
    return (item.type,)


USER: list[dict[str, Any]] = [{"role": "user", "content": "Where is it warm?"}]
AGAIN = {"role": "user", "content": "Say hello."}


async def messages(host: SingleEngineHost, stream: bool, **request: Any) -> Any:
    _, client = clients(host)
    request = {"model": MODEL, "max_tokens": 900, "messages": USER, **request}
    if not stream:
        return await client.beta.messages.create(**request)
    async with client.beta.messages.stream(**request) as events:
        return await events.get_final_message()
