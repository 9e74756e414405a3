"""Responses: the models of a request body, and the parameters that are rejected."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import ResponseFormat
from vllm_mlx_harmony.protocols.freeform import GrammarSyntax
from vllm_mlx_harmony.protocols.openai_content import Part, Parts
from vllm_mlx_harmony.protocols.openai_request import (
    OpenAISampling,
    TemplateOptions,
    UnsupportedFields,
    given,
    reject_unsupported,
)
from vllm_mlx_harmony.protocols.validation import (
    UNSUPPORTED,
    Variants,
    Wire,
    checked,
    required,
)

TOOLS = frozenset({"function", "custom", "namespace", "tool_search"})
"""The types of tools that the client runs. All others run on a server."""

# --- Fields are optional, and null is the same as absent, unless a model says otherwise.


def _as_items(value: object) -> object:
    """A string becomes a user's message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("input_type", "must be a string or a list of items")


def _as_item(value: object) -> object:
    """Adds the type, which messages and references may omit, and the item as it was sent."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value else "item_reference" if "id" in value else None
    return {**value, "type": kind, "document": value}


def _as_tool(value: object) -> object:
    """Removes the fields of tools that this server does not run."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    hosted = kind == "tool_search" and value.get("execution") != "client"
    if kind == "mcp":
        fields = {name: value.get(name) for name in _OF_MCP}
        return {"type": kind, **fields, "document": value}
    if isinstance(kind, str) and (hosted or kind not in TOOLS):
        return {"type": kind, "document": value}
    return {**value, "document": value}


_OF_MCP = ("server_label", "allowed_tools", "require_approval")


def _as_choice(value: object) -> object:
    """Strings such as ``auto`` become objects of that type."""
    if isinstance(value, str):
        return {"type": value, "document": value}
    return {**value, "document": value} if isinstance(value, dict) else value


def _as_filter(value: object) -> object:
    """A list of names becomes a filter for these tools."""
    return {"tool_names": value} if isinstance(value, list) else value


class ToolFilter(Wire):
    """Selects some of a server's tools: by name, or those that only read."""

    tool_names: list[str] | None = None
    read_only: bool | None = None


class ApprovalFilters(Wire):
    """The tools whose calls must be approved before they run, and those whose calls need not."""

    always: Annotated[ToolFilter | None, BeforeValidator(_as_filter)] = None
    never: Annotated[ToolFilter | None, BeforeValidator(_as_filter)] = None


class Format(Wire):
    """The format of a freeform tool's input."""

    type: str
    syntax: GrammarSyntax | None = None
    definition: str | None = None


class NamespacedTool(Wire):
    """A tool that the client runs: a function, or a freeform one (``custom``)."""

    type: str
    document: dict[str, Any]
    name: str | None = Field(default=None, min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: Format | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    execution: str | None = None


class ResponsesTool(NamespacedTool):
    """A tool, or a ``namespace`` of them."""

    tools: list[Annotated[NamespacedTool, BeforeValidator(_as_tool)]] | None = None
    server_label: str | None = Field(default=None, min_length=1)
    allowed_tools: Annotated[ToolFilter | None, BeforeValidator(_as_filter)] = None
    require_approval: str | ApprovalFilters | None = None


ToolList: TypeAlias = list[Annotated[ResponsesTool, BeforeValidator(_as_tool)]]


class AllowedTool(Wire):
    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None


class ToolChoice(Wire):
    type: str
    document: Any
    mode: str | None = None
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None
    tools: list[AllowedTool] | None = None


class TextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    document: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Wire):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Wire):
    effort: Any = None
    summary: str | None = None
    generate_summary: str | None = None


def _bounded(metadata: dict[str, str]) -> dict[str, str]:
    """Applies OpenAI's limits, since every event repeats the metadata."""
    if len(metadata) > MOST_PAIRS:
        raise PydanticCustomError("too_many", f"must not have more than {MOST_PAIRS} pairs")
    if max(map(len, metadata), default=0) > LONGEST_KEY:
        message = f"must not have keys of more than {LONGEST_KEY} characters"
        raise PydanticCustomError("too_long", message)
    if max(map(len, metadata.values()), default=0) > LONGEST_VALUE:
        message = f"must not have values of more than {LONGEST_VALUE} characters"
        raise PydanticCustomError("too_long", message)
    return metadata


MOST_PAIRS, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512


# --- The items of the input, one model for each kind.


class Item(Wire):
    """One item of the input. ``document`` is all of it, as it was sent."""

    type: str
    document: dict[str, Any]
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
    """A call of a tool that the client runs."""

    name: str = Field(min_length=1)
    call_id: str = Field(min_length=1)
    namespace: str | None = None


class FunctionCallItem(CallItem):
    arguments: Any = None


class CustomCallItem(CallItem):
    input: str


class CallOutputItem(Item):
    """The result of a function or of a freeform tool."""

    call_id: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1)
    namespace: str | None = None
    output: Parts = None


class SearchItem(Item):
    """A search for tools. Without ``call_id``, or run by a server, the client did not run it."""

    call_id: str | None = Field(default=None, min_length=1)
    execution: str | None = None


class SearchCallItem(SearchItem):
    arguments: Any = None


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
    arguments: Any = None
    output: Parts = None
    error: Any = None
    approval_request_id: str | None = None


class ApprovalItem(Item):
    approval_request_id: str
    approve: bool
    reason: str | None = None


class CodeCallItem(Item):
    code: str | None = None
    outputs: list[Any] | None = None


ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "tool_search_call": SearchCallItem,
    "tool_search_output": SearchOutputItem,
    "additional_tools": AdditionalToolsItem,
    "configuration_update": ConfigurationItem,
    "item_reference": ItemReference,
    "mcp_call": ServerCallItem,
    "mcp_approval_request": ServerCallItem,
    "mcp_approval_response": ApprovalItem,
    "code_interpreter_call": CodeCallItem,
}
AnyItem: TypeAlias = Annotated[Item, Variants(ITEMS, OtherItem), BeforeValidator(_as_item)]


class _StoredItem(Wire):
    item: AnyItem


class ResponsesBody(OpenAISampling):
    """The body of ``POST /v1/responses``: the fields that are read."""

    model: str = Field(min_length=1)
    input: Annotated[list[AnyItem] | None, BeforeValidator(_as_items)] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None

    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=1)
    timeout: float | None = Field(default=None, gt=0, lt=1e9)
    min_tokens: int | None = Field(default=None, ge=0)
    thinking_token_budget: int | None = Field(default=None, ge=-1)

    tools: ToolList | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_as_choice)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: Any = None
    chat_template_kwargs: TemplateOptions | None = None

    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    metadata: Annotated[dict[str, str], AfterValidator(_bounded)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    top_logprobs: int | None = Field(default=None, ge=0)


# --- Unsupported parameters that would change the answer: name, rejected values, reason.

_LOGPROBS = "message.output_text.logprobs"
_NO_LOGPROBS = "log probabilities are not available"
_ELSEWHERE = "not a field of Responses: use Chat Completions"
_FORMAT = "not available: use text.format"
_LENGTH = "not a field of Responses: use max_output_tokens"


NO_CONVERSATIONS = (
    "this server stores responses, not conversations; continue a stored response with "
    "previous_response_id (store must not be false), or send the whole history as input"
)
"""The alternative to OpenAI's conversations, for error messages."""

UNSUPPORTED_FIELDS: UnsupportedFields = (
    ("top_logprobs", bool, _NO_LOGPROBS),
    ("include", lambda requested: _LOGPROBS in requested, _NO_LOGPROBS),
    ("logprobs", bool, _NO_LOGPROBS),
    ("conversation", given, f"not available: {NO_CONVERSATIONS}"),
    ("prompt", given, "prompt templates are not available: send input and instructions"),
    ("moderation", given, "not available"),
    (
        "prompt_cache_options",
        lambda options: isinstance(options, dict) and options.get("prewarm"),
        "prewarm is not available",
    ),
    ("structured_outputs", given, _FORMAT),
    ("guided_json", given, _FORMAT),
    ("guided_json_object", bool, _FORMAT),
    ("guided_regex", given, _FORMAT),
    ("guided_choice", given, _FORMAT),
    ("guided_grammar", given, _FORMAT),
    ("response_format", given, "not a field of Responses: use text.format"),
    ("max_tokens", given, _LENGTH),
    ("max_completion_tokens", given, _LENGTH),
    ("messages", bool, "not a field of Responses: use input"),
    ("n", lambda n: n != 1, "one answer per request: send the request again"),
    ("stop", bool, _ELSEWHERE),
    ("logit_bias", bool, _ELSEWHERE),
    ("stop_token_ids", bool, "not available"),
    ("ignore_eos", bool, "a turn ends where the model ends it"),
    ("allowed_token_ids", bool, "not available"),
    ("bad_words", bool, "not available"),
)


def read_body(body: object) -> ResponsesBody:
    """The parsed JSON of a request, checked field by field.

    Raises only ``RequestError``, naming the field that is invalid, out of range or unsupported,
    whatever ``body`` is. Unknown fields are ignored.
    """
    requested = checked(ResponsesBody, body)
    reject_unsupported(body, UNSUPPORTED_FIELDS)
    if requested.background and requested.store is False:
        problem = "background requires store: a response that is not stored cannot be retrieved"
        raise RequestError(problem, param="background", code=UNSUPPORTED)
    return requested


def read_item(document: object) -> Item:
    """A stored item, read like an item of a request. Raises ``RequestError`` like ``read_body``."""
    return checked(_StoredItem, {"item": document}).item


def response_format(requested: TextFormat, where: str) -> ResponseFormat | None:
    """The format that ``requested``, at ``where``, stands for; ``None``: plain text."""
    if requested.type == "text":
        return None
    if requested.type == "json_object":
        return ResponseFormat(where=where)
    if requested.document is None:
        raise required(f"{where}.schema")
    name, description = requested.name or "response", requested.description or ""
    strict = requested.strict is True
    return ResponseFormat(requested.document, name, description, strict, where=where)
