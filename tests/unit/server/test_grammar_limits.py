"""Schemas and syntaxes that would kill a server, through the front end: strict ones are refused,
others ignored, and no error has a message of the library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from grammar_texts import LARK, OBJECT, SCHEMAS, pattern
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.server import grammar_checks
from vllm_mlx_harmony.server.app import application

FINAL = "<|channel|>final<|message|>Good day.<|return|>"
HELLO = [{"role": "user", "content": "Hello!"}]

pytestmark = pytest.mark.usefixtures("patient_checks")


@pytest.fixture
def client() -> Iterator[TestClient]:
    engine = ScriptedEngine({"Hello!": FINAL}, 1_000, context_length=None)
    host = SingleEngineHost(engine, seconds=900.0)
    test_client = TestClient(application(host), base_url="http://localhost")
    test_client.headers["Authorization"] = f"Bearer {KEY}"
    yield test_client
    assert host.lent == 0


def request(api: str, schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request with a tool, or with a response format."""
    chat, responses = "/v1/chat/completions", "/v1/responses"
    response_format = {"name": "f", "schema": schema, "strict": strict}
    tool = {"name": "f", "parameters": schema, "strict": strict}
    claude = {"name": "f", "input_schema": schema, "strict": strict}
    kind = {"type": "json_schema"}
    return {
        "chat": (chat, {"messages": HELLO, "tools": [{"type": "function", "function": tool}]}),
        "responses": (responses, {"input": "Hello!", "tools": [{"type": "function", **tool}]}),
        "messages": ("/v1/messages", {"messages": HELLO, "tools": [claude], "max_tokens": 100}),
        "format": (
            chat,
            {"messages": HELLO, "response_format": {**kind, "json_schema": response_format}},
        ),
        "text": (responses, {"input": "Hello!", "text": {"format": {**kind, **response_format}}}),
    }[api]


APIS = ("chat", "responses", "messages", "format", "text")


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_dangerous_schema_is_refused(client: TestClient, api: str, name: str) -> None:
    for strict in (False, True):
        path, body = request(api, SCHEMAS[name], strict)
        answer = client.post(path, json={"model": MODEL, **body})
        assert answer.status_code == (400 if strict else 200), answer.text
        assert "panic" not in answer.text


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("name", LARK)
def test_dangerous_syntax_is_refused(client: TestClient, name: str) -> None:
    syntax = {"type": "grammar", "syntax": "lark", "definition": LARK[name]}
    nested = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK[name]}}
    by_chat = {"type": "custom", "custom": {"name": "f", "format": nested}}
    by_responses = {"type": "custom", "name": "f", "format": syntax}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HELLO, "tools": [by_chat]}),
        ("/v1/responses", {"input": "Hello!", "tools": [by_responses]}),
        ("/v1/chat/completions", {"messages": HELLO, "guided_grammar": LARK[name]}),
    ]
    for path, body in requests:
        answer = client.post(path, json={"model": MODEL, **body})
        assert answer.status_code in (200, 400), answer.text
        assert "panic" not in answer.text
        assert client.post(path, json={"model": MODEL, **body}).status_code == answer.status_code


def test_only_strict_schemas_and_syntaxes_start_process(client: TestClient) -> None:
    grammar_checks.POOL.close()
    schemas = [*SCHEMAS.values(), pattern(r"^(\s*\S+){1,300}$"), {"type": "object"}]
    for schema in schemas:
        for api in ("chat", "messages", "text"):
            path, body = request(api, schema, False)
            answer = client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
    assert not grammar_checks.POOL.idle
    path, body = request("chat", {**OBJECT, "properties": {}, "additionalProperties": False}, True)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
    assert grammar_checks.POOL.idle


def test_grammar_is_omitted_while_process_is_busy(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strict request is to be sent again; for others, any arguments will do this time."""

    def busy(*_: Any) -> None:
        raise grammar_checks.CheckUnavailable("timed out waiting for the checker")

    monkeypatch.setattr(grammar_checks.WorkerPool, "trial", busy)
    schema = {"type": "object", "properties": {"unseen": {"type": "integer"}}}
    strict_schema = {**schema, "required": ["unseen"], "additionalProperties": False}
    path, body = request("chat", strict_schema, True)
    answer = client.post(path, json={"model": MODEL, **body})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    path, body = request("chat", schema, False)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
    monkeypatch.undo()
    path, body = request("chat", strict_schema, True)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
