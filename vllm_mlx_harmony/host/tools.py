"""Tools that the server runs: those of ``--mcp-config``, if ``VLLM_MLX_HARMONY_TOOLS`` is set, and
the browser of ``--web-search``.

vllm-mlx itself starts the servers of that file for its endpoints ``/v1/mcp/…`` only. With the
setting they are started here instead, once, and vllm-mlx's endpoints, ``/health`` and metrics show
ours, through the two classes below. Without it nothing changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from json import dumps
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from vllm_mlx_harmony.core.turn import ServerCall
from vllm_mlx_harmony.host.mount import installed_front_end
from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.host.startup_banner import WIDTH
from vllm_mlx_harmony.server.settings import ServerSettings, ToolsMode
from vllm_mlx_harmony.server.tools import config
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

Init = Callable[[str], Awaitable[None]]

running: Toolbox | None = None
"""The tool servers that this process has started."""


def init_mcp(original: Init) -> Init:
    """vllm-mlx's ``init_mcp``, which it awaits before the server listens."""

    @wraps(original)
    async def init(config_path: str) -> None:
        global running
        settings = installed_front_end().settings
        if settings.tools is ToolsMode.OFF:
            await original(config_path)
            return
        toolbox = Toolbox.of(config.read(config_path), settings)
        await toolbox.start()
        for line in toolbox.lines:
            print(f"  {'tools':<{WIDTH}}{line}")
        running = toolbox
        server()._mcp_manager = server()._mcp_executor = Tools(toolbox)

    return init


def start_browser(settings: ServerSettings, config_path: str | None) -> list[str]:
    """Makes the browser of ``--web-search``, if `init_mcp` does not; returns what it is.

    Raises ``HostError`` if it cannot be made.
    """
    global running
    if not settings.web_search or (config_path and settings.tools is not ToolsMode.OFF):
        return []
    running = Toolbox.of(config.ToolsConfig(), settings)
    return running.lines


@dataclass(frozen=True, slots=True)
class Tools:
    """Our tool servers with the interfaces of vllm-mlx's ``MCPClientManager`` and
    ``ToolExecutor``."""

    toolbox: Toolbox

    def get_server_status(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                name=namespace.label,
                state=SimpleNamespace(value="connected" if namespace.tools else "error"),
                transport=SimpleNamespace(value="mcp"),
                tools_count=len(namespace.tools),
                error=namespace.problem or None,
            )
            for namespace in self.toolbox.namespaces
        ]

    def get_all_tools(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                server_name=namespace.label,
                full_name=f"{namespace.label}__{tool.origin[-1]}",
                description=tool.description,
                input_schema=dict(tool.parameters or {}),
            )
            for namespace in self.toolbox.namespaces
            for tool in namespace.tools
        ]

    async def stop(self) -> None:
        global running
        running = None
        await self.toolbox.stop()

    async def execute_tool_calls(
        self, calls: Sequence[Mapping[str, Any]], parallel: bool = True
    ) -> list[tuple[SimpleNamespace, None]]:
        """The results, in order. The calls run one after another, whatever ``parallel`` is."""
        namespaces, limits = self.toolbox.namespaces, self.toolbox.config
        recipients = {
            "__".join(tool.origin): recipient
            for namespace in namespaces
            for recipient, tool in namespace.by_recipient.items()
        }
        results = []
        for function in (call["function"] for call in calls):
            name, arguments = function["name"], function["arguments"]
            text = arguments if isinstance(arguments, str) else dumps(arguments)
            call = ServerCall(f"call_{uuid4().hex[:24]}", recipients.get(name, name), text)
            answered = await self.toolbox.execute(
                call, namespaces, limits.max_seconds, limits.max_output_tokens
            )
            failure = answered.failure
            result = SimpleNamespace(
                tool_name=name,
                content=answered.text,
                is_error=failure is not None,
                error_message=None if failure is None else failure.text,
            )
            results.append((result, None))
        return results
