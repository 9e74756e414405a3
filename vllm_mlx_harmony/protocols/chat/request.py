"""Chat Completions, inwards, second half: a checked body into a Turn.

Knows what every field and message means (semantics A2 to A11). Refuses to know how a Turn is
rendered, and how the answer is written (chat/api.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import (
    NO_THINKING,
    Answer,
    Call,
    Defaults,
    Effort,
    Instructions,
    Limits,
    Message,
    Preamble,
    Reasoning,
    ResponseFormat,
    Result,
    Sampling,
    Tool,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.body import UNSUPPORTED, required
from vllm_mlx_harmony.protocols.chat.body import (
    ChatBody,
    ChatCall,
    ChatFormat,
    ChatMessage,
    ChatTool,
    TemplateOptions,
)
from vllm_mlx_harmony.protocols.openai_content import call_arguments, message_text, result_text

VOCABULARY = 201_088
"""How many ids o200k_harmony has: what ``logit_bias`` may name."""


def read_turn(body: ChatBody, defaults: Defaults) -> Turn:
    """What a checked body asks the model for. Raises only ``RequestError``."""
    template = body.chat_template_kwargs or TemplateOptions()
    effort, thinking = _reasoning(body, template, defaults)
    return Turn(
        messages=tuple(_messages(body.messages)),
        tools=() if body.tool_choice == "none" else tuple(_tools(body.tools or ())),
        effort=effort,
        response_format=_response_format(body.response_format),
        identity=template.model_identity or defaults.identity,
        date=defaults.date,
        builtin_tools=_builtin_tools(template, defaults),
        sampling=_sampling(body),
        limits=_limits(body),
        thinking=thinking,
    )


# --- Messages (semantics A2 to A6, A11): one reader per role.


def _messages(messages: Sequence[ChatMessage]) -> Iterator[Message]:
    for index, message in enumerate(messages):
        yield from _ROLES[message.role](message, f"messages[{index}]")


def _instructions(message: ChatMessage, where: str) -> Iterator[Message]:
    text = _needed(message, where)
    if text:
        yield Instructions(text)


def _user(message: ChatMessage, where: str) -> Iterator[Message]:
    yield User(_needed(message, where))


def _assistant(message: ChatMessage, where: str) -> Iterator[Message]:
    """In the model's own order: reasoning, text, calls (A4). Nothing at all adds nothing."""
    for field in ("function_call", "audio"):
        if getattr(message, field) is not None:
            param = f"{where}.{field}"
            raise RequestError(f"{param} cannot be read", param=param, code=UNSUPPORTED)
    calls = message.tool_calls or ()
    if reasoning := message.reasoning_content or message.reasoning or message.thinking:
        yield Reasoning(reasoning)
    if text := message_text(message.content or (), f"{where}.content") or message.refusal:
        yield Preamble(text) if calls else Answer(text)
    for index, call in enumerate(calls):
        yield _call(call, f"{where}.tool_calls[{index}]")


def _tool(message: ChatMessage, where: str) -> Iterator[Message]:
    if not message.tool_call_id:
        raise RequestError("tool message without tool_call_id", param=where)
    text = result_text(message.content or (), f"{where}.content")
    yield Result(message.tool_call_id, text, where)


_ROLES: dict[str, Callable[[ChatMessage, str], Iterator[Message]]] = {
    "system": _instructions,
    "developer": _instructions,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool,
}


def _call(call: ChatCall, where: str) -> Call:
    arguments = call_arguments(call.function.arguments, f"{where}.function.arguments")
    return Call(call.id, call.function.name, arguments)


def _needed(message: ChatMessage, where: str) -> str:
    if message.content is None:
        raise required(f"{where}.content")
    return message_text(message.content, f"{where}.content")


# --- Tools, format, effort, sampling and limits.


def _tools(tools: Sequence[ChatTool]) -> Iterator[Tool]:
    for index, tool in enumerate(tools):
        what = tool.function
        yield Tool(what.name, what.description or "", what.parameters, f"tools[{index}]")


def _builtin_tools(template: TemplateOptions, defaults: Defaults) -> tuple[str, ...]:
    if template.builtin_tools is None:
        return defaults.builtin_tools
    return tuple(dict.fromkeys(template.builtin_tools))


def _response_format(asked: ChatFormat | None) -> ResponseFormat | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return ResponseFormat()
    schema = asked.json_schema
    if schema is None:
        raise required("response_format.json_schema")
    return ResponseFormat(schema.document, schema.name or "response", schema.description or "")


def _reasoning(
    body: ChatBody, template: TemplateOptions, defaults: Defaults
) -> tuple[Effort, bool]:
    thoughtless = False in (body.enable_thinking, template.enable_thinking)
    return defaults.reasoning(
        ("reasoning_effort", body.reasoning_effort),
        ("reasoning.effort", body.reasoning.effort if body.reasoning else None),
        ("chat_template_kwargs.reasoning_effort", template.reasoning_effort),
        ("enable_thinking", NO_THINKING if thoughtless else None),
    )


def _sampling(body: ChatBody) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == -1 else body.top_k,  # -1 is vLLM's word for "all of them"
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple((_token_id(k), bias) for k, bias in (body.logit_bias or {}).items()),
    )


def _token_id(key: str) -> int:
    digits = key.isascii() and key.isdigit() and len(key) <= len(str(VOCABULARY))
    if not digits or int(key) >= VOCABULARY:
        raise RequestError(
            f"logit_bias: {key!r} is not a token id from 0 to {VOCABULARY - 1}",
            param="logit_bias",
            code="invalid_value",
        )
    return int(key)


def _limits(body: ChatBody) -> Limits:
    """An empty stop string can end nothing and is ignored: forms send one for an empty field."""
    older = body.max_completion_tokens is None
    return Limits(
        max_tokens=body.max_tokens if older else body.max_completion_tokens,
        timeout=body.timeout,
        stop=tuple(text for text in body.stop or () if text),
        one_call=body.parallel_tool_calls is False,
        where="max_tokens" if older else "max_completion_tokens",
    )
