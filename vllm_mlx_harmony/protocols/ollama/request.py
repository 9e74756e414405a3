"""Ollama's API: turns a request body into a Turn (semantics A2 to A11)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import (
    NO_THINKING,
    Answer,
    Call,
    Defaults,
    Effort,
    Instructions,
    Message,
    OutputLimits,
    Preamble,
    Reasoning,
    ResponseFormat,
    ResponseInfo,
    Result,
    Sampling,
    Tool,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.ollama import schema
from vllm_mlx_harmony.protocols.ollama.emitter import Emitter
from vllm_mlx_harmony.protocols.ollama.schema import ChatBody, GenerateBody, OllamaMessage
from vllm_mlx_harmony.protocols.openai_content import call_arguments
from vllm_mlx_harmony.protocols.request_body import UnsupportedFields, reject_unsupported
from vllm_mlx_harmony.protocols.validation import invalid, required, validate


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A parsed request: the turn for the model, and the form of the answer.

    ``chat``: of ``/api/chat``, whose answer is a message; otherwise a text.
    """

    turn: Turn
    model: str
    stream: bool
    chat: bool

    def emitter(self, info: ResponseInfo, began: int = 0) -> Emitter:
        """``began``: when the request arrived, in nanoseconds."""
        return Emitter(info, began, stream=self.stream, chat=self.chat)

    def as_sent_back(self, message: Message) -> Message:
        return message


def loads_only(body: object) -> bool:
    """Whether a request has neither messages nor a prompt, and so only loads the model."""
    return isinstance(body, dict) and not body.get("messages") and not body.get("prompt")


def read_chat(body: object, defaults: Defaults) -> OllamaRequest:
    """The request in ``body``, the parsed JSON of ``POST /api/chat``.

    Raises ``RequestError`` naming the field, and nothing else, whatever JSON value ``body`` is.
    Unknown fields are ignored.
    """
    request = validate(ChatBody, body)
    _reject_unsupported(body)
    tools = tuple(
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters,
            f"tools[{at}]",
        )
        for at, tool in enumerate(request.tools or ())
    )
    messages = tuple(_conversation(request.messages or (), defaults.attachments))
    return OllamaRequest(
        _turn(request, messages, tools, defaults),
        request.model,
        stream=request.stream is not False,
        chat=True,
    )


def read_generate(body: object, defaults: Defaults) -> OllamaRequest:
    """The request in ``body``, that of ``POST /api/generate``. Raises as ``read_chat``."""
    request = validate(GenerateBody, body)
    _reject_unsupported(body)
    messages: list[Message] = [Instructions(request.system)] if request.system else []
    messages.append(User(_with_images(request.prompt, request.images, "", defaults.attachments)))
    return OllamaRequest(
        _turn(request, tuple(messages), (), defaults),
        request.model,
        stream=request.stream is not False,
        chat=False,
    )


def _reject_unsupported(body: object) -> None:
    reject_unsupported(body, schema.UNSUPPORTED_FIELDS)
    options = body.get("options") if isinstance(body, dict) else None
    if isinstance(options, dict):
        nested = {f"options.{name}": value for name, value in options.items()}
        reject_unsupported(nested, _NESTED)


_NESTED: UnsupportedFields = tuple(
    (f"options.{name}", rejects, why) for name, rejects, why in schema.UNSUPPORTED_OPTIONS
)


def _turn(
    body: schema.OllamaBody,
    messages: tuple[Message, ...],
    tools: tuple[Tool, ...],
    defaults: Defaults,
) -> Turn:
    options = body.options or schema.Options()
    effort, thinking = _reasoning(body, defaults)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs requires logprobs: true")
    return Turn(
        messages=messages,
        tools=tools,
        effort=effort,
        response_format=_response_format(body.format),
        identity=defaults.identity,
        date=defaults.date,
        builtin_tools=defaults.enabled(None),
        sampling=Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=0 if options.top_k == -1 else options.top_k,
            min_p=options.min_p,
            presence_penalty=options.presence_penalty,
            repetition_penalty=options.repeat_penalty,
            frequency_penalty=options.frequency_penalty,
            seed=options.seed,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        limits=OutputLimits(
            max_tokens=options.num_predict,
            stop=tuple(text for text in options.stop or () if text),
            where="options.num_predict",
            sets_reasoning=body.think is not None,
        ),
        thinking=thinking,
        namespaces=defaults.default_namespaces(tools),
    )


def _reasoning(body: schema.OllamaBody, defaults: Defaults) -> tuple[Effort, bool]:
    """Effort and whether to think (A8): ``think`` is a switch, or an effort."""
    if body.think is True:
        return defaults.effort, True
    return defaults.reasoning(("think", NO_THINKING if body.think is False else body.think))


def _response_format(requested: object) -> ResponseFormat | None:
    """The format of the answer: any object for ``json``, or an object that fits a schema.

    As in Ollama, what its grammars cannot express is left out, not refused.
    """
    match requested:
        case None | "":
            return None
        case "json":
            return ResponseFormat(where="format")
        case dict():
            return ResponseFormat(requested, where="format")
        case _:
            raise invalid("format", 'format must be "json" or a JSON Schema')


# --- Messages (semantics A2 to A6, A11).


def _conversation(messages: Sequence[OllamaMessage], attachments: Attachments) -> Iterator[Message]:
    reader = _Reader(attachments)
    for spoken, run in groupby(
        enumerate(messages), key=lambda placed: placed[1].role == "assistant"
    ):
        if spoken:
            yield from reader.read_assistant(list(run))
        else:
            for index, message in run:
                yield from reader.read_input(message, index)


@dataclass(slots=True)
class _Reader:
    """Reads messages in order. ``_unanswered`` are the calls without a result so far: their ids and
    names. A result names its call by id or by the name of the tool, or not at all."""

    attachments: Attachments
    _unanswered: dict[str, str] = field(default_factory=dict)

    def read_input(self, message: OllamaMessage, index: int) -> Iterator[Message]:
        """The messages for a message that is not the assistant's."""
        where = f"messages[{index}]"
        if message.role == "tool":
            text = _with_images(message.content, message.images, f"{where}.", self.attachments)
            yield Result(self._answered(message, where), text, where)
        elif message.content is None and not message.images:
            raise required(f"{where}.content")
        else:
            text = _with_images(message.content, message.images, f"{where}.", self.attachments)
            if message.role == "user":
                yield User(text)
            elif text:
                yield Instructions(text)

    def _answered(self, message: OllamaMessage, where: str) -> str:
        """The id of the call whose result ``message`` is."""
        if message.tool_call_id:
            self._unanswered.pop(message.tool_call_id, None)
            return message.tool_call_id
        name = message.tool_name or message.name
        calls = (key for key, called in self._unanswered.items() if name in (None, called))
        key = next(calls, None)
        if key is None:
            problem = "a message with the role 'tool' must follow a call of its tool"
            raise RequestError(problem, param=where)
        del self._unanswered[key]
        return key

    def read_assistant(self, run: Sequence[tuple[int, OllamaMessage]]) -> list[Message]:
        """One turn of the assistant in the model's own order (A4). Calls come last, so that there
        is no text between them and their results."""
        kind = Preamble if any(message.tool_calls for _, message in run) else Answer
        read: list[Message] = []
        for index, message in run:
            where = f"messages[{index}]"
            if message.thinking:
                read.append(Reasoning(message.thinking))
            if text := _with_images(message.content, message.images, f"{where}.", self.attachments):
                read.append(kind(text))
            for at, call in enumerate(message.tool_calls or ()):
                path = f"{where}.tool_calls[{at}]"
                key = call.id or f"call_{index}_{at}"
                self._unanswered[key] = call.function.name
                arguments = call_arguments(call.function.arguments, f"{path}.function.arguments")
                read.append(Call(key, call.function.name, arguments))
        return sorted(read, key=lambda message: isinstance(message, Call))


def _with_images(
    text: str | None, images: Sequence[object] | None, where: str, attachments: Attachments
) -> str:
    """``text``, and a line for each image (A11). ``where`` is what precedes the field's name."""
    lines = (
        attachments.line("image", "image", f"{where}images[{at}]")
        for at in range(len(images or ()))
    )
    return "\n".join(filter(None, (text, *lines)))
