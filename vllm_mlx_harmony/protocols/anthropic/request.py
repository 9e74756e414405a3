"""The Messages API, inwards, second half: a checked body into a Turn.

Knows what every field, message and block means (semantics A2 to A11). Refuses to know how a Turn
is rendered, and how the answer is written (anthropic/api.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from json import dumps
from typing import TypeAlias

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import (
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
    left_out,
)
from vllm_mlx_harmony.protocols.anthropic.body import (
    CUSTOM,
    AnthropicMessage,
    AnthropicTool,
    Block,
    MessagesBody,
    Part,
    ResultBlock,
    Source,
)
from vllm_mlx_harmony.protocols.anthropic.input import INVALID_JSON
from vllm_mlx_harmony.protocols.body import UNSUPPORTED, required
from vllm_mlx_harmony.protocols.seal import Seal


def read_turn(body: MessagesBody, defaults: Defaults, seal: Seal) -> Turn:
    """What a checked body asks the model for. Raises only ``RequestError``."""
    messages, prefill = _conversation(body.messages, seal)
    return Turn(
        messages=(*_system(body.system or ()), *messages),
        tools=() if _no_tools(body) else tuple(_tools(body.tools or ())),
        effort=_effort(body, defaults),
        response_format=_response_format(body),
        identity=defaults.identity,
        date=defaults.date,
        builtin_tools=defaults.builtin_tools,
        prefill=prefill,
        sampling=_sampling(body),
        limits=Limits(
            max_tokens=body.max_tokens,
            stop=tuple(text for text in body.stop_sequences or () if text),
            one_call=_one_call(body),
        ),
    )


def notes(body: MessagesBody) -> tuple[str, ...]:
    """What was accepted but has no effect, a sentence each, for the log."""
    return tuple(
        f"tools[{index}] ({tool.type}) was left out: the caller does not define it"
        for index, tool in enumerate(body.tools or ())
        if _is_anthropics(tool)
    )


# --- The conversation: runs of messages of one speaker, each read by its role.


@dataclass(frozen=True, slots=True)
class _Placed:
    """A block and its path in the request."""

    block: Block
    where: str


_Spoken: TypeAlias = "list[list[_Placed]]"
"""The blocks of each message of a run."""


def _conversation(
    messages: Sequence[AnthropicMessage], seal: Seal
) -> tuple[list[Message], str | None]:
    """All messages, and the beginning of the answer when the last one is the assistant's."""
    numbered = enumerate(messages)
    runs = [
        (role, [_placed(message, f"messages[{index}].content") for index, message in run])
        for role, run in groupby(numbered, key=lambda each: each[1].role)
    ]
    read = [message for role, run in runs[:-1] for message in _ROLES[role](run, seal)]
    role, last = runs[-1]
    if role != "assistant":
        return [*read, *_ROLES[role](last, seal)], None
    prefill = _prefill(last)
    return [*read, *_unanswered(last, seal)], prefill


def _placed(message: AnthropicMessage, where: str) -> list[_Placed]:
    """The blocks of a message. An empty text says nothing and is as absent."""
    placed = [_Placed(block, f"{where}[{index}]") for index, block in enumerate(message.content)]
    return [each for each in placed if each.block.type != "text" or _text(each)]


def _prefill(run: _Spoken) -> str | None:
    """The text that the answer continues; it is taken out of ``run``.

    Anthropic's API refuses the same: white space at the end (the model's next token brings its
    own), and a call that nobody has answered.
    """
    placed = [each for blocks in run for each in blocks]
    for each in placed:
        if each.block.type == "tool_use":
            raise RequestError(
                f"{each.where} is a tool_use without a tool_result after it", param=each.where
            )
    if not placed or placed[-1].block.type != "text":
        return None
    text, where = _text(placed[-1]), placed[-1].where
    if text != text.rstrip():
        problem = f"{where}: final assistant content cannot end with trailing whitespace"
        raise RequestError(problem, param=where)
    next(blocks for blocks in reversed(run) if blocks).pop()
    return text


def _instructions(run: _Spoken, _: Seal) -> Iterator[Message]:
    for blocks in run:
        if text := _lines(map(_readable, blocks)):
            yield Instructions(text)


def _user(run: _Spoken, _: Seal) -> Iterator[Message]:
    """What tools answered, then what the user says: the order that the API demands anyway."""
    for blocks in run:
        results = [each for each in blocks if each.block.type == "tool_result"]
        texts = [each for each in blocks if each.block.type != "tool_result"]
        yield from map(_result, results)
        if texts or not results:
            yield User(_lines(map(_readable, texts)))


def _assistant(run: _Spoken, seal: Seal) -> Iterator[Message]:
    """In the model's own order (A4). Messages in a row are one turn of the assistant."""
    if any(each.block.type == "tool_use" for blocks in run for each in blocks):
        yield from _unanswered(run, seal)
        return
    for blocks in run:
        answer = next((each for each in reversed(blocks) if each.block.type == "text"), None)
        for each in blocks:
            if each is answer:
                yield Answer(_text(each))
            else:
                yield from _said(each, seal)


def _unanswered(run: _Spoken, seal: Seal) -> Iterator[Message]:
    """What the assistant said while its answer is still to come: before calls or a prefill.

    Calls come last: results follow them, and nothing that is said stands between (A4).
    """
    said = (each for blocks in run for each in blocks)
    for each in sorted(said, key=lambda each: each.block.type == "tool_use"):
        yield from _said(each, seal)


def _said(placed: _Placed, seal: Seal) -> Iterator[Message]:
    block = placed.block
    if block.type == "text":
        yield Preamble(_text(placed))
    elif block.type == "tool_use":
        yield _call(placed)
    elif block.type in ("thinking", "redacted_thinking"):
        if thought := _thought(placed, seal):
            yield Reasoning(thought)
    elif not _is_another_servers(block.type):
        raise _unreadable(placed)


_ROLES: dict[str, Callable[[_Spoken, Seal], Iterator[Message]]] = {
    "system": _instructions,
    "user": _user,
    "assistant": _assistant,
}


def _system(blocks: Iterable[Block]) -> Iterator[Message]:
    for index, block in enumerate(blocks):
        text = _without_billing(_readable(_Placed(block, f"system[{index}]")))
        if text:
            yield Instructions(text)


_BILLING = "x-anthropic-billing-header:"


def _without_billing(text: str) -> str:
    """``text`` without the line in which Claude Code tells Anthropic whom to bill.

    It changes with every request, so that no prompt would begin as the one before (A12).
    """
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


# --- Blocks.


def _thought(placed: _Placed, seal: Seal) -> str:
    """What was thought: as it was sealed, whatever the client made of the text; else the text."""
    block = placed.block
    if block.type == "redacted_thinking":
        if block.data is None:
            raise required(f"{placed.where}.data")
        return seal.unseal(block.data) or ""
    sealed = seal.unseal(block.signature or "")
    if sealed is None and block.thinking is None:
        raise required(f"{placed.where}.thinking")
    return sealed or block.thinking or ""


def _call(placed: _Placed) -> Call:
    block = placed.block
    for field in ("id", "name", "input"):
        if getattr(block, field) is None:
            raise required(f"{placed.where}.{field}")
    return Call(block.id or "", block.name or "", _arguments(block.input or {}))


def _arguments(given: dict[str, object]) -> str:
    """Compact, non-ASCII kept (A4). What the model wrote in place of an object is what it wrote."""
    invalid = given.get(INVALID_JSON)
    if isinstance(invalid, str):
        return invalid
    return dumps(given, ensure_ascii=False, separators=(",", ":"))


def _result(placed: _Placed) -> Result:
    block = placed.block
    if block.tool_use_id is None:
        raise required(f"{placed.where}.tool_use_id")
    parts = enumerate(block.content or ())
    text = _lines(_result_text(part, f"{placed.where}.content[{i}]") for i, part in parts)
    return Result(block.tool_use_id, _failed(text) if block.is_error else text, placed.where)


_ERROR = "Error"


def _failed(text: str) -> str:
    """Harmony has no place for ``is_error``: the text says so itself, in its first word."""
    if text[: len(_ERROR)].lower() == _ERROR.lower():
        return text
    return f"{_ERROR}: {text}" if text else _ERROR


_KINDS = {"document": "file"}


def _result_text(part: ResultBlock, where: str) -> str:
    if part.type == "search_result":
        return _found(part, where)
    if part.source is not None and part.source.type == "text":
        return _document(part.source, where)
    return _part_text(part, where)


def _found(part: ResultBlock, where: str) -> str:
    if part.content is None:
        raise required(f"{where}.content")
    parts = enumerate(part.content)
    return _lines(_part_text(each, f"{where}.content[{index}]") for index, each in parts)


def _document(source: Source, where: str) -> str:
    if source.data is None:
        raise required(f"{where}.source.data")
    return source.data


def _part_text(part: Part, where: str) -> str:
    if part.type != "text":
        return left_out(_KINDS.get(part.type, part.type))
    if part.text is None:
        raise required(f"{where}.text")
    return part.text


def _lines(texts: Iterable[str]) -> str:
    """Blocks are separate texts: each begins on a line of its own."""
    joined = ""
    for text in texts:
        joined += f"\n{text}" if joined and not joined.endswith("\n") else text
    return joined


def _text(placed: _Placed) -> str:
    if placed.block.text is None:
        raise required(f"{placed.where}.text")
    return placed.block.text


def _readable(placed: _Placed) -> str:
    """The text of a block. One that is not text is a 400 that names it (A11)."""
    if placed.block.type != "text":
        raise _unreadable(placed)
    return _text(placed)


_WHY: dict[str, str] = {
    **dict.fromkeys(
        ("thinking", "redacted_thinking", "tool_use", "tool_result"), "it cannot stand here"
    ),
    **dict.fromkeys(("image", "document", "audio", "video"), "the model reads text only"),
}


def _unreadable(placed: _Placed) -> RequestError:
    kind, where = placed.block.type, placed.where
    why = _WHY.get(kind, "it is not supported here")
    return RequestError(f"{where} is of type {kind!r}: {why}", param=where, code=UNSUPPORTED)


def _is_another_servers(kind: str) -> bool:
    """Whether a block tells of a tool that Anthropic's servers ran: left out, as the tool is."""
    return kind in ("server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result")


# --- Tools, format, effort, sampling and limits.


def _no_tools(body: MessagesBody) -> bool:
    return body.tool_choice is not None and body.tool_choice.type == "none"


def _is_anthropics(tool: AnthropicTool) -> bool:
    return tool.type not in (None, CUSTOM) and tool.input_schema is None


def _tools(tools: Iterable[AnthropicTool]) -> Iterator[Tool]:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if _is_anthropics(tool):
            continue
        if tool.name is None:
            raise required(f"{where}.name")
        if tool.input_schema is None:
            raise required(f"{where}.input_schema")
        yield Tool(tool.name, tool.description or "", tool.input_schema, where)


def _effort(body: MessagesBody, defaults: Defaults) -> Effort:
    """The lowest when thinking is disabled; a budget of thinking tokens changes nothing (A8)."""
    asked = body.output_config.effort if body.output_config else None
    param = "output_config.effort"
    effort = defaults.effort if asked is None else Effort.parse(asked, param=param)
    disabled = body.thinking is not None and body.thinking.type == "disabled"
    return Effort.LOW if disabled else effort


def _response_format(body: MessagesBody) -> ResponseFormat | None:
    """``output_format`` is what ``output_config.format`` was called while it was a beta."""
    asked = (body.output_config.format if body.output_config else None) or body.output_format
    return None if asked is None else ResponseFormat(asked.document)


def _sampling(body: MessagesBody) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == -1 else body.top_k,  # -1 is vLLM's word for "all of them"
    )


def _one_call(body: MessagesBody) -> bool:
    choice = body.tool_choice
    return choice is not None and choice.type == "auto" and bool(choice.disable_parallel_tool_use)
