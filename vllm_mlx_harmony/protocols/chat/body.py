"""Chat Completions, inwards, first half: the shape of a request body, field by field.

Knows which fields there are, their types and ranges, and what is refused because ignoring it
would change the answer. Refuses to know what they mean for a Turn (chat/request.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import BuiltinTool
from vllm_mlx_harmony.protocols.body import UNSUPPORTED, Wire, checked
from vllm_mlx_harmony.protocols.openai_content import Parts

# --- The shapes, field by field. Everything is optional unless it says otherwise; null is absent.


def _as_strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ChatFunction(Wire):
    name: str = Field(min_length=1)
    arguments: Any = None


class ChatCall(Wire):
    id: str = Field(min_length=1)
    type: Literal["function"] | None = None
    function: ChatFunction


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class ChatToolFunction(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(Wire):
    type: Literal["function"] | None = None
    function: ChatToolFunction


class ChatSchema(Wire):
    name: str | None = None
    description: str | None = None
    document: dict[str, Any] | None = Field(default=None, alias="schema")


class ChatFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: ChatSchema | None = None


class StreamOptions(Wire):
    include_usage: bool | None = None


class ReasoningOptions(Wire):
    effort: Any = None


class TemplateOptions(Wire):
    reasoning_effort: Any = None
    model_identity: str | None = None
    builtin_tools: list[BuiltinTool] | None = None
    enable_thinking: bool | None = None


class ChatBody(Wire):
    """The body of ``POST /v1/chat/completions``, as far as this server looks at it."""

    model: str = Field(min_length=1)
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: Annotated[list[str] | None, BeforeValidator(_as_strings)] = None
    timeout: float | None = Field(default=None, gt=0, lt=1e9)

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None

    tools: list[ChatTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ChatFormat | None = None
    reasoning_effort: Any = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    n: int | None = Field(default=None, ge=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


# --- What would silently change the answer if it were ignored: field, when, why.

_REFUSED: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    ("n", lambda n: n > 1, "one answer per request: send the request again instead of n > 1"),
    ("logprobs", bool, "log probabilities are not available"),
    ("top_logprobs", bool, "log probabilities are not available"),
    ("frequency_penalty", bool, "not available: use presence_penalty or repetition_penalty"),
    ("modalities", lambda asked: {*asked} - {"text"}, "the model writes text only"),
    ("audio", lambda _: True, "the model writes text only"),
    ("functions", bool, "replaced by tools: send each function as a tool of type 'function'"),
    ("function_call", lambda _: True, "replaced by tool_choice"),
    ("web_search_options", lambda _: True, "web search is not available: declare it as a tool"),
    (
        "tool_choice",
        lambda choice: choice not in ("auto", "none"),
        "only 'auto' and 'none' are available: a call cannot be forced",
    ),
)


def read_body(body: object) -> ChatBody:
    """The parsed JSON of a request, checked field by field.

    Raises ``RequestError`` naming the field for everything malformed, out of range or not
    available, and nothing else, whatever JSON value ``body`` is. Unknown fields are ignored.
    """
    chat = checked(ChatBody, body)
    for field, refused, why in _REFUSED:
        value = getattr(chat, field)
        if value is not None and refused(value):
            raise RequestError(f"{field}: {why}", param=field, code=UNSUPPORTED)
    return chat
