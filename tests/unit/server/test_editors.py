"""Editors: requests with the fields in their sources, and answers parsed as they parse them.

The editors cannot be run here. Zed's requests and types are those of `crates/open_ai`
(completion.rs, open_ai.rs, responses.rs) in https://github.com/zed-industries/zed, those of VS
Code of `extensions/copilot/src/extension/byok` (openAIEndpoint.ts, customEndpointProvider.ts) and
`platform/thinking/common/thinkingUtils.ts` in https://github.com/microsoft/vscode. Of Xcode only
the endpoints are documented:
https://developer.apple.com/documentation/xcode/setting-up-coding-intelligence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("starlette")

from harmony_text import ids_of
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

pytestmark = pytest.mark.usefixtures("no_grammars")

THOUGHT = "I should read it."
ARGUMENTS = '{"path":"src/main.rs"}'
CALL = (
    f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.read_file <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)
ANSWER = "It prints hello."
SCRIPTS = {
    "What does it do?": CALL,
    "fn main": f"<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final"
    f"<|message|>{ANSWER}<|return|>",
}
SYSTEM = "You are an agent in an editor."
FILE = 'fn main() { println!("hello"); }'
FUNCTION: dict[str, Any] = {
    "name": "read_file",
    "description": "Reads a file of the project.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Where"}},
        "required": ["path"],
    },
}

Json = dict[str, Any]


@dataclass
class Turn:
    """What an editor reads from an answer."""

    thinking: str = ""
    text: str = ""
    calls: dict[Any, Json] = field(default_factory=dict)
    """``id``, ``name`` and ``arguments``, by the index or item of the call."""
    stop: str = ""
    usage: Json = field(default_factory=dict)

    @property
    def call(self) -> Json:
        (call,) = self.calls.values()
        return call

    def add_call(self, chunk: Json) -> None:
        call = self.calls.setdefault(chunk["index"], {"id": "", "name": "", "arguments": ""})
        call["id"] = chunk.get("id") or call["id"]
        function = chunk.get("function") or {}
        call["name"] = function.get("name") or call["name"]
        call["arguments"] += function.get("arguments") or ""


def data(stream: str) -> Iterator[Json]:
    """The documents of a stream: lines that begin with ``data:``, up to ``[DONE]``."""
    for line in stream.split("\n"):
        if line.startswith("data:"):
            text = line.removeprefix("data:").strip()
            if text != "[DONE]":
                yield json.loads(text)


# --- Zed


def zed_chat_body(turns: list[Turn]) -> Json:
    messages: list[Json] = [
        {"role": "system", "content": SYSTEM},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": f"The file src/main.rs:\n{'x' * 20}"},
                {"type": "text", "text": "What does it do?"},
            ],
        },
    ]
    for turn in turns:
        function = {"name": turn.call["name"], "arguments": turn.call["arguments"]}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": turn.call["id"], "type": "function", "function": function}],
                "reasoning_content": turn.thinking,  # `interleaved_reasoning`
            },
            {"role": "tool", "content": FILE, "tool_call_id": turn.call["id"]},
        ]
    return {
        "model": MODEL,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 1_000,
        "temperature": 1.0,
        "tools": [{"type": "function", "function": FUNCTION}],
        "reasoning_effort": "medium",
    }


def parse_zed_chat(stream: str) -> Turn:
    """As its types require: an event has ``choices``, a choice ``index``, usage three numbers."""
    turn = Turn()
    for event in data(stream):
        if usage := event.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            turn.usage = {name: int(usage[name]) for name in names}
        for choice in event["choices"][:1]:
            assert choice["index"] == 0
            delta = choice.get("delta") or {}
            assert delta.get("role") in (None, "user", "assistant", "system", "tool")
            turn.thinking += delta.get("reasoning_content") or ""
            turn.text += delta.get("content") or ""
            for chunk in delta.get("tool_calls") or ():
                turn.add_call(chunk)
            turn.stop = choice.get("finish_reason") or turn.stop
    return turn


def zed_responses_body(turns: list[Turn]) -> Json:
    def message(role: str, kind: str, text: str) -> Json:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    items = [message("system", "input_text", SYSTEM)]
    items.append(message("user", "input_text", "What does it do?"))
    for turn in turns:
        call, key = turn.call, {"call_id": turn.call["id"]}
        items.append({"type": "function_call", **key, **_without_id(call)})
        items.append({"type": "function_call_output", **key, "output": FILE})
    return {
        "model": MODEL,
        "input": items,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "stream": True,
        "max_output_tokens": 1_000,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"effort": "medium", "summary": "auto"},
    }


def _without_id(call: Json) -> Json:
    return {name: value for name, value in call.items() if name != "id"}


def parse_zed_responses(stream: str) -> Turn:
    """Reasoning comes from summaries; calls, by the id of their item, end with their arguments."""
    turn = Turn()
    for event in data(stream):
        kind, item = event["type"], event.get("item") or {}
        assert kind not in ("error", "response.error", "response.failed")
        if kind == "response.output_item.added":
            assert isinstance(event["output_index"], int)
            if item["type"] == "function_call":
                turn.calls[item["id"]] = {
                    "id": item["call_id"],
                    "name": item["name"],
                    "arguments": item["arguments"],
                }
        elif kind == "response.reasoning_summary_text.delta":
            turn.thinking += event["delta"]
        elif kind == "response.output_text.delta":
            turn.text += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            turn.calls[event["item_id"]]["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            turn.calls[event["item_id"]]["arguments"] = event["arguments"]
        elif kind == "response.completed":
            turn.usage = event["response"]["usage"]
            turn.stop = "tool_calls" if turn.calls else "stop"
    return turn


# --- VS Code


def vscode_body(turns: list[Turn]) -> Json:
    """A custom endpoint with ``thinking``: no temperature and no ``max_tokens``."""
    messages: list[Json] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What does it do?", "copilot_cache_control": _EPHEMERAL},
    ]
    for turn in turns:
        function = {"name": turn.call["name"], "arguments": turn.call["arguments"]}
        calls = [{"id": turn.call["id"], "type": "function", "function": function}]
        # Reasoning without an id is not sent back.
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": turn.call["id"], "content": FILE})
    return {
        "messages": messages,
        "model": MODEL,
        "top_p": 1,
        "n": 1,
        "stream": True,
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_completion_tokens": 1_000,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "high",
    }


_EPHEMERAL = {"type": "ephemeral"}


def parse_vscode(stream: str) -> Turn:
    """Reasoning from the first field that has some; usage must have three numbers."""
    turn = Turn()
    for event in data(stream):
        if usage := event.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert all(isinstance(usage[name], int) for name in names)
            turn.usage = usage
        for choice in event["choices"]:
            delta = choice["delta"]
            fields = ("cot_summary", "reasoning_text", "reasoning_content", "reasoning", "thinking")
            turn.thinking += next(filter(None, map(delta.get, fields)), "")
            turn.text += delta.get("content") or ""
            for chunk in delta.get("tool_calls") or ():
                turn.add_call(chunk)
            turn.stop = choice.get("finish_reason") or turn.stop
    return turn


@dataclass(frozen=True)
class Editor:
    path: str
    body: Callable[[list[Turn]], Json]
    """The request that follows these turns, each of which made a call."""
    parse: Callable[[str], Turn]


EDITORS = {
    "Zed": Editor("/v1/chat/completions", zed_chat_body, parse_zed_chat),
    "Zed, with Responses": Editor("/v1/responses", zed_responses_body, parse_zed_responses),
    "VS Code": Editor("/v1/chat/completions", vscode_body, parse_vscode),
}


@pytest.fixture(params=[1, 1000], ids=["id by id", "at once"])
def host(request: pytest.FixtureRequest) -> SingleEngineHost:
    return SingleEngineHost(ScriptedEngine(SCRIPTS, request.param))


@pytest.fixture
def wire(host: SingleEngineHost) -> Iterator[TestClient]:
    with TestClient(host.app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


@pytest.mark.parametrize("name", EDITORS)
def test_editor_reads_file(host: SingleEngineHost, wire: TestClient, name: str) -> None:
    """Thinking, the call and the answer arrive; the second prompt continues the first."""
    editor = EDITORS[name]

    def send(turns: list[Turn]) -> Turn:
        response = wire.post(editor.path, json=editor.body(turns))
        assert response.status_code == 200, response.text
        return editor.parse(response.text)

    first = send([])
    assert (first.thinking, first.text, first.stop) == (THOUGHT, "", "tool_calls")
    assert (first.call["name"], first.call["arguments"]) == ("read_file", ARGUMENTS)
    second = send([first])
    assert (second.thinking, second.text, second.calls, second.stop) == (
        "Easy.",
        ANSWER,
        {},
        "stop",
    )
    assert second.usage["total_tokens"] > first.usage["total_tokens"] > 0
    before, after = host.engine.prompts  # type: ignore[attr-defined]
    continued = (*before, *ids_of(CALL))
    assert after[: len(continued)] == continued
    assert host.leases == 0


@pytest.mark.parametrize("name", EDITORS)
def test_editor_without_key_gets_401(wire: TestClient, name: str) -> None:
    editor = EDITORS[name]
    headers = {"Authorization": "Bearer none"}
    response = wire.post(editor.path, json=editor.body([]), headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models?", "/v1/models/"])
def test_editors_list_models(wire: TestClient, path: str) -> None:
    """Xcode 26 has been seen to append the question mark
    (https://github.com/ai-forever/gpt2giga/pull/28); VS Code appends the path to a group's URL."""
    models = wire.get(path, headers={"Content-Type": "application/json"}).json()
    (model,) = models["data"]
    assert (models["object"], model["object"], model["id"]) == ("list", "model", MODEL)
    assert isinstance(model["created"], int) and isinstance(model["owned_by"], str)
