"""The Messages API: turns a request body into a Turn (semantics A2 to A11)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from json import dumps
from typing import NamedTuple, TypeAlias

from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import RequestError, quoted
from vllm_mlx_harmony.core.turn import (
    BROWSER,
    NO_THINKING,
    AdditionalTools,
    Answer,
    Call,
    Defaults,
    Effort,
    EffortUpdate,
    Instructions,
    Message,
    Namespace,
    OutputLimits,
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
from vllm_mlx_harmony.protocols.messages import schema
from vllm_mlx_harmony.protocols.messages.content import FILES, TextReader, lines, unreadable
from vllm_mlx_harmony.protocols.messages.emitter import UPDATE, Display, Emitter
from vllm_mlx_harmony.protocols.messages.schema import Block, MessagesBody
from vllm_mlx_harmony.protocols.messages.server_tools import (
    declares_web,
    found_tools,
    requested_namespaces,
    result_text,
    translated_call,
    unavailable_name,
    unavailable_tools,
)
from vllm_mlx_harmony.protocols.messages.tool_types import client_tool
from vllm_mlx_harmony.protocols.messages.web import displayed, recipients_of_native
from vllm_mlx_harmony.protocols.partial_json import INVALID_JSON
from vllm_mlx_harmony.protocols.request_body import sampling
from vllm_mlx_harmony.protocols.server_calls import (
    last_call,
    recipients_of,
    with_missing_results,
    with_results_moved,
)
from vllm_mlx_harmony.protocols.unavailable import NONE, Unavailable, notice, unavailable
from vllm_mlx_harmony.protocols.validation import required, unsupported, validate


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed request: the turn for the model, and the form of the answer.

    ``unavailable`` has the declared tools that nobody runs. ``native``: the request declares
    Anthropic's web search or web fetch. ``notes`` names, for the log, the fields that were accepted
    but have no effect.
    """

    turn: Turn
    model: str
    stream: bool
    thinking: Display
    unavailable: Unavailable
    native: bool
    notes: tuple[str, ...]
    cipher: Cipher = field(repr=False)

    def emitter(self, info: ResponseInfo) -> Emitter:
        return Emitter(
            info,
            self.cipher,
            stream=self.stream,
            thinking=self.thinking,
            namespaces=self.turn.namespaces,
            native=self.native,
            unavailable=self.unavailable,
        )

    def as_sent_back(self, message: Message) -> Message:
        return message


def read(
    body: object, defaults: Defaults, cipher: Cipher, *, counting: bool = False
) -> MessagesRequest:
    """The request in ``body``, the parsed JSON of ``POST /v1/messages``.

    ``counting``: of ``POST /v1/messages/count_tokens``, where ``max_tokens`` is not required.
    Raises ``RequestError`` naming the field, and nothing else, whatever JSON value ``body`` is.
    Unknown fields are ignored.
    """
    request = validate(MessagesBody, body)
    if request.max_tokens is None and not counting:
        raise required("max_tokens")
    fields = body if isinstance(body, dict) else {}
    if fields.get("thread") is not None:
        problem = (
            "thread is not supported: this server does not store conversations; send all messages"
        )
        raise RequestError(problem, param="thread", code=schema.THREAD_UNSUPPORTED)
    if fields.get("compaction") is not None and not counting:  # Anthropic's own count ignores it
        raise unsupported("compaction", "compaction: this server does not summarize conversations")
    shown: Display = "shown"
    if request.thinking is not None and request.thinking.type in _OFF:
        shown = _OFF[request.thinking.type]
    elif request.thinking is not None and request.thinking.display in ("omitted", "updates"):
        shown = "encrypted"
    turn, missing = read_turn(request, defaults, cipher)
    return MessagesRequest(
        turn=turn,
        model=request.model,
        stream=bool(request.stream),
        thinking=shown,
        unavailable=missing,
        native=declares_web(request),
        notes=notes(request, missing),
        cipher=cipher,
    )


_OFF: dict[str, Display] = {"disabled": "hidden", "between_tools": "preambles"}
"""The types of thinking that switch reasoning off, each with what is shown instead."""


def read_turn(body: MessagesBody, defaults: Defaults, cipher: Cipher) -> tuple[Turn, Unavailable]:
    """The turn that a validated body asks for, and the tools that nobody runs.

    Raises only ``RequestError``.
    """
    no_tools = body.tool_choice is not None and body.tool_choice.type == "none"
    tools, deferred = ((), {}) if no_tools else _tools(body.tools or ())
    response_format = _response_format(body)
    reader = _Reader(cipher, defaults, {**deferred})
    messages, prefill = reader.conversation(body, wants_json=response_format is not None)
    if no_tools:
        messages = [message for message in messages if not isinstance(message, AdditionalTools)]
    additions = (message for message in messages if isinstance(message, AdditionalTools))
    added = [*tools, *(tool for message in additions for tool in message.tools)]
    namespaces: tuple[Namespace, ...] = ()
    if not no_tools:
        requested = requested_namespaces(body, defaults.namespaces)
        namespaces = defaults.default_namespaces([*added, *deferred.values()], requested)
    builtin_tools = () if no_tools else defaults.builtin_tools
    missing = NONE
    if not no_tools:
        other_tools = (*(tool.name for tool in added), *deferred, *builtin_tools)
        missing = _unavailable(body, defaults, namespaces, messages, other_tools)
    open_call = last_call(messages)
    runs = open_call is not None and prefill is None and namespaces
    messages = [*with_missing_results(messages, (open_call.id,) if open_call and runs else ())]
    effort, thinking = _reasoning(body, defaults)
    for message in messages:
        if isinstance(message, EffortUpdate):
            thinking = message.thinking
    thinks = body.thinking
    stops = () if missing.answer else tuple(text for text in body.stop_sequences or () if text)
    instructions = _system(body.system or (), defaults.attachments)
    turn = Turn(
        messages=missing.announced((*instructions, *messages)),
        tools=tools,
        effort=effort,
        response_format=response_format,
        identity=defaults.identity,
        date=defaults.date,
        builtin_tools=builtin_tools,
        prefill=None if missing.answer else prefill,
        sampling=sampling(body),
        limits=OutputLimits(
            max_tokens=body.max_tokens,
            stop=stops,
            one_call=bool(body.tool_choice and body.tool_choice.disable_parallel_tool_use),
            reasoning_tokens=thinks.budget_tokens if thinks and thinks.type == "enabled" else None,
            sets_reasoning=thinks is not None
            or bool(body.output_config and body.output_config.effort is not None)
            or any(isinstance(message, EffortUpdate) for message in messages),
        ),
        tool_choice=ToolChoice()
        if missing.answer
        else _tool_choice(body, added, namespaces, builtin_tools),
        thinking=thinking,
        namespaces=namespaces,
        pauses=True,
        fixed_answer=missing.answer,
    )
    return turn, missing


def _unavailable(
    body: MessagesBody,
    defaults: Defaults,
    namespaces: Sequence[Namespace],
    messages: Sequence[Message],
    other_tools: Collection[str],
) -> Unavailable:
    """The declared tools that nobody runs. ``other_tools``: names of those that the client runs.

    A function of the client's may have the name of a tool that is not available.
    """
    tools = unavailable_tools(body, defaults.namespaces, namespaces)
    choice = body.tool_choice or schema.ToolChoice(type="auto")
    if choice.type == "tool" and choice.name in tools and choice.name not in other_tools:
        return unavailable(tools, (choice.name,), messages, forced=True)
    forced = choice.type == "any"
    requested = () if other_tools or namespaces else tools
    return unavailable(tools, requested, messages, forced=forced)


def notes(body: MessagesBody, missing: Unavailable) -> tuple[str, ...]:
    """A sentence, for the log, for each field that was accepted but has no effect."""
    names = ", ".join(map(quoted, missing.tools))
    tools = (f"tools that are not available: {names}",) if names else ()
    if not _is_searched(body.tools or ()):
        return tools
    return (*tools, "defer_loading was ignored: this server searches no tools for the model")


# --- The conversation: groups of messages of one role.


class _Placed(NamedTuple):
    block: Block
    where: str


@dataclass(frozen=True, slots=True)
class _ReadMessage:
    """The blocks of a message, and the effort that it sets from there on."""

    role: str
    blocks: list[_Placed]
    effort: EffortUpdate | None


_Group: TypeAlias = Sequence[_ReadMessage]
"""Consecutive messages of one role."""

_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")

_IGNORED = ("mcp_tool_listing", "fallback")
"""Blocks that Anthropic's servers add to an answer, and that mean nothing to the model."""


@dataclass(slots=True)
class _Reader:
    """Reads the messages of a request, in order.

    ``deferred`` are the tools that are declared where they are first referred to, by name.
    """

    cipher: Cipher
    defaults: Defaults
    deferred: dict[str, Tool]

    def conversation(
        self, body: MessagesBody, *, wants_json: bool
    ) -> tuple[list[Message], str | None]:
        """All messages, and the beginning of the answer when the last one is the assistant's."""
        groups = [
            (role, list(group))
            for role, group in groupby(self.placed(body), lambda message: message.role)
        ]
        last: _Group = ()
        prefill, finished = None, False
        if body.messages[-1].role == "assistant":
            last = groups.pop()[1]
            choice = body.tool_choice.type if body.tool_choice else ""
            prefill, finished = _take_prefill(last, choice in ("any", "tool"), wants_json)
        messages: list[Message] = []
        for role, group in groups:
            if role == "system":
                messages += self.instructions(group)
            elif role == "user":
                messages += self.user(group)
            else:
                messages += self.assistant(group, answered=True)
        messages += self.assistant(last, answered=finished)
        return with_results_moved(messages), prefill

    def placed(self, body: MessagesBody) -> Iterator[_ReadMessage]:
        """The messages without empty texts, and without the text of those that are cleared."""
        last_user = max(
            (at for at, message in enumerate(body.messages) if message.role == "user"), default=-1
        )
        off = body.thinking is not None and body.thinking.type in _OFF
        for at, message in enumerate(body.messages):
            cleared = message.clear_at == "next_user_message" and at < last_user
            blocks = _joined(
                _Placed(block, f"messages[{at}].content[{index}]")
                for index, block in enumerate(message.content)
                if not (isinstance(block, schema.TextBlock) and not block.text)
                and (not cleared or isinstance(block, schema.ToolAdditionBlock))
            )
            update = None
            if message.output_config is not None and message.output_config.effort is not None:
                word = (f"messages[{at}].output_config.effort", message.output_config.effort)
                effort, thinking = self.defaults.reasoning(word)
                update = EffortUpdate(effort, thinking and not off)
            if blocks or update or message.role != "system":
                yield _ReadMessage(message.role, blocks, update)

    def instructions(self, group: _Group) -> Iterator[Message]:
        """Instructions, and the tools that are declared among them (A12)."""
        for message in group:
            for adds, blocks in groupby(
                message.blocks, lambda placed: isinstance(placed.block, schema.ToolAdditionBlock)
            ):
                if not adds:
                    if text := self.text(blocks):
                        yield Instructions(text)
                    continue
                yield from self.additions(blocks)
            if message.effort:
                yield message.effort

    def additions(self, blocks: Iterable[_Placed]) -> Iterator[Message]:
        tools: list[Tool] = []
        missing: list[str] = []
        for block, where in blocks:
            assert isinstance(block, schema.ToolAdditionBlock)
            if not isinstance(block.tool, schema.ToolDefinition):
                tools += self.load([block.tool.name])
                continue
            defined = [*_tool(block.tool.definition, f"{where}.tool.definition")]
            tools += defined
            if not defined:
                missing.append(unavailable_name(block.tool.definition))
        if tools:
            yield AdditionalTools(tuple(tools))
        if missing:
            yield notice(missing)

    def user(self, group: _Group) -> Iterator[Message]:
        """The results of tools, then the user's texts: the order that the API requires anyway.

        A tool that a result refers to is declared after the result.
        """
        for message in group:
            other_blocks: list[_Placed] = []
            for block, where in message.blocks:
                if not (isinstance(block, schema.ResultBlock) and block.type == "tool_result"):
                    other_blocks.append(_Placed(block, where))
                    continue
                text = self.result(block, where)
                if block.is_error and not text.lower().startswith("error"):
                    # Harmony has no field for it.
                    text = f"Error: {text}" if text else "Error"
                yield Result(block.tool_use_id, text, where)
                parts = block.content or ()
                yield from self.declare(
                    part.tool_name for part in parts if isinstance(part, schema.ToolReferenceBlock)
                )
            if other_blocks or not message.blocks:
                yield User(self.text(other_blocks))

    def assistant(self, turn: _Group, *, answered: bool) -> Iterator[Message]:
        """In the model's own order (A4). Consecutive messages are one turn of the assistant.

        The last text of a message is its answer, unless a call follows it, or the turn is not
        ``answered`` yet. A client's calls come last, so that there is no text between them and
        their results.
        """
        blocks = [placed for message in turn for placed in message.blocks]
        if not answered or any(placed.block.type == "tool_use" for placed in blocks):
            for placed in sorted(blocks, key=lambda placed: placed.block.type == "tool_use"):
                yield from self.assistant_block(*placed)
            return
        for message in turn:
            ends = ("text", *_SERVER_CALLS)
            last = (
                placed.block for placed in reversed(message.blocks) if placed.block.type in ends
            )
            answer = next(last, None)
            for block, where in message.blocks:
                if block is answer and isinstance(block, schema.TextBlock):
                    yield Answer(block.text)
                else:
                    yield from self.assistant_block(block, where)

    def assistant_block(self, block: Block, where: str) -> Iterator[Message]:
        match block:
            case schema.TextBlock():
                yield Preamble(block.text)
            case schema.ThinkingBlock() | schema.RedactedThinkingBlock():
                yield from self.thought(block, where)
            case schema.CallBlock():
                # The model's own text, if that was not an object.
                invalid = block.input.get(INVALID_JSON)
                compact = dumps(block.input, ensure_ascii=False, separators=(",", ":"))
                arguments = invalid if isinstance(invalid, str) else compact
                if block.type == "tool_use":
                    yield Call(block.id, block.name, arguments)
                    return
                label = block.server_name if isinstance(block, schema.McpCallBlock) else None
                called = translated_call(
                    self.defaults.namespaces, label, block.name, block.input, arguments
                )
                if called is not None:
                    yield ServerCall(block.id, *called)
            case schema.ResultBlock(type="mcp_tool_result"):
                yield ServerResult(block.tool_use_id, "", self.result(block, where))
            case schema.ServerResultBlock():
                yield from self.declare(found_tools(block.content))
                shown = displayed(block.content, self.cipher)
                text = shown or result_text(
                    block.content, f"{where}.content", self.defaults.attachments
                )
                yield ServerResult(block.tool_use_id, "", text)
            case _ if block.type in FILES:
                yield Preamble(self.text([_Placed(block, where)]))
            case _ if block.type not in _IGNORED:
                raise unreadable(block.type, where)

    def thought(
        self, block: schema.ThinkingBlock | schema.RedactedThinkingBlock, where: str
    ) -> Iterator[Message]:
        """The encrypted reasoning, whatever the client made of the text; without it, the text."""
        if isinstance(block, schema.RedactedThinkingBlock):
            text, decrypted = "", self.cipher.decrypt(block.data)
        else:
            text, decrypted = block.thinking or "", self.cipher.decrypt(block.signature or "")
            if decrypted is None and block.thinking is None:
                raise required(f"{where}.thinking")
        if decrypted and decrypted.startswith(UPDATE):
            yield Preamble(decrypted.removeprefix(UPDATE))
        elif thought := decrypted or text:
            yield Reasoning(thought)

    def text(self, placed: Iterable[_Placed]) -> str:
        """The text of blocks that are neither calls nor results."""
        reader = TextReader(self.defaults.attachments)
        return lines(reader.text(*block) for block in placed)

    def result(self, block: schema.ResultBlock, where: str) -> str:
        reader = TextReader(self.defaults.attachments, lenient=True)
        return reader.texts(block.content or (), f"{where}.content")

    def load(self, names: Iterable[str | None]) -> list[Tool]:
        """The deferred tools of these names, except for those that are declared already."""
        return [self.deferred.pop(name) for name in names if name in self.deferred]

    def declare(self, names: Iterable[str]) -> Iterator[Message]:
        if tools := self.load(names):
            yield AdditionalTools(tuple(tools))


def _joined(placed: Iterable[_Placed]) -> list[_Placed]:
    """``placed`` with each text that its citations have divided as one block again."""
    joined: list[_Placed] = []
    cites = False
    for placed_block in placed:
        block, last = placed_block.block, joined[-1].block if joined else None
        is_text = isinstance(block, schema.TextBlock)
        if cites and isinstance(block, schema.TextBlock) and isinstance(last, schema.TextBlock):
            whole = last.model_copy(update={"text": last.text + block.text})
            joined[-1] = joined[-1]._replace(block=whole)
        else:
            joined.append(placed_block)
        cites = is_text and bool(getattr(block, "citations", None))
    return joined


def _take_prefill(turn: _Group, must_call: bool, wants_json: bool) -> tuple[str | None, bool]:
    """Takes the text that the answer continues from ``turn``; or true, if that is an answer.

    It is one if the request requires a call or JSON, which cannot continue the text. Then a new
    turn of the assistant begins after it, as in Chat Completions. LangGraph requests a typed answer
    in this way, after an agent's last answer.

    Raises ``RequestError`` for a call without a result and for white space at the end, as
    Anthropic's API does: the model's next token brings its own.
    """
    placed = [block for message in turn for block in message.blocks]
    for block, where in placed:
        if block.type == "tool_use":
            raise RequestError(f"{where} is a tool_use without a tool_result after it", param=where)
    if not placed or not isinstance(placed[-1].block, schema.TextBlock):
        return None, False
    text, where = placed[-1].block.text, placed[-1].where
    if must_call or (wants_json and not text.lstrip().startswith(("{", "[", '"'))):
        return None, True
    if text != text.rstrip():
        problem = f"{where}: final assistant content cannot end with trailing whitespace"
        raise RequestError(problem, param=where)
    next(message.blocks for message in reversed(turn) if message.blocks).pop()
    return text, False


_BILLING = "x-anthropic-billing-header:"


def _system(blocks: Iterable[Block], attachments: Attachments) -> Iterator[Message]:
    """The instructions, without the line in which Claude Code tells Anthropic whom to bill.

    That line changes with every request: no prompt would begin like the one before it (A12).
    """
    for index, block in enumerate(blocks):
        text = TextReader(attachments).text(block, f"system[{index}]")
        if text.startswith(_BILLING):
            text = text.partition("\n")[2]
        if text:
            yield Instructions(text)


# --- Tools, format and effort.


def _is_searched(tools: Iterable[schema.AnyTool]) -> bool:
    """Whether one of Anthropic's servers should search the tools that are deferred."""
    return any((tool.type or "").startswith(schema.TOOL_SEARCH) for tool in tools)


def _tools(tools: Sequence[schema.AnyTool]) -> tuple[tuple[Tool, ...], dict[str, Tool]]:
    """The tools at the beginning of the prompt, and by name those that are declared later.

    None is deferred where Anthropic's servers would have to search them. Raises ``RequestError``
    for a deferred tool with the name of another (A10).
    """
    shown: list[Tool] = []
    later: list[Tool] = []
    searched = _is_searched(tools)
    for index, tool in enumerate(tools):
        defers = (
            isinstance(tool, (schema.ClientTool, schema.PredefinedTool))
            and tool.defer_loading
            and not searched
        )
        (later if defers else shown).extend(_tool(tool, f"tools[{index}]"))
    names = {tool.name for tool in shown}
    deferred: dict[str, Tool] = {}
    for deferred_tool in later:
        if deferred_tool.name in names or deferred_tool.name in deferred:
            raise RequestError(
                f"duplicate tool name {quoted(deferred_tool.name)}", param=deferred_tool.where
            )
        deferred[deferred_tool.name] = deferred_tool
    return tuple(shown), deferred


def _tool(tool: schema.AnyTool, where: str) -> Iterator[Tool]:
    """The tool at ``where``; nothing if Anthropic's servers would run it."""
    if isinstance(tool, schema.ClientTool):
        described = tool.description or ""
        yield Tool(tool.name, described, tool.input_schema, where, bool(tool.strict))
    elif isinstance(tool, schema.PredefinedTool):
        kind = client_tool(tool.type, tool.raw)
        name, strict = tool.name or kind.name, bool(tool.strict)
        yield Tool(name, kind.description, kind.parameters, where, strict)


def _tool_choice(
    body: MessagesBody,
    tools: Sequence[Tool],
    namespaces: Sequence[Namespace],
    builtin_tools: Sequence[str],
) -> ToolChoice:
    """Anthropic's API rejects ``any`` and ``tool`` while thinking; this model may think first."""
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
    served = recipients_of(namespaces, None, choice.name)
    if any(namespace.name == BROWSER for namespace in namespaces):
        served = recipients_of_native(choice.name) or served
    if not served:
        problem = f"tool_choice.name: there is no tool named {quoted(choice.name)} to call"
        raise RequestError(problem, param="tool_choice.name")
    return ToolChoice(required=True, names=served)


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
            schema = requested.json_schema
            return ResponseFormat(schema, strict=True, where=where, strict_implied=True)
    return None
