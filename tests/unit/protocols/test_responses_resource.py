"""Responses' other endpoints: their documents, and their errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from event_checker import check
from reverse_cipher import Reverse

from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Started, Text, Usage
from vllm_mlx_harmony.core.errors import HostError, OutputError
from vllm_mlx_harmony.core.turn import (
    AdditionalTools,
    Answer,
    Defaults,
    Instructions,
    Preamble,
    Reasoning,
    ResponseInfo,
    Summary,
    ToolChoice,
    User,
)
from vllm_mlx_harmony.protocols.responses import error_body, read
from vllm_mlx_harmony.protocols.responses.resource import (
    deleted,
    error_event,
    failed_event,
    input_tokens,
    is_running,
    lost,
    not_found,
    not_ready,
    page,
)

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")


@pytest.mark.parametrize(
    ("param", "message", "code"),
    [
        (None, "response with id 'resp_1' not found", "not_found"),
        (
            "previous_response_id",
            "previous response with id 'resp_1' not found",
            "previous_response_not_found",
        ),
    ],
)
def test_not_found(param: str | None, message: str, code: str) -> None:
    error = not_found("resp_1", param=param)
    assert error.status == 404
    assert error_body(error) == {
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    }


def test_not_ready() -> None:
    error = not_ready("resp_1")
    assert (error.status, error.param) == (400, "previous_response_id")
    assert error.code == "previous_response_not_ready"


def test_small_documents() -> None:
    assert deleted("resp_1") == {"id": "resp_1", "object": "response", "deleted": True}
    assert input_tokens(7) == {"object": "response.input_tokens", "input_tokens": 7}


RUNNING = [("queued", True), ("in_progress", True), ("completed", False), ("failed", False)]


@pytest.mark.parametrize(("status", "running"), RUNNING)
def test_whether_more_will_come(status: str, running: bool) -> None:
    assert is_running({"id": "resp_1", "status": status}) is running


def test_a_response_whose_server_has_gone() -> None:
    gone = lost({"id": "resp_1", "status": "in_progress", "error": None, "output": []})
    assert gone == {
        "id": "resp_1",
        "status": "failed",
        "error": {
            "code": "server_error",
            "message": "the server that was generating this response has stopped",
        },
        "output": [],
    }
    event = failed_event(gone, 7)
    assert (event.name, json.loads(event.data)) == (
        "response.failed",
        {"type": "response.failed", "sequence_number": 7, "response": gone},
    )


def test_error_event_of_an_ended_stream() -> None:
    event = error_event(HostError("the server ends", code="server_unavailable"), 3)
    assert (event.name, json.loads(event.data)) == (
        "error",
        {
            "type": "error",
            "sequence_number": 3,
            "code": "server_unavailable",
            "message": "the server ends",
            "param": None,
        },
    )


SUMMARY: list[Delta] = [
    Started(9),
    Opened(0, Kind.REASONING),
    Text("Hm."),
    Closed(),
    Opened(1, Kind.PREAMBLE),
    Text("They "),
    Text("greeted."),
    Closed(),
]


def test_compacted_conversation_continues() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"role": "user", "content": "More"},
    ]
    asked = read({"model": "m", "input": items}, Defaults(), Reverse()).compaction()
    emitter = asked.emitter(INFO)
    for delta in [*SUMMARY, Finished("stop", None, Usage(9, 2, 1, 4))]:
        assert emitter.feed(delta) == []
    compacted = asked.compacted(emitter.result(), INFO)
    output = compacted.pop("output")
    assert compacted == {
        "id": f"resp_{INFO.id_seed}",
        "object": "response.compaction",
        "created_at": INFO.created,
        "usage": {
            "input_tokens": 9,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 11,
        },
    }
    again = read({"model": "m", "input": output}, Defaults(), Reverse())
    assert again.turn.messages == (User("Hi"), User("More"), Summary("They greeted."))


def test_compaction_keeps_user_messages_of_earlier_responses() -> None:
    """But not the summary of an earlier compaction: it is part of the new one."""
    history = (
        Instructions("Be brief."),
        Summary("They met."),
        User("Hi"),
        Reasoning("Hm."),
        Answer("Hello"),
        User("More"),
        Answer("No."),
    )
    for new in ([], [{"role": "user", "content": "Please"}]):
        body = {"model": "m", "previous_response_id": "resp_1", "input": new}
        asked = read(body, Defaults(), Reverse(), history).compaction()
        emitter = asked.emitter(INFO)
        for delta in [*SUMMARY, Finished("stop", None, Usage(9, 2))]:
            emitter.feed(delta)
        *users, item = asked.compacted(emitter.result(), INFO)["output"]
        assert [each["content"] for each in users] == [
            [{"type": "input_text", "text": text}]
            for text in ("Hi", "More", *(each["content"] for each in new))
        ]
        assert len({each["id"] for each in users}) == len(users)
        assert item["type"] == "compaction"
        for each in users:
            assert each.keys() == {"type", "id", "role", "status", "content"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_triggered_compaction_is_the_only_item(stream: bool, reason: Any, status: str) -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    asked = read({"model": "m", "input": items, "stream": stream}, Defaults(), Reverse())
    emitter = asked.emitter(INFO)
    deltas = [*SUMMARY, Finished(reason, None, Usage(9, 2, 1, 4))]
    events = [event for delta in deltas for event in emitter.feed(delta)]
    response = check(events) if stream else emitter.result()
    (item,) = response["output"]
    assert item.keys() == {"id", "type", "encrypted_content"}
    assert (item["type"], response["status"]) == ("compaction", status)
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    again = read({"model": "m", "input": [item]}, Defaults(), Reverse())
    assert again.turn.messages == (Summary("They greeted."),)
    assert [each.get("type") for each in asked.input_items(INFO)] == ["message"]


NO_SUMMARY: dict[str, list[Delta]] = {
    "nothing": [],
    "reasoning alone": SUMMARY[1:4],
    "a call": [Opened(0, Kind.CALL, "f"), Text("{}"), Closed()],
    "white space": [Opened(0, Kind.ANSWER), Text(" \n"), Closed()],
}


@pytest.mark.parametrize("output", NO_SUMMARY.values(), ids=NO_SUMMARY)
def test_a_compaction_without_a_summary_fails(output: list[Delta]) -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    asked = read({"model": "m", "input": items, "stream": True}, Defaults(), Reverse())
    emitter = asked.emitter(INFO)
    deltas = [Started(9), *output, Finished("stop", None, Usage(9, 2))]
    response = check([event for delta in deltas for event in emitter.feed(delta)])
    assert (response["status"], response["output"]) == ("failed", [])
    with pytest.raises(OutputError) as failed:
        emitter.result()
    assert failed.value.code == "compaction_failed"
    # What could not be summed up goes on as it was.
    assert asked.conversation(asked.turn.messages, ended=False) == (User("Hi"),)


def test_compaction_of_a_stored_conversation() -> None:
    tools = [{"type": "function", "name": "f"}]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"type": "additional_tools", "role": "developer", "tools": tools},
        {"type": "compaction_trigger"},
    ]
    body = {"model": "m", "instructions": "Be kind.", "input": items}
    asked = read(body, Defaults(), Reverse())
    order = asked.turn.messages[-1]
    assert isinstance(order, User)
    assert asked.turn.tool_choice == ToolChoice(names=())
    answer = (Reasoning("Hm."), Preamble("They"), Answer("greeted."))
    brief, later, summary = asked.conversation((*asked.turn.messages, *answer))
    assert (brief, summary) == (Instructions("Be brief."), Summary("They\ngreeted."))
    assert isinstance(later, AdditionalTools)


# --- The input, read back with the official client's models, which are strict about it.

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}
PLAIN = {"type": "input_text", "text": "a"}
TEXT = {"type": "output_text", "text": "a", "annotations": []}
CITED = {**TEXT, "annotations": [{"type": "file_path", "file_id": "f", "index": 0}]}
REFUSAL = {"type": "refusal", "refusal": "no"}

ITEMS: list[tuple[dict[str, Any], str, Any]] = [
    # what was sent, the field of it that is looked at, what is listed
    ({"role": "user", "content": "a"}, "content", [PLAIN]),
    ({"role": "developer", "content": [{**PLAIN, "type": "text"}]}, "content", [PLAIN]),
    ({"role": "assistant", "content": "a"}, "content", [TEXT]),
    (
        {"role": "assistant", "content": [{**PLAIN, "type": "output_text"}]},
        "content",
        [TEXT],
    ),
    (
        {"role": "assistant", "content": [{**TEXT, "annotations": None}, CITED, REFUSAL]},
        "content",
        [TEXT, CITED, REFUSAL],
    ),
    ({"role": "assistant", "content": None}, "content", []),
    ({"type": "reasoning", "encrypted_content": "x"}, "summary", []),
    ({"type": "reasoning", "summary": None, "content": None}, "summary", []),
    (
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
        "summary",
        [{"type": "summary_text", "text": "a"}],
    ),
    ({**CALL, "arguments": None}, "arguments", "{}"),
    ({**CALL, "arguments": {"a": "é"}}, "arguments", '{"a":"é"}'),
    ({**CALL, "arguments": "{ }"}, "arguments", "{ }"),
    ({"type": "function_call_output", "call_id": "c", "output": None}, "output", ""),
    (
        {"type": "custom_tool_call_output", "call_id": "c", "output": [PLAIN]},
        "output",
        [PLAIN],
    ),
    (CUSTOM, "input", ""),
    ({"type": "compaction", "encrypted_content": "x"}, "encrypted_content", "x"),
]


@pytest.mark.parametrize(("sent", "name", "expected"), ITEMS)
def test_items_are_listed_as_the_schema_has_them(
    sent: dict[str, Any], name: str, expected: Any
) -> None:
    models = pytest.importorskip("openai.types.responses.response_item_list")
    caller = CUSTOM if sent.get("type") == "custom_tool_call_output" else CALL
    before = [USER, caller] if "output" in sent else [USER]
    asked = read({"model": "m", "input": [*before, sent]}, Defaults(), Reverse())
    listed = page(asked.input_items(INFO), {"order": "asc"})
    models.ResponseItemList.model_validate(listed, strict=True)
    assert listed["data"][-1][name] == expected


def test_a_page_without_items() -> None:
    models = pytest.importorskip("openai.types.responses.response_item_list")
    read_back = models.ResponseItemList.model_validate(page([], {}), strict=True)
    assert (read_back.first_id, read_back.last_id, read_back.data) == ("", "", [])
