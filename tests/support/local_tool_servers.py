"""A tool server in this process, for tests that do not concern MCP itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_mlx_harmony.core.turn import Tool
from vllm_mlx_harmony.server.tools.tool_server import ToolError, ToolResult

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
SECONDS = {"type": "object", "properties": {"seconds": {"type": "number"}}}

Run = Callable[..., Awaitable[ToolResult]]


async def now(city: str) -> ToolResult:
    return ToolResult(f"{city}: 20 °C")


async def fails() -> ToolResult:
    return ToolResult("It is broken.", failed=True)


async def dies() -> ToolResult:
    raise ToolError("the server has died")


async def sleep(seconds: float = 3600.0) -> ToolResult:
    await asyncio.sleep(seconds)
    return ToolResult("slept")


async def python(code: str) -> ToolResult:
    return ToolResult(repr(eval(code, {"__builtins__": {}})))


async def search(query: str) -> ToolResult:
    return ToolResult(f"[0] Results for {query}")


async def page(**_: Any) -> ToolResult:
    return ToolResult("[1] A page")


@dataclass
class LocalServer:
    """Functions under a label; ``calls`` lists their calls."""

    label: str
    functions: dict[str, tuple[Mapping[str, Any] | None, Run]]
    description: str = ""
    timeout: float = 3600.0
    problem: str = ""
    calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.tools = tuple(
            Tool(name, f"Does {name}.", schema, read_only=name == "now")
            for name, (schema, _) in self.functions.items()
        )

    async def start(self) -> None:
        """Does nothing."""

    async def stop(self) -> None:
        """Does nothing."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs the function."""
        self.calls.append((tool, arguments))
        self.running += 1
        try:
            return await self.functions[tool][1](**arguments)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def weather() -> LocalServer:
    return LocalServer(
        "weather",
        {
            "now": (CITY, now),
            "fails": (None, fails),
            "dies": (None, dies),
            "sleep": (SECONDS, sleep),
        },
        "Weather of anywhere.",
    )


def interpreter() -> LocalServer:
    return LocalServer("python", {"python": (CODE, python)})


def browser() -> LocalServer:
    functions = {"search": (None, search), "open": (None, page), "find": (None, page)}
    return LocalServer("browser", functions)
