"""The Messages API: turns a request body into a Turn (semantics A2 to A11)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from json import dumps
from typing import TypeAlias

from vllm_mlx_harmony.core.attachments import Attachments, left_out
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import (
    NO_THINKING,
    AdditionalTools,
    Answer,
    Call,
    Defaults,
    Effort,
    EffortUpdate,
    Instructions,
    Limits,
    Message,
    Namespace,
    Preamble,
    Reasoning,
    ResponseFormat,
    ResponseInfo,
    Result,
    ServerCall,
    ServerResult,
    Tool,
    ToolChoice,
    Turn,
    User,
)
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.messages.emitter import UPDATE, Display, Emitter
from vllm_mlx_harmony.protocols.messages.partial_json import INVALID_JSON
from vllm_mlx_harmony.protocols.messages.schema import (
    CUSTOM,
    TOOL_SEARCH,
    TOOLSET,
    AnthropicMessage,
    AnthropicTool,
    Block,
    CallBlock,
    ContentSource,
    DocumentBlock,
    McpCallBlock,
    MessagesBody,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    ServerResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReferenceBlock,
    read_body,
)
from vllm_mlx_harmony.protocols.messages.server_tools import (
    asked_for,
    call_of,
    found_tools,
    result_text,
)
from vllm_mlx_harmony.protocols.sampling import sampling
from vllm_mlx_harmony.protocols.server_calls import last_call, with_results, without_gaps
from vllm_mlx_harmony.protocols.validation import UNSUPPORTED, required


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed request: the turn for the model, and the form of the answer.

    ``notes`` names, for the log, the fields that were accepted but have no effect.
    """

    turn: Turn
    model: str
    stream: bool
    thinking: Display
    notes: tuple[str, ...]
    cipher: Cipher = field(repr=False)

    def emitter(self, info: ResponseInfo) -> Emitter:
        """The writer of the answer to this request, which ``info`` is of."""
        return Emitter(
            info,
            self.cipher,
            stream=self.stream,
            thinking=self.thinking,
            namespaces=self.turn.namespaces,
        )

    def echoed(self, message: Message) -> Message:
        """A message of the model as it is read when the client sends it back: unchanged."""
        return message


def read(
    body: object, defaults: Defaults, cipher: Cipher, *, counting: bool = False
) -> MessagesRequest:
    """The request in ``body``, the parsed JSON of ``POST /v1/messages``.

    ``counting``: of ``POST /v1/messages/count_tokens``, where ``max_tokens`` is not required.
    Raises ``RequestError`` naming the field, and nothing else, whatever JSON value ``body`` is.
    """
    request = read_body(body, counting=counting)
    return MessagesRequest(
        turn=read_turn(request, defaults, cipher),
        model=request.model,
        stream=bool(request.stream),
        thinking=_display(request),
        notes=notes(request, defaults),
        cipher=cipher,
    )


def _display(request: MessagesBody) -> Display:
    thinking = request.thinking
    if thinking is None:
        return "shown"
    if thinking.type in _DISPLAYS:
        return _DISPLAYS[thinking.type]
    return "shown" if thinking.display in (None, "summarized") else "encrypted"


_DISPLAYS: dict[str, Display] = {"disabled": "hidden", "between_tools": "preambles"}


def read_turn(body: MessagesBody, defaults: Defaults, cipher: Cipher) -> Turn:
    """What a checked body asks the model for. Raises only ``RequestError``."""
    messages, prefill = _conversation(body, defaults, cipher)
    tools = () if _no_tools(body) else _declared(body, deferred=False)
    additions = (each for each in messages if isinstance(each, AdditionalTools))
    added = [*tools, *(tool for each in additions for tool in each.tools)]
    asked = () if _no_tools(body) else asked_for(body, defaults.namespaces)
    taken = {each.name for each in asked}
    others = () if _no_tools(body) else defaults.unasked([*added, *_declared(body, deferred=True)])
    builtin_tools = () if _no_tools(body) else defaults.builtin_tools
    namespaces = (*asked, *(each for each in others if each.name not in taken))
    open_call = last_call(messages)
    runs = open_call is not None and prefill is None and namespaces
    messages = [*without_gaps(messages, (open_call.id,) if open_call and runs else ())]
    thinks = body.thinking
    effort, thinking = _reasoning(body, defaults)
    for message in messages:
        if isinstance(message, EffortUpdate):
            thinking = message.thinking
    return Turn(
        messages=(*_system(body.system or (), defaults.attachments), *messages),
        tools=tools,
        effort=effort,
        response_format=_response_format(body),
        identity=defaults.identity,
        date=defaults.date,
        builtin_tools=builtin_tools,
        prefill=prefill,
        sampling=sampling(body),
        limits=Limits(
            max_tokens=body.max_tokens,
            stop=tuple(text for text in body.stop_sequences or () if text),
            one_call=bool(body.tool_choice and body.tool_choice.disable_parallel_tool_use),
            reasoning_tokens=thinks.budget_tokens if thinks and thinks.type == "enabled" else None,
        ),
        tool_choice=_tool_choice(body, added, namespaces, builtin_tools),
        thinking=thinking,
        namespaces=namespaces,
        pauses=True,
    )


def notes(body: MessagesBody, defaults: Defaults) -> tuple[str, ...]:
    """A sentence, for the log, for each field that was accepted but has no effect."""
    serves = bool(defaults.namespaces)
    tools = tuple(
        f"tools[{index}] ({quoted(tool.type)}) was left out: the caller does not define it"
        for index, tool in enumerate(body.tools or ())
        if _is_anthropics(tool) and not (serves and tool.type == TOOLSET)
    )
    if any((tool.type or "").startswith(TOOL_SEARCH) for tool in body.tools or ()):
        tools = (*tools, "defer_loading was ignored: this server searches no tools for the model")
    if not body.mcp_servers or serves:
        return tools
    return (*tools, "mcp_servers was left out: this server runs no tools")


# --- The conversation: runs of messages of one speaker, each read by its role.


@dataclass(frozen=True, slots=True)
class _Placed:
    """A block and its path in the request."""

    block: Block
    where: str


@dataclass(frozen=True, slots=True)
class _ReadMessage:
    """The blocks of a message, and the effort that holds from it on, where it says one."""

    role: str
    blocks: list[_Placed]
    effort: EffortUpdate | None


_Run: TypeAlias = Sequence[_ReadMessage]
"""A run of messages of one speaker."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What blocks are read with: whose reasoning to believe, what the server's tools are, what
    becomes of attachments, and which tools are declared where they are first referred to.
    """

    cipher: Cipher
    namespaces: tuple[Namespace, ...]
    attachments: Attachments
    deferred: dict[str, Tool]

    def load(self, names: Iterable[str | None]) -> list[Tool]:
        """The tools of these names, to be declared here; not those that are declared already."""
        return [self.deferred.pop(name) for name in names if name in self.deferred]


def _conversation(
    body: MessagesBody, defaults: Defaults, cipher: Cipher
) -> tuple[list[Message], str | None]:
    """All messages, and the beginning of the answer when the last one is the assistant's."""
    roles = [message.role for message in body.messages]
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)

    def read_message(message: AnthropicMessage, at: int) -> _ReadMessage:
        """What is cleared is the text."""
        cleared = message.clear_at == "next_user_message" and at < last_user
        blocks = _placed(message, at)
        if cleared:
            blocks = [each for each in blocks if isinstance(each.block, ToolAdditionBlock)]
        return _ReadMessage(message.role, blocks, _effort_update(message, at, body, defaults))

    shown = [
        each
        for each in (read_message(message, index) for index, message in enumerate(body.messages))
        if each.role != "system" or each.blocks or each.effort
    ]
    runs = [(role, list(run)) for role, run in groupby(shown, key=lambda each: each.role)]
    prefill, finished = None, False
    if roles[-1] == "assistant":
        last = runs.pop()[1]
        finished = _is_finished(last, body)
        prefill = None if finished else _prefill(last)
    known = _Known(cipher, defaults.namespaces, defaults.attachments, _deferred(body))
    read = [message for role, run in runs for message in _ROLES[role](run, known)]
    if roles[-1] == "assistant":
        read += (_assistant if finished else _unanswered)(last, known)
    read = with_results(read)
    if _no_tools(body):
        read = [message for message in read if not isinstance(message, AdditionalTools)]
    return read, prefill


def _effort_update(
    message: AnthropicMessage, at: int, body: MessagesBody, defaults: Defaults
) -> EffortUpdate | None:
    """The effort from a message on. The request's ``thinking`` takes precedence."""
    word = message.output_config.effort if message.output_config else None
    if word is None:
        return None
    effort, thinking = defaults.reasoning((f"messages[{at}].output_config.effort", word))
    return EffortUpdate(effort, thinking and not (body.thinking and body.thinking.type in _OFF))


def _placed(message: AnthropicMessage, at: int) -> list[_Placed]:
    """The blocks of message ``at`` without empty texts."""
    placed = [
        _Placed(block, f"messages[{at}].content[{index}]")
        for index, block in enumerate(message.content)
    ]
    return [
        each for each in placed if not (isinstance(each.block, TextBlock) and not each.block.text)
    ]


def _is_finished(run: _Run, body: MessagesBody) -> bool:
    """Whether the text at the end of the conversation cannot become what is asked for: a call, or
    JSON. It is an answer then, and a turn of the assistant begins behind it, as in Chat
    Completions. So LangGraph asks an agent that has answered for a typed answer.

    Raises ``RequestError`` for a call without a result, as Anthropic's API does.
    """
    placed = [each for message in run for each in message.blocks]
    for each in placed:
        if each.block.type == "tool_use":
            raise RequestError(
                f"{each.where} is a tool_use without a tool_result after it", param=each.where
            )
    last = placed[-1].block if placed else None
    if not isinstance(last, TextBlock):
        return False
    if body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
        return True
    begins_json = last.text.lstrip().startswith(("{", "[", '"'))
    return _response_format(body) is not None and not begins_json


def _prefill(run: _Run) -> str | None:
    """The text that the answer continues; it is taken out of ``run``.

    White space at its end is refused, as Anthropic's API does: the model's next token brings its
    own.
    """
    placed = [each for message in run for each in message.blocks]
    last = placed[-1] if placed else None
    if last is None or not isinstance(last.block, TextBlock):
        return None
    if last.block.text != last.block.text.rstrip():
        problem = f"{last.where}: final assistant content cannot end with trailing whitespace"
        raise RequestError(problem, param=last.where)
    next(message.blocks for message in reversed(run) if message.blocks).pop()
    return last.block.text


def _instructions(run: _Run, known: _Known) -> Iterator[Message]:
    for message in run:
        for adds, blocks in groupby(
            message.blocks, lambda each: isinstance(each.block, ToolAdditionBlock)
        ):
            if adds:
                yield from _declaring(tool for each in blocks for tool in _addition(each, known))
            elif text := _lines(_message_text(each, known.attachments) for each in blocks):
                yield Instructions(text)
        if message.effort:
            yield message.effort


def _declaring(tools: Iterable[Tool]) -> Iterator[AdditionalTools]:
    if declared := tuple(tools):
        yield AdditionalTools(declared)


def _addition(placed: _Placed, known: _Known) -> Iterator[Tool]:
    """The tool that is defined there, or was deferred until it is referred to (A12)."""
    if not isinstance(placed.block, ToolAdditionBlock):
        return
    change = placed.block.tool
    if change.type == "tool_definition":
        where = f"{placed.where}.tool.definition"
        if change.definition is None:
            raise required(where)
        yield from _tool(change.definition, where)
    else:
        yield from known.load([change.name])


def _user(run: _Run, known: _Known) -> Iterator[Message]:
    """The results of tools, then the user's texts: the order that the API requires anyway.

    A tool that a result refers to is declared after the result.
    """
    for message in run:
        others: list[_Placed] = []
        for each in message.blocks:
            block = each.block
            if not (isinstance(block, ResultBlock) and block.type == "tool_result"):
                others.append(each)
                continue
            text = _result_text(block, each.where, known.attachments)
            text = _failed(text) if block.is_error else text
            yield Result(block.tool_use_id, text, each.where)
            parts = block.content or ()
            references = (part for part in parts if isinstance(part, ToolReferenceBlock))
            yield from _declaring(known.load(part.tool_name for part in references))
        if others or not message.blocks:
            yield User(_lines(_message_text(each, known.attachments) for each in others))


def _assistant(run: _Run, known: _Known) -> Iterator[Message]:
    """In the model's own order (A4). Messages in a row are one turn of the assistant.

    The last text of a message is its answer, if no call stands behind it.
    """
    if any(each.block.type == "tool_use" for message in run for each in message.blocks):
        yield from _unanswered(run, known)
        return
    for message in run:
        blocks = message.blocks
        ends = ("text", *_SERVER_CALLS)
        answer = next((each for each in reversed(blocks) if each.block.type in ends), None)
        for each in blocks:
            if each is answer and isinstance(each.block, TextBlock):
                yield Answer(each.block.text)
            else:
                yield from _assistant_block(each, known)


_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")


def _unanswered(run: _Run, known: _Known) -> Iterator[Message]:
    """The assistant's blocks before calls or a prefill, which are not its answer yet.

    Calls come last, so that no text stands between them and their results (A4).
    """
    read = (each for message in run for each in message.blocks)
    for each in sorted(read, key=lambda each: each.block.type == "tool_use"):
        yield from _assistant_block(each, known)


def _assistant_block(  # noqa: C901 - a case for each kind of block
    placed: _Placed, known: _Known
) -> Iterator[Message]:
    block = placed.block
    match block:
        case TextBlock():
            yield Preamble(block.text)
        case ThinkingBlock() | RedactedThinkingBlock():
            if thought := _thought(block, placed.where, known.cipher):
                shown = thought.startswith(UPDATE)
                yield Preamble(thought.removeprefix(UPDATE)) if shown else Reasoning(thought)
        case CallBlock(type="tool_use"):
            yield Call(block.id, block.name, _arguments(block.input))
        case CallBlock():
            label = block.server_name if isinstance(block, McpCallBlock) else None
            arguments = _arguments(block.input)
            called = call_of(known.namespaces, label, block.name, block.input, arguments)
            if called is not None:
                yield ServerCall(block.id, *called)
        case ResultBlock(type="mcp_tool_result"):
            text = _result_text(block, placed.where, known.attachments)
            yield ServerResult(block.tool_use_id, "", text)
        case ServerResultBlock():
            yield from _declaring(known.load(found_tools(block.content)))
            text = result_text(block.content, f"{placed.where}.content", known.attachments)
            yield ServerResult(block.tool_use_id, "", text)
        case _ if block.type in _FILES:
            yield Preamble(_message_text(placed, known.attachments))
        case _ if block.type not in _SILENT:
            raise _unreadable(block.type, placed.where)


_ROLES: dict[str, Callable[[_Run, _Known], Iterator[Message]]] = {
    "system": _instructions,
    "user": _user,
    "assistant": _assistant,
}


def _system(blocks: Iterable[Block], attachments: Attachments) -> Iterator[Message]:
    for index, block in enumerate(blocks):
        placed = _Placed(block, f"system[{index}]")
        if text := _without_billing(_message_text(placed, attachments)):
            yield Instructions(text)


_BILLING = "x-anthropic-billing-header:"


def _without_billing(text: str) -> str:
    """``text`` without the line in which Claude Code tells Anthropic whom to bill.

    It changes with every request, so that no prompt would begin as the one before (A12).
    """
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


# --- Blocks.


def _thought(block: ThinkingBlock | RedactedThinkingBlock, where: str, cipher: Cipher) -> str:
    """The encrypted reasoning, whatever the client made of the text; without it, the text."""
    if isinstance(block, RedactedThinkingBlock):
        return cipher.decrypt(block.data) or ""
    encrypted = cipher.decrypt(block.signature or "")
    if encrypted is None and block.thinking is None:
        raise required(f"{where}.thinking")
    return encrypted or block.thinking or ""


def _arguments(given: dict[str, object]) -> str:
    """The input as compact JSON (A4), or the model's own text if that was not an object."""
    invalid = given.get(INVALID_JSON)
    if isinstance(invalid, str):
        return invalid
    return dumps(given, ensure_ascii=False, separators=(",", ":"))


def _result_text(block: ResultBlock, where: str, attachments: Attachments) -> str:
    def otherwise(kind: str, where: str) -> str:
        file = _FILES.get(kind)
        return attachments.line(file, kind, where) if file else left_out(kind)

    return _texts(block.content or (), f"{where}.content", otherwise)


_ERROR = "Error"


def _failed(text: str) -> str:
    """``text`` with ``Error`` as its first word, since Harmony has no field for ``is_error``."""
    if text[: len(_ERROR)].lower() == _ERROR.lower():
        return text
    return f"{_ERROR}: {text}" if text else _ERROR


_Otherwise: TypeAlias = Callable[[str, str], str]
"""Returns the text for a part that is not text, given its type and its path, or rejects it."""


def _message_text(placed: _Placed, attachments: Attachments) -> str:
    """The text of a block that is neither a call nor a result."""

    def otherwise(kind: str, where: str) -> str:
        if kind in _FILES:
            return attachments.line(_FILES[kind], kind, where)
        raise _unreadable(kind, where)

    return _block_text(placed.block, placed.where, otherwise)


def _block_text(block: Block, where: str, otherwise: _Otherwise) -> str:
    """A text, or the title, the source and the text of a document or search result, in lines."""
    match block:
        case TextBlock():
            return block.text
        case SearchResultBlock():
            text = _texts(block.content, f"{where}.content", otherwise)
            return _headed(text, Title=block.title, Source=block.source)
        case DocumentBlock(source=TextSource(data=text)):
            return _headed(text, Title=block.title, Context=block.context)
        case DocumentBlock(source=source):
            if isinstance(source, ContentSource):
                text = _texts(source.content, f"{where}.source.content", otherwise)
            else:
                text = otherwise(block.type, where)
            return _headed(text, Title=block.title, Context=block.context)
        case ToolReferenceBlock():
            return block.tool_name
        case _:
            return otherwise(block.type, where)


def _texts(blocks: Iterable[Block], where: str, otherwise: _Otherwise) -> str:
    numbered = enumerate(blocks)
    return _lines(_block_text(block, f"{where}[{index}]", otherwise) for index, block in numbered)


def _headed(text: str, **heading: str | None) -> str:
    return _lines([*(f"{name}: {read}" for name, read in heading.items() if read), text])


_FILES: dict[str, str] = {
    "image": "image",
    "audio": "audio",
    "video": "video",
    "document": "file",
    "container_upload": "file",
}
"""Parts that are no text by their nature, and what they are."""


def _lines(texts: Iterable[str]) -> str:
    """Blocks are separate texts: each begins on a line of its own."""
    joined = ""
    for text in texts:
        joined += f"\n{text}" if joined and not joined.endswith("\n") else text
    return joined


_MISPLACED = ("thinking", "redacted_thinking", "tool_use", "tool_result")


def _unreadable(kind: str, where: str) -> RequestError:
    why = "which is not allowed here" if kind in _MISPLACED else "which is not supported"
    return RequestError(f"{where} is of type {quoted(kind)}, {why}", param=where, code=UNSUPPORTED)


_SILENT = ("mcp_tool_listing", "fallback")
"""Blocks that Anthropic's servers add to an answer, and that mean nothing to the model."""


# --- Tools, format, effort, sampling and limits.


def _no_tools(body: MessagesBody) -> bool:
    return body.tool_choice is not None and body.tool_choice.type == "none"


def _is_anthropics(tool: AnthropicTool) -> bool:
    return tool.type not in (None, CUSTOM) and tool.input_schema is None


def _declared(body: MessagesBody, *, deferred: bool) -> tuple[Tool, ...]:
    """The tools that stand in front of the prompt, or those that are declared later.

    Nobody here searches for the model: with a search of Anthropic's servers none is deferred.
    """
    tools = body.tools or ()
    searched = any((tool.type or "").startswith(TOOL_SEARCH) for tool in tools)
    return tuple(
        read
        for index, tool in enumerate(tools)
        if (bool(tool.defer_loading) and not searched) is deferred
        for read in _tool(tool, f"tools[{index}]")
    )


def _deferred(body: MessagesBody) -> dict[str, Tool]:
    """Tools that a message declares, by name. Raises ``RequestError`` for two of one name (A10)."""
    if _no_tools(body):
        return {}
    names = {tool.name for tool in _declared(body, deferred=False)}
    tools: dict[str, Tool] = {}
    for tool in _declared(body, deferred=True):
        if tool.name in names or tool.name in tools:
            raise RequestError(f"two tools are named {quoted(tool.name)}", param=tool.where)
        tools[tool.name] = tool
    return tools


def _tool(tool: AnthropicTool, where: str) -> Iterator[Tool]:
    """The tool at ``where``; nothing if Anthropic defines it."""
    if _is_anthropics(tool):
        return
    if tool.name is None:
        raise required(f"{where}.name")
    if tool.input_schema is None:
        raise required(f"{where}.input_schema")
    strict = bool(tool.strict)
    yield Tool(tool.name, tool.description or "", tool.input_schema, where, strict)


def _tool_choice(
    body: MessagesBody,
    tools: Sequence[Tool],
    namespaces: Sequence[Namespace],
    builtin_tools: Sequence[str],
) -> ToolChoice:
    """Anthropic's API refuses ``any`` and ``tool`` while thinking; this model may think first."""
    choice = body.tool_choice
    if choice is None or choice.type not in ("any", "tool"):
        return ToolChoice()
    if choice.type == "any":
        if not (tools or namespaces or builtin_tools):
            problem = "tool_choice is 'any', but there is no tool to call"
            raise RequestError(problem, param="tool_choice")
        return ToolChoice(required=True)
    if choice.name is None:
        raise required("tool_choice.name")
    if choice.name in {tool.name for tool in tools}:
        return ToolChoice(required=True, names=(choice.name,))
    served = tuple(
        recipient
        for namespace in namespaces
        for recipient, tool in namespace.by_recipient.items()
        if tool.origin[-1] == choice.name
    )
    if not served:
        problem = f"tool_choice.name: there is no tool named {quoted(choice.name)} to call"
        raise RequestError(problem, param="tool_choice.name")
    return ToolChoice(required=True, names=served)


_OFF = ("disabled", "between_tools")
"""Types of thinking without any (Anthropic's ``ThinkingTypes``).

``between_tools`` shows in thinking blocks what the model says on its way: `emitter.Display`.
"""


def _reasoning(body: MessagesBody, defaults: Defaults) -> tuple[Effort, bool]:
    """Effort and thinking (A8). The field ``thinking`` takes precedence over an effort."""
    word = body.output_config.effort if body.output_config else None
    effort, thinking = defaults.reasoning(("output_config.effort", word))
    if body.thinking is None:
        return effort, thinking
    if body.thinking.type in _OFF:
        return defaults.reasoning(("thinking.type", NO_THINKING))
    return effort, thinking or word is None


def _response_format(body: MessagesBody) -> ResponseFormat | None:
    """``output_format`` is what ``output_config.format`` was called while it was a beta."""
    fields = {
        "output_config.format": body.output_config.format if body.output_config else None,
        "output_format": body.output_format,
    }
    for where, requested in fields.items():
        if requested is not None:
            document = requested.document
            return ResponseFormat(document, strict=True, where=where, strict_implied=True)
    return None
