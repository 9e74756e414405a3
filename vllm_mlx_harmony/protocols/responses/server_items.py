"""Responses: the items of calls that the server runs, and their events.

A call is opened, receives its arguments, is closed, started and finished, in this order. Each kind
of item (``mcp_call``, ``code_interpreter_call``, ``web_search_call``, ``mcp_approval_request``)
has events of its own for some of these. The item is done when the call is finished, or when the
turn ends before that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from vllm_mlx_harmony.core.deltas import ToolFailure
from vllm_mlx_harmony.core.turn import PYTHON, Namespace
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.responses.output_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    PendingEvent,
    Writing,
    added,
    done,
    parsed,
)
from vllm_mlx_harmony.protocols.responses.server_tools import Served
from vllm_mlx_harmony.protocols.server_calls import CodeArguments, as_arguments

FAILED = "failed"


@dataclass
class ServerItem:
    """One call while it is written and run. Each method returns the events for one step.

    ``key`` is the part of its id after the prefix, ``approved`` the id of the request for approval
    that preceded it. ``code``: the tool takes code instead of JSON. ``shown``: whether the call is
    an item of the output yet.
    """

    index: int
    key: str
    tool: Served
    writing: Writing
    code: bool = False
    approved: str | None = None
    status: str = IN_PROGRESS
    text: str | None = None
    failure: ToolFailure | None = None
    parts: list[str] = field(default_factory=list)

    shown = True
    prefix: ClassVar[str] = ""
    """Prefix of its id."""
    stem: ClassVar[str] = ""
    """Prefix of its events."""
    text_stem: ClassVar[str] = ""
    """Prefix of the events of its arguments, if it has any."""
    whole: ClassVar[str] = ""
    """The field with all of the arguments."""
    running: ClassVar[str] = ""
    """Its status while it runs, and the event for it, if it has one."""
    tells_failure: ClassVar[bool] = False
    """Whether there is an event for a call that failed."""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}_{self.key}"

    @property
    def arguments(self) -> str:
        return "".join(self.parts)

    def document(self) -> Document:
        """The item in its current state."""
        raise NotImplementedError

    def opened(self) -> list[PendingEvent]:
        """The model begins the call."""
        return [added(self.index, self.document()), self.event(f"{self.stem}.in_progress")]

    def take(self, text: str) -> list[PendingEvent]:
        """More of its arguments."""
        self.parts.append(text)
        return [self.event(f"{self.text_stem}.delta", delta=text)] if self.text_stem else []

    def closed(self) -> list[PendingEvent]:
        """The arguments are complete."""
        if not self.text_stem:
            return []
        return [self.event(f"{self.text_stem}.done", **{self.whole: self.arguments})]

    def started(self) -> list[PendingEvent]:
        """The call is run."""
        self.status = self.running or self.status
        return [self.event(f"{self.stem}.{self.running}")] if self.running else []

    def finished(self, text: str, failure: ToolFailure | None) -> list[PendingEvent]:
        """The call has a result."""
        self.text, self.failure = text, failure
        self.status = COMPLETED if failure is None else FAILED
        ended = done(self.index, self.document())
        if failure is None or self.tells_failure:
            return [self.event(f"{self.stem}.{self.status}"), ended]
        return [ended]

    def ended(self) -> list[PendingEvent]:
        """The turn ended before the call had a result."""
        self.status = INCOMPLETE
        return [done(self.index, self.document())]

    def event(self, kind: str, **fields: str) -> PendingEvent:
        """An event at the position of the item."""
        return PendingEvent(kind, {"item_id": self.id, "output_index": self.index, **fields})


class McpCall(ServerItem):
    """``mcp_call``: a tool of one of the operator's servers. Arguments are JSON, of code too."""

    prefix, stem, tells_failure = "mcp", "response.mcp_call", True
    text_stem, whole = "response.mcp_call_arguments", "arguments"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._json = CodeArguments() if self.code else None

    def document(self) -> Document:
        answered = self.text is not None and self.failure is None
        return {
            "id": self.id,
            "type": "mcp_call",
            "status": self.status,
            "approval_request_id": self.approved,
            "arguments": self.arguments,
            "error": None if self.failure is None else _error(self.failure, self.text or ""),
            "name": self.tool.name,
            "output": self.text if answered else None,
            "server_label": self.tool.label,
        }

    def take(self, text: str) -> list[PendingEvent]:
        return super().take(self._json.feed(text) if self._json else text)

    def closed(self) -> list[PendingEvent]:
        rest = super().take(self._json.close()) if self._json else []
        return [*rest, *super().closed()]


def _error(failure: ToolFailure, text: str) -> Document:
    if failure.by_tool:
        content = [{"type": "text", "text": text}]
        return {"type": "mcp_tool_execution_error", "content": content}
    return {"type": "mcp_protocol_error", "code": NO_ANSWER, "message": text}


NO_ANSWER = -32000
"""The first of JSON-RPC's numbers for errors of an implementation's own."""


class CodeInterpreterCall(ServerItem):
    """``code_interpreter_call``: code for the server named ``python``."""

    prefix, stem, running = "ci", "response.code_interpreter_call", "interpreting"
    text_stem, whole = "response.code_interpreter_call_code", "code"

    def document(self) -> Document:
        shown = self.writing.shows_outputs and self.text is not None
        return {
            "id": self.id,
            "type": "code_interpreter_call",
            "status": self.status,
            "code": self.arguments,
            "container_id": self.tool.label,
            "outputs": [{"type": "logs", "logs": self.text}] if shown else None,
        }


class WebSearchCall(ServerItem):
    """``web_search_call``: a function of the server named ``browser``."""

    prefix, stem, running = "ws", "response.web_search_call", "searching"

    def document(self) -> Document:
        head = {"id": self.id, "type": "web_search_call", "status": self.status}
        value = parsed(self.arguments)
        given = value if isinstance(value, dict) else {}
        if self.tool.name == "open":
            page = given.get("id")
            url = page if isinstance(page, str) else None
            return {**head, "action": {"type": "open_page", "url": url}}
        if self.tool.name == "find":
            pattern = str(given.get("pattern", ""))
            return {**head, "action": {"type": "find_in_page", "pattern": pattern, "url": ""}}
        query = str(given.get("query", ""))
        action: Document = {"type": "search", "query": query, "queries": [query]}
        if self.writing.shows_sources and self.text is not None and self.failure is None:
            action["sources"] = [{"type": "url", "url": url} for url in _urls(self.text)]
        return {**head, "action": action}


_URL = re.compile(r"https?://[^\s<>\"'`|\\^{}\[\]【】†]+")
_MOST_URLS = 100


def _urls(text: str) -> list[str]:
    """The URLs in what a search has answered, each once, in order.

    Without punctuation or brackets that belong to the surrounding sentence; a bracket that was
    opened within the URL belongs to the URL.
    """
    found: dict[str, None] = {}
    for match in _URL.finditer(text):
        url = match.group()
        end, unopened = len(url), url.count(")") - url.count("(")
        while url[end - 1] in ".,;:!?" or (url[end - 1] == ")" and unopened > 0):
            unopened -= url[end - 1] == ")"
            end -= 1
        found[url[:end]] = None
        if len(found) == _MOST_URLS:
            break
    return list(found)


class ApprovalRequest(ServerItem):
    """``mcp_approval_request``: a call that runs once the client has approved it.

    It is added when its arguments are complete: calls that were cut need no approval.
    """

    prefix = "mcpr"
    shown = False

    def document(self) -> Document:
        return {
            "id": self.id,
            "type": "mcp_approval_request",
            "arguments": as_arguments(self.arguments) if self.code else self.arguments,
            "name": self.tool.name,
            "server_label": self.tool.label,
        }

    def opened(self) -> list[PendingEvent]:
        """It has no events while it is written."""
        return []

    def closed(self) -> list[PendingEvent]:
        self.shown = True
        return [added(self.index, self.document())]

    def ended(self) -> list[PendingEvent]:
        return [done(self.index, self.document())] if self.shown else []


_CLASSES: dict[str, type[ServerItem]] = {
    "mcp": McpCall,
    "code_interpreter": CodeInterpreterCall,
    "web_search": WebSearchCall,
}


def server_item(
    index: int, key: str, recipient: str, writing: Writing, approved: str | None = None
) -> ServerItem:
    """The item of a call to ``recipient``, or of the request to approve it.

    ``approved`` is the id of that request, once it was approved.
    """
    asks = approved is None and writing.server.needs_approval(recipient)
    tool = writing.server.served(recipient)
    kind = ApprovalRequest if asks else _CLASSES[tool.kind]
    return kind(index, key, tool, writing, recipient == PYTHON, approved)


def tool_list(index: int, key: str, namespace: Namespace) -> tuple[Document, list[PendingEvent]]:
    """The item ``mcp_list_tools`` of one server, and its events."""
    item: Document = {
        "id": f"mcpl_{key}",
        "type": "mcp_list_tools",
        "server_label": namespace.label,
        "tools": [],
        "error": None,
    }
    tools = [
        {
            "name": tool.origin[-1],
            "description": tool.description,
            "input_schema": tool.parameters,
            "annotations": None if tool.read_only is None else {"read_only": tool.read_only},
        }
        for tool in namespace.tools
    ]
    error = namespace.problem or None
    listed = {**item, "tools": tools, "error": error}
    position = {"item_id": item["id"], "output_index": index}
    outcome = "completed" if error is None else "failed"
    return listed, [
        added(index, item),
        PendingEvent("response.mcp_list_tools.in_progress", position),
        PendingEvent(f"response.mcp_list_tools.{outcome}", position),
        done(index, listed),
    ]
