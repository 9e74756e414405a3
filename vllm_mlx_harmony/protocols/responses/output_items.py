"""Responses: one item of the output while it is written, and its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json import loads
from typing import NamedTuple

from vllm_mlx_harmony.core.deltas import Kind, Opened
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Namespace, ResponseInfo
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.events import Document, encode, quote
from vllm_mlx_harmony.protocols.freeform import FreeformInput
from vllm_mlx_harmony.protocols.responses.schema import SEARCH
from vllm_mlx_harmony.protocols.responses.server_tools import ServerTools
from vllm_mlx_harmony.protocols.responses.tools import Tools
from vllm_mlx_harmony.protocols.validation import mended

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class PendingEvent(NamedTuple):
    """An event's type, and its fields other than ``type`` and ``sequence_number``."""

    type: str
    fields: Document


def added(index: int, item: Document) -> PendingEvent:
    """The event that opens ``item``, number ``index`` of the output."""
    return PendingEvent("response.output_item.added", {"output_index": index, "item": item})


def done(index: int, item: Document) -> PendingEvent:
    """The event that closes ``item``."""
    return PendingEvent("response.output_item.done", {"output_index": index, "item": item})


def key_of(info: ResponseInfo, index: int) -> str:
    """The part of an item's ids after the prefix."""
    return f"{info.id_seed[:20]}{index:04x}"


def parsed(arguments: str) -> object:
    """The value of ``arguments``; the text itself if it is not JSON, or none that can be sent."""
    try:
        return mended(loads(arguments or "{}"))
    except (ValueError, RecursionError, RequestError):
        return arguments


class DeltaHead(NamedTuple):
    """The constant parts of a delta event, made once per item: the number of an event goes before
    ``head``, its quoted text between ``head`` and ``tail``."""

    type: str
    start: str
    head: str
    tail: str

    def event(self, number: int, quoted: str, logprobs: Sequence[Document] = ()) -> str:
        tail = f',"logprobs":{encode(logprobs)}}}' if logprobs else self.tail
        return f"{self.start}{number}{self.head}{quoted}{tail}"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in an item that text is written to, and its events.

    ``stem`` has ``.delta`` and ``.done``; the ``part`` that it stands in, if any, has ``.added``
    and ``.done``. ``whole`` is the field of ``.done`` with all of the text, ``index`` the field
    with the number of the part.
    """

    stem: str
    whole: str = "text"
    index: str = ""
    part_stem: str = ""
    part: Document | None = None
    has_logprobs: bool = False  # both events, and the part
    marks_cut: bool = False


_OUTPUT_TEXT: Document = {"type": "output_text", "annotations": [], "logprobs": []}

OUTPUT_TEXT = Place(
    "response.output_text",
    index="content_index",
    part_stem="response.content_part",
    part=_OUTPUT_TEXT,
    has_logprobs=True,
)
REASONING_TEXT = Place(
    "response.reasoning_text",
    index="content_index",
    part_stem="response.content_part",
    part={"type": "reasoning_text"},
)
SUMMARY_TEXT = Place(
    "response.reasoning_summary_text",
    index="summary_index",
    part_stem="response.reasoning_summary_part",
    part={"type": "summary_text"},
    marks_cut=True,
)
ARGUMENTS = Place("response.function_call_arguments", whole="arguments")
INPUT = Place("response.custom_tool_call_input", whole="input")


class OutputItem:
    """One item while it is written; the cost of a text does not depend on the text before.

    ``write`` makes the document of the text so far and the status. ``name`` is sent beside complete
    arguments, where clients made before 2026 look for it. ``logprobs`` are those of the text so
    far.
    """

    def __init__(
        self,
        index: int,
        write: Callable[[str, str], Document],
        places: tuple[Place, ...],
        *,
        name: str = "",
        freeform: bool = False,
        logprobs: list[Document] | None = None,
    ) -> None:
        self.logprobs = [] if logprobs is None else logprobs
        self._index = index
        self._write = write
        self._name = {"name": name} if name else {}
        self._parts: list[str] = []
        self._input = FreeformInput() if freeform else None
        position: Document = {"item_id": write("", IN_PROGRESS)["id"], "output_index": index}
        self._places = [
            (place, {**position, place.index: 0} if place.index else position) for place in places
        ]
        self.deltas = [
            DeltaHead(
                type=f"{place.stem}.delta",
                start=f'{{"type":{quote(f"{place.stem}.delta")},"sequence_number":',
                head=f',{encode(at)[1:-1]},"delta":',
                tail=',"logprobs":[]}' if place.has_logprobs else "}",
            )
            for place, at in self._places
        ]

    def take(self, text: str) -> str:
        """Adds text of the model; returns the text that the client receives."""
        shown = self._input.feed(text) if self._input else text
        self._parts.append(shown)
        return shown

    def rest(self) -> str:
        """What ``take`` still held back, at the end."""
        shown = self._input.close() if self._input else ""
        self._parts.append(shown)
        return shown

    def document(self, status: str = IN_PROGRESS) -> Document:
        return self._write("".join(self._parts), status)

    def added(self) -> list[PendingEvent]:
        """The events that open it."""
        events = [added(self._index, self._write("", IN_PROGRESS))]
        for place, at in self._places:
            if place.part is not None:
                part = {**place.part, "text": ""}
                events.append(PendingEvent(f"{place.part_stem}.added", {**at, "part": part}))
        return events

    def done(self, document: Document) -> list[PendingEvent]:
        """The events that close it; ``document`` is what it has become."""
        events: list[PendingEvent] = []
        text, cut = "".join(self._parts), document["status"] != COMPLETED
        for place, at in self._places:
            logprobs = {"logprobs": self.logprobs} if place.has_logprobs else {}
            fields: Document = {**at, place.whole: text, **logprobs, **self._name}
            events.append(PendingEvent(f"{place.stem}.done", fields))
            if place.part is not None:
                fields = {**at, "part": {**place.part, "text": text, **logprobs}}
                if place.marks_cut and cut:
                    fields["status"] = INCOMPLETE
                events.append(PendingEvent(f"{place.part_stem}.done", fields))
        return [*events, done(self._index, document)]


@dataclass(frozen=True, slots=True)
class Writing:
    """How one request wants its output written.

    ``cipher`` is given if the request asked for encrypted reasoning. ``server`` has the tools that
    the server runs, ``listed`` the servers whose lists of tools the client receives. With
    ``shows_outputs`` the client receives the output of code, with ``shows_sources`` the URLs that a
    search found.
    """

    tools: Tools
    summarized: bool = False
    cipher: Cipher | None = None
    server: ServerTools = field(default_factory=ServerTools)
    listed: tuple[Namespace, ...] = ()
    shows_outputs: bool = False
    shows_sources: bool = False

    def item(self, delta: Opened, index: int, info: ResponseInfo) -> OutputItem:
        """The item for the message that ``delta`` opens; it is number ``index`` of the output."""
        key = key_of(info, delta.index)
        if delta.kind is Kind.CALL:
            return self._call(delta.name, index, key, info.call_id(delta.index))
        if delta.kind is Kind.REASONING:
            return self._reasoning(index, key)
        phase = "commentary" if delta.kind is Kind.PREAMBLE else "final_answer"
        logprobs: list[Document] = []

        def message(text: str, status: str) -> Document:
            part = {**_OUTPUT_TEXT, "logprobs": [*logprobs], "text": text}
            return {
                "id": f"msg_{key}",
                "type": "message",
                "status": status,
                "role": "assistant",
                "phase": phase,
                "content": [part] if text else [],
            }

        return OutputItem(index, message, (OUTPUT_TEXT,), logprobs=logprobs)

    def _reasoning(self, index: int, key: str) -> OutputItem:
        def reasoning(text: str, status: str) -> Document:
            summary = {"type": "summary_text", "text": text}
            item: Document = {
                "id": f"rs_{key}",
                "type": "reasoning",
                "status": status,
                "summary": [summary] if text and self.summarized else [],
                "content": [{"type": "reasoning_text", "text": text}] if text else [],
            }
            if self.cipher is not None:
                sealed = None if status == IN_PROGRESS else self.cipher.encrypt(text)
                item["encrypted_content"] = sealed
            return item

        places = (REASONING_TEXT, SUMMARY_TEXT) if self.summarized else (REASONING_TEXT,)
        return OutputItem(index, reasoning, places)

    def _call(self, called: str, index: int, key: str, call_id: str) -> OutputItem:
        """A call; clients find their tool by name and namespace, which are apart."""
        tool = self.tools.declared(called)
        addressed = {"name": tool.name}
        if tool.namespace:
            addressed["namespace"] = tool.namespace

        def search(text: str, status: str) -> Document:
            """It has no events of its own: its arguments, an object, are there when it is done."""
            head = {"id": f"tsc_{key}", "type": "tool_search_call", "status": status}
            arguments = {} if status == IN_PROGRESS else parsed(text)
            return {**head, "execution": "client", "call_id": call_id, "arguments": arguments}

        def custom(text: str, status: str) -> Document:
            head = {"id": f"ctc_{key}", "type": "custom_tool_call", "status": status}
            return {**head, "call_id": call_id, **addressed, "input": text}

        def function(text: str, status: str) -> Document:
            head = {"id": f"fc_{key}", "type": "function_call", "status": status}
            return {**head, "call_id": call_id, **addressed, "arguments": text}

        if tool.kind == SEARCH:
            return OutputItem(index, search, ())
        if tool.freeform:
            return OutputItem(index, custom, (INPUT,), freeform=True)
        return OutputItem(index, function, (ARGUMENTS,), name=tool.name)
