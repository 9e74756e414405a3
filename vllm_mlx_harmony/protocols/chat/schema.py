"""Chat Completions: the models of a request body, and the parameters that are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from vllm_mlx_harmony.core.turn import SyntaxKind
from vllm_mlx_harmony.protocols.events import Document
from vllm_mlx_harmony.protocols.openai_content import TEXT_PARTS, AnyPart, Parts, paragraphs
from vllm_mlx_harmony.protocols.request_body import (
    JsonSchema,
    OpenAIBody,
    TemplateOptions,
    UnsupportedFields,
    any_value,
)
from vllm_mlx_harmony.protocols.validation import (
    RequestModel,
    StopStrings,
    Variants,
    as_choice,
    string_as_list,
)

MAX_CHOICES = 8
"""Answers to one request: each takes as much memory as a request of its own."""

# --- Fields are optional, and null is the same as absent, unless a model says otherwise.


def _as_strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_named_schema(value: object) -> object:
    """A schema in the place of the object that has it as ``schema``, as clients of llama.cpp and
    SGLang send it."""
    if isinstance(value, dict) and not value.keys() <= _NAMED_SCHEMA:
        return value if "schema" in value else {"schema": value}
    return value


_NAMED_SCHEMA = {"name", "description", "strict", "schema"}


def _as_nested(value: object) -> object:
    """A choice as in Responses, whose fields are beside its type, or Anthropic's, in the form of
    Chat."""
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str):
        if kind == "any":
            return {"type": "required"}
        if kind == "tool":
            return {"type": "function", "function": value}
        inner = {"function": "name", "custom": "name", "allowed_tools": "tools"}.get(kind, "")
        if value.get(kind) is None and value.get(inner) is not None:
            return {"type": kind, kind: value}
    return as_choice(value)


def _kind(value: Mapping[str, object]) -> object:
    """The type of a tool or of a call, which may be omitted."""
    custom = value.get("custom") is not None and value.get("function") is None
    return value.get("type") or ("custom" if custom else "function")


class ChatFunction(RequestModel):
    name: str = Field(min_length=1)
    arguments: object = None


class ChatInput(RequestModel):
    name: str = Field(min_length=1)
    input: str


class ChatCall(RequestModel):
    id: str = Field(min_length=1)
    type: Literal["function", "custom"] | None = None


class FunctionCall(ChatCall):
    function: ChatFunction


class CustomCall(ChatCall):
    custom: ChatInput


AnyCall: TypeAlias = Annotated[
    FunctionCall | CustomCall, Variants({"custom": CustomCall}, FunctionCall, _kind)
]


class ToolResultPart(AnyPart):
    """The result of a call in a message of the user, as Anthropic has it."""

    tool_use_id: str = Field(min_length=1)
    content: Parts = None


class ToolUsePart(AnyPart):
    """A call in a message of the assistant, as Anthropic has it."""

    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: object = None


class ReasoningPart(AnyPart):
    """Reasoning in a message of the assistant, as Anthropic, Mistral, LangChain or Vercel has it:
    ``thinking`` with a text or parts, ``reasoning`` with a ``text`` or a ``reasoning``."""

    thinking: Parts = None
    reasoning: str | None = None
    text: str | None = None

    @property
    def words(self) -> str:
        return self.text or self.reasoning or paragraphs(self.thinking)


_PARTS: dict[str, type[RequestModel]] = {
    **TEXT_PARTS,
    **dict.fromkeys(("thinking", "redacted_thinking", "reasoning"), ReasoningPart),
    "tool_result": ToolResultPart,
    "tool_use": ToolUsePart,
}
ChatPart: TypeAlias = Annotated[AnyPart, Variants(_PARTS, AnyPart)]


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[list[ChatPart] | None, string_as_list("parts")] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    tool_calls: list[AnyCall] | None = None
    tool_call_id: str | None = None
    function_call: ChatFunction | None = None
    name: object = None
    audio: object = None

    @property
    def words_of_reasoning(self) -> str:
        """The reasoning, in whichever field or parts the client sends it back."""
        parts = (part.words for part in self.content or () if isinstance(part, ReasoningPart))
        field = self.reasoning_content or self.reasoning or self.thinking
        return field or "\n".join(filter(None, parts))

    @property
    def has_calls(self) -> bool:
        parts = self.content or ()
        has_blocks = any(isinstance(part, ToolUsePart) for part in parts)
        return bool(self.tool_calls or self.function_call or has_blocks)


class ChatToolFunction(RequestModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Document | None = None
    strict: bool | None = None


class ChatGrammar(RequestModel):
    syntax: SyntaxKind
    definition: str = Field(min_length=1)


class InputFormat(RequestModel):
    type: Literal["text", "grammar"]


class GrammarFormat(InputFormat):
    grammar: ChatGrammar


class ChatFreeform(RequestModel):
    name: str = Field(min_length=1)
    description: str | None = None
    format: Annotated[InputFormat, Variants({"grammar": GrammarFormat}, InputFormat)] | None = None


class ChatTool(RequestModel):
    type: Literal["function", "custom"] | None = None


class FunctionTool(ChatTool):
    function: ChatToolFunction


class CustomTool(ChatTool):
    """A freeform tool. ``flat``: it was declared as in Responses."""

    custom: ChatFreeform
    flat: bool = False


def _nested(tool: object) -> object:
    """A tool as Responses or Anthropic declare it, in the form of Chat Completions.

    Cursor sends such tools, among others: https://github.com/BerriAI/litellm/pull/34029,
    https://github.com/router-for-me/CLIProxyAPI/pull/3804.
    """
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return tool
    kind = tool.get("type")
    if tool.get("function") is not None or tool.get("custom") is not None:
        return tool
    if kind == "custom":
        form = tool.get("format")
        if isinstance(form, dict) and form.get("grammar") is None:
            form = {**form, "grammar": form}
        return {"type": kind, "custom": {**tool, "format": form}, "flat": True}
    if kind not in (None, "function"):
        return tool
    names = ("parameters", "input_schema")
    schemas = (tool[name] for name in names if tool.get(name) is not None)
    return {"type": "function", "function": {**tool, "parameters": next(schemas, None)}}


AnyTool: TypeAlias = Annotated[
    FunctionTool | CustomTool,
    Variants({"custom": CustomTool}, FunctionTool, _kind),
    BeforeValidator(_nested),
]


class ChatNamed(RequestModel):
    name: str


class ChatNamedTool(RequestModel):
    """A tool, by its type and its name."""

    type: str = "function"
    function: ChatNamed | None = None
    custom: ChatNamed | None = None


class ChatAllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: list[Annotated[ChatNamedTool, BeforeValidator(_as_nested)]] = Field(min_length=1)


class ChatToolChoice(ChatNamedTool):
    """A tool that must be called, or a rule: ``auto`` and the like are types of their own."""

    allowed_tools: ChatAllowedTools | None = None


class ChatFormat(RequestModel):
    """``bare_schema`` is where llama.cpp has the schema, in both types."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema | None, BeforeValidator(_as_named_schema)] = None
    bare_schema: Document | None = Field(default=None, alias="schema")


class StructuredOutputs(RequestModel):
    """vLLM's fields for the format of the answer, of which one is given."""

    json_schema: object = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    structural_tag: object = None
    disable_additional_properties: bool | None = None


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class ReasoningOptions(RequestModel):
    """``effort`` as everywhere; the rest is OpenRouter's."""

    effort: object = None
    max_tokens: int | None = Field(default=None, ge=0)
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingOptions(RequestModel):
    """Anthropic's field, which proxies pass on as it is."""

    type: str | None = None
    budget_tokens: int | None = Field(default=None, ge=0)


class Prediction(RequestModel):
    type: Literal["content"]
    content: Parts


class ChatTemplateOptions(TemplateOptions):
    enable_thinking: bool | None = None


MaxTokens: TypeAlias = Annotated[
    Annotated[int, Field(ge=1)] | None,
    # llama.cpp and LM Studio: no limit
    BeforeValidator(lambda value: None if value == -1 else value),
]


class ChatBody(OpenAIBody):
    """The body of ``POST /v1/chat/completions``: the fields that are read."""

    messages: list[ChatMessage] = Field(min_length=1)
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    stop: Annotated[StopStrings | None, BeforeValidator(_as_strings)] = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    prediction: Prediction | None = None
    logprobs: bool | None = None

    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    tools: list[AnyTool] | None = None
    tool_choice: Annotated[ChatToolChoice | None, BeforeValidator(_as_nested)] = None
    web_search_options: Document | None = None

    response_format: ChatFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: object = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1)
    guided_grammar: str | None = None
    json_schema: object = None
    regex: str | None = None
    grammar: str | None = None

    thinking_budget_tokens: int | None = Field(default=None, ge=-1)
    thinking_budget: int | None = Field(default=None, ge=-1)
    thinking: ThinkingOptions | None = None
    include_reasoning: bool | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: ChatTemplateOptions | None = None


# --- Unsupported parameters that would change the answer: name, rejected values, reason.

_LOGPROBS = "not available: use logprobs and top_logprobs"
_TEXT_ONLY = "not supported: the model generates text only"
_TOKENS = "not supported: token ids are not returned"


UNSUPPORTED_FIELDS: UnsupportedFields = (
    ("prompt_logprobs", any_value, _LOGPROBS),
    ("logprob_token_ids", any_value, _LOGPROBS),
    ("modalities", lambda requested: requested not in ([], ["text"]), _TEXT_ONLY),
    ("audio", any_value, _TEXT_ONLY),
    ("functions", bool, "deprecated: use tools with the type 'function'"),
    ("function_call", any_value, "deprecated: use tool_choice"),
    ("moderation", any_value, "not supported"),
    ("echo", bool, "not supported: only the generated text is returned"),
    ("use_beam_search", bool, "not supported"),
    ("stop_token_ids", bool, "not available: use stop"),
    (
        "include_stop_str_in_output",
        bool,
        "not supported: stop strings are never included in the answer",
    ),
    ("ebnf", bool, "not available: guided_grammar takes a grammar in Lark's notation"),
    ("truncate_prompt_tokens", any_value, "not supported: prompts are never truncated"),
    ("allowed_token_ids", bool, "not available: use logit_bias"),
    ("bad_words", bool, "not available: use logit_bias"),
    ("repetition_detection", any_value, "not available"),
    ("chat_template", any_value, "not supported: prompts always have the Harmony format"),
    ("documents", bool, "not available: send them in a message"),
    ("return_token_ids", bool, _TOKENS),
    ("return_tokens_as_token_ids", bool, _LOGPROBS),
    ("return_prompt_text", bool, _TOKENS),
)
