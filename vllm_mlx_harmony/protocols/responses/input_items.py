"""Responses, inwards: the items of the input into messages.

Knows what each item says (semantics A4 to A6, A11) and whose reasoning to believe.
Refuses to know tools' declarations (tools) and the rest of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from vllm_mlx_harmony.core.errors import quoted
from vllm_mlx_harmony.core.turn import (
    PYTHON,
    AdditionalTools,
    Answer,
    Call,
    Defaults,
    EffortUpdate,
    FormatUpdate,
    Instructions,
    Message,
    Preamble,
    Reasoning,
    Result,
    ServerCall,
    ServerResult,
    Summary,
    User,
)
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.freeform import wrap
from vllm_mlx_harmony.protocols.openai_content import (
    call_arguments,
    message_text,
    paragraphs,
    result_text,
)
from vllm_mlx_harmony.protocols.responses.schema import Item, read_item, response_format
from vllm_mlx_harmony.protocols.responses.server_tools import ServerTools
from vllm_mlx_harmony.protocols.responses.tools import ToolReader
from vllm_mlx_harmony.protocols.server_calls import NOT_RUN, code_in
from vllm_mlx_harmony.protocols.validation import required

Stored: TypeAlias = Callable[[str], Mapping[str, Any] | None]
"""Looks up an item of an earlier response by its id; ``None`` when there is none."""


def nothing_stored(_: str) -> None:
    """A store without any item."""


UNKNOWN = "unknown"
"""The name of a tool whose call is not stored, when nothing says which it was."""


class _After(NamedTuple):
    """Whether the model calls a tool in the same run of its items: one of the client's anywhere,
    since such calls are the end of it however they are placed, or one of a server's after the item.
    """

    calls: bool


@dataclass(slots=True)
class ItemReader:
    """Reads one request's items. ``notes`` says, for the log, what could not be used.

    ``calls`` are the ids of the calls that were made in the conversation so far, ``approved`` those
    of the server's calls that the client has approved since the model's last turn: that turn has
    run what had been approved before it.
    """

    cipher: Cipher
    tools: ToolReader
    defaults: Defaults
    stored: Stored = nothing_stored
    calls: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    server: ServerTools = field(default_factory=ServerTools)
    approved: set[str] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)  # the ids of calls that had to be approved
    _lost: bool = False  # whether a reference referred to nothing

    def messages(self, items: Sequence[Item]) -> Iterator[Message]:
        """The messages ``items`` stand for. Raises ``RequestError`` naming the guilty field.

        Nothing is left of a foreign call: Codex answers its ``local_shell_call`` as a function's.
        """
        known = [self._resolved(item, f"input[{at}]") for at, item in enumerate(items)]
        foreign = {
            key
            for key in (each.document.get("call_id") for each in known if each.type not in _READERS)
            if isinstance(key, str)
        }
        placed = enumerate(zip(known, _after(known), strict=True))
        for from_assistant, run in groupby(placed, lambda each: _is_from_assistant(each[1][0])):
            said: list[Message] = []
            for at, (item, after) in run:
                if _follows_the_answers(item):
                    self.approved.clear()
                read = _READERS.get(item.type)
                if read is not None and not (item.type in OUTPUTS and item.call_id in foreign):
                    said += read(self, item, f"input[{at}]", after)
            if from_assistant:  # results follow the calls, and nothing that is said stands between
                said.sort(key=lambda message: isinstance(message, Call))
            yield from said

    def _resolved(self, item: Item, where: str) -> Item:
        """The item that a reference refers to; if none, the reference, which says nothing."""
        if item.type != "item_reference":
            return item
        found = self.stored(_needed(item.id, f"{where}.id"))
        if found is None:
            self._lost = True
            self.notes.append(f"{where} refers to {quoted(item.id)}, which is not stored: left out")
            return item
        return read_item(found)

    def _message(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        if item.role is None:
            raise required(f"{where}.role")
        if item.content is None and item.role != "assistant":
            raise required(f"{where}.content")
        text = message_text(item.content or (), f"{where}.content", self.defaults.attachments)
        if item.role == "user":
            yield User(text)
        elif text:
            yield self._spoken(item, text, after)

    def _spoken(self, item: Item, text: str, after: _After) -> Message:
        if item.role != "assistant":
            return Instructions(text)
        phase = item.phase or ("commentary" if after.calls else "final_answer")
        return Preamble(text) if phase == "commentary" else Answer(text)

    def _reasoning(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        """What was encrypted here is what the model thought; or the text, or a summary of it."""
        text = (
            self._decrypted(item, where)
            or paragraphs(item.content or (), f"{where}.content")
            or paragraphs(item.summary or (), f"{where}.summary")
        )
        if text:
            yield Reasoning(text)

    def _compaction(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        """A conversation that was compacted here goes on as what the user tells of it."""
        if text := self._decrypted(item, where):
            yield Summary(text)

    def _decrypted(self, item: Item, where: str) -> str:
        if not item.encrypted_content:
            return ""
        text = self.cipher.decrypt(item.encrypted_content)
        if text is None:
            self.notes.append(f"{where}.encrypted_content was not encrypted here: ignored")
        return text or ""

    def _function_call(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        yield self._call(item, where, call_arguments(item.arguments, f"{where}.arguments"))

    def _custom_call(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        yield self._call(item, where, wrap(_needed(item.input, f"{where}.input")))

    def _search_call(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        """A search that a server did elsewhere was no call of the model's here."""
        if _is_clients(item):
            arguments = call_arguments(item.arguments, f"{where}.arguments")
            yield self._called(Call(str(item.call_id), self.tools.search, arguments))

    def _call(self, item: Item, where: str, arguments: str) -> Call:
        name = _needed(item.name, f"{where}.name")
        key = _needed(item.call_id, f"{where}.call_id")
        return self._called(Call(key, self.tools.name(name, item.namespace or ""), arguments))

    def _called(self, call: Call) -> Call:
        self.calls.add(call.id)
        return call

    def _output(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        key = _needed(item.call_id, f"{where}.call_id")
        named = self.tools.name(item.name, item.namespace or "") if item.name else self.tools.only
        text = self._output_text(item, where)
        yield from self._answer(Result(key, text, where), named or UNKNOWN)

    def _output_text(self, item: Item, where: str) -> str:
        return result_text(item.output or (), f"{where}.output", self.defaults.attachments)

    def _search_output(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        """The tools that were found, which are callable from here on."""
        if item.tools is None:
            raise required(f"{where}.tools")
        declared = self.tools.declare(item.tools, f"{where}.tools", found=True)
        if _is_clients(item):
            found = _FOUND if item.tools else _FOUND_NONE
            yield from self._answer(Result(str(item.call_id), found, where), self.tools.search)
        if declared:
            yield AdditionalTools(declared)

    def _answer(self, result: Result, name: str) -> Iterator[Message]:
        """``result``, behind its call: of one that is not stored only ``name`` is known."""
        if self._lost and result.call_id not in self.calls:
            self.notes.append(f"{result.where} answers a call that is not stored")
            yield self._called(Call(result.call_id, name, "{}"))
        yield result

    def _additional(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        if item.tools is None:
            raise required(f"{where}.tools")
        declared = self.tools.declare(item.tools, f"{where}.tools")
        if declared:
            yield AdditionalTools(declared)

    def _server_call(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        """A call that the server ran; what it has no answer of, was not run to its end.

        One that was approved before is the call that was asked about.
        """
        label = _needed(item.server_label, f"{where}.server_label")
        name = self.server.recipient(label, _needed(item.name, f"{where}.name"))
        arguments = call_arguments(item.arguments, f"{where}.arguments")
        key = call_id(item.id or where)
        asked = call_id(item.approval_request_id or "")
        if item.type == "mcp_call" and asked in self._asked:
            key = asked
        else:
            yield ServerCall(key, name, code_in(arguments) if name == PYTHON else arguments)
        if item.type == "mcp_approval_request":
            self._asked.add(key)
        else:
            text = self._output_text(item, where)
            yield ServerResult(key, name, text or _error_text(item.error) or NOT_RUN)

    def _code_call(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        """Without its outputs, which a client need not ask for, nothing is known of it."""
        logs = [
            str(each.get("logs", ""))
            for each in item.outputs or ()
            if isinstance(each, dict) and each.get("type") == "logs"
        ]
        if logs and item.code is not None:
            key = call_id(item.id or where)
            yield ServerCall(key, PYTHON, item.code)
            yield ServerResult(key, PYTHON, "\n".join(logs))

    def _approval(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        """A call that is not approved has a result; one that is approved is run first of all."""
        key = _needed(item.approval_request_id, f"{where}.approval_request_id")
        if item.approve is None:
            raise required(f"{where}.approve")
        if item.approve:
            self.approved.add(call_id(key))
        else:
            reason = f": {item.reason}" if item.reason else ""
            yield ServerResult(call_id(key), "", f"{NOT_APPROVED}{reason}")

    def _update(self, item: Item, where: str, after: _After) -> Iterator[Message]:
        """What holds from here on until another update: the request's fields are what was before.

        https://openrouter.ai/docs/cookbook/evaluate-and-optimize/model-migrations/gpt-6-astra
        """
        if item.reasoning is not None and item.reasoning.effort is not None:
            requested = (f"{where}.reasoning.effort", item.reasoning.effort)
            yield EffortUpdate(*self.defaults.reasoning(requested))
        if item.text is not None and item.text.format is not None:
            yield FormatUpdate(response_format(item.text.format, f"{where}.text.format"))


NOT_APPROVED = "The user did not approve this call"


def call_id(item_id: str) -> str:
    """The id of the call that the item ``item_id`` tells of: in every API it has the same key."""
    return f"call_{item_id.partition('_')[2] or item_id}"


def _error_text(error: Any) -> str:
    """What the model read of a call that failed: it stands in the item's error."""
    if not isinstance(error, dict):
        return str(error) if error else ""
    parts = error.get("content")
    if isinstance(parts, list):
        texts = [str(each.get("text", "")) for each in parts if isinstance(each, dict)]
        return "\n".join(texts)
    return str(error.get("message") or "")


_FOUND = "Found. The tools can be called from now on."
_FOUND_NONE = "No tools were found."


def _is_clients(item: Item) -> bool:
    """Whether it is of a search that the model asked its client for."""
    return item.call_id is not None and item.execution != "server"


_Read: TypeAlias = Callable[[ItemReader, Item, str, _After], Iterator[Message]]

_READERS: dict[str, _Read] = {
    "message": ItemReader._message,
    "reasoning": ItemReader._reasoning,
    "compaction": ItemReader._compaction,
    "function_call": ItemReader._function_call,
    "custom_tool_call": ItemReader._custom_call,
    "function_call_output": ItemReader._output,
    "custom_tool_call_output": ItemReader._output,
    "tool_search_call": ItemReader._search_call,
    "tool_search_output": ItemReader._search_output,
    "additional_tools": ItemReader._additional,
    "configuration_update": ItemReader._update,
    "mcp_call": ItemReader._server_call,
    "mcp_approval_request": ItemReader._server_call,
    "mcp_approval_response": ItemReader._approval,
    "code_interpreter_call": ItemReader._code_call,
}
"""What each item says. Any other says nothing: it is no fault of the client's to send it back."""

CALLS = frozenset({"function_call", "custom_tool_call", "tool_search_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "tool_search_output"})


SERVER_CALLS = frozenset(
    {"mcp_call", "mcp_approval_request", "code_interpreter_call", "web_search_call"}
)
_NOT_THE_ASSISTANTS = OUTPUTS | {
    "additional_tools",
    "compaction",
    "compaction_trigger",
    "configuration_update",
    "mcp_approval_response",
}


def _is_from_assistant(item: Item) -> bool:
    """Whether it is the model's; one that says nothing here ends no run of those that are."""
    if item.type == "message":
        return item.role == "assistant"
    return item.type not in _NOT_THE_ASSISTANTS


def _follows_the_answers(item: Item) -> bool:
    """Whether the model wrote it after its client had answered all requests for approval so far."""
    return _is_from_assistant(item) and item.type not in _BESIDE_ANSWERS


_BESIDE_ANSWERS = frozenset({"mcp_approval_request", "mcp_list_tools", "item_reference"})
"""The model's items that a client may list among its answers to requests for approval."""


def _after(items: Sequence[Item]) -> list[_After]:
    """What comes after each of ``items``."""
    reversed_: list[_After] = []
    for _, group in groupby(reversed(items), _is_from_assistant):
        run = list(group)
        calls = any(item.type in CALLS for item in run)
        for item in run:
            reversed_.append(_After(calls))
            calls = calls or item.type in SERVER_CALLS
    return reversed_[::-1]


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise required(where)
    return value
