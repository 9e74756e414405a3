"""Responses: the items of calls that the server runs, and their events.

A call is opened, receives its arguments, is closed, started and finished, in this order. Each kind
of item (``mcp_call``, ``code_interpreter_call``, ``web_search_call``, ``mcp_approval_request``)
has events of its own for some of these. The item is done when the call is finished, or when the
turn ends before that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_mlx_harmony.core.deltas import ToolFailure
from vllm_mlx_harmony.core.pages import read_page
from vllm_mlx_harmony.core.turn import PYTHON, Namespace
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.responses.output_items import (
    COMPLETED,
    INCOMPLETE,
    OutputItem,
    OutputOptions,
    PendingEvent,
    TextField,
    added,
    done,
    parse_arguments,
    pending,
)
from vllm_mlx_harmony.protocols.responses.server_tools import Kind
from vllm_mlx_harmony.protocols.server_calls import CodeArguments, as_arguments, label_and_name

FAILED = "failed"


@dataclass
class ServerItem(OutputItem):
    """One call while it is written and run.

    ``tool`` is its name at the server ``label``. ``approved`` is the id of the request for approval
    that preceded it. ``code``: the tool takes code instead of JSON.
    """

    label: str
    tool: str
    code: bool = False
    approved: str | None = None

    stem: ClassVar[str] = ""  # the beginning of the names of its events
    running: ClassVar[str] = ""  # its status and its event while the call is running, if any
    has_failed_event: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answer: str | None = None
        self.failure: ToolFailure | None = None

    def opened(self) -> list[PendingEvent]:
        return [*self.announce(), pending(f"{self.stem}.in_progress", **self.position)]

    def closed(self) -> list[PendingEvent]:
        return self.close_text()

    def started(self) -> list[PendingEvent]:
        self.status = self.running or self.status
        return [pending(f"{self.stem}.{self.running}", **self.position)] if self.running else []

    def finished(self, text: str, failure: ToolFailure | None) -> list[PendingEvent]:
        self.answer, self.failure = text, failure
        status = COMPLETED if failure is None else FAILED
        ended = pending(f"{self.stem}.{status}", **self.position)
        is_shown = failure is None or self.has_failed_event
        return [*([ended] if is_shown else ()), *self.finish(status)]

    def ended(self) -> list[PendingEvent]:
        return self.finish(INCOMPLETE)


class McpCall(ServerItem):
    """``mcp_call``: a tool of one of the operator's servers. Arguments are JSON, of code too."""

    prefix, stem, has_failed_event = "mcp", "response.mcp_call", True
    text_fields = (TextField("response.mcp_call_arguments", whole="arguments"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.translator = CodeArguments() if self.code else None

    def document(self) -> Document:
        failure, text = self.failure, self.answer or ""
        return self.fields(
            "mcp_call",
            approval_request_id=self.approved,
            arguments=self.text,
            error=None if failure is None else _error(failure, text),
            name=self.tool,
            output=self.answer if failure is None else None,
            server_label=self.label,
        )


def _error(failure: ToolFailure, text: str) -> Document:
    if failure.by_tool:
        content = [{"type": "text", "text": text}]
        return {"type": "mcp_tool_execution_error", "content": content}
    # The first of the codes that JSON-RPC reserves for implementations.
    return {"type": "mcp_protocol_error", "code": -32000, "message": text}


class CodeInterpreterCall(ServerItem):
    """``code_interpreter_call``: code for the server named ``python``."""

    prefix, stem, running = "ci", "response.code_interpreter_call", "interpreting"
    text_fields = (TextField("response.code_interpreter_call_code", whole="code"),)

    def document(self) -> Document:
        shown = self.options.shows_outputs and self.answer is not None
        outputs = [{"type": "logs", "logs": self.answer}] if shown else None
        called = {"code": self.text, "container_id": self.label}
        return self.fields("code_interpreter_call", **called, outputs=outputs)


class WebSearchCall(ServerItem):
    """``web_search_call``: a function of the server named ``browser``."""

    prefix, stem, running = "ws", "response.web_search_call", "searching"

    def document(self) -> Document:
        value = parse_arguments(self.text)
        members = value if isinstance(value, dict) else {}
        answer = None if self.failure else self.answer
        page = None if answer is None else read_page(answer)
        action: Document
        if self.tool == "open":
            named = members.get("id")
            url = named if isinstance(named, str) else None
            action = {"type": "open_page", "url": page.url if page else url}
        elif self.tool == "find":
            pattern = str(members.get("pattern", ""))
            url = page.url if page else ""
            action = {"type": "find_in_page", "pattern": pattern, "url": url}
        else:
            query = str(members.get("query", ""))
            action = {"type": "search", "query": query, "queries": [query]}
            if self.options.shows_sources and answer is not None:
                found = [result.url for result in page.found] if page else []
                urls = found or _urls(answer)
                action["sources"] = [{"type": "url", "url": url} for url in urls]
        return self.fields("web_search_call", action=action)


class FileSearchCall(ServerItem):
    """``file_search_call``, which always fails: the server has no vector stores."""

    prefix, stem = "fs", "response.file_search_call"

    def document(self) -> Document:
        return self.fields("file_search_call", queries=[], results=None)


class ImageGenerationCall(ServerItem):
    """``image_generation_call``, which always fails: the model generates text only."""

    prefix, stem = "ig", "response.image_generation_call"

    def document(self) -> Document:
        return self.fields("image_generation_call", result=None)


_URL = re.compile(r"https?://[^\s<>\"'`|\\^{}\[\]【】†]+")
_MAX_URLS = 100


def _urls(text: str) -> list[str]:
    """The distinct URLs in a search result, in order.

    Punctuation and brackets of the surrounding sentence are left out. A bracket that is opened
    within a URL belongs to it.
    """
    urls: dict[str, None] = {}
    for match in _URL.finditer(text):
        url = match.group()
        end, unopened = len(url), url.count(")") - url.count("(")
        while url[end - 1] in ".,;:!?" or (url[end - 1] == ")" and unopened > 0):
            unopened -= url[end - 1] == ")"
            end -= 1
        urls[url[:end]] = None
        if len(urls) == _MAX_URLS:
            break
    return list(urls)


class ApprovalRequest(ServerItem):
    """``mcp_approval_request``: a call that runs once the client has approved it.

    It is added when its arguments are complete: calls that were cut need no approval.
    """

    prefix = "mcpr"

    def document(self) -> Document:
        return {
            "id": self.id,
            "type": "mcp_approval_request",
            "arguments": as_arguments(self.text) if self.code else self.text,
            "name": self.tool,
            "server_label": self.label,
        }

    def opened(self) -> list[PendingEvent]:
        return []

    def take(self, text: str, logprobs: Sequence[Document] = ()) -> list[PendingEvent]:
        return self._write(text)

    def closed(self) -> list[PendingEvent]:
        return self.announce()


_CLASSES: dict[Kind, type[ServerItem]] = {
    "mcp": McpCall,
    "code_interpreter": CodeInterpreterCall,
    "web_search": WebSearchCall,
}


def server_item(
    index: int, key: str, recipient: str, options: OutputOptions, approved: str | None = None
) -> ServerItem:
    """The item of a call to ``recipient``, or of the request to approve it.

    ``approved`` is the id of that request, once it was approved.
    """
    namespaces = options.server.namespaces
    asks = approved is None and any(namespace.needs_approval(recipient) for namespace in namespaces)
    kind = ApprovalRequest if asks else _CLASSES[options.server.kind(recipient)]
    label, tool = label_and_name(namespaces, recipient)
    return kind(index, key, options, label, tool, recipient == PYTHON, approved)


_REFUSED: Mapping[str, type[ServerItem]] = {
    "code_interpreter": CodeInterpreterCall,
    "file_search": FileSearchCall,
    "image_generation": ImageGenerationCall,
    "web_search": WebSearchCall,
}


def failed_call(
    index: int, key: str, name: str, options: OutputOptions
) -> tuple[Document, list[PendingEvent]] | None:
    """The item of a call of the tool ``name``, which nobody runs, and its events.

    ``None`` if the API has no item for it.
    """
    if name not in _REFUSED:
        return None
    item = _REFUSED[name](index, key, options, label="", tool="")
    failure = ToolFailure("not available")
    events = [*item.opened(), *item.closed(), *item.finished("", failure)]
    assert item.finished_document is not None
    return item.finished_document, events


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
    finished_item = {**item, "tools": tools, "error": error}
    position = {"item_id": item["id"], "output_index": index}
    outcome = "completed" if error is None else "failed"
    return finished_item, [
        added(index, item),
        pending("response.mcp_list_tools.in_progress", **position),
        pending(f"response.mcp_list_tools.{outcome}", **position),
        done(index, finished_item),
    ]
