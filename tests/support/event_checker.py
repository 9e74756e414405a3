"""Checks any event stream of the Responses API: order, counters, ids, sums of deltas.

Knows what the public schema and semantics require of every stream, not what was generated. A
violation is an ``AssertionError`` that names the event.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vllm_mlx_harmony.protocols.events import DONE, Event

PARTS = {
    "message": {"response.content_part": ("output_text", "response.output_text")},
    "reasoning": {
        "response.content_part": ("reasoning_text", "response.reasoning_text"),
        "response.reasoning_summary_part": ("summary_text", "response.reasoning_summary_text"),
    },
}
"""By item: its parts, and the type and text events of each."""

ARGUMENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
    "code_interpreter_call": ("response.code_interpreter_call_code", "code"),
}
"""By item: the events of a text outside of parts, and the field with the whole text."""

FAILED = frozenset(
    {"code_interpreter_call", "file_search_call", "image_generation_call", "web_search_call"}
)
"""Items of calls that the server cannot run, which always fail."""

WHOLE = frozenset(
    {
        *("tool_search_call", "compaction", "local_shell_call", "apply_patch_call"),
        *("computer_call", "shell_call", "mcp_list_tools", *FAILED),
    }
)
"""Items with events for their start and end only."""

AT_ONCE = frozenset({"compaction"})
"""Items that are complete when they are added, and have no status."""

NO_STATUS = AT_ONCE | {"mcp_list_tools"}

PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "tool_search_call": "tsc_",
    "compaction": "cmp_",
    "shell_call": "sh_",
    "local_shell_call": "lsh_",
    "apply_patch_call": "apc_",
    "computer_call": "cu_",
    "code_interpreter_call": "ci_",
    "file_search_call": "fs_",
    "image_generation_call": "ig_",
    "web_search_call": "ws_",
    "mcp_list_tools": "mcpl_",
}

STARTS = {
    "response.created": {""},
    "response.queued": {"response.created"},
    "response.in_progress": {"response.created", "response.queued"},
}
"""The events before the first item: what each may follow."""

ENDINGS = {
    "response.completed": {"completed"},
    "response.incomplete": {"incomplete", "cancelled"},
    "response.failed": {"failed"},
}

INDICES = {
    "response.content_part": "content_index",
    "response.output_text": "content_index",
    "response.reasoning_text": "content_index",
    "response.reasoning_summary_part": "summary_index",
    "response.reasoning_summary_text": "summary_index",
}


def from_wire(text: str) -> list[Event]:
    """The events of a whole response body, without comments."""
    assert text.endswith("\n\n"), "the stream ends within an event"
    blocks = text[:-2].split("\n\n")
    return [_from_block(block) for block in blocks if not block.startswith(":")]


def _from_block(block: str) -> Event:
    lines = [line.partition(": ") for line in block.split("\n") if not line.startswith(":")]
    fields = {name: value for name, _, value in lines}
    assert len(fields) == len(lines), f"a field twice in one event: {block!r}"
    return Event(fields["data"], fields.get("event", ""))


def check(events: Iterable[Event]) -> dict[str, Any]:
    """The final response of a stream. Raises ``AssertionError`` if the stream is invalid."""
    *body, last = events
    assert last == DONE, f"the last event is {last}, not [DONE]"
    return check_documents([_document(event) for event in body])


def check_documents(documents: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The same for events without SSE frames, as on a WebSocket."""
    checker = _Checker()
    for number, document in enumerate(documents):
        where = f"event {number}: {json.dumps(document)[:400]}"
        assert document.get("sequence_number") == number, f"wrong sequence_number in {where}"
        _no_counters_inside(document, where)
        try:
            checker.read(document)
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"{error!r} in {where}") from error
    return checker.final()


def _document(event: Event) -> dict[str, Any]:
    assert len(event.data.splitlines()) == 1, f"not one line: {event.data!r}"
    document = json.loads(event.data)
    assert event.name == document["type"], f"the event is named {event.name!r}: {event.data}"
    return document


def _no_counters_inside(document: dict[str, Any], where: str) -> None:
    """Indices count from 0, and only events are numbered, but for fields that the client sent."""
    own_fields = {key: value for key, value in document.items() if key != "response"}
    output = document.get("response", {}).get("output", [])
    for key, value in _within([own_fields, output]):
        assert not key.endswith("_index") or value >= 0, f"{key} in {where}"
    nested = [key for key, _ in _within([*own_fields.values(), output])]
    assert "sequence_number" not in nested, f"a nested sequence_number in {where}"


def _within(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from _within(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _within(inner)


@dataclass
class _Text:
    """A text of an item, the sum of its deltas so far."""

    text: str = ""
    state: Literal["open", "text done", "part done"] = "open"


class _Item:
    """An open item, with its events so far."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.added = document
        self.type = document["type"]
        self.texts: dict[str, _Text] = {}  # by the stem of their events
        self.logprobs: list[Any] = []
        self.commands: list[str] = []  # of a shell
        self.command = ""  # the last one, while it is open


class _Checker:
    def __init__(self) -> None:
        self.start = ""
        self.ended = ""
        self.response: dict[str, Any] = {}
        self.done_items: list[dict[str, Any]] = []
        self.item: _Item | None = None
        self.seen: set[str] = set()

    def final(self) -> dict[str, Any]:
        assert self.ended, "the stream has no ending"
        return self.response

    def read(self, event: dict[str, Any]) -> None:
        assert not self.ended, f"an event behind {self.ended}"
        kind = event["type"]
        if kind in STARTS:
            self.begin(kind, event["response"])
        elif kind in ENDINGS:
            self.end(kind, event["response"])
        else:
            assert self.start == "response.in_progress", f"{kind} before in_progress"
            stem, _, action = kind.rpartition(".")
            if stem == "response.shell_call_command":
                self.command(action, event)
                return
            _HANDLERS[action](self, stem, event)

    # The response

    def begin(self, kind: str, response: dict[str, Any]) -> None:
        assert self.start in STARTS[kind], f"{kind} follows {self.start}"
        self.start = kind
        in_progress = kind == "response.in_progress"
        assert response["status"] in ({"in_progress"} if in_progress else {"queued", "in_progress"})
        assert response["output"] == [], "output before any item"
        assert response["usage"] is None
        self.check_fixed_fields(response)

    def check_fixed_fields(self, response: dict[str, Any]) -> None:
        assert response["object"] == "response"
        assert response["id"].startswith("resp_")
        changing = {"status", "output", "usage", "error", "incomplete_details", "completed_at"}
        fixed = {key: value for key, value in response.items() if key not in changing}
        previous = self.response or response
        assert fixed == {key: value for key, value in previous.items() if key not in changing}
        self.response = response

    def end(self, kind: str, response: dict[str, Any]) -> None:
        assert self.item is None, "an item is still open"
        assert response["store"] in (False, self.response["store"]), "stored, but not asked to be"
        # Storing may have failed.
        self.check_fixed_fields({**response, "store": self.response["store"]})
        self.response = response
        self.ended = kind
        assert response["status"] in ENDINGS[kind]
        assert response["output"] == self.done_items, "the output is not the items that were done"
        assert (response["error"] is not None) == (kind == "response.failed")
        is_cut = response["status"] == "incomplete"
        assert response["incomplete_details"] == (
            {"reason": "max_output_tokens"} if is_cut else None
        )
        is_complete = kind == "response.completed"
        incomplete_flags = [item.get("status") == "incomplete" for item in self.done_items]
        assert not any(incomplete_flags[:-1] if not is_complete else incomplete_flags), (
            "an item cut, and not the last"
        )
        if response["status"] in ("completed", "incomplete"):
            usage = response["usage"]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]

    # Items

    def open_item(self) -> _Item:
        assert self.item is not None, "no item is open"
        return self.item

    def item_of(self, event: dict[str, Any]) -> _Item:
        item = self.open_item()
        assert event["item_id"] == item.added["id"]
        assert event["output_index"] == len(self.done_items)
        index = INDICES.get(event["type"].rpartition(".")[0])
        assert index is None or event[index] == 0, f"there is one part, and its {index} is 0"
        return item

    def added(self, stem: str, event: dict[str, Any]) -> None:
        if stem != "response.output_item":
            self.part_added(stem, event)
            return
        item = event["item"]
        assert self.item is None, "the item before is still open"
        assert event["output_index"] == len(self.done_items)
        assert item.get("status") == (None if item["type"] in NO_STATUS else "in_progress")
        assert item["id"].startswith(PREFIXES[item["type"]])
        for key in (item["id"], item.get("call_id")):
            assert key is None or key not in self.seen, f"{key} twice"
            self.seen.add(key or "")
        empty = ("content", "summary", "arguments", "input")
        assert not any(item.get(name) for name in empty), "an item that begins with text"
        assert item["type"] != "shell_call" or item["action"]["commands"] == []
        self.item = _Item(item)

    def item_done(self, event: dict[str, Any]) -> None:
        item, document = self.open_item(), event["item"]
        assert event["output_index"] == len(self.done_items)
        last_state = "text done" if item.type in ARGUMENTS else "part done"
        for stem, text in item.texts.items():
            assert text.state == last_state, f"{stem} without its .done"
        changing = {"status", "content", "summary", "arguments", "input", "encrypted_content"}
        changing |= {"action"} if item.type == "shell_call" else {"code"}
        changing |= {"tools", "error"} if item.type == "mcp_list_tools" else set()
        for name in {*item.added, *document} - changing:
            assert item.added[name] == document[name], name
        assert ("encrypted_content" in item.added) == ("encrypted_content" in document)
        if item.type in AT_ONCE:
            assert document == item.added
        elif item.type not in NO_STATUS:
            ends = {"failed"} if item.type in FAILED else {"completed", "incomplete"}
            assert document["status"] in ends
        if item.type == "shell_call":
            assert document["action"] == {**item.added["action"], "commands": item.commands}
        if item.type in ARGUMENTS:
            stem, name = ARGUMENTS[item.type]
            assert document[name] == item.texts[stem].text
        elif item.type in WHOLE:
            assert not item.texts, f"a {item.type} has no events of its own"
        else:
            self.check_parts(item, document)
        self.done_items.append(document)
        self.item = None

    def check_parts(self, item: _Item, document: dict[str, Any]) -> None:
        places = [name for name in ("content", "summary") if document.get(name)]
        assert len(places) == 1, "an item with nothing in it, or with its text twice"
        for part_stem, name in (
            ("response.content_part", "content"),
            ("response.reasoning_summary_part", "summary"),
        ):
            _, stem = PARTS[item.type].get(part_stem, ("", ""))
            texts = [part["text"] for part in document.get(name, [])]
            assert texts == ([item.texts[stem].text] if stem in item.texts else []), name
            assert all(texts), "an empty part"

    def running(self, stem: str, event: dict[str, Any]) -> None:
        assert stem == f"response.{self.item_of(event).type}"

    def command(self, action: str, event: dict[str, Any]) -> None:
        item = self.open_item()
        assert event["output_index"] == len(self.done_items)
        assert event["command_index"] == len(item.commands)
        if action == "added":
            item.command = event["command"]
            assert item.command == ""
        elif action == "delta":
            assert event["delta"]
            item.command += event["delta"]
        else:
            assert event["command"] == item.command
            item.commands.append(item.command)

    # Parts and texts

    def part_added(self, stem: str, event: dict[str, Any]) -> None:
        item = self.item_of(event)
        kind, text = PARTS[item.type][stem]
        assert event["part"]["type"] == kind
        assert event["part"]["text"] == ""
        assert text not in item.texts, "the part twice"
        item.texts[text] = _Text()

    def delta(self, stem: str, event: dict[str, Any]) -> None:
        item = self.item_of(event)
        if item.type in ARGUMENTS:
            assert stem == ARGUMENTS[item.type][0]
            item.texts.setdefault(stem, _Text())
        assert item.texts[stem].state == "open", "a delta behind .done"
        assert event["delta"], "an empty delta"
        item.texts[stem].text += event["delta"]
        if stem == "response.output_text":
            assert isinstance(event["logprobs"], list)
            item.logprobs += event["logprobs"]

    def text_done(self, stem: str, event: dict[str, Any]) -> None:
        item = self.item_of(event)
        name = ARGUMENTS[item.type][1] if item.type in ARGUMENTS else "text"
        text = item.texts.setdefault(stem, _Text())
        assert event[name] == text.text, ".done is not the sum of its deltas"
        if stem == "response.output_text":
            assert event["logprobs"] == item.logprobs
        assert text.state == "open", ".done twice"
        text.state = "text done"

    def part_done(self, stem: str, event: dict[str, Any]) -> None:
        item = self.item_of(event)
        kind, text_stem = PARTS[item.type][stem]
        text = item.texts[text_stem]
        assert text.state == "text done", "the part is done before its text, or twice"
        assert event["part"]["type"] == kind
        assert event["part"]["text"] == text.text
        assert event["part"].get("logprobs", []) == item.logprobs
        text.state = "part done"

    def finish(self, stem: str, event: dict[str, Any]) -> None:
        if stem == "response.output_item":
            self.item_done(event)
        elif stem.endswith("_part"):
            self.part_done(stem, event)
        else:
            self.text_done(stem, event)


_HANDLERS: dict[str, Callable[[_Checker, str, dict[str, Any]], None]] = {
    "added": _Checker.added,
    "delta": _Checker.delta,
    "done": _Checker.finish,
    "in_progress": _Checker.running,
    "failed": _Checker.running,
}
