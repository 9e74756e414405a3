"""Responses: the items of calls that the server runs, and their events.

A call is opened, receives its arguments, is closed, started and finished, in this order. Each kind
of item (``mcp_call``, ``code_interpreter_call``, ``web_search_call``, ``mcp_approval_request``)
has events of its own for some of these. The item is done when the call is finished, or when the
turn ends before that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from json import loads
from typing import Any

from vllm_mlx_harmony.core.deltas import ToolFailure
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import PYTHON, Namespace
from vllm_mlx_harmony.protocols.responses.output_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Document,
    PendingEvent,
)
from vllm_mlx_harmony.protocols.responses.server_tools import Served
from vllm_mlx_harmony.protocols.server_calls import CodeArguments, as_arguments
from vllm_mlx_harmony.protocols.validation import mended

FAILED = "failed"


class ServerItem:
    """One call while it is written and run. Each method returns the events for one step.

    ``key`` is the part of its id after the prefix, ``approved`` the id of the request for approval
    that preceded it. ``outputs``: the client asked for the output of code; ``sources``: for the
    URLs that a search found. ``code``: the tool takes code instead of JSON. ``shown``: whether the
    call is an item of the output yet.
    """

    prefix = ""
    """Prefix of its id."""
    stem = ""
    """Prefix of its events."""
    shown = True

    def __init__(self, index: int, key: str, tool: Served) -> None:
        self.index, self.tool = index, tool
        self.id = f"{self.prefix}_{key}"
        self.approved: str | None = None
        self.outputs = self.sources = self.code = False
        self._parts: list[str] = []
        self.status = IN_PROGRESS
        self.text: str | None = None
        self.failure: ToolFailure | None = None

    @property
    def arguments(self) -> str:
        """The arguments so far."""
        return "".join(self._parts)

    def document(self) -> Document:
        """The item in its current state."""
        raise NotImplementedError

    def opened(self) -> Iterator[PendingEvent]:
        """The model begins the call."""
        yield self._item("added")
        yield self._event("in_progress")

    def take(self, text: str) -> Iterator[PendingEvent]:
        """More of its arguments."""
        self._parts.append(text)
        yield from ()

    def closed(self) -> Iterator[PendingEvent]:
        """The arguments are complete."""
        yield from ()

    def started(self) -> Iterator[PendingEvent]:
        """The call is run."""
        yield from ()

    def finished(self, text: str, failure: ToolFailure | None) -> Iterator[PendingEvent]:
        """The call has a result."""
        self.text, self.failure = text, failure
        self.status = COMPLETED if failure is None else FAILED
        if failure is None or self.tells_failure:
            yield self._event("completed" if failure is None else "failed")
        yield self._item("done")

    tells_failure = True

    def ended(self) -> Iterator[PendingEvent]:
        """The turn ended before the call had a result."""
        self.status = INCOMPLETE
        yield self._item("done")

    def _position(self) -> Document:
        return {"item_id": self.id, "output_index": self.index}

    def _event(self, kind: str, **fields: Any) -> PendingEvent:
        return PendingEvent(f"{self.stem}.{kind}", {**self._position(), **fields})

    def _item(self, kind: str) -> PendingEvent:
        fields = {"output_index": self.index, "item": self.document()}
        return PendingEvent(f"response.output_item.{kind}", fields)


class McpCall(ServerItem):
    """``mcp_call``: a tool of one of the operator's servers. Arguments are JSON, of code too."""

    prefix, stem = "mcp", "response.mcp_call"

    def __init__(self, index: int, key: str, tool: Served) -> None:
        super().__init__(index, key, tool)
        self._json = CodeArguments()

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

    def take(self, text: str) -> Iterator[PendingEvent]:
        yield from self._more(self._json.feed(text) if self.code else text)

    def closed(self) -> Iterator[PendingEvent]:
        if self.code:
            yield from self._more(self._json.close())
        yield PendingEvent(
            "response.mcp_call_arguments.done", {**self._position(), "arguments": self.arguments}
        )

    def _more(self, text: str) -> Iterator[PendingEvent]:
        self._parts.append(text)
        yield PendingEvent("response.mcp_call_arguments.delta", {**self._position(), "delta": text})


def _error(failure: ToolFailure, text: str) -> Document:
    if failure.by_tool:
        return {
            "type": "mcp_tool_execution_error",
            "content": [{"type": "text", "text": text}],
        }
    return {"type": "mcp_protocol_error", "code": NO_ANSWER, "message": text}


NO_ANSWER = -32000
"""The first of JSON-RPC's numbers for errors of an implementation's own."""


class CodeInterpreterCall(ServerItem):
    """``code_interpreter_call``: code for the server named ``python``."""

    prefix, stem = "ci", "response.code_interpreter_call"
    tells_failure = False  # the schema has no event for it

    def document(self) -> Document:
        shown = self.outputs and self.text is not None
        return {
            "id": self.id,
            "type": "code_interpreter_call",
            "status": self.status,
            "code": self.arguments,
            "container_id": self.tool.label,
            "outputs": [{"type": "logs", "logs": self.text}] if shown else None,
        }

    def take(self, text: str) -> Iterator[PendingEvent]:
        self._parts.append(text)
        fields = {**self._position(), "delta": text}
        yield PendingEvent("response.code_interpreter_call_code.delta", fields)

    def closed(self) -> Iterator[PendingEvent]:
        fields = {**self._position(), "code": self.arguments}
        yield PendingEvent("response.code_interpreter_call_code.done", fields)

    def started(self) -> Iterator[PendingEvent]:
        self.status = "interpreting"
        yield self._event("interpreting")


class WebSearchCall(ServerItem):
    """``web_search_call``: a function of the server named ``browser``."""

    prefix, stem = "ws", "response.web_search_call"
    tells_failure = False  # the schema has no event for it

    def __init__(self, index: int, key: str, tool: Served) -> None:
        super().__init__(index, key, tool)
        self._found: list[Document] | None = None  # where, when it is known and wanted

    def document(self) -> Document:
        return {
            "id": self.id,
            "type": "web_search_call",
            "status": self.status,
            "action": self._action(),
        }

    def started(self) -> Iterator[PendingEvent]:
        self.status = "searching"
        yield self._event("searching")

    def finished(self, text: str, failure: ToolFailure | None) -> Iterator[PendingEvent]:
        if self.sources and failure is None:
            self._found = [{"type": "url", "url": url} for url in _urls(text)]
        yield from super().finished(text, failure)

    def _action(self) -> Document:
        given = _object(self.arguments)
        if self.tool.name == "open":
            page = given.get("id")
            return {"type": "open_page", "url": page if isinstance(page, str) else None}
        if self.tool.name == "find":
            return {"type": "find_in_page", "pattern": str(given.get("pattern", "")), "url": ""}
        query = str(given.get("query", ""))
        action: Document = {"type": "search", "query": query, "queries": [query]}
        if self._found is not None:
            action["sources"] = self._found
        return action


_URL = re.compile(r"https?://[^\s<>\"'`|\\^{}\[\]【】†]+")
_MOST_URLS = 100


def _urls(text: str) -> list[str]:
    """The URLs in what a search has answered, each once, in order.

    Without what a sentence, or brackets around it, put behind one: a bracket that the URL has
    opened itself belongs to it.
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


def _object(arguments: str) -> dict[str, Any]:
    """``arguments``, if they are an object that can be sent."""
    try:
        value = mended(loads(arguments or "{}"))
    except (ValueError, RecursionError, RequestError):
        return {}
    return value if isinstance(value, dict) else {}


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

    def opened(self) -> Iterator[PendingEvent]:
        """It has no events while it is written."""
        yield from ()

    def closed(self) -> Iterator[PendingEvent]:
        self.shown = True
        yield self._item("added")

    def ended(self) -> Iterator[PendingEvent]:
        if self.shown:
            yield self._item("done")


_CLASSES: dict[str, Callable[[int, str, Served], ServerItem]] = {
    "mcp": McpCall,
    "code_interpreter": CodeInterpreterCall,
    "web_search": WebSearchCall,
}


def server_item(
    index: int, key: str, tool: Served, recipient: str, *, asks: bool, outputs: bool, sources: bool
) -> ServerItem:
    """The item of a call to ``recipient``; ``asks``: it is not run before it is approved."""
    item = (ApprovalRequest if asks else _CLASSES[tool.kind])(index, key, tool)
    item.outputs, item.sources, item.code = outputs, sources, recipient == PYTHON
    return item


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
    done = {**item, "tools": tools, "error": error}
    position = {"item_id": item["id"], "output_index": index}
    outcome = "completed" if error is None else "failed"
    return done, [
        PendingEvent("response.output_item.added", {"output_index": index, "item": item}),
        PendingEvent("response.mcp_list_tools.in_progress", position),
        PendingEvent(f"response.mcp_list_tools.{outcome}", position),
        PendingEvent("response.output_item.done", {"output_index": index, "item": done}),
    ]
