"""``ToolServer``: the interface of tool servers.

Other packages implement it for tools of other kinds than MCP, and register a function that makes
one as an entry point of the group ``GROUP``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from vllm_mlx_harmony.core.pages import Page
from vllm_mlx_harmony.core.turn import Tool, WebLimits

GROUP = "vllm_mlx_harmony.tools"
"""Entry points: functions without parameters that return a ``ToolServer``."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. ``failed``: ``text`` is an error message of the tool."""

    text: str
    failed: bool = False


class ToolServer(Protocol):
    """Tools under one label. Every method is called on the event loop."""

    label: str
    """The name that clients and the operator use; the model's namespace is made from it."""
    description: str
    """A description for the model; may be empty."""
    timeout: float
    """Time limit of one call, in seconds."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The current tools, under their own names: the same object until they change."""

    @property
    def problem(self) -> str:
        """Why there are no tools now; empty when nothing is wrong."""

    async def start(self) -> None:
        """Starts or connects, within a bounded time. A failure sets ``problem``."""

    async def stop(self) -> None:
        """Ends every task and process that it has started."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs the tool. The call is cancelled at its time limit, and when its client has gone.

        Raises ``ToolError`` with a message for the model when there is no answer.
        """


@runtime_checkable
class Conversational(Protocol):
    """A browser, whose calls depend on the conversation."""

    def session(
        self, pages: Mapping[int, Page], tenant: str, limits: WebLimits | None = None
    ) -> ToolServer:
        """The tool server for one turn, whose prompt shows ``pages``. It is neither started nor
        stopped."""


@runtime_checkable
class Monitored(Protocol):
    """A server that is checked when it may have stopped responding."""

    def call_timed_out(self) -> None:
        """A call has reached its time limit."""


class ToolError(Exception):
    """A call has no answer: the server is unreachable, rejects it, or has died.

    ``code`` as in ``ToolFailure``.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
