"""The Messages API: the models of a request body."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.client_servers import MOST_SERVERS
from vllm_mlx_harmony.protocols.sampling import SamplingFields
from vllm_mlx_harmony.protocols.validation import (
    UNSUPPORTED,
    StopStrings,
    Variants,
    Wire,
    checked,
    required,
)

# --- Fields are optional, and null is the same as absent, unless a model says otherwise.


def _as_blocks(value: object) -> object:
    """A string becomes a list of one text block."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("content_type", "must be a string or a list of blocks")


class Block(Wire):
    """One block of a content."""

    type: str


class OtherBlock(Block):
    """A block that is not read: only its type matters."""


class TextBlock(Block):
    text: str


Part: TypeAlias = Annotated[Block, Variants({"text": TextBlock}, OtherBlock)]
"""Text, or a block that is not read."""


class Source(Wire):
    """Where a document comes from. Files and links are not read."""

    type: str | None = None


class TextSource(Source):
    data: str


class ContentSource(Source):
    content: Annotated[list[Part], BeforeValidator(_as_blocks)]


class DocumentBlock(Block):
    title: str | None = None
    context: str | None = None
    source: (
        Annotated[Source, Variants({"text": TextSource, "content": ContentSource}, Source)] | None
    ) = None


class SearchResultBlock(Block):
    """One result of a search. ``source`` is its address."""

    title: str | None = None
    source: str | None = None
    content: list[Part]


class ToolReferenceBlock(Block):
    tool_name: str = Field(min_length=1)


_READABLE: dict[str, type[Wire]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
"""The blocks that both a user and a tool may send."""

ResultPart: TypeAlias = Annotated[
    Block, Variants({**_READABLE, "tool_reference": ToolReferenceBlock}, OtherBlock)
]


class ToolSwitch(Wire):
    """Whether a tool of an MCP server may be called."""

    enabled: bool | None = None


class AnthropicTool(Wire):
    """A tool, or, with ``mcp_server_name``, the tools of an MCP server as ``configs`` selects."""

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
        """Of a tool that Anthropic defines only the type is read."""
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
"""Prefix of the types of tools with which Anthropic's servers search deferred tools."""

TOOLSET = "mcp_toolset"
"""The type of an entry that stands for the tools of an MCP server."""


class ToolChange(Wire):
    """A tool that a conversation adds: its definition, or the name of an earlier one."""

    type: str
    name: str | None = None
    definition: AnthropicTool | None = None


class ThinkingBlock(Block):
    thinking: str | None = None
    signature: str | None = None


class RedactedThinkingBlock(Block):
    data: str


class CallBlock(Block):
    """A call: the client's (``tool_use``) or one of Anthropic's servers (``server_tool_use``)."""

    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, object]


class McpCallBlock(CallBlock):
    server_name: str = Field(min_length=1)


class ResultBlock(Block):
    """The result of a client's tool, or of an MCP server's."""

    tool_use_id: str = Field(min_length=1)
    content: Annotated[list[ResultPart] | None, BeforeValidator(_as_blocks)] = None
    is_error: bool | None = None


class ServerResultBlock(Block):
    """The result of a tool that Anthropic's servers ran. Each tool has a content of its own."""

    tool_use_id: str = Field(min_length=1)
    content: object = None


class ToolAdditionBlock(Block):
    tool: ToolChange


_BLOCKS: dict[str, type[Wire]] = {
    **_READABLE,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": CallBlock,
    "server_tool_use": CallBlock,
    "mcp_tool_use": McpCallBlock,
    "tool_result": ResultBlock,
    "mcp_tool_result": ResultBlock,
    "*_tool_result": ServerResultBlock,
    "tool_addition": ToolAdditionBlock,
}
Blocks: TypeAlias = Annotated[
    list[Annotated[Block, Variants(_BLOCKS, OtherBlock)]], BeforeValidator(_as_blocks)
]


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
        """A system message that sets an effort may omit its content."""
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


class MessagesBody(SamplingFields):
    """The body of ``POST /v1/messages``: the fields that are read."""

    model: str = Field(min_length=1)
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Blocks | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    stream: bool | None = None

    stop_sequences: StopStrings | None = None

    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    mcp_servers: list[McpServer] | None = Field(default=None, max_length=MOST_SERVERS)


THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The code that makes Anthropic's client send whole conversations."""


def read_body(body: object, *, counting: bool = False) -> MessagesBody:
    """The parsed JSON of a request, checked field by field.

    ``counting``: the request is for ``count_tokens``, where ``max_tokens`` is optional.
    Raises only ``RequestError``, naming the field that is invalid, out of range or unsupported,
    whatever ``body`` is. Unknown fields are ignored.
    """
    request = checked(MessagesBody, body)
    if request.max_tokens is None and not counting:
        raise required("max_tokens")
    fields = body if isinstance(body, dict) else {}
    if fields.get("thread") is not None:
        problem = "thread: this server does not store conversations: send all messages"
        raise RequestError(problem, param="thread", code=THREAD_UNSUPPORTED)
    if fields.get("compaction") is not None and not counting:  # Anthropic's own count ignores it
        problem = "compaction: this server does not summarize conversations"
        raise RequestError(problem, param="compaction", code=UNSUPPORTED)
    return request
