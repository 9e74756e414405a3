"""Responses: the items of the output while they are written, and their events.

The items of the calls that the server runs are in `server_items`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from json import loads
from typing import ClassVar, TypeAlias

from vllm_mlx_harmony.core.deltas import Citation, Kind, Opened
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Namespace, ResponseInfo
from vllm_mlx_harmony.protocols.citations import link, span
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.events import Document, Event, encode, quote
from vllm_mlx_harmony.protocols.freeform import FreeformInput
from vllm_mlx_harmony.protocols.responses.local_tools import LOCAL_TOOLS
from vllm_mlx_harmony.protocols.responses.schema import SEARCH
from vllm_mlx_harmony.protocols.responses.server_tools import ServerTools
from vllm_mlx_harmony.protocols.responses.tools import DeclaredTool, Tools
from vllm_mlx_harmony.protocols.server_calls import CodeArguments
from vllm_mlx_harmony.protocols.validation import repair

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"

PendingEvent: TypeAlias = Callable[[int], Event]
"""Makes an event when its ``sequence_number`` is known."""


def pending(kind: str, **fields: object) -> PendingEvent:
    return lambda number: Event(encode({"type": kind, "sequence_number": number, **fields}), kind)


def added(index: int, item: Document) -> PendingEvent:
    """The event that opens ``item``, number ``index`` of the output."""
    return pending("response.output_item.added", output_index=index, item=item)


def done(index: int, item: Document) -> PendingEvent:
    return pending("response.output_item.done", output_index=index, item=item)


# --- The ids of items: a prefix, the seed of the response, and four digits, the item's number. The
# number of a message or call that the model writes is its place in the output. It stays below the
# following ones: such an item has at least five tokens, and a context of 131,072 holds 26,214.

FIRST_LIST = 0x7F00
"""Lists of tools, and calls that nobody runs, count up from here, by their places in the output."""

LAST_APPROVED = 0x7FFF
"""Approved calls count down from here, by their places in the output. If they reach the numbers of
the lists, the ids still differ by their prefixes."""

FIRST_INPUT = 0x8000
"""Items of the input count up from here."""


def key_of(info: ResponseInfo, number: int) -> str:
    """The part of an item's id after the prefix."""
    return f"{info.id_seed[:20]}{number:04x}"


def parse_arguments(arguments: str) -> object:
    """The value of ``arguments``; the text itself if it is not JSON that can be sent."""
    try:
        return repair(loads(arguments or "{}"))
    except (ValueError, RecursionError, RequestError):
        return arguments


@dataclass(frozen=True, slots=True)
class TextField:
    """A field of an item that receives text, and its events.

    The events are ``{stem}.delta`` and ``{stem}.done``, which has all of the text in its field
    ``whole``. A field that is in a ``part`` of the item also has ``{part_stem}.added`` and
    ``{part_stem}.done``, and each of its events has the number of the part in the field ``index``.
    """

    stem: str
    whole: str = "text"
    index: str = ""
    part_stem: str = ""
    part: Document | None = None
    has_logprobs: bool = False  # in both events, and in the part
    marks_cut: bool = False  # with a status in the part's last event


_OUTPUT_TEXT: Document = {"type": "output_text", "annotations": [], "logprobs": []}

OUTPUT_TEXT = TextField(
    "response.output_text",
    index="content_index",
    part_stem="response.content_part",
    part=_OUTPUT_TEXT,
    has_logprobs=True,
)
REASONING_TEXT = TextField(
    "response.reasoning_text",
    index="content_index",
    part_stem="response.content_part",
    part={"type": "reasoning_text"},
)
SUMMARY_TEXT = TextField(
    "response.reasoning_summary_text",
    index="summary_index",
    part_stem="response.reasoning_summary_part",
    part={"type": "summary_text"},
    marks_cut=True,
)


class _TextWriter:
    """Writes the deltas of a field of one item. Their constant parts are encoded once."""

    def __init__(self, field: TextField, position: Document) -> None:
        self.field = field
        self.position = {**position, field.index: 0} if field.index else position
        self._kind = f"{field.stem}.delta"
        self._start = f'{{"type":{quote(self._kind)},"sequence_number":'
        self._head = f',{encode(self.position)[1:-1]},"delta":'
        self._tail = ',"logprobs":[]}' if field.has_logprobs else "}"

    def delta(self, text: str, logprobs: Sequence[Document]) -> PendingEvent:
        tail = f',"logprobs":{encode(logprobs)}}}' if logprobs else self._tail
        return lambda number: Event(
            f"{self._start}{number}{self._head}{quote(text)}{tail}", self._kind
        )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a request wants its output to be written.

    ``cipher`` is given if the request asked for encrypted reasoning. ``server`` has the tools that
    the server runs, ``tool_lists`` the servers whose lists of tools the client receives,
    ``refused`` the names of the tools whose failed calls begin the output
    (`protocols.unavailable`). With ``shows_outputs`` the client receives the output of code, with
    ``shows_sources`` the URLs that a search found.
    """

    tools: Tools
    summarized: bool = False
    cipher: Cipher | None = None
    server: ServerTools = dataclass_field(default_factory=ServerTools)
    tool_lists: tuple[Namespace, ...] = ()
    refused: tuple[str, ...] = ()
    shows_outputs: bool = False
    shows_sources: bool = False


@dataclass
class OutputItem:
    """One item while it is written.

    Each method returns the events for one step. ``index`` is its number in the output, and ``key``
    the part of its id after the prefix. ``announced``: its first event was returned. ``done``: it
    gets no more events; if it was announced, ``finished_document`` is its document.
    """

    index: int
    key: str
    options: OutputOptions

    prefix: ClassVar[str] = ""  # the prefix of the item's id
    text_fields: ClassVar[tuple[TextField, ...]] = ()

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}_{self.key}"
        self.position: Document = {"item_id": self.id, "output_index": self.index}
        self.status = IN_PROGRESS
        self.announced = self.done = False
        self.finished_document: Document | None = None
        # Translates what the model writes into what the client receives, if the two differ.
        self.translator: FreeformInput | CodeArguments | None = None
        self.logprobs: list[Document] = []
        self._parts: list[str] = []
        self._writers = [_TextWriter(field, self.position) for field in self.text_fields]

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def document(self) -> Document:
        raise NotImplementedError

    def fields(self, kind: str, **fields: object) -> Document:
        return {"id": self.id, "type": kind, "status": self.status, **fields}

    def opened(self) -> list[PendingEvent]:
        """The message begins. It is announced with its first text: only calls may be empty."""
        return []

    def take(self, text: str, logprobs: Sequence[Document] = ()) -> list[PendingEvent]:
        announced = None if self.announced else self.announce()
        self.logprobs += logprobs
        written = self._write(self.translator.feed(text) if self.translator else text, logprobs)
        return [*announced, *written] if announced else written

    def closed(self) -> list[PendingEvent]:
        """Its text is complete."""
        return self._end(COMPLETED)

    def ended(self) -> list[PendingEvent]:
        """The turn ended before it was complete."""
        return self._end(INCOMPLETE)

    def announce(self) -> list[PendingEvent]:
        self.announced = True
        events = [added(self.index, self.document())]
        for writer in self._writers:
            if writer.field.part is not None:
                part = {**writer.field.part, "text": ""}
                kind = f"{writer.field.part_stem}.added"
                events.append(pending(kind, **writer.position, part=part))
        return events

    def close_text(self, **beside: str) -> list[PendingEvent]:
        """The rest of its text, and the events that have all of it beside other fields."""
        events = self._write(self.translator.close() if self.translator else "")
        for writer in self._writers:
            field, text = writer.field, self.text
            logprobs = {"logprobs": self.logprobs} if field.has_logprobs else {}
            whole = {field.whole: text, **logprobs, **beside}
            events.append(pending(f"{field.stem}.done", **writer.position, **whole))
            if field.part is not None:
                cut = {"status": INCOMPLETE} if field.marks_cut and self.status != COMPLETED else {}
                part = {**field.part, "text": text, **logprobs, **self.beside_text()}
                kind = f"{field.part_stem}.done"
                events.append(pending(kind, **writer.position, part=part, **cut))
        return events

    def beside_text(self) -> Document:
        """Fields of a part beside its text, once that is complete."""
        return {}

    def finish(self, status: str) -> list[PendingEvent]:
        """Its last event, if it was announced."""
        self.status, self.done = status, True
        if not self.announced:
            return []
        self.finished_document = self.document()
        return [done(self.index, self.finished_document)]

    def _write(self, text: str, logprobs: Sequence[Document] = ()) -> list[PendingEvent]:
        self._parts.append(text)
        return [writer.delta(text, logprobs) for writer in self._writers if text]

    def _end(self, status: str) -> list[PendingEvent]:
        self.status = status
        return [*(self.close_text() if self.announced else ()), *self.finish(status)]


@dataclass
class MessageItem(OutputItem):
    """``message``: a preamble or an answer, by its ``phase``."""

    phase: str
    prefix, text_fields = "msg", (OUTPUT_TEXT,)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.annotations: list[Document] = []

    def cite(self, citation: Citation, logprobs: Sequence[Document]) -> list[PendingEvent]:
        """Adds a link to the text, and its annotation."""
        events = self.take(link(citation), logprobs)
        annotation = {"type": "url_citation", **span(citation, len(self.text))}
        self.annotations.append(annotation)
        kind, index = f"{OUTPUT_TEXT.stem}.annotation.added", len(self.annotations) - 1
        position = self._writers[0].position
        return [*events, pending(kind, **position, annotation_index=index, annotation=annotation)]

    def beside_text(self) -> Document:
        return {"annotations": [*self.annotations]}

    def document(self) -> Document:
        part = {
            **_OUTPUT_TEXT,
            **self.beside_text(),
            "logprobs": [*self.logprobs],
            "text": self.text,
        }
        content = [part] if part["text"] else []
        return self.fields("message", role="assistant", phase=self.phase, content=content)


class ReasoningItem(OutputItem):
    """``reasoning``: its text in ``content``.

    In one place only (semantics E4): many clients show ``content`` and ``summary``.
    """

    prefix = "rs"
    text_fields: ClassVar[tuple[TextField, ...]] = (REASONING_TEXT,)
    place: ClassVar[str] = "content"

    def document(self) -> Document:
        text, cipher, (field,) = self.text, self.options.cipher, self.text_fields
        parts = [{**(field.part or {}), "text": text}] if text else []
        item = self.fields("reasoning", **{"summary": [], "content": [], self.place: parts})
        if cipher is not None:
            is_open = self.status == IN_PROGRESS
            item["encrypted_content"] = None if is_open else cipher.encrypt(text)
        return item


class SummarizedReasoningItem(ReasoningItem):
    """``reasoning`` of a request that asks for a summary: its text in ``summary``."""

    text_fields = (SUMMARY_TEXT,)
    place = "summary"


@dataclass
class FunctionCall(OutputItem):
    """``function_call``. Clients find their tool by name and namespace, which are apart."""

    call_id: str
    tool: DeclaredTool
    prefix = "fc"
    text_fields: ClassVar[tuple[TextField, ...]] = (
        TextField("response.function_call_arguments", whole="arguments"),
    )

    def opened(self) -> list[PendingEvent]:
        return self.announce()

    def document(self) -> Document:
        return self.call("function_call", arguments=self.text)

    def call(self, kind: str, **fields: object) -> Document:
        """A document of type ``kind`` that names the tool."""
        namespace = {"namespace": self.tool.namespace} if self.tool.namespace else {}
        return self.fields(kind, call_id=self.call_id, name=self.tool.name, **namespace, **fields)

    def close_text(self, **beside: str) -> list[PendingEvent]:
        """With the name, where clients made before 2026 look for it."""
        return super().close_text(name=self.tool.name)


class CustomCall(FunctionCall):
    """``custom_tool_call``, of a freeform tool."""

    prefix, text_fields = "ctc", (TextField("response.custom_tool_call_input", whole="input"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.translator = FreeformInput()

    def document(self) -> Document:
        return self.call("custom_tool_call", input=self.text)

    def close_text(self, **beside: str) -> list[PendingEvent]:
        return OutputItem.close_text(self)


class SearchCall(FunctionCall):
    """``tool_search_call``. Its arguments, an object, are there when it is done."""

    prefix, text_fields = "tsc", ()

    def document(self) -> Document:
        arguments = {} if self.status == IN_PROGRESS else parse_arguments(self.text)
        called = {"call_id": self.call_id, "arguments": arguments}
        return self.fields("tool_search_call", execution="client", **called)


class LocalToolCall(FunctionCall):
    """A call of one of the ``LOCAL_TOOLS``.

    It is announced when its arguments are complete, because only then is it certain that they are
    an object of that tool. If not, or if the call was cut, the client gets them unchanged, in
    a ``function_call``.
    """

    text_fields = ()

    def __post_init__(self) -> None:
        self.local = LOCAL_TOOLS[self.tool.kind]
        self.prefix = self.local.prefix  # type: ignore[misc]
        super().__post_init__()
        self.item: Document = {}

    def opened(self) -> list[PendingEvent]:
        return []

    def take(self, text: str, logprobs: Sequence[Document] = ()) -> list[PendingEvent]:
        return self._write(text)

    def closed(self) -> list[PendingEvent]:
        item = self.local.item(self.text)
        if item is None:
            return self._as_function(OutputItem.closed)
        self.item = item
        return [*self.announce(), *self.finish(COMPLETED)]

    def ended(self) -> list[PendingEvent]:
        return self._as_function(OutputItem.ended)

    def document(self) -> Document:
        return self.fields(self.local.call, call_id=self.call_id, **self.item)

    def _as_function(self, last: Callable[[OutputItem], list[PendingEvent]]) -> list[PendingEvent]:
        tool = DeclaredTool(self.options.tools.shown_name(self.tool))
        function = FunctionCall(self.index, self.key, self.options, self.call_id, tool)
        events = [*function.opened(), *function.take(self.text), *last(function)]
        self.announced, self.done, self.finished_document = True, True, function.finished_document
        return events


class ShellCall(LocalToolCall):
    """``shell_call``, whose commands have events of their own."""

    def announce(self) -> list[PendingEvent]:
        self.announced = True
        action = self.item["action"]
        without_commands = {**self.document(), "action": {**action, "commands": []}}
        events = [added(self.index, without_commands)]
        for number, command in enumerate(action["commands"]):
            place = {"output_index": self.index, "command_index": number}
            stem = "response.shell_call_command"
            events.append(pending(f"{stem}.added", **place, command=""))
            if command:
                events.append(pending(f"{stem}.delta", **place, delta=command))
            events.append(pending(f"{stem}.done", **place, command=command))
        return events


_CALLS: dict[str, type[FunctionCall]] = {
    "custom": CustomCall,
    SEARCH: SearchCall,
    **dict.fromkeys(LOCAL_TOOLS, LocalToolCall),
    "shell": ShellCall,
}


def output_item(
    delta: Opened, index: int, info: ResponseInfo, options: OutputOptions
) -> OutputItem:
    """The item for the message that ``delta`` opens; it is number ``index`` of the output."""
    key = key_of(info, delta.index)
    if delta.kind is Kind.CALL:
        tool = options.tools.tool(delta.name)
        kind = _CALLS.get(tool.kind, FunctionCall)
        return kind(index, key, options, info.call_id(delta.index), tool)
    if delta.kind is Kind.REASONING:
        return (SummarizedReasoningItem if options.summarized else ReasoningItem)(
            index, key, options
        )
    phase = "commentary" if delta.kind is Kind.PREAMBLE else "final_answer"
    return MessageItem(index, key, options, phase)
