"""The Messages API: the models of a request body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from vllm_mlx_harmony.protocols.client_servers import MAX_SERVERS
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.messages.tool_types import (
    CLIENT_TOOLS,
    SERVER_TOOLS,
    WEB_TOOLS,
)
from vllm_mlx_harmony.protocols.request_body import RequestBody
from vllm_mlx_harmony.protocols.validation import (
    RequestModel,
    StopStrings,
    Variants,
    string_as_list,
)

# --- Fields are optional, and null is the same as absent, unless a model says otherwise.


class Block(RequestModel):
    """One block of a content. Of other blocks than those below, only the type is read."""

    type: str


class TextBlock(Block):
    text: str
    citations: object = None


Part: TypeAlias = Annotated[Block, Variants({"text": TextBlock}, Block)]
"""Text, or a block that is not read."""


class Source(RequestModel):
    """Where a document comes from. Files and links are not read."""

    type: str | None = None


class TextSource(Source):
    data: str


class ContentSource(Source):
    content: Annotated[list[Part], string_as_list("blocks")]


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


_READABLE: dict[str, type[RequestModel]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
"""The blocks that both a user and a tool may send."""

ResultPart: TypeAlias = Annotated[
    Block, Variants({**_READABLE, "tool_reference": ToolReferenceBlock}, Block)
]


# --- Tools.

CUSTOM = "custom"
"""The type of a tool that the caller defines: a name, a description and a schema."""

TOOL_SEARCH = "tool_search_tool_"
"""Prefix of the types of tools with which Anthropic's servers search deferred tools."""

TOOLSET = "mcp_toolset"
"""The type of an entry that stands for the tools of an MCP server."""


class AnthropicTool(RequestModel):
    """A tool that Anthropic's servers would run: only its type is read."""

    type: str | None = None


class PredefinedTool(AnthropicTool):
    """A tool that Anthropic defines and the client runs. ``raw`` is the whole declaration."""

    type: str
    raw: Document
    name: str | None = Field(default=None, min_length=1)
    strict: bool | None = None
    defer_loading: bool | None = None


class WebTool(AnthropicTool):
    """Web search or web fetch, and what it may show."""

    type: str
    max_uses: int | None = Field(default=None, ge=1)
    allowed_domains: list[str] | None = None
    blocked_domains: list[str] | None = None


class ClientTool(AnthropicTool):
    name: str
    description: str | None = None
    input_schema: Document
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolSwitch(RequestModel):
    enabled: bool | None = None


class Toolset(AnthropicTool):
    """The tools of an MCP server as ``configs`` selects them."""

    mcp_server_name: str
    default_config: ToolSwitch | None = None
    configs: dict[str, ToolSwitch | None] | None = None


def _tool_kind(tool: Mapping[str, object]) -> object:
    kind = tool.get("type")
    return CUSTOM if kind is None or tool.get("input_schema") is not None else kind


_TOOLS: dict[str, type[RequestModel]] = {
    CUSTOM: ClientTool,
    TOOLSET: Toolset,
    **dict.fromkeys(CLIENT_TOOLS, PredefinedTool),
    **{kind: WebTool for kind, name in SERVER_TOOLS.items() if name in WEB_TOOLS},
}
AnyTool: TypeAlias = Annotated[AnthropicTool, Variants(_TOOLS, AnthropicTool, _tool_kind)]


class ToolChange(RequestModel):
    """A tool that a conversation adds: a reference to an earlier one."""

    type: str
    name: str | None = None


class ToolDefinition(ToolChange):
    definition: AnyTool


# --- Blocks of a message.


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
    tool_use_id: str = Field(min_length=1)
    content: Annotated[list[ResultPart] | None, string_as_list("blocks")] = None
    is_error: bool | None = None


class ServerResultBlock(Block):
    """The result of a tool that Anthropic's servers ran. Each tool has a content of its own."""

    tool_use_id: str = Field(min_length=1)
    content: object = None


class ToolAdditionBlock(Block):
    tool: Annotated[ToolChange, Variants({"tool_definition": ToolDefinition}, ToolChange)]


_BLOCKS: dict[str, type[RequestModel]] = {
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
    list[Annotated[Block, Variants(_BLOCKS, Block)]], string_as_list("blocks")
]


# --- The body.


class ToolConfiguration(ToolSwitch):
    """Which tools of an MCP server may be called: all, unless ``allowed_tools`` lists some."""

    allowed_tools: list[str] | None = None


class McpServer(RequestModel):
    name: str = Field(min_length=1)
    url: str | None = None
    authorization_token: str | None = Field(default=None, repr=False)
    tool_configuration: ToolConfiguration | None = None


class EffortConfig(RequestModel):
    effort: object = None


class AnthropicMessage(RequestModel):
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


class ToolChoice(RequestModel):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: Document = Field(alias="schema")


class OutputConfig(EffortConfig):
    format: OutputFormat | None = None


class MessagesBody(RequestBody):
    """The body of ``POST /v1/messages``: the fields that are read."""

    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Blocks | None = None
    max_tokens: int | None = Field(default=None, ge=0)

    stop_sequences: StopStrings | None = None

    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    mcp_servers: list[McpServer] | None = Field(default=None, max_length=MAX_SERVERS)


THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The code that makes Anthropic's client send whole conversations."""
