"""Responses' other endpoints: their documents, and their errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ciphers import Reverse
from event_checker import check

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
def test_unknown_response_is_not_found(param: str | None, message: str, code: str) -> None:
    error = not_found("resp_1", param=param)
    assert error.status == 404
    assert error_body(error) == {
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    }


def test_unfinished_previous_response_is_not_ready() -> None:
    error = not_ready("resp_1")
    assert (error.status, error.param) == (400, "previous_response_id")
    assert error.code == "previous_response_not_ready"


def test_deletion_and_token_count_have_their_documents() -> None:
    assert deleted("resp_1") == {"id": "resp_1", "object": "response", "deleted": True}
    assert input_tokens(7) == {"object": "response.input_tokens", "input_tokens": 7}


RUNNING = [("queued", True), ("in_progress", True), ("completed", False), ("failed", False)]


@pytest.mark.parametrize(("status", "running"), RUNNING)
def test_queued_and_in_progress_responses_are_running(status: str, running: bool) -> None:
    assert is_running({"id": "resp_1", "status": status}) is running


def test_response_of_lost_server_has_failed() -> None:
    response = lost({"id": "resp_1", "status": "in_progress", "error": None, "output": []})
    assert response == {
        "id": "resp_1",
        "status": "failed",
        "error": {
            "code": "server_error",
            "message": "the server that was generating this response has stopped",
        },
        "output": [],
    }
    event = failed_event(response, 7)
    assert (event.name, json.loads(event.data)) == (
        "response.failed",
        {"type": "response.failed", "sequence_number": 7, "response": response},
    )


def test_error_event_has_openai_shape() -> None:
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
    request = read({"model": "m", "input": items}, Defaults(), Reverse()).compaction()
    emitter = request.emitter(INFO)
    for delta in [*SUMMARY, Finished("stop", None, Usage(9, 2, 1, 4))]:
        assert emitter.feed(delta) == []
    compacted = request.compacted(emitter.result(), INFO)
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
    """But it drops the summary of an earlier compaction, which is part of the new one."""
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
        request = read(body, Defaults(), Reverse(), history).compaction()
        emitter = request.emitter(INFO)
        for delta in [*SUMMARY, Finished("stop", None, Usage(9, 2))]:
            emitter.feed(delta)
        *users, item = request.compacted(emitter.result(), INFO)["output"]
        assert [message["content"] for message in users] == [
            [{"type": "input_text", "text": text}]
            for text in ("Hi", "More", *(message["content"] for message in new))
        ]
        assert len({message["id"] for message in users}) == len(users)
        assert item["type"] == "compaction"
        for message in users:
            assert message.keys() == {"type", "id", "role", "status", "content"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_triggered_compaction_is_the_only_item(stream: bool, reason: Any, status: str) -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    request = read({"model": "m", "input": items, "stream": stream}, Defaults(), Reverse())
    emitter = request.emitter(INFO)
    deltas = [*SUMMARY, Finished(reason, None, Usage(9, 2, 1, 4))]
    events = [event for delta in deltas for event in emitter.feed(delta)]
    response = check(events) if stream else emitter.result()
    (item,) = response["output"]
    assert item.keys() == {"id", "type", "encrypted_content"}
    assert (item["type"], response["status"]) == ("compaction", status)
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    again = read({"model": "m", "input": [item]}, Defaults(), Reverse())
    assert again.turn.messages == (Summary("They greeted."),)
    assert [listed.get("type") for listed in request.input_items(INFO)] == ["message"]


NO_SUMMARY: dict[str, list[Delta]] = {
    "nothing": [],
    "reasoning alone": SUMMARY[1:4],
    "a call": [Opened(0, Kind.CALL, "f"), Text("{}"), Closed()],
    "white space": [Opened(0, Kind.ANSWER), Text(" \n"), Closed()],
}


@pytest.mark.parametrize("output", NO_SUMMARY.values(), ids=NO_SUMMARY)
def test_compaction_without_summary_fails(output: list[Delta]) -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    request = read({"model": "m", "input": items, "stream": True}, Defaults(), Reverse())
    emitter = request.emitter(INFO)
    deltas = [Started(9), *output, Finished("stop", None, Usage(9, 2))]
    response = check([event for delta in deltas for event in emitter.feed(delta)])
    assert (response["status"], response["output"]) == ("failed", [])
    with pytest.raises(OutputError) as caught:
        emitter.result()
    assert caught.value.code == "compaction_failed"
    # The conversation stays as it was.
    assert request.conversation(request.turn.messages, ended=False) == (User("Hi"),)


def test_compaction_of_stored_conversation_keeps_instructions_and_tools() -> None:
    tools = [{"type": "function", "name": "f"}]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"type": "additional_tools", "role": "developer", "tools": tools},
        {"type": "compaction_trigger"},
    ]
    body = {"model": "m", "instructions": "Be kind.", "input": items}
    request = read(body, Defaults(), Reverse())
    order = request.turn.messages[-1]
    assert isinstance(order, User)
    assert request.turn.tool_choice == ToolChoice(names=())
    answer = (Reasoning("Hm."), Preamble("They"), Answer("greeted."))
    brief, later, summary = request.conversation((*request.turn.messages, *answer))
    assert (brief, summary) == (Instructions("Be brief."), Summary("They\ngreeted."))
    assert isinstance(later, AdditionalTools)


# --- The listed input, validated by the official client's strict models.

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}
PLAIN = {"type": "input_text", "text": "a"}
TEXT = {"type": "output_text", "text": "a", "annotations": []}
CITED = {**TEXT, "annotations": [{"type": "file_path", "file_id": "f", "index": 0}]}
REFUSAL = {"type": "refusal", "refusal": "no"}

ITEMS: list[tuple[dict[str, Any], str, Any]] = [
    # a sent item, the field that is compared, its value in the list
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
def test_items_are_listed_in_form_of_schema(sent: dict[str, Any], name: str, expected: Any) -> None:
    models = pytest.importorskip("openai.types.responses.response_item_list")
    caller = CUSTOM if sent.get("type") == "custom_tool_call_output" else CALL
    before = [USER, caller] if "output" in sent else [USER]
    request = read({"model": "m", "input": [*before, sent]}, Defaults(), Reverse())
    listed = page(request.input_items(INFO), {"order": "asc"})
    models.ResponseItemList.model_validate(listed, strict=True)
    assert listed["data"][-1][name] == expected


def test_page_without_items_is_valid() -> None:
    models = pytest.importorskip("openai.types.responses.response_item_list")
    read_back = models.ResponseItemList.model_validate(page([], {}), strict=True)
    assert (read_back.first_id, read_back.last_id, read_back.data) == ("", "", [])
