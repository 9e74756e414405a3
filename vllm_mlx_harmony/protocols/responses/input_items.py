"""Responses: turns the items of the input into messages (semantics A4 to A6, A11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

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
    Tool,
    User,
)
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.freeform import wrap
from vllm_mlx_harmony.protocols.openai_content import call_arguments, paragraphs, text_of
from vllm_mlx_harmony.protocols.responses import local_tools, schema
from vllm_mlx_harmony.protocols.responses.local_tools import LOCAL_TOOLS, types_of
from vllm_mlx_harmony.protocols.responses.schema import Item, read_item, response_format
from vllm_mlx_harmony.protocols.responses.server_tools import ServerTools, unavailable_tools
from vllm_mlx_harmony.protocols.responses.tools import ToolReader
from vllm_mlx_harmony.protocols.server_calls import NOT_RUN, code_in, recipient_of
from vllm_mlx_harmony.protocols.unavailable import notice
from vllm_mlx_harmony.protocols.validation import required

Stored: TypeAlias = Callable[[str], Mapping[str, object] | None]
"""Looks up an item of an earlier response by its id; ``None`` if there is none."""


def nothing_stored(_: str) -> None:
    """A store without any item."""


@dataclass(slots=True)
class ItemReader:
    """Reads one request's items. ``notes`` names, for the log, what could not be used.

    ``calls`` are the ids of all calls in the conversation so far. ``approved`` are those of the
    server's calls that the client has approved since the model's last turn, which ran the ones that
    were approved before it.
    """

    cipher: Cipher
    tools: ToolReader
    defaults: Defaults
    stored: Stored = nothing_stored
    calls: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    server: ServerTools = field(default_factory=ServerTools)
    approved: set[str] = field(default_factory=set)
    _approval_requests: set[str] = field(default_factory=set)  # ids of calls
    _local_ids: dict[str, str] = field(default_factory=dict)  # ids of calls, by those of the items
    _lost: bool = False  # whether an item that was referred to is not stored

    def messages(self, items: Sequence[Item], earlier: int = 0) -> Iterator[Message]:
        """The messages that ``items`` stand for. Raises ``RequestError`` naming the invalid field.

        So many of them are ``earlier`` than the input: those of its conversation.

        Results of calls that are not read are left out, too: Codex sends the result of a
        ``local_shell_call`` as that of a function.
        """

        def place(at: int) -> str:
            return f"conversation[{at}]" if at < earlier else f"input[{at - earlier}]"

        known = [self._resolved(item, place(at)) for at, item in enumerate(items)]
        other_items = (
            item for item in known if isinstance(item, (schema.OtherItem, schema.ItemReference))
        )
        keys = (item.raw.get("call_id") for item in other_items)
        foreign = {key for key in keys if isinstance(key, str)}
        for from_assistant, group in groupby(
            enumerate(known), lambda placed: _is_from_assistant(placed[1])
        ):
            run = list(group)
            # A client's tool counts wherever it is called, since such calls end the run however
            # they are placed; a server's tool counts if it is called after the item.
            calls = any(item.type in CALLS for _, item in run)
            served = max((at for at, item in run if item.type in SERVER_CALLS), default=-1)
            messages: list[Message] = []
            for at, item in run:
                if from_assistant and item.type not in _BESIDE_ANSWERS:
                    self.approved.clear()
                if not (isinstance(item, _OUTPUT_ITEMS) and item.call_id in foreign):
                    messages += self._read(item, place(at), calls or at < served)
            if from_assistant:  # results follow the calls: no text may stand between them
                messages.sort(key=lambda message: isinstance(message, Call))
            yield from messages

    def _resolved(self, item: Item, where: str) -> Item:
        """The item that a reference refers to; the reference itself if there is none."""
        if not isinstance(item, schema.ItemReference):
            return item
        stored = self.stored(item.id)
        if stored is None:
            self._lost = True
            self.notes.append(f"{where} refers to {quoted(item.id)}, which is not stored: left out")
            return item
        return read_item(stored)

    def _read(  # noqa: C901, PLR0912, PLR0915 - a case for each kind of item
        self, item: Item, where: str, calls_follow: bool
    ) -> Iterator[Message]:
        """The messages that ``item``, at ``where``, stands for.

        ``calls_follow``: the model calls a tool in the same run of its items. Items of other kinds
        stand for nothing: clients send back whatever another server gave them.
        """
        match item:
            case schema.MessageItem():
                if item.content is None and item.role != "assistant":
                    raise required(f"{where}.content")
                text = text_of(item.content, f"{where}.content", self.defaults.attachments)
                if item.role == "user":
                    yield User(text)
                elif text and item.role != "assistant":
                    yield Instructions(text)
                elif text:
                    phase = item.phase or ("commentary" if calls_follow else "final_answer")
                    yield Preamble(text) if phase == "commentary" else Answer(text)
            case schema.ReasoningItem():
                text = (
                    self._decrypted(item.encrypted_content, where)
                    or paragraphs(item.content)
                    or paragraphs(item.summary)
                )
                if text:
                    yield Reasoning(text)
            case schema.CompactionItem():
                if text := self._decrypted(item.encrypted_content, where):
                    yield Summary(text)
            case schema.CallItem():
                if isinstance(item, schema.CustomCallItem):
                    arguments = wrap(item.input)
                else:
                    arguments = call_arguments(item.arguments, f"{where}.arguments")
                yield self._called(item.call_id, self._name(item), arguments)
            case schema.CallOutputItem():
                named = self._name(item) if item.name else self.tools.only
                text = self._output_text(item, where)
                yield from self._answer(Result(item.call_id, text, where), named or "unknown")
            case schema.LocalCallItem():
                yield self._local_call(item, where)
            case schema.LocalOutputItem():
                key = item.call_id or self._local_ids.get(item.id or "", item.id)
                if key is None:
                    raise required(f"{where}.call_id")
                text = self._local_output(item, f"{where}.output")
                yield from self._answer(Result(key, text, where), self._local_name(item))
            case schema.AgentMessageItem():
                text = text_of(
                    item.content, f"{where}.content", self.defaults.attachments, lenient=True
                )
                yield User(f"Message from {item.author} to {item.recipient}:\n{text}")
            case schema.SearchCallItem():
                # A search that a server ran was not a call that the model made of the client.
                if _is_clients(item):
                    arguments = call_arguments(item.arguments, f"{where}.arguments")
                    yield self._called(item.call_id or "", self.tools.search, arguments)
            case schema.SearchOutputItem():
                declared = self.tools.declare(item.tools, f"{where}.tools", found=True)
                if _is_clients(item):
                    result = Result(item.call_id or "", _FOUND[bool(item.tools)], where)
                    yield from self._answer(result, self.tools.search)
                yield from _added(declared, item.tools)
            case schema.AdditionalToolsItem():
                yield from _added(self.tools.declare(item.tools, f"{where}.tools"), item.tools)
            case schema.ConfigurationItem():
                # Holds until the next update; the request's own fields hold before the first.
                # https://openrouter.ai/docs/cookbook/evaluate-and-optimize/model-migrations/gpt-6-astra
                if item.reasoning is not None and item.reasoning.effort is not None:
                    requested = (f"{where}.reasoning.effort", item.reasoning.effort)
                    yield EffortUpdate(*self.defaults.reasoning(requested))
                if item.text is not None and item.text.format is not None:
                    yield FormatUpdate(response_format(item.text.format, f"{where}.text.format"))
            case schema.ServerCallItem():
                yield from self._server_call(item, where)
            case schema.ApprovalItem():
                # A rejected call has a result; an approved one is run before anything is generated.
                key = call_id(item.approval_request_id)
                if item.approve:
                    self.approved.add(key)
                else:
                    reason = f": {item.reason}" if item.reason else ""
                    yield ServerResult(key, "", f"The user did not approve this call{reason}")
            case schema.CodeCallItem():
                # The server sends the outputs only to clients that ask for them.
                texts: list[str] = []
                for at, output in enumerate(item.outputs or ()):
                    kind = output.get("type") if isinstance(output, dict) else None
                    if isinstance(output, dict) and kind == "logs":
                        texts.append(str(output.get("logs") or ""))
                    elif kind == "image":
                        path = f"{where}.outputs[{at}]"
                        texts.append(self.defaults.attachments.line("image", "image", path))
                if texts and item.code is not None:
                    key = call_id(item.id or where)
                    yield ServerCall(key, PYTHON, item.code)
                    yield ServerResult(key, PYTHON, "\n".join(texts))

    def _name(self, item: schema.CallItem | schema.CallOutputItem) -> str:
        return self.tools.name(item.name or "", item.namespace or "")

    def _decrypted(self, encrypted: str | None, where: str) -> str:
        if not encrypted:
            return ""
        text = self.cipher.decrypt(encrypted)
        if text is None:
            self.notes.append(
                f"{where}.encrypted_content was not encrypted by this server: ignored"
            )
        return text or ""

    def _called(self, key: str, name: str, arguments: str) -> Call:
        self.calls.add(key)
        return Call(key, name, arguments)

    def _local_call(self, item: schema.LocalCallItem, where: str) -> Call:
        tool = LOCAL_TOOLS[types_of(item.raw)[0]]
        arguments = tool.arguments(item.raw)
        if arguments is None:
            raise required(f"{where}.{tool.payload}")
        key = item.call_id or item.id
        if key is None:
            raise required(f"{where}.call_id")
        self._local_ids[item.id or key] = key
        return self._called(key, self._local_name(item), arguments)

    def _local_name(self, item: schema.LocalCallItem | schema.LocalOutputItem) -> str:
        types = types_of(item.raw)
        return self.tools.of_kind(*types) or LOCAL_TOOLS[types[0]].name

    def _local_output(self, item: schema.LocalOutputItem, where: str) -> str:
        """The result of a client's tool, as the model reads it."""
        if isinstance(item, schema.ShellOutputItem):
            return "\n\n".join(map(_shell_output, item.output or ()))
        text = text_of(item.output, where, self.defaults.attachments, lenient=True)
        if item.type != "apply_patch_call_output":
            return text
        status = item.status or "completed"
        return f"{status}: {text}" if text else status

    def _output_text(self, item: schema.CallOutputItem | schema.ServerCallItem, where: str) -> str:
        at = f"{where}.output"
        return text_of(item.output, at, self.defaults.attachments, lenient=True)

    def _answer(self, result: Result, name: str) -> Iterator[Message]:
        """``result``, preceded by a call of ``name`` if its call is lost."""
        if self._lost and result.call_id not in self.calls:
            self.notes.append(f"{result.where} answers a call that is not stored")
            yield self._called(result.call_id, name, "{}")
        yield result

    def _server_call(self, item: schema.ServerCallItem, where: str) -> Iterator[Message]:
        """A call that a server ran, with its result; `NOT_RUN` if it has none.

        A call that was approved has the id of the request for approval, which precedes it.
        """
        name = recipient_of(self.server.available, item.server_label, item.name)
        arguments = call_arguments(item.arguments, f"{where}.arguments")
        key = call_id(item.id or where)
        request_id = call_id(item.approval_request_id or "")
        if item.type == "mcp_call" and request_id in self._approval_requests:
            key = request_id
        else:
            yield ServerCall(key, name, code_in(arguments) if name == PYTHON else arguments)
        if item.type == "mcp_approval_request":
            self._approval_requests.add(key)
        else:
            text = self._output_text(item, where)
            yield ServerResult(key, name, text or _error_text(item.error) or NOT_RUN)


def _shell_output(output: schema.ShellOutput) -> str:
    """The output of one command, and how it ended."""
    outcome = output.outcome or {}
    parts = [output.stdout or ""]
    if output.stderr:
        parts.append(f"[stderr]\n{output.stderr}")
    if outcome.get("type") == "timeout":
        parts.append("[timed out]")
    elif outcome.get("exit_code") is not None:
        parts.append(f"[exit code {outcome['exit_code']}]")
    return "\n".join(part.removesuffix("\n") for part in parts if part)


def _added(tools: tuple[Tool, ...], items: Sequence[schema.ResponsesTool]) -> Iterator[Message]:
    """Declares ``tools``, and says which of the declared ``items`` are not available."""
    if tools:
        yield AdditionalTools(tools)
    if missing := unavailable_tools(items):
        yield notice(missing)


def call_id(item_id: str) -> str:
    """The id of the call of the item ``item_id``: the ids of both end alike in every API."""
    return f"call_{item_id.partition('_')[2] or item_id}"


def _error_text(error: object) -> str:
    """The text of the error of a call that failed, as the model read it."""
    if not isinstance(error, dict):
        return str(error) if error else ""
    parts = error.get("content")
    if isinstance(parts, list):
        texts = [str(part.get("text") or "") for part in parts if isinstance(part, dict)]
        return "\n".join(texts)
    return str(error.get("message") or "")


_FOUND = ("No tools were found.", "Found. The tools can be called from now on.")


def _is_clients(item: schema.SearchItem) -> bool:
    """Whether the model asked the client for this search."""
    return item.call_id is not None and item.execution != "server"


CALLS = frozenset({"function_call", "custom_tool_call", "tool_search_call", *local_tools.CALLS})
OUTPUTS = frozenset(
    {
        "function_call_output",
        "custom_tool_call_output",
        "tool_search_output",
        *local_tools.OUTPUTS,
    }
)
SERVER_CALLS = frozenset(
    {"mcp_call", "mcp_approval_request", "code_interpreter_call", "web_search_call"}
)

_OUTPUT_ITEMS = (schema.CallOutputItem, schema.SearchOutputItem, schema.LocalOutputItem)
_FROM_CLIENT = (
    *_OUTPUT_ITEMS,
    schema.AdditionalToolsItem,
    schema.CompactionItem,
    schema.ConfigurationItem,
    schema.ApprovalItem,
    schema.AgentMessageItem,
)


def _is_from_assistant(item: Item) -> bool:
    """Whether the model wrote ``item``. Items of other kinds do not end a run of the model's."""
    if isinstance(item, schema.MessageItem):
        return item.role == "assistant"
    return not isinstance(item, _FROM_CLIENT)


_BESIDE_ANSWERS = frozenset({"mcp_approval_request", "mcp_list_tools", "item_reference"})
"""The model's items that a client may list among its answers to requests for approval.

The model writes any other item after its client has answered all requests so far."""
