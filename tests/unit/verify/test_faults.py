"""Each check fails, and no other does, on a server with the fault that it is there to find."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from fake import TIMES, BookEngine, Deaf, Fault, Reply, Request, outcomes, serving, stream

from vllm_mlx_harmony.verify import wire
from vllm_mlx_harmony.verify.values import Ask

APIS = ("chat", "responses", "messages")
PATHS = {"/v1/chat/completions", "/v1/responses", "/v1/messages"}


def asked(ask: Ask, *, streamed: bool | None = None, **fields: object) -> Callable[..., bool]:
    """Requests with the message of ``ask`` and these fields, streamed, whole or both."""
    text = json.dumps(ask.messages[-1])

    def when(method: str, path: str, body: Request) -> bool:
        right = streamed is None or body.get("stream", False) == streamed
        same = all(body.get(name) == value for name, value in fields.items())
        return path in PATHS and right and same and text in json.dumps(body)

    return when


def at(method: str, path: str) -> Callable[..., bool]:
    """Requests with this method of paths that match a pattern."""
    return lambda verb, where, body: verb == method and bool(re.fullmatch(path, where))


def posted(**fields: object) -> Callable[..., bool]:
    """Requests with these fields, of which ``...`` means any."""

    def when(method: str, path: str, body: Request) -> bool:
        return path in PATHS and all(
            name in body and value in (..., body[name]) for name, value in fields.items()
        )

    return when


def each(change: Callable[[Any], None]) -> Callable[[Reply], Reply]:
    """Changes the document, or each event of a stream."""

    def reply(given: Reply) -> Reply:
        if "data: " not in given.text:
            document = given.document
            change(document)
            return Reply(given.status, json.dumps(document))
        events = given.events()
        for _, document in events:
            if isinstance(document, dict):
                change(document)
        return Reply(given.status, stream(events))

    return reply


def swapped(old: str, new: str, count: int = 0) -> Callable[[Reply], Reply]:
    """Replaces a pattern in the text of a response, everywhere or the first times."""
    return lambda given: Reply(given.status, re.sub(old, new, given.text, count=count))


def ended(document: Any) -> None:
    """Makes the end of an answer another one."""
    other = {"stop": "length", "length": "stop", "end_turn": "max_tokens", "max_tokens": "end_turn"}
    for choice in document.get("choices", ()):
        choice["finish_reason"] = other.get(choice["finish_reason"])
    for part in (document, document.get("delta", {})):
        if isinstance(part, dict) and part.get("stop_reason"):
            part["stop_reason"] = other[part["stop_reason"]]
    response = document.get("response", document)
    if response.get("status") in ("completed", "incomplete") and "output" in response:
        done = response["status"] == "completed"
        response["status"] = "incomplete" if done else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if done else None
        if "response" in document:
            document["type"] = f"response.{response['status']}"


def counted(document: Any) -> None:
    """Counts another token in the prompt."""
    for part in (document, document.get("message"), document.get("response")):
        usage = (part or {}).get("usage") or {}
        for name in ("prompt_tokens", "input_tokens", "total_tokens"):
            if name in usage:
                usage[name] += 1


def emptied(document: Any) -> None:
    """Takes the text away."""
    for choice in document.get("choices", ()):
        choice["message"]["content"] = ""
    for item in [*document.get("output", ()), *document.get("content", ())]:
        for part in [item, *(item.get("content") or ())]:
            if part.get("type") in ("text", "output_text"):
                part["text"] = ""


def failed(given: Reply) -> Reply:
    """As a server fails that did not expect this."""
    return Reply(500, given.text)


def misshapen(given: Reply) -> Reply:
    """FastAPI's own shape of an error."""
    return Reply(given.status, '{"detail": "no"}')


def forget(*names: str) -> Callable[[Request], None]:
    """Reads over these fields of a request."""
    return lambda body: [body.pop(name, None) for name in names] and None


def running(given: Reply) -> Reply:
    return Reply(200, 'vllm:num_requests_running{engine="0"} 1.0\n')


ERRORS = {
    "missing-model": posted(model=wire.MISSING),
    "bad-json": posted(broken=...),
    "wrong-type": lambda method, path, body: 7 in (body.get("input"), body.get("messages")),
    "too-long": lambda method, path, body: " a" * 8192 in json.dumps(body),
    "method": lambda method, path, body: method == "PUT",
}

FAULTS: dict[str, Fault | type[Deaf]] = {
    "whole": Fault(asked(wire.PLAIN, streamed=False), reply=each(emptied)),
    "stream": Fault(asked(wire.PLAIN, streamed=True), reply=each(ended)),
    "same": Fault(asked(wire.COUNT, streamed=True, temperature=0), reply=each(ended)),
    "usage": Fault(asked(wire.PLAIN, streamed=True), reply=each(counted)),
    "limit": Fault(
        lambda method, path, body: 16 in (body.get("max_tokens"), body.get("max_output_tokens")),
        request=forget("max_tokens", "max_output_tokens"),
    ),
    "limit-above": Fault(
        lambda method, path, body: (
            wire.MOST in (body.get("max_tokens"), body.get("max_output_tokens"))
        ),
        reply=failed,
    ),
    "thinking-once": Fault(
        asked(wire.THINK, streamed=False),
        reply=swapped("It orbits", "Sunlight falls on half of it. It"),
    ),
    "thinking-once, twice": Fault(
        asked(wire.THINK, streamed=False),
        reply=swapped(r"(Sunlight falls on half of it\.)", r"\1 \1"),
    ),
    "cancel": Deaf,
    "cancel, metrics": Fault(at("GET", "/metrics"), reply=running),
    "at-once": Fault(
        lambda *request: any(
            asked(one, streamed=True)(*request) for one in (wire.PLAIN, wire.OTHER)
        ),
        reply=swapped(r'"id": ?"(chatcmpl-|resp_|msg_)[0-9a-zA-Z]+"', r'"id":"\g<1>0"'),
    ),
    "control-tokens": Fault(
        asked(wire.PLAIN, streamed=False), reply=swapped("to it.", "to it.<|end|>")
    ),
    "control-tokens, headers": Fault(
        asked(wire.PLAIN, streamed=False), reply=swapped("to it.", "to it.assistantfinal")
    ),
    "characters": Fault(asked(wire.EMOJI), reply=swapped("中", "\ufffd")),
    "unknown-parameter": Fault(posted(no_such_parameter=...), reply=failed),
    "key": Fault(
        asked(wire.PLAIN, streamed=False),
        reply=lambda given: Reply(403 if given.status == 401 else given.status, given.text),
    ),
    **{name: Fault(when, reply=failed) for name, when in ERRORS.items()},
    **{f"{name}, shape": Fault(when, reply=misshapen) for name, when in ERRORS.items()},
}
"""By check, of every API that has it."""

OF_ONE: dict[str, Fault] = {
    "chat.stream, created": Fault(
        asked(wire.PLAIN, streamed=True), reply=swapped(r'"created": ?\d+', '"created":1', 1)
    ),
    "chat.stop": Fault(posted(stop=...), request=forget("stop")),
    "messages.stop": Fault(posted(stop_sequences=...), request=forget("stop_sequences")),
    "chat.models": Fault(at("GET", "/v1/models"), reply=swapped('"created": ?0', '"created":"x"')),
    "chat.model": Fault(at("GET", "/v1/models/.*"), reply=failed),
    "responses.previous": Fault(
        posted(previous_response_id=..., input=...),
        request=lambda body: (
            forget("previous_response_id")(body) if wire.SECOND in json.dumps(body) else None
        ),
    ),
    "responses.previous, stored": Fault(at("GET", "/v1/responses/.*"), reply=swapped("OK", "KO")),
    **{
        f"{api}.{name}": Fault(asked(ask), request=forget("tools"))
        for api in ("responses", "messages")
        for name, ask in (("search", wire.SEARCH), ("predefined", wire.EDIT))
    },
    "responses.missing-response": Fault(
        posted(previous_response_id="resp_0123456789abcdef"),
        request=forget("previous_response_id"),
    ),
    "responses.conversation": Fault(
        posted(conversation=..., input=...),
        request=lambda body: (
            forget("conversation")(body) if wire.SECOND in json.dumps(body) else None
        ),
    ),
    "responses.conversation, items": Fault(
        at("GET", "/v1/conversations/.*"), reply=swapped("4711", "4712")
    ),
    "chat.decision": Fault(
        at("POST", "/v1/systemone"), reply=swapped('"blue": ?1.0', '"blue":0.5')
    ),
    "chat.decision, choice": Fault(
        at("POST", "/v1/systemone"), reply=swapped('"choice": ?"blue"', '"choice":"green"')
    ),
    "chat.ollama": Fault(at("POST", "/api/chat"), reply=swapped('"done": ?true', '"done":false')),
    "chat.ollama, text": Fault(at("POST", "/api/chat"), reply=swapped('"content":', '"text":')),
    "messages.count-tokens": Fault(
        at("POST", "/v1/messages/count_tokens"),
        reply=each(lambda document: document.update(input_tokens=document["input_tokens"] + 1)),
    ),
}
"""Of one API."""

ALL = {
    **{f"{api}.{name}": fault for api in APIS for name, fault in FAULTS.items()},
    **OF_ONE,
}


@pytest.fixture
def _times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a prompt that takes seconds."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "1")
    for name, seconds in TIMES.items():
        monkeypatch.setattr(wire, name, seconds)


@pytest.mark.usefixtures("_times")
def test_the_fake_server_passes_everything() -> None:
    with serving(engine=BookEngine(slow=True)) as url:
        found = outcomes(url)
    assert {name: each.problem for name, each in found.items() if each.state != "passed"} == {}


def test_each_check_has_a_fault() -> None:
    checks = {check.name.partition(".")[2] for check in wire.CHECKS}
    slow = {f"{api}.{name}" for api in APIS for name in ("waiting", "kept")}  # have tests below
    assert checks == {name.partition(",")[0] for name in ALL} | slow


@pytest.mark.parametrize("name", ALL)
def test_exactly_the_check_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FREED_WITHIN_SECONDS", 0.1)
    check = f"wire.{name.partition(',')[0]}"
    with serving(ALL[name]) as url:
        found = outcomes(url, check.rpartition(".")[0])
    fast = {f"wire.{api}.kept" for api in APIS}  # unsupported where a prompt takes no time
    bad = [each.name for each in found.values() if each.state != "passed" and each.name not in fast]
    assert bad == [check], found
    assert found[check].state == "failed" and found[check].problem and found[check].sent


@pytest.mark.usefixtures("_times")
def test_comments_are_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pings, a stream has comments with the progress of the prompt, and nothing else."""
    monkeypatch.setenv("VLLM_MLX_HARMONY_PING_SECONDS", "0")
    with serving(engine=BookEngine(slow=True)) as url:
        found = outcomes(url, "*.waiting", "*.kept")
    states = {name: each.state for name, each in found.items()}
    assert states == {
        **{f"wire.{api}.waiting": "failed" for api in APIS},
        **{f"wire.{api}.kept": "passed" for api in APIS},
    }
    assert "no event for " in found["wire.messages.waiting"].problem


@pytest.mark.usefixtures("_times")
def test_forgotten_cancelled_prompt_is_found() -> None:
    with serving(engine=BookEngine(slow=True, forgets=True)) as url:
        found = outcomes(url, "*.waiting", "*.kept")
    states = {name: each.state for name, each in found.items()}
    assert states == {
        **{f"wire.{api}.waiting": "passed" for api in APIS},
        **{f"wire.{api}.kept": "failed" for api in APIS},
    }
