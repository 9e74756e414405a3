"""The Messages API, inwards: the shape of a request body, field by field.

Knows which fields and blocks there are, their types and ranges.
Refuses to know what they mean for a Turn (messages/request.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.client_servers import MOST_SERVERS
from vllm_mlx_harmony.protocols.validation import UNSUPPORTED, StopStrings, Wire, checked, required

# --- The shapes, field by field. Everything is optional unless it says otherwise; null is absent.


def _as_blocks(value: object) -> object:
    """A string is a list of one text block."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("content_type", "must be a string or a list of blocks")


_READ: dict[object, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "search_result": ("title", "source", "content"),
    "document": ("title", "context", "source"),
    "tool_addition": ("tool",),
    "server_tool_use": ("id", "name", "input"),
    "mcp_tool_use": ("id", "name", "input", "server_name"),
    "mcp_tool_result": ("tool_use_id", "content", "is_error"),
    "tool_reference": ("tool_name",),
}
"""The fields of a block that are looked at. Fields of the same name mean other things elsewhere."""

RESULT = "_tool_result"
"""What the type of a result ends with, of a tool that Anthropic's servers ran."""


def _only_read(value: object) -> object:
    """A block of another type is only named."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind.endswith(RESULT) and kind not in _READ:
        return {
            "type": kind,
            "tool_use_id": value.get("tool_use_id"),
            "found": value.get("content"),
        }
    known = ("type", *(_READ.get(kind, ()) if isinstance(kind, str) else ()))
    return {field: value[field] for field in known if field in value}


class Part(Wire):
    """Text, or something that is only named."""

    type: str
    text: str | None = None

    _only_read = model_validator(mode="before")(_only_read)


class Source(Wire):
    """Where a document comes from. Of type ``text`` it is in ``data``, of ``content`` in parts."""

    type: str | None = None
    data: str | None = None
    content: Annotated[list[Part] | None, BeforeValidator(_as_blocks)] = None
    url: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_its_own(cls, value: object) -> object:
        """A file or a link to one is only named."""
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        read = {"text": "data", "content": "content", None: "url"}
        field = read.get(kind) if kind is None or isinstance(kind, str) else None
        return {name: value[name] for name in ("type", field) if name in value}


def _as_source(value: object) -> object:
    """The source of a search result is an address."""
    return {"url": value} if isinstance(value, str) else value


class Readable(Wire):
    """A block that a user or a tool may send: a text, a document, what a search found."""

    type: str
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: Annotated[Source | None, BeforeValidator(_as_source)] = None

    _only_read = model_validator(mode="before")(_only_read)


class ResultBlock(Readable):
    """One block of a tool's result: ``content`` of what a search found, or the name of a tool."""

    content: list[Part] | None = None
    tool_name: str | None = Field(default=None, min_length=1)


class ToolSwitch(Wire):
    """Whether a tool of an MCP server may be called."""

    enabled: bool | None = None


class AnthropicTool(Wire):
    """A tool, or with ``mcp_server_name`` those of an MCP server: all, but for ``configs``."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    mcp_server_name: str | None = None
    default_config: ToolSwitch | None = None
    configs: dict[str, ToolSwitch | None] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_ours(cls, value: object) -> object:
        """A tool that Anthropic defines is only named: its other fields are its own."""
        if not isinstance(value, dict) or value.get("input_schema") is not None:
            return value
        kind = value.get("type")
        if kind == TOOLSET:
            own = ("type", "mcp_server_name", "default_config", "configs")
            return {name: value[name] for name in own if name in value}
        return value if kind in (None, CUSTOM) else {"type": kind}


CUSTOM = "custom"
"""The type of a tool that the caller defines: a name, a description and a schema."""

TOOL_SEARCH = "tool_search_tool_"
"""What the type of a tool begins with by which Anthropic's servers search deferred tools."""

TOOLSET = "mcp_toolset"
"""The type of what stands for the tools of an MCP server."""


class ToolChange(Wire):
    """A tool that a conversation adds: its definition, or the name of an earlier one."""

    type: str
    name: str | None = None
    definition: AnthropicTool | None = None


class Block(Readable):
    """One block of a message's content.

    ``found`` is what a tool of Anthropic's servers answered: each has a shape of its own.
    """

    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = Field(default=None, min_length=1)
    name: str | None = Field(default=None, min_length=1)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(default=None, min_length=1)
    content: Annotated[list[ResultBlock] | None, BeforeValidator(_as_blocks)] = None
    is_error: bool | None = None
    tool: ToolChange | None = None
    server_name: str | None = Field(default=None, min_length=1)
    found: Any = None


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks)]


class ToolConfiguration(ToolSwitch):
    """``None``: all of its tools."""

    allowed_tools: list[str] | None = None


class McpServer(Wire):
    """An MCP server that the request names, and perhaps which of its tools."""

    name: str = Field(min_length=1)
    url: str | None = None
    authorization_token: str | None = Field(default=None, repr=False)
    tool_configuration: ToolConfiguration | None = None


class EffortConfig(Wire):
    effort: Any = None


class AnthropicMessage(Wire):
    role: Literal["user", "assistant", "system"]
    content: Blocks
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: EffortConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _effort_alone(cls, value: object) -> object:
        """The system's may have no content, when it says an effort."""
        if not isinstance(value, dict):
            return value
        if value.get("role") != "system":
            return {name: field for name, field in value.items() if name != "output_config"}
        if value.get("content") is None and value.get("output_config"):
            return {**value, "content": []}
        return value


class ToolChoice(Wire):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(Wire):
    type: Literal["json_schema"]
    document: dict[str, Any] = Field(alias="schema")


class OutputConfig(EffortConfig):
    format: OutputFormat | None = None


class MessagesBody(Wire):
    """The body of ``POST /v1/messages``, as far as this server looks at it."""

    model: str = Field(min_length=1)
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Annotated[list[Block] | None, BeforeValidator(_as_blocks)] = None
    max_tokens: int | None = Field(default=None, ge=0)
    stream: bool | None = None

    stop_sequences: StopStrings | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)

    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    thread: Any = None
    compaction: Any = None
    mcp_servers: list[McpServer] | None = Field(default=None, max_length=MOST_SERVERS)


THREAD_UNSUPPORTED = "thread_unsupported_request"
"""By this code Anthropic's client knows that it has to send whole conversations."""


def read_body(body: object, *, counting: bool = False) -> MessagesBody:
    """The parsed JSON of a request, checked field by field.

    ``counting``: it is for ``count_tokens``, where ``max_tokens`` need not be given.
    Raises ``RequestError`` naming the field for everything malformed, out of range or not
    available, and nothing else, whatever JSON value ``body`` is. Unknown fields are ignored.
    """
    request = checked(MessagesBody, body)
    if request.max_tokens is None and not counting:
        raise required("max_tokens")
    for refusal in _unsupported_fields(request, counting=counting):
        raise refusal
    return request


def _unsupported_fields(request: MessagesBody, *, counting: bool) -> Iterator[RequestError]:
    """What cannot be done, and would be another request if it were ignored.

    Anthropic's own count ignores ``compaction``, too.
    """
    if request.thread is not None:
        why = "no conversation is kept here: send all of its messages"
        yield _unsupported("thread", why, THREAD_UNSUPPORTED)
    if request.compaction is not None and not counting:
        yield _unsupported("compaction", "this server does not summarize conversations")


def _unsupported(field: str, why: str, code: str = UNSUPPORTED) -> RequestError:
    return RequestError(f"{field}: {why}", param=field, code=code)
