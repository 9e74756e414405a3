"""The checker itself: it accepts a valid stream and rejects each stream with one error."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from ciphers import Unusable
from event_checker import check, check_documents, from_wire

from vllm_mlx_harmony.core.deltas import Closed, Finished, Kind, Opened, Started, Text, Usage
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo
from vllm_mlx_harmony.protocols.events import DONE, Event, frame
from vllm_mlx_harmony.protocols.responses import read

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")


def stream(*, summary: str | None = None) -> list[Event]:
    body = {"model": "m", "input": "Hi", "stream": True, "reasoning": {"summary": summary}}
    emitter = read(body, Defaults(), Unusable()).emitter(INFO)
    turn = (
        Started(1), Opened(0, Kind.REASONING), Text("a"), Text("b"), Closed(),
        Opened(1, Kind.PREAMBLE), Text("c"), Closed(),
        Opened(2, Kind.CALL, "f"), Text("{"), Text("}"), Closed(),
        Finished("tool_calls", None, Usage(1, 2)),
    )  # fmt: skip
    return [event for delta in turn for event in emitter.feed(delta)]


Documents = list[dict[str, Any]]


def index_of_first(documents: Documents, kind: str) -> int:
    return next(
        at for at, document in enumerate(documents) if document["type"] == f"response.{kind}"
    )


def renumber(documents: Documents) -> Documents:
    return [{**document, "sequence_number": number} for number, document in enumerate(documents)]


def without(kind: str) -> Callable[[Documents], Documents]:
    def change(documents: Documents) -> Documents:
        documents.pop(index_of_first(documents, kind))
        return renumber(documents)

    return change


def twice(kind: str) -> Callable[[Documents], Documents]:
    def change(documents: Documents) -> Documents:
        at = index_of_first(documents, kind)
        documents.insert(at, deepcopy(documents[at]))
        return renumber(documents)

    return change


def with_(kind: str, **fields: Any) -> Callable[[Documents], Documents]:
    def change(documents: Documents) -> Documents:
        documents[index_of_first(documents, kind)].update(fields)
        return documents

    return change


def inside(kind: str, name: str, **fields: Any) -> Callable[[Documents], Documents]:
    def change(documents: Documents) -> Documents:
        documents[index_of_first(documents, kind)][name].update(fields)
        return documents

    return change


def item_id(index: int, prefix: str) -> str:
    return f"{prefix}_{INFO.id_seed[:20]}{index:04x}"


CHANGES: dict[str, Callable[[Documents], Documents]] = {
    **{
        f"without {kind}": without(kind)
        for kind in (
            "created", "in_progress", "completed", "output_item.added", "output_item.done",
            "content_part.added", "content_part.done", "reasoning_text.delta",
            "reasoning_text.done", "reasoning_summary_part.added", "reasoning_summary_part.done",
            "reasoning_summary_text.delta", "reasoning_summary_text.done", "output_text.delta",
            "output_text.done", "function_call_arguments.delta", "function_call_arguments.done",
        )
    },
    **{
        f"{kind} twice": twice(kind)
        for kind in (
            "created", "in_progress", "completed", "output_item.added", "output_item.done",
            "content_part.added", "content_part.done", "reasoning_text.delta",
            "reasoning_text.done", "output_text.delta", "function_call_arguments.done",
        )
    },
    "a gap": lambda documents: [*documents[:4], *documents[5:]],
    "a number of -1": with_("output_text.delta", sequence_number=-1),
    "a nested number": inside("output_item.done", "item", sequence_number=-1),
    "another item's id": with_("output_text.delta", item_id="msg_1"),
    "another item's index": with_("output_text.delta", output_index=0),
    "another part's index": with_("output_text.delta", content_index=1),
    "an index of -1": inside("content_part.added", "part", content_index=-1),
    "no logprobs": with_("output_text.delta", logprobs=None),
    "an empty delta": with_("output_text.delta", delta=""),
    "another text": with_("output_text.done", text="d"),
    "other arguments": with_("function_call_arguments.done", arguments="{"),
    "another part": inside("content_part.done", "part", text="d"),
    "a part of another type": inside("content_part.added", "part", type="output_text"),
    "another id at last": inside("output_item.done", "item", id="rs_1"),
    "a status that is none": inside("output_item.done", "item", status="in_progress"),
    "a message that is cut": inside("output_item.done", "item", status="incomplete"),
    "nothing in it": inside("output_item.done", "item", content=[]),
    "another summary": inside("output_item.done", "item", summary=[]),
    "a summary of what is in the content": inside(
        "output_item.done", "item", content=[{"type": "reasoning_text", "text": "ab"}]
    ),
    "text from the start": inside("output_item.added", "item", content=[{"text": "a"}]),
    "another response": inside("completed", "response", id="resp_1"),
    "another model": inside("completed", "response", model="n"),
    "another output": inside("completed", "response", output=[]),
    "an error without failure": inside("completed", "response", error={"code": "x"}),
    "another status": inside("completed", "response", status="incomplete"),
    "details of no cut": inside("completed", "response", incomplete_details={"reason": "x"}),
    "output at the start": inside("created", "response", output=[{}]),
    "completed at the start": inside("created", "response", status="completed"),
    "an event nobody knows": with_("output_text.delta", type="response.refusal.delta"),
}  # fmt: skip


def documents(*, summary: str | None = None) -> Documents:
    return [json.loads(event.data) for event in stream(summary=summary)[:-1]]


@pytest.mark.parametrize("summary", [None, "auto"])
def test_valid_stream_is_accepted(summary: str | None) -> None:
    valid = stream(summary=summary)
    assert check(valid)["status"] == "completed"
    assert check_documents(documents(summary=summary)) == check(valid)
    assert check(from_wire("".join(map(frame, valid)))) == check(valid)


@pytest.mark.parametrize("change", CHANGES)
def test_stream_with_one_error_is_rejected(change: str) -> None:
    summary = "auto" if "summary" in change else None
    with pytest.raises(AssertionError):
        check_documents(CHANGES[change](documents(summary=summary)))


@pytest.mark.parametrize(
    "events",
    [
        [],
        [DONE],
        stream()[:-1],
        [*stream(), DONE],
        [DONE, *stream()],
        [event._replace(name="") for event in stream()],
        [Event(event.data.replace(",", ",\n", 1), event.name) for event in stream()],
    ],
    ids=["nothing", "only the end", "no end", "two ends", "a first end", "no names", "two lines"],
)
def test_invalid_frames_are_rejected(events: list[Event]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(events)


@pytest.mark.parametrize("wire", ["data: {}", "event: a\nevent: b\ndata: {}\n\n"])
def test_invalid_wire_format_is_rejected(wire: str) -> None:
    with pytest.raises(AssertionError):
        from_wire(wire)
