"""What a tool server is to the front end: tools now, and an answer to a call.

Whoever brings tools of another kind than MCP implements ``ToolServer`` and names a function that
makes one as an entry point of the group ``GROUP``; nothing else of it is seen from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_mlx_harmony.core.turn import Tool

GROUP = "vllm_mlx_harmony.tools"
"""Entry points: functions without parameters that return a ``ToolServer``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool answered. ``failed``: it says so itself; the model reads ``text`` anyway."""

    text: str
    failed: bool = False


class ToolServer(Protocol):
    """Some tools under one label. All of it is called on the event loop."""

    label: str
    """What clients and the operator call it, and the model too as far as a name can be."""
    description: str
    """For the model; may be empty."""
    timeout: float
    """Seconds that one call may take."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Its tools now, under their own names: the same object as long as nothing changed."""

    @property
    def problem(self) -> str:
        """Why there are none now; empty when nothing is wrong."""

    async def start(self) -> None:
        """Gets ready, as far as it can in a bounded time; what goes wrong is a ``problem``."""

    async def stop(self) -> None:
        """Ends everything that it began: no task and no process is left behind."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Answer:
        """Runs the tool. Cancelled when nobody waits any more.

        Raises ``ToolError`` that says, to the model, why there is no answer.
        """


class ToolError(Exception):
    """A call has no answer: its server cannot be reached, refuses it, or has died."""
