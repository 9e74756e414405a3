"""vllm-mlx's ``--mcp-config`` with our loop around it, where the operator switches that on.

vllm-mlx starts tool servers of its own for the endpoints ``/v1/mcp/…``; no answer of the model ever
uses them. With ``VLLM_MLX_HARMONY_TOOLS`` the same file is read here instead, so that every server
runs once, and those endpoints, ``/health`` and the gauges tell of ours. Without it nothing changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from json import dumps
from typing import Any
from uuid import uuid4

from vllm_mlx_harmony.core.turn import ServerCall
from vllm_mlx_harmony.host.adapter import VllmMlx
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.host.summary import WIDTH
from vllm_mlx_harmony.server.tools import config
from vllm_mlx_harmony.server.tools.metrics import ToolMetrics
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

Init = Callable[[str], Awaitable[None]]


def init_mcp(original: Init) -> Init:
    """vllm-mlx's ``init_mcp``, which its lifespan awaits before the server listens."""

    @wraps(original)
    async def init(config_path: str) -> None:
        use = config.use()
        if use is config.Use.OFF:
            await original(config_path)
            return
        toolbox = Toolbox.of(config.read(config_path), use)
        await toolbox.start()
        for line in toolbox.lines:
            print(f"  {'tools':<{WIDTH}}{line}")
        VllmMlx.toolbox = toolbox
        server()._mcp_manager = Manager(toolbox)
        server()._mcp_executor = Executor(toolbox)

    return init


class _State(Enum):
    CONNECTED = "connected"
    ERROR = "error"


class _Transport(Enum):
    ANY = "mcp"


@dataclass(frozen=True, slots=True)
class _Status:
    name: str
    state: _State
    tools_count: int
    error: str | None
    transport: _Transport = _Transport.ANY


@dataclass(frozen=True, slots=True)
class _Tool:
    server_name: str
    name: str
    description: str
    input_schema: dict[str, Any]

    @property
    def full_name(self) -> str:
        return f"{self.server_name}__{self.name}"


class Manager:
    """Our tool servers as vllm-mlx's MCP manager: what it is asked for, and its end."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        metrics = server()._metrics._prom
        self._registry = None if metrics is None else metrics["registry"]
        self._collector = ToolMetrics(toolbox)
        if self._registry is not None:
            self._registry.register(self._collector)

    def get_server_status(self) -> list[_Status]:
        """Whether each is there."""
        return [
            _Status(
                each.label,
                _State.CONNECTED if each.tools else _State.ERROR,
                len(each.tools),
                each.problem or None,
            )
            for each in self._toolbox.namespaces
        ]

    def get_all_tools(self) -> list[_Tool]:
        """The tools of all."""
        return [
            _Tool(each.label, tool.origin[-1], tool.description, dict(tool.parameters or {}))
            for each in self._toolbox.namespaces
            for tool in each.tools
        ]

    async def stop(self) -> None:
        """Ends them."""
        VllmMlx.toolbox = None
        if self._registry is not None:
            self._registry.unregister(self._collector)
        await self._toolbox.stop()


@dataclass(frozen=True, slots=True)
class _Result:
    tool_name: str
    content: str
    is_error: bool
    error_message: str | None


class Executor:
    """One call of one of our tools, as ``POST /v1/mcp/execute`` wants it."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox

    async def execute_tool_calls(
        self, calls: list[dict[str, Any]], parallel: bool = True
    ) -> list[tuple[_Result, None]]:
        """Each in turn, whatever ``parallel`` says."""
        return [(await self._run(call["function"]), None) for call in calls]

    async def _run(self, function: dict[str, Any]) -> _Result:
        name, arguments = function["name"], function["arguments"]
        text = arguments if isinstance(arguments, str) else dumps(arguments)
        namespaces = self._toolbox.namespaces
        recipient = name
        for namespace in namespaces:
            for known, tool in namespace.by_recipient.items():
                if "__".join(tool.origin) == name:
                    recipient = known
        limits = self._toolbox.config
        call = ServerCall(f"call_{uuid4().hex[:24]}", recipient, text)
        most = limits.max_output_tokens
        answered = await self._toolbox.run(call, namespaces, limits.max_seconds, most)
        failure = answered.failure
        message = None if failure is None else failure.text
        return _Result(name, answered.text, failure is not None, message)
