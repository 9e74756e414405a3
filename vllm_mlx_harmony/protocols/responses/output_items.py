"""Responses: one item of the output while it is written, and its events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from json import loads
from typing import Any, NamedTuple, TypeAlias

from vllm_mlx_harmony.core.deltas import Kind, Opened
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.turn import Namespace, ResponseInfo
from vllm_mlx_harmony.protocols.encryption import Cipher
from vllm_mlx_harmony.protocols.events import encode, quote
from vllm_mlx_harmony.protocols.freeform import FreeformInput
from vllm_mlx_harmony.protocols.responses.server_tools import ServerTools
from vllm_mlx_harmony.protocols.responses.tools import SEARCH, Declared, Tools
from vllm_mlx_harmony.protocols.validation import mended

Document: TypeAlias = dict[str, Any]

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class PendingEvent(NamedTuple):
    """An event's type, and its fields other than ``type`` and ``sequence_number``."""

    type: str
    fields: Document


class DeltaHead(NamedTuple):
    """A delta event but for the two things that change: its number goes before ``head``, the
    quoted text between ``head`` and ``tail``. Made once per item."""

    type: str
    start: str
    head: str
    tail: str

    def event(self, number: int, quoted: str) -> str:
        """The event's JSON."""
        return f"{self.start}{number}{self.head}{quoted}{self.tail}"


# --- Where text can go.


@dataclass(frozen=True, slots=True)
class Place:
    """A place in an item that text is written to, and its events.

    ``stem`` has ``.delta`` and ``.done``; the part it stands in, if any, ``.added`` and ``.done``.
    ``whole`` is the field of ``.done`` that has all of the text.
    """

    stem: str
    whole: str = "text"
    index: str = ""
    part_stem: str = ""
    part: Callable[[str], Document] = field(default=lambda text: {})
    always: tuple[tuple[str, Any], ...] = ()  # fields of both events
    at_last: tuple[tuple[str, Any], ...] = ()  # fields of .done
    marks_cut: bool = False

    def at(self, position: Document) -> Document:
        """``position`` of the item, and the place in it."""
        return {**position, self.index: 0} if self.index else position

    def added(self, position: Document) -> Iterator[PendingEvent]:
        """What opens it."""
        if self.part_stem:
            yield PendingEvent(
                f"{self.part_stem}.added", {**self.at(position), "part": self.part("")}
            )

    def delta(self, position: Document) -> DeltaHead:
        """What more text is sent with."""
        kind = f"{self.stem}.delta"
        where = encode(self.at(position))[1:-1]
        always = encode(dict(self.always))[1:-1]
        return DeltaHead(
            type=kind,
            start=f'{{"type":{quote(kind)},"sequence_number":',
            head=f',{where},"delta":',
            tail=f",{always}}}" if always else "}",
        )

    def done(self, position: Document, text: str, *, complete: bool) -> Iterator[PendingEvent]:
        """What closes it."""
        at = self.at(position)
        more = dict((*self.always, *self.at_last))
        yield PendingEvent(f"{self.stem}.done", {**at, self.whole: text, **more})
        if self.part_stem:
            cut = {"status": INCOMPLETE} if self.marks_cut and not complete else {}
            yield PendingEvent(f"{self.part_stem}.done", {**at, "part": self.part(text), **cut})


def _output_text(text: str) -> Document:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _reasoning_text(text: str) -> Document:
    return {"type": "reasoning_text", "text": text}


def _summary_text(text: str) -> Document:
    return {"type": "summary_text", "text": text}


_CONTENT = "response.content_part"

OUTPUT_TEXT = Place(
    "response.output_text",
    index="content_index",
    part_stem=_CONTENT,
    part=_output_text,
    always=(("logprobs", []),),
)
REASONING_TEXT = Place(
    "response.reasoning_text", index="content_index", part_stem=_CONTENT, part=_reasoning_text
)
SUMMARY_TEXT = Place(
    "response.reasoning_summary_text",
    index="summary_index",
    part_stem="response.reasoning_summary_part",
    part=_summary_text,
    marks_cut=True,
)
ARGUMENTS = Place("response.function_call_arguments", whole="arguments")
INPUT = Place("response.custom_tool_call_input", whole="input")


# --- What an item is: its document at any moment, of its text so far and its status.


class Written(NamedTuple):
    """A kind of item: what it is, where its text goes, and what is made of the text before."""

    document: Callable[[str, str], Document]
    places: tuple[Place, ...]
    freeform: bool = False


def _message(key: str, phase: str) -> Written:
    def document(text: str, status: str) -> Document:
        return {
            "id": f"msg_{key}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "phase": phase,
            "content": [_output_text(text)] if text else [],
        }

    return Written(document, (OUTPUT_TEXT,))


def _reasoning(key: str, *, summarized: bool, cipher: Cipher | None) -> Written:
    def document(text: str, status: str) -> Document:
        item: Document = {
            "id": f"rs_{key}",
            "type": "reasoning",
            "status": status,
            "summary": [_summary_text(text)] if text and summarized else [],
            "content": [_reasoning_text(text)] if text else [],
        }
        if cipher is not None:
            item["encrypted_content"] = None if status == IN_PROGRESS else cipher.encrypt(text)
        return item

    return Written(document, (REASONING_TEXT, SUMMARY_TEXT) if summarized else (REASONING_TEXT,))


def _function_call(key: str, call_id: str, tool: Declared) -> Written:
    def document(text: str, status: str) -> Document:
        head = {"id": f"fc_{key}", "type": "function_call", "status": status}
        return {**head, "call_id": call_id, **_addressed(tool), "arguments": text}

    # `name` beside the arguments: clients made before 2026 look for it there.
    return Written(document, (replace(ARGUMENTS, at_last=(("name", tool.name),)),))


def _custom_call(key: str, call_id: str, tool: Declared) -> Written:
    def document(text: str, status: str) -> Document:
        head = {"id": f"ctc_{key}", "type": "custom_tool_call", "status": status}
        return {**head, "call_id": call_id, **_addressed(tool), "input": text}

    return Written(document, (INPUT,), freeform=True)


def _search_call(key: str, call_id: str) -> Written:
    """It has no events of its own: its arguments, an object, are there when it is done."""

    def document(text: str, status: str) -> Document:
        head = {"id": f"tsc_{key}", "type": "tool_search_call", "status": status}
        arguments = {} if status == IN_PROGRESS else _parsed(text)
        return {**head, "execution": "client", "call_id": call_id, "arguments": arguments}

    return Written(document, ())


def _parsed(arguments: str) -> Any:
    """The value of ``arguments``; the text itself when it is no JSON, or none that can be sent."""
    try:
        return mended(loads(arguments or "{}"))
    except (ValueError, RecursionError, RequestError):
        return arguments


def _addressed(tool: Declared) -> Document:
    """Name and namespace apart: clients find their tool by exactly these two."""
    return {"name": tool.name, **({"namespace": tool.namespace} if tool.namespace else {})}


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
        key = f"{info.id_seed[:20]}{delta.index:04x}"
        if delta.kind is Kind.CALL:
            tool = self.tools.declared(delta.name)
            call_id = info.call_id(delta.index)
            if tool.kind == SEARCH:
                return OutputItem(_search_call(key, call_id), index)
            write = _custom_call if tool.freeform else _function_call
            return OutputItem(write(key, call_id, tool), index)
        if delta.kind is Kind.REASONING:
            return OutputItem(
                _reasoning(key, summarized=self.summarized, cipher=self.cipher), index
            )
        phase = "commentary" if delta.kind is Kind.PREAMBLE else "final_answer"
        return OutputItem(_message(key, phase), index)


class OutputItem:
    """One item while it is written. A text costs the same whatever came before it."""

    def __init__(self, written: Written, index: int) -> None:
        self._written = written
        self._index = index
        self._parts: list[str] = []
        self._input = FreeformInput() if written.freeform else None
        opened = written.document("", IN_PROGRESS)
        self._position: Document = {"item_id": opened["id"], "output_index": index}
        self.deltas = tuple(place.delta(self._position) for place in written.places)

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
        """The item as far as it is written."""
        return self._written.document("".join(self._parts), status)

    def added(self) -> Iterator[PendingEvent]:
        """The events that open it."""
        item = self._written.document("", IN_PROGRESS)
        yield PendingEvent(
            "response.output_item.added", {"output_index": self._index, "item": item}
        )
        for place in self._written.places:
            yield from place.added(self._position)

    def done(self, document: Document) -> Iterator[PendingEvent]:
        """The events that close it; ``document`` is what it has become."""
        text, complete = "".join(self._parts), document["status"] == COMPLETED
        for place in self._written.places:
            yield from place.done(self._position, text, complete=complete)
        yield PendingEvent(
            "response.output_item.done", {"output_index": self._index, "item": document}
        )
