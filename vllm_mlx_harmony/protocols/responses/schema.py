"""Responses: the models of a request body, and the parameters that are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_mlx_harmony.core.turn import ResponseFormat, SyntaxKind
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.openai_content import Part, Parts
from vllm_mlx_harmony.protocols.request_body import (
    JsonSchema,
    OpenAIBody,
    TemplateOptions,
    UnsupportedFields,
    any_value,
)
from vllm_mlx_harmony.protocols.responses.local_tools import CALLS, LOCAL_TOOLS, OUTPUTS
from vllm_mlx_harmony.protocols.validation import (
    VARIANT,
    RequestModel,
    Variants,
    as_choice,
    required,
    string_as_list,
    validate,
)

SEARCH = "tool_search"
"""The type of a search for tools, and its name for the model unless another tool has that name."""

# --- Fields are optional, and null is the same as absent, unless a model says otherwise.


def _as_item(value: object) -> object:
    """Adds the type, which messages and references may omit."""
    if not isinstance(value, dict) or value.get("type") is not None:
        return value
    kind = "message" if "role" in value else "item_reference" if "id" in value else None
    return {**value, "type": kind} if kind else value


def _as_list(value: object) -> object:
    """A single part becomes a list."""
    return [value] if isinstance(value, dict) else value


def _as_filter(value: object) -> object:
    """A list of names becomes a filter for these tools."""
    return {"tool_names": value} if isinstance(value, list) else value


# --- Tools.


class ToolFilter(RequestModel):
    """Selects the tools of a server that meet all of its conditions, of which it has at least one.

    Unknown conditions are rejected: without them, the filter would select more than was meant.
    """

    model_config = ConfigDict(extra="forbid")

    tool_names: list[str] | None = None
    read_only: bool | None = None

    @model_validator(mode="after")
    def _has_condition(self) -> ToolFilter:
        if self.tool_names is None and self.read_only is None:
            raise PydanticCustomError("tool_filter", "must have tool_names or read_only")
        return self


Filter: TypeAlias = Annotated[ToolFilter | None, BeforeValidator(_as_filter)]


class ApprovalFilters(RequestModel):
    """The tools whose calls must be approved before they run, and those whose calls need not.

    ``always`` takes precedence.
    """

    always: Filter = None
    never: Filter = None


Approval: TypeAlias = Annotated[
    Annotated[Literal["always", "never"], Tag(VARIANT + "rule")]
    | Annotated[ApprovalFilters, Tag(VARIANT + "filters")],
    Discriminator(lambda value: VARIANT + ("rule" if isinstance(value, str) else "filters")),
]


class Format(RequestModel):
    type: Literal["text", "grammar"]


class GrammarFormat(Format):
    syntax: SyntaxKind | None = None
    definition: str = Field(min_length=1)


class ResponsesTool(RequestModel):
    """A tool that another server would have to run, if it is of none of the kinds below."""

    type: str
    raw: Document


class ClientTool(ResponsesTool):
    description: str | None = None
    parameters: Document | None = None
    defer_loading: bool | None = None


class PredefinedTool(ResponsesTool):
    """A tool that OpenAI defines and the client runs: only its type is required."""


class FunctionTool(ClientTool):
    name: str = Field(min_length=1)
    strict: bool | None = None


class CustomTool(ClientTool):
    name: str = Field(min_length=1)
    format: Annotated[Format, Variants({"grammar": GrammarFormat}, Format)] | None = None


class SearchTool(ClientTool):
    """The client's own search for tools."""


def _tool_kind(tool: Mapping[str, object]) -> object:
    """The type of a tool; ``None`` if OpenAI's servers would run this one."""
    environment = tool.get("environment")
    in_container = isinstance(environment, dict) and environment.get("type") != "local"
    hosted = {
        SEARCH: tool.get("execution") != "client",
        "shell": in_container,
    }
    kind = tool.get("type")
    return None if isinstance(kind, str) and hosted.get(kind) else kind


_CLIENT_TOOLS: dict[str, type[RequestModel]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    SEARCH: SearchTool,
}


class NamespaceTool(ResponsesTool):
    name: str = Field(min_length=1)
    description: str | None = None
    defer_loading: bool | None = None
    tools: list[Annotated[ResponsesTool, Variants(_CLIENT_TOOLS, ResponsesTool, _tool_kind)]]


class McpTool(ResponsesTool):
    server_label: str | None = Field(default=None, min_length=1)
    allowed_tools: Filter = None
    require_approval: Approval | None = None


class WebFilters(RequestModel):
    """The domains whose pages a web search may show; their subdomains are among them."""

    allowed_domains: list[str] | None = None
    blocked_domains: list[str] | None = None


class WebSearchTool(ResponsesTool):
    """Web search. Without ``external_web_access``, it is to use an index alone."""

    filters: WebFilters | None = None
    external_web_access: bool | None = None


WEB_SEARCH = (
    *("web_search", "web_search_2025_08_26"),
    *("web_search_preview", "web_search_preview_2025_03_11"),
)
"""The types of web search."""

TOOLS: dict[str, type[RequestModel]] = {
    **dict.fromkeys(WEB_SEARCH, WebSearchTool),
    **_CLIENT_TOOLS,
    **dict.fromkeys(LOCAL_TOOLS, PredefinedTool),
    "namespace": NamespaceTool,
    "mcp": McpTool,
}
ToolList: TypeAlias = list[Annotated[ResponsesTool, Variants(TOOLS, ResponsesTool, _tool_kind)]]


class AllowedTool(RequestModel):
    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None


def _with_raw(value: object) -> object:
    choice = as_choice(value)
    return {**choice, "raw": value} if isinstance(choice, dict) else choice


class ToolChoice(AllowedTool):
    """A rule such as ``auto``, a tool that must be called, or ``allowed_tools``."""

    raw: object
    mode: str | None = None
    tools: list[AllowedTool] | None = None


# --- The format of the answer, and reasoning.


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(RequestModel):
    effort: object = None
    summary: str | None = None
    generate_summary: str | None = None


def _bounded(metadata: dict[str, str]) -> dict[str, str]:
    """Applies OpenAI's limits, since every event repeats the metadata."""
    for size, limit, problem in (
        (len(metadata), 16, "more than 16 pairs"),
        (max(map(len, metadata), default=0), 64, "keys of more than 64 characters"),
        (max(map(len, metadata.values()), default=0), 512, "values of more than 512 characters"),
    ):
        if size > limit:
            raise PydanticCustomError("metadata_length", f"must not have {problem}")
    return metadata


Metadata: TypeAlias = Annotated[dict[str, str], AfterValidator(_bounded)]


def _as_conversation(value: object) -> object:
    return {"id": value} if isinstance(value, str) else value


class ConversationReference(RequestModel):
    id: str = Field(min_length=1)


# --- The items of the input, one model for each kind.


class Item(RequestModel):
    """One item of the input. ``raw`` is all of it, as it was sent."""

    type: str
    raw: Document
    id: str | None = None


class OtherItem(Item):
    """An item that means nothing to the model: only its type is read."""

    id: Any = None


class MessageItem(Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts = None
    phase: str | None = None


class ReasoningItem(Item):
    content: Parts = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class CompactionItem(Item):
    encrypted_content: str | None = None


class CallItem(Item):
    name: str = Field(min_length=1)
    call_id: str = Field(min_length=1)
    namespace: str | None = None
    arguments: object = None


class CustomCallItem(CallItem):
    input: str


class CallOutputItem(Item):
    call_id: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1)
    namespace: str | None = None
    output: Parts = None


class LocalCallItem(Item):
    """A call of one of the ``LOCAL_TOOLS``. Some clients omit the id of the call."""

    call_id: str | None = Field(default=None, min_length=1)


class LocalOutputItem(Item):
    """Its result. That of a ``local_shell_call`` has the id of the call as its own id."""

    call_id: str | None = Field(default=None, min_length=1)
    status: str | None = None
    output: Annotated[Parts, BeforeValidator(_as_list)] = None


class ShellOutput(RequestModel):
    stdout: str | None = None
    stderr: str | None = None
    outcome: Document | None = None


class ShellOutputItem(LocalOutputItem):
    output: list[ShellOutput] | None = None  # type: ignore[assignment]


class AgentMessageItem(Item):
    """A message from one agent of the client to another, as Codex sends it."""

    author: str | None = None
    recipient: str | None = None
    content: Parts = None


class SearchItem(Item):
    """A search for tools. Without ``call_id``, or run by a server, the client did not run it."""

    call_id: str | None = Field(default=None, min_length=1)
    execution: str | None = None


class SearchCallItem(SearchItem):
    arguments: object = None


class SearchOutputItem(SearchItem):
    tools: ToolList


class AdditionalToolsItem(Item):
    tools: ToolList


class ConfigurationItem(Item):
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None


class ItemReference(Item):
    id: str


class ServerCallItem(Item):
    """A call of a tool that a server runs, or the request to approve it."""

    server_label: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: object = None
    output: Parts = None
    error: object = None
    approval_request_id: str | None = None


class ApprovalItem(Item):
    approval_request_id: str
    approve: bool
    reason: str | None = None


class CodeCallItem(Item):
    code: str | None = None
    outputs: list[object] | None = None


ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "tool_search_call": SearchCallItem,
    "tool_search_output": SearchOutputItem,
    "additional_tools": AdditionalToolsItem,
    "configuration_update": ConfigurationItem,
    "item_reference": ItemReference,
    **dict.fromkeys(CALLS, LocalCallItem),
    **dict.fromkeys(OUTPUTS, LocalOutputItem),
    "shell_call_output": ShellOutputItem,
    "agent_message": AgentMessageItem,
    "mcp_call": ServerCallItem,
    "mcp_approval_request": ServerCallItem,
    "mcp_approval_response": ApprovalItem,
    "code_interpreter_call": CodeCallItem,
}
AnyItem: TypeAlias = Annotated[Item, Variants(ITEMS, OtherItem), BeforeValidator(_as_item)]


class _StoredItem(RequestModel):
    item: AnyItem


class ResponsesBody(OpenAIBody):
    """The body of ``POST /v1/responses``: the fields that are read."""

    input: Annotated[
        list[AnyItem] | None, string_as_list("items", "content", type="message", role="user")
    ] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[ConversationReference | None, BeforeValidator(_as_conversation)] = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None

    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=1)

    tools: ToolList | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_with_raw)] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None

    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


# --- Unsupported parameters that would change the answer: name, rejected values, reason.

_ELSEWHERE = "not a field of Responses: use Chat Completions"
_FORMAT = "not available: use text.format"
_LENGTH = "not a field of Responses: use max_output_tokens"


UNSUPPORTED_FIELDS: UnsupportedFields = (
    ("logprobs", bool, "not a field of Responses: use include and top_logprobs"),
    ("prompt", any_value, "prompt templates are not available: send input and instructions"),
    ("moderation", any_value, "not available"),
    (
        "prompt_cache_options",
        lambda options: isinstance(options, dict) and options.get("prewarm"),
        "prewarm is not available",
    ),
    ("structured_outputs", any_value, _FORMAT),
    ("guided_json", any_value, _FORMAT),
    ("guided_json_object", bool, _FORMAT),
    ("guided_regex", any_value, _FORMAT),
    ("guided_choice", any_value, _FORMAT),
    ("guided_grammar", any_value, _FORMAT),
    ("json_schema", bool, _FORMAT),
    ("regex", bool, _FORMAT),
    ("grammar", bool, _FORMAT),
    ("ebnf", bool, _FORMAT),
    ("response_format", any_value, "not a field of Responses: use text.format"),
    ("max_tokens", any_value, _LENGTH),
    ("max_completion_tokens", any_value, _LENGTH),
    ("messages", bool, "not a field of Responses: use input"),
    ("n", lambda n: n != 1, "only one answer per request: send several requests"),
    ("stop", bool, _ELSEWHERE),
    ("logit_bias", bool, _ELSEWHERE),
    ("stop_token_ids", bool, "not available"),
    ("allowed_token_ids", bool, "not available"),
    ("bad_words", bool, "not available"),
)


def read_item(document: object) -> Item:
    """A stored item, read like an item of a request. Raises ``RequestError``."""
    return validate(_StoredItem, {"item": document}).item


def response_format(requested: TextFormat, where: str) -> ResponseFormat | None:
    """The format that ``requested``, at ``where``, stands for; ``None``: plain text."""
    if requested.type == "text":
        return None
    if requested.type == "json_object":
        return ResponseFormat(where=where)
    if requested.json_schema is None:
        raise required(f"{where}.schema")
    name, description = requested.name or "response", requested.description or ""
    strict = requested.strict is True
    return ResponseFormat(requested.json_schema, name, description, strict, where=where)
