"""Faults for the wire checks: only the check that is meant to find a fault fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from faulty_server import (
    TIMES,
    BookEngine,
    Deaf,
    Fault,
    Reply,
    Request,
    outcomes,
    run_faulty_server,
    stream,
)

from vllm_mlx_harmony.verify import wire
from vllm_mlx_harmony.verify.values import Ask

APIS = ("chat", "responses", "messages")
PATHS = {"/v1/chat/completions", "/v1/responses", "/v1/messages"}


def request_of(ask: Ask, *, streamed: bool | None = None, **fields: object) -> Callable[..., bool]:
    """Matches requests with the message of ``ask`` and these fields, streamed, whole or both."""
    text = json.dumps(ask.messages[-1])

    def when(method: str, path: str, body: Request) -> bool:
        right = streamed is None or body.get("stream", False) == streamed
        same = all(body.get(name) == value for name, value in fields.items())
        return path in PATHS and right and same and text in json.dumps(body)

    return when


def request_to(method: str, path: str) -> Callable[..., bool]:
    """Matches requests with this method and paths of this pattern."""
    return lambda verb, where, body: verb == method and bool(re.fullmatch(path, where))


def request_with(**fields: object) -> Callable[..., bool]:
    """Matches requests with these fields; ``...`` stands for any value."""

    def when(method: str, path: str, body: Request) -> bool:
        return path in PATHS and all(
            name in body and value in (..., body[name]) for name, value in fields.items()
        )

    return when


def edit_documents(change: Callable[[Any], None]) -> Callable[[Reply], Reply]:
    """Applies ``change`` to the document, or to each event of a stream."""

    def reply(response: Reply) -> Reply:
        if "data: " not in response.text:
            document = response.document
            change(document)
            return Reply(response.status, json.dumps(document))
        events = response.events()
        for _, document in events:
            if isinstance(document, dict):
                change(document)
        return Reply(response.status, stream(events))

    return reply


def replace(old: str, new: str, count: int = 0) -> Callable[[Reply], Reply]:
    """Replaces a pattern in the text of a response, everywhere or ``count`` times."""
    return lambda response: Reply(response.status, re.sub(old, new, response.text, count=count))


def change_finish(document: Any) -> None:
    """Swaps the reason why an answer ended."""
    other = {"stop": "length", "length": "stop", "end_turn": "max_tokens", "max_tokens": "end_turn"}
    for choice in document.get("choices", ()):
        choice["finish_reason"] = other.get(choice["finish_reason"])
    for part in (document, document.get("delta", {})):
        if isinstance(part, dict) and part.get("stop_reason"):
            part["stop_reason"] = other[part["stop_reason"]]
    response = document.get("response", document)
    if response.get("status") in ("completed", "incomplete") and "output" in response:
        completed = response["status"] == "completed"
        response["status"] = "incomplete" if completed else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if completed else None
        if "response" in document:
            document["type"] = f"response.{response['status']}"


def add_prompt_token(document: Any) -> None:
    """Counts one more token in the prompt."""
    for part in (document, document.get("message"), document.get("response")):
        usage = (part or {}).get("usage") or {}
        for name in ("prompt_tokens", "input_tokens", "total_tokens"):
            if name in usage:
                usage[name] += 1


def remove_text(document: Any) -> None:
    """Empties the text of an answer."""
    for choice in document.get("choices", ()):
        choice["message"]["content"] = ""
    for item in [*document.get("output", ()), *document.get("content", ())]:
        for part in [item, *(item.get("content") or ())]:
            if part.get("type") in ("text", "output_text"):
                part["text"] = ""


def fail(response: Reply) -> Reply:
    """Answers with status 500, as for an unhandled exception."""
    return Reply(500, response.text)


def reshape_error(response: Reply) -> Reply:
    """Answers with FastAPI's own error document."""
    return Reply(response.status, '{"detail": "no"}')


def forget(*names: str) -> Callable[[Request], None]:
    """Removes these fields from a request."""
    return lambda body: [body.pop(name, None) for name in names] and None


def report_running(response: Reply) -> Reply:
    return Reply(200, 'vllm:num_requests_running{engine="0"} 1.0\n')


ERRORS = {
    "missing-model": request_with(model=wire.MISSING),
    "bad-json": request_with(broken=...),
    "wrong-type": lambda method, path, body: 7 in (body.get("input"), body.get("messages")),
    "too-long": lambda method, path, body: " a" * 8192 in json.dumps(body),
    "method": lambda method, path, body: method == "PUT",
}

FAULTS: dict[str, Fault | type[Deaf]] = {
    "whole": Fault(request_of(wire.PLAIN, streamed=False), reply=edit_documents(remove_text)),
    "stream": Fault(request_of(wire.PLAIN, streamed=True), reply=edit_documents(change_finish)),
    "same": Fault(
        request_of(wire.COUNT, streamed=True, temperature=0), reply=edit_documents(change_finish)
    ),
    "usage": Fault(request_of(wire.PLAIN, streamed=True), reply=edit_documents(add_prompt_token)),
    "limit": Fault(
        lambda method, path, body: 16 in (body.get("max_tokens"), body.get("max_output_tokens")),
        request=forget("max_tokens", "max_output_tokens"),
    ),
    "limit-above": Fault(
        lambda method, path, body: (
            wire.MOST in (body.get("max_tokens"), body.get("max_output_tokens"))
        ),
        reply=fail,
    ),
    "thinking-once": Fault(
        request_of(wire.THINK, streamed=False),
        reply=replace("It orbits", "Sunlight falls on half of it. It"),
    ),
    "thinking-once, twice": Fault(
        request_of(wire.THINK, streamed=False),
        reply=replace(r"(Sunlight falls on half of it\.)", r"\1 \1"),
    ),
    "cancel": Deaf,
    "cancel, metrics": Fault(request_to("GET", "/metrics"), reply=report_running),
    "at-once": Fault(
        lambda *request: any(
            request_of(ask, streamed=True)(*request) for ask in (wire.PLAIN, wire.OTHER)
        ),
        reply=replace(r'"id": ?"(chatcmpl-|resp_|msg_)[0-9a-zA-Z]+"', r'"id":"\g<1>0"'),
    ),
    "control-tokens": Fault(
        request_of(wire.PLAIN, streamed=False), reply=replace("to it.", "to it.<|end|>")
    ),
    "control-tokens, headers": Fault(
        request_of(wire.PLAIN, streamed=False), reply=replace("to it.", "to it.assistantfinal")
    ),
    "characters": Fault(request_of(wire.EMOJI), reply=replace("中", "\ufffd")),
    "unknown-parameter": Fault(request_with(no_such_parameter=...), reply=fail),
    "key": Fault(
        request_of(wire.PLAIN, streamed=False),
        reply=lambda response: Reply(
            403 if response.status == 401 else response.status, response.text
        ),
    ),
    **{name: Fault(when, reply=fail) for name, when in ERRORS.items()},
    **{f"{name}, shape": Fault(when, reply=reshape_error) for name, when in ERRORS.items()},
}
"""Faults by check, for every API that has it."""

OF_ONE: dict[str, Fault] = {
    "chat.stream, created": Fault(
        request_of(wire.PLAIN, streamed=True), reply=replace(r'"created": ?\d+', '"created":1', 1)
    ),
    "chat.stop": Fault(request_with(stop=...), request=forget("stop")),
    "messages.stop": Fault(request_with(stop_sequences=...), request=forget("stop_sequences")),
    "chat.models": Fault(
        request_to("GET", "/v1/models"), reply=replace('"created": ?0', '"created":"x"')
    ),
    "chat.model": Fault(request_to("GET", "/v1/models/.*"), reply=fail),
    "responses.previous": Fault(
        request_with(previous_response_id=..., input=...),
        request=lambda body: (
            forget("previous_response_id")(body) if wire.SECOND in json.dumps(body) else None
        ),
    ),
    "responses.previous, stored": Fault(
        request_to("GET", "/v1/responses/.*"), reply=replace("OK", "KO")
    ),
    **{
        f"{api}.{name}": Fault(request_of(ask), request=forget("tools"))
        for api in ("responses", "messages")
        for name, ask in (("search", wire.SEARCH), ("predefined", wire.EDIT))
    },
    "responses.missing-response": Fault(
        request_with(previous_response_id="resp_0123456789abcdef"),
        request=forget("previous_response_id"),
    ),
    "responses.conversation": Fault(
        request_with(conversation=..., input=...),
        request=lambda body: (
            forget("conversation")(body) if wire.SECOND in json.dumps(body) else None
        ),
    ),
    "responses.conversation, items": Fault(
        request_to("GET", "/v1/conversations/.*"), reply=replace("4711", "4712")
    ),
    "chat.decision": Fault(
        request_to("POST", "/v1/systemone"), reply=replace('"blue": ?1.0', '"blue":0.5')
    ),
    "chat.decision, choice": Fault(
        request_to("POST", "/v1/systemone"), reply=replace('"choice": ?"blue"', '"choice":"green"')
    ),
    "chat.ollama": Fault(
        request_to("POST", "/api/chat"), reply=replace('"done": ?true', '"done":false')
    ),
    "chat.ollama, text": Fault(
        request_to("POST", "/api/chat"), reply=replace('"content":', '"text":')
    ),
    "messages.count-tokens": Fault(
        request_to("POST", "/v1/messages/count_tokens"),
        reply=edit_documents(
            lambda document: document.update(input_tokens=document["input_tokens"] + 1)
        ),
    ),
}
"""Faults by API and check."""

ALL = {
    **{f"{api}.{name}": fault for api in APIS for name, fault in FAULTS.items()},
    **OF_ONE,
}


@pytest.fixture
def _times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the times for a prompt that takes seconds."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "1")
    for name, seconds in TIMES.items():
        monkeypatch.setattr(wire, name, seconds)


@pytest.mark.nightly
@pytest.mark.usefixtures("_times")
def test_server_without_fault_passes_all_checks() -> None:
    with run_faulty_server(engine=BookEngine(slow=True)) as url:
        results = outcomes(url)
    assert {
        name: outcome.problem for name, outcome in results.items() if outcome.state != "passed"
    } == {}


def test_each_check_has_fault() -> None:
    checks = {check.name.partition(".")[2] for check in wire.CHECKS}
    slow = {f"{api}.{name}" for api in APIS for name in ("waiting", "kept")}  # have tests below
    assert checks == {name.partition(",")[0] for name in ALL} | slow


@pytest.mark.nightly(sample=24)
@pytest.mark.parametrize("name", ALL)
def test_fault_fails_only_its_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FREED_WITHIN_SECONDS", 0.1)
    check = f"wire.{name.partition(',')[0]}"
    with run_faulty_server(ALL[name]) as url:
        results = outcomes(url, check.rpartition(".")[0])
    fast = {f"wire.{api}.kept" for api in APIS}  # unsupported where a prompt takes no time
    bad = [
        outcome.name
        for outcome in results.values()
        if outcome.state != "passed" and outcome.name not in fast
    ]
    assert bad == [check], results
    assert results[check].state == "failed" and results[check].problem and results[check].sent


@pytest.mark.nightly
@pytest.mark.usefixtures("_times")
def test_comments_do_not_count_as_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pings, a stream only has comments with the progress of the prompt."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "0")
    with run_faulty_server(engine=BookEngine(slow=True)) as url:
        results = outcomes(url, "*.waiting", "*.kept")
    states = {name: outcome.state for name, outcome in results.items()}
    assert states == {
        **{f"wire.{api}.waiting": "failed" for api in APIS},
        **{f"wire.{api}.kept": "passed" for api in APIS},
    }
    assert "no event for " in results["wire.messages.waiting"].problem


@pytest.mark.nightly
@pytest.mark.usefixtures("_times")
def test_forgotten_cancelled_prompt_fails_check() -> None:
    with run_faulty_server(engine=BookEngine(slow=True, forgets=True)) as url:
        results = outcomes(url, "*.waiting", "*.kept")
    states = {name: outcome.state for name, outcome in results.items()}
    assert states == {
        **{f"wire.{api}.waiting": "passed" for api in APIS},
        **{f"wire.{api}.kept": "failed" for api in APIS},
    }
