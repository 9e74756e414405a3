"""Chat Completions: turns a request body into a Turn (semantics A2 to A11)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import (
    BROWSER,
    NO_THINKING,
    VOCAB_SIZE,
    Answer,
    Call,
    Defaults,
    Effort,
    Instructions,
    Message,
    Namespace,
    OutputLimits,
    Preamble,
    Reasoning,
    ReasoningField,
    ResponseInfo,
    Result,
    Tool,
    ToolChoice,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.chat import schema
from vllm_mlx_harmony.protocols.chat.emitter import ChoicesEmitter, Emitter
from vllm_mlx_harmony.protocols.chat.formats import response_format
from vllm_mlx_harmony.protocols.chat.schema import ChatBody, ChatMessage
from vllm_mlx_harmony.protocols.freeform import freeform_tool, unwrap, wrap
from vllm_mlx_harmony.protocols.openai_content import AnyPart, call_arguments, text_of
from vllm_mlx_harmony.protocols.request_body import reject_unsupported, sampling
from vllm_mlx_harmony.protocols.validation import invalid, required, unsupported, validate


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed request: the turn for the model, and the form of the answer."""

    turn: Turn
    model: str
    stream: bool
    include_usage: bool
    shows_reasoning: bool = True
    freeform: frozenset[str] = frozenset()
    flat: frozenset[str] = frozenset()
    shows_progress: bool = False
    reasoning_field: ReasoningField = ReasoningField.BOTH

    def emitter(self, info: ResponseInfo) -> Emitter | ChoicesEmitter:
        emitters = [
            Emitter(
                replace(info, choice=choice) if choice else info,
                stream=self.stream,
                include_usage=self.include_usage,
                shows_reasoning=self.shows_reasoning,
                freeform=self.freeform,
                flat=self.flat,
                shows_progress=self.shows_progress,
                reasoning_field=self.reasoning_field,
            )
            for choice in range(self.turn.choices)
        ]
        return ChoicesEmitter(emitters) if emitters[1:] else emitters[0]

    def as_sent_back(self, message: Message) -> Message:
        if isinstance(message, Call) and message.name in self.freeform:
            return replace(message, arguments=wrap(unwrap(message.arguments)))
        return message


def read(body: object, defaults: Defaults) -> ChatRequest:
    """The request in ``body``, the parsed JSON of ``POST /v1/chat/completions``.

    Raises ``RequestError`` naming the field, and nothing else, whatever JSON value ``body`` is.
    Unknown fields are ignored.
    """
    chat = validate(ChatBody, body)
    reject_unsupported(body, schema.UNSUPPORTED_FIELDS)
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("top_logprobs", "top_logprobs requires logprobs: true")
    options = chat.stream_options
    custom = [tool for tool in chat.tools or () if isinstance(tool, schema.CustomTool)]
    return ChatRequest(
        turn=read_turn(chat, defaults),
        model=chat.model,
        stream=bool(chat.stream),
        include_usage=bool(options and options.include_usage),
        shows_reasoning=chat.include_reasoning is not False
        and not (chat.reasoning and chat.reasoning.exclude),
        freeform=frozenset(tool.custom.name for tool in custom),
        flat=frozenset(tool.custom.name for tool in custom if tool.flat),
        shows_progress=bool(chat.return_progress),
        reasoning_field=defaults.reasoning_field,
    )


def read_turn(body: ChatBody, defaults: Defaults) -> Turn:
    """The turn that a validated body asks for. Raises only ``RequestError``."""
    template = body.chat_template_kwargs or schema.ChatTemplateOptions()
    effort, thinking = _reasoning(body, template, defaults)
    messages, prefill = _conversation(body, defaults.attachments)
    older = body.max_completion_tokens is None
    choice = body.tool_choice or schema.ChatToolChoice(type="auto")
    none = choice.type == "none"
    predicted = body.prediction.content if body.prediction else None
    declared = enumerate(body.tools or ())
    tools = () if none else tuple(_tool(tool, f"tools[{at}]") for at, tool in declared)
    builtin_tools = () if none else defaults.enabled(template.builtin_tools)
    browser = _browser(body, defaults)
    namespaces = () if none else defaults.default_namespaces(tools, browser)
    callable_ = bool(tools or builtin_tools or namespaces)
    tool_choice = _tool_choice(choice, body.tools or (), callable_)
    if tool_choice.required and prefill is not None:
        problem = (
            "tool_choice: a call cannot be required when the last assistant message is continued"
        )
        raise unsupported("tool_choice", problem)
    return Turn(
        messages=tuple(messages),
        tools=tools,
        effort=effort,
        response_format=response_format(body),
        identity=template.model_identity or defaults.identity,
        date=defaults.date,
        builtin_tools=builtin_tools,
        prefill=prefill,
        sampling=sampling(
            body,
            logit_bias=tuple(dict(_logit_bias(body)).items()),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        limits=OutputLimits(
            max_tokens=body.max_tokens if older else body.max_completion_tokens,
            # An empty one can end nothing: forms send one for an empty field.
            stop=tuple(text for text in body.stop or () if text),
            one_call=body.parallel_tool_calls is False,
            where="max_tokens" if older else "max_completion_tokens",
            reasoning_tokens=_reasoning_tokens(body),
            sets_reasoning=_sets_reasoning(body, template),
            min_tokens=body.fewest_tokens,
        ),
        tool_choice=tool_choice,
        thinking=thinking,
        namespaces=namespaces,
        choices=body.n or 1,
        prediction=text_of(predicted, "prediction.content", defaults.attachments),
    )


# --- Messages (semantics A2 to A6, A11).


def _conversation(body: ChatBody, attachments: Attachments) -> tuple[list[Message], str | None]:
    """All messages; and the beginning of the answer, when the last message is to be continued."""
    continued = _continued(body)
    custom = (tool for tool in body.tools or () if isinstance(tool, schema.CustomTool))
    reader = _Reader(attachments, frozenset(tool.custom.name for tool in custom if tool.flat))
    read: list[Message] = []
    prefill = None
    last = len(body.messages) - 1
    for from_assistant, group in groupby(
        enumerate(body.messages), key=lambda placed: placed[1].role == "assistant"
    ):
        if not from_assistant:
            for index, message in group:
                read += reader.read_input(message, index)
            continue
        turn = list(group)
        if continued and turn[-1][0] == last:
            prefill = reader.take_prefill(turn)
            read += reader.read_assistant(turn, Preamble)
        else:
            calls = any(message.has_calls for _, message in turn)
            read += reader.read_assistant(turn, Preamble if calls else Answer)
    return read, prefill


def _continued(body: ChatBody) -> bool:
    """Whether the last message is to be continued: vLLM's two fields, which exclude each other.

    A prompt without ``add_generation_prompt`` is one whose last message is open, unless
    ``continue_final_message`` says that it is not.
    """
    requested = body.continue_final_message
    if requested and body.add_generation_prompt:
        problem = "add_generation_prompt and continue_final_message cannot both be true"
        raise invalid("add_generation_prompt", problem)
    field = "add_generation_prompt" if requested is None else "continue_final_message"
    continued = body.add_generation_prompt is False if requested is None else requested
    if continued and body.messages[-1].role != "assistant":
        raise unsupported(field, f"{field} requires the last message to have the role 'assistant'")
    return continued


_AssistantTurn: TypeAlias = Sequence[tuple[int, ChatMessage]]
"""Consecutive messages of the assistant, each with its place among all messages."""


@dataclass(slots=True)
class _Reader:
    """``flat`` are the freeform tools whose input is sent back as the arguments of a function."""

    attachments: Attachments
    flat: frozenset[str] = frozenset()
    _functions: dict[str, str] = field(default_factory=dict)
    """By name, the ids that the latest legacy calls were given, as they have none."""

    def read_input(self, message: ChatMessage, index: int) -> Iterator[Message]:
        """The messages for a message that is not the assistant's."""
        where = f"messages[{index}]"
        if message.role in ("tool", "function"):
            if message.role == "tool":
                key, problem = (
                    message.tool_call_id,
                    "tool_call_id is required for a message with the role 'tool'",
                )
            else:
                name = message.name if isinstance(message.name, str) else ""
                key = self._functions.get(name)
                problem = "a function message must follow a function_call with the same name"
            if not key:
                raise RequestError(problem, param=where)
            text = text_of(message.content, f"{where}.content", self.attachments, lenient=True)
            yield Result(key, text, where)
        elif message.content is None:
            raise required(f"{where}.content")
        elif message.role == "user":
            yield from self._user(message.content, f"{where}.content")
        else:
            text = text_of(message.content, f"{where}.content", self.attachments)
            if text:
                yield Instructions(text)

    def _user(self, parts: Sequence[AnyPart], where: str) -> Iterator[Message]:
        """A message of the user, after the results of calls in it: Anthropic's form of them."""
        results = 0
        for at, part in enumerate(parts):
            if isinstance(part, schema.ToolResultPart):
                results, here = results + 1, f"{where}[{at}]"
                text = text_of(part.content, f"{here}.content", self.attachments, lenient=True)
                yield Result(part.tool_use_id, text, here)
        if not results or results < len(parts):
            yield User(text_of(parts, where, self.attachments, skip=(schema.ToolResultPart,)))

    def read_assistant(
        self, turn: _AssistantTurn, kind: type[Preamble] | type[Answer]
    ) -> list[Message]:
        """One turn of the assistant in the model's own order (A4): its texts are of one ``kind``.

        Calls come last, so that there is no text between them and their results.
        """
        read: list[Message] = []
        for index, message in turn:
            where = f"messages[{index}]"
            if reasoning := message.words_of_reasoning:
                read.append(Reasoning(reasoning))
            if text := self._text(message, where):
                read.append(kind(text))
            for at, part in enumerate(message.content or ()):
                if isinstance(part, schema.ToolUsePart):
                    arguments = call_arguments(part.input, f"{where}.content[{at}].input")
                    read.append(Call(part.id, part.name, arguments))
            for at, call in enumerate(message.tool_calls or ()):
                read.append(self._call(call, f"{where}.tool_calls[{at}]"))
            if legacy := message.function_call:
                key = self._functions[legacy.name] = f"function_call_{index}"
                arguments = call_arguments(legacy.arguments, f"{where}.function_call.arguments")
                read.append(Call(key, legacy.name, arguments))
        return sorted(read, key=lambda message: isinstance(message, Call))

    def take_prefill(self, turn: _AssistantTurn) -> str | None:
        """The text that the answer continues; it is taken out of the last message of ``turn``.

        Raises ``RequestError`` for a call in it: a call needs a result.
        """
        for index, message in turn:
            if message.has_calls:
                problem = f"messages[{index}]: a message with tool calls cannot be continued"
                raise unsupported(f"messages[{index}]", problem)
        index, last = turn[-1]
        text = self._text(last, f"messages[{index}]")
        reasoning = [part for part in last.content or () if isinstance(part, schema.ReasoningPart)]
        last.content, last.refusal, last.audio = [*reasoning], None, None
        return text or None

    def _text(self, message: ChatMessage, where: str) -> str:
        """The text of a message, followed by its refusal.

        A spoken answer is only referred to by its id.
        """
        content, skip = f"{where}.content", (schema.ToolUsePart, schema.ReasoningPart)
        text = text_of(message.content, content, self.attachments, skip=skip)
        if message.audio is not None:
            line = self.attachments.line("audio", "audio", f"{where}.audio")
            text = f"{text}\n{line}" if text else line
        return text + (message.refusal or "")

    def _call(self, call: schema.AnyCall, where: str) -> Call:
        if isinstance(call, schema.CustomCall):
            return Call(call.id, call.custom.name, wrap(call.custom.input))
        name, arguments = call.function.name, call.function.arguments
        if name in self.flat and isinstance(arguments, str):
            return Call(call.id, name, wrap(arguments))
        return Call(call.id, name, call_arguments(arguments, f"{where}.function.arguments"))


# --- Tools, effort, sampling and limits.


def _tool(tool: schema.AnyTool, where: str) -> Tool:
    if isinstance(tool, schema.FunctionTool):
        what = tool.function
        described = what.description or ""
        return Tool(what.name, described, what.parameters, where, strict=bool(what.strict))
    custom, syntax, definition = tool.custom, None, None
    if isinstance(custom.format, schema.GrammarFormat):
        syntax, definition = custom.format.grammar.syntax, custom.format.grammar.definition
    return freeform_tool(custom.name, custom.description or "", where, syntax, definition)


def _browser(body: ChatBody, defaults: Defaults) -> tuple[Namespace, ...]:
    """The browser, if the request asks for web search."""
    field = "web_search_options"
    if body.web_search_options is None:
        return ()
    browser = (
        namespace
        for namespace in defaults.namespaces
        if namespace.name == BROWSER and namespace.tools
    )
    if (found := next(browser, None)) is None:
        raise unsupported(field, f"{field}: web search is not available: declare it as a tool")
    return (found,)


def _tool_choice(
    choice: schema.ChatToolChoice, tools: Sequence[schema.AnyTool], callable_: bool
) -> ToolChoice:
    """What may or must be called. All tools stay in the prompt, whichever are allowed (A12).

    ``callable_``: there is a tool that can be called, be it built in or the server's.
    """
    if choice.type in ("auto", "none"):
        return ToolChoice()
    if choice.type == "required":
        if not callable_:
            raise _no_choice("there are no tools")
        return ToolChoice(required=True)
    declared = {
        (True, tool.custom.name)
        if isinstance(tool, schema.CustomTool)
        else (False, tool.function.name)
        for tool in tools
    }
    if choice.type in ("function", "custom"):
        return ToolChoice(required=True, names=(_declared(choice, declared),))
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise required("tool_choice.allowed_tools")
        names = dict.fromkeys(_declared(tool, declared) for tool in choice.allowed_tools.tools)
        return ToolChoice(choice.allowed_tools.mode == "required", tuple(names))
    raise _no_choice(f"unknown type {quoted(choice.type)}")


def _declared(named: schema.ChatNamedTool, declared: Collection[tuple[bool, str]]) -> str:
    """The name of the chosen tool. Raises ``RequestError`` when no such tool is declared.

    ``declared`` has the name of each tool, preceded by whether the tool is freeform.
    """
    freeform = named.type == "custom"
    chosen = named.custom if freeform else named.function
    if chosen is None:
        raise required(f"tool_choice.{'custom' if freeform else 'function'}")
    if (freeform, chosen.name) not in declared:
        raise _no_choice(f"{quoted(chosen.name)} is not among the tools")
    return chosen.name


def _no_choice(problem: str) -> RequestError:
    return invalid("tool_choice", f"tool_choice: {problem}")


def _reasoning(
    body: ChatBody, template: schema.ChatTemplateOptions, defaults: Defaults
) -> tuple[Effort, bool]:
    """Effort and whether to think (A8); a budget of 0 is no thinking.

    ``thinking`` or ``reasoning`` switched off takes precedence over an effort, and an effort over
    ``enable_thinking``, which comes from templates of models without efforts. If switches
    contradict each other, off wins.
    """
    requested = body.reasoning or schema.ReasoningOptions()
    kind = body.thinking.type if body.thinking else None
    words = _efforts(body, template)
    switches = (body.enable_thinking, template.enable_thinking, requested.enabled)
    effort, thinking = defaults.reasoning(*words)
    worded = any(word is not None for _, word in words)
    off = kind == "disabled" or requested.enabled is False
    if off or (not worded and False in switches):
        effort, thinking = defaults.reasoning(("enable_thinking", NO_THINKING))
    elif not worded and (True in switches or kind is not None):
        thinking = True
    return effort, thinking and _reasoning_tokens(body) != 0


def _efforts(
    body: ChatBody, template: schema.ChatTemplateOptions
) -> tuple[tuple[str, object], ...]:
    """The fields that may set the effort, in order of precedence, and their values (A8)."""
    return (
        ("reasoning_effort", body.reasoning_effort),
        ("reasoning.effort", body.reasoning.effort if body.reasoning else None),
        ("chat_template_kwargs.reasoning_effort", template.reasoning_effort),
    )


def _reasoning_tokens(body: ChatBody) -> int | None:
    """The reasoning budget; -1 means no limit."""
    budget = next(_budgets(body), None)
    return None if budget == -1 else budget


def _budgets(body: ChatBody) -> Iterator[int]:
    """The reasoning budget under each of the names that other servers use."""
    requested = (
        body.thinking_token_budget,  # vLLM
        body.thinking_budget_tokens,  # llama.cpp
        body.thinking_budget,  # Qwen's own API
        body.reasoning.max_tokens if body.reasoning else None,  # OpenRouter
        body.thinking.budget_tokens if body.thinking else None,  # Anthropic, through proxies
    )
    return (tokens for tokens in requested if tokens is not None)


def _sets_reasoning(body: ChatBody, template: schema.ChatTemplateOptions) -> bool:
    """Whether any field says how much reasoning there is to be."""
    switches = (
        body.enable_thinking,
        template.enable_thinking,
        body.reasoning.enabled if body.reasoning else None,
        body.thinking.type if body.thinking else None,
    )
    words = (word for _, word in _efforts(body, template))
    return any(value is not None for value in (*words, *switches, *_budgets(body)))


def _logit_bias(body: ChatBody) -> Iterator[tuple[int, float]]:
    for key, bias in (body.logit_bias or {}).items():
        digits = key.isascii() and key.isdigit() and len(key) <= len(str(VOCAB_SIZE))
        if not digits or int(key) >= VOCAB_SIZE:
            raise invalid(
                "logit_bias",
                f"logit_bias: {quoted(key)} is not a token id from 0 to {VOCAB_SIZE - 1}",
            )
        yield int(key), bias
