"""What would end a server, through the front end: answered where nothing strict was asked for,
refused where it was, and with nothing of the library in the words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")


from fakes import KEY, MODEL, Alone, ScriptedEngine
from grammar_texts import LARK, OBJECT, SCHEMAS, pattern
from starlette.testclient import TestClient

from vllm_mlx_harmony.server import grammar_checks
from vllm_mlx_harmony.server.app import application

FINAL = "<|channel|>final<|message|>Good day.<|return|>"
HELLO = [{"role": "user", "content": "Hello!"}]


pytestmark = pytest.mark.usefixtures("patient_checks")


@pytest.fixture
def client() -> Iterator[TestClient]:
    engine = ScriptedEngine({"Hello!": FINAL}, 1_000, context_length=None)
    host = Alone(engine, seconds=900.0)
    one = TestClient(application(host), base_url="http://localhost")
    one.headers["Authorization"] = f"Bearer {KEY}"
    yield one
    assert host.lent == 0


def chat(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    function = {"name": "f", "parameters": schema, "strict": strict}
    tools = [{"type": "function", "function": function}]
    return "/v1/chat/completions", {"messages": HELLO, "tools": tools}


def responses(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
    return "/v1/responses", {"input": "Hello!", "tools": [tool]}


def messages(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    tool = {"name": "f", "input_schema": schema, "strict": strict}
    return "/v1/messages", {"messages": HELLO, "tools": [tool], "max_tokens": 100}


def chat_format(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    asked = {"name": "f", "schema": schema, "strict": strict}
    response_format = {"type": "json_schema", "json_schema": asked}
    return "/v1/chat/completions", {"messages": HELLO, "response_format": response_format}


def responses_format(schema: Any, strict: bool) -> tuple[str, dict[str, Any]]:
    asked = {"type": "json_schema", "name": "f", "schema": schema, "strict": strict}
    return "/v1/responses", {"input": "Hello!", "text": {"format": asked}}


@pytest.mark.parametrize("api", [chat, responses, messages, chat_format, responses_format])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_would_end_the_server(client: TestClient, api: Any, name: str) -> None:
    for strict in (False, True):
        path, body = api(SCHEMAS[name], strict)
        answer = client.post(path, json={"model": MODEL, **body})
        assert answer.status_code == (400 if strict else 200), answer.text
        assert "panic" not in answer.text


@pytest.mark.parametrize("name", LARK)
def test_a_syntax_that_would_end_the_server(client: TestClient, name: str) -> None:
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


def test_only_strict_schemas_and_syntaxes_start_the_helper_process(client: TestClient) -> None:
    grammar_checks.POOL.close()
    schemas = [*SCHEMAS.values(), pattern(r"^(\s*\S+){1,300}$"), {"type": "object"}]
    for schema in schemas:
        for api in (chat, messages, responses_format):
            path, body = api(schema, False)
            answer = client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == 200, answer.text
    assert not grammar_checks.POOL.idle
    path, body = chat({**OBJECT, "properties": {}, "additionalProperties": False}, True)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
    assert grammar_checks.POOL.idle


def test_what_cannot_be_checked_now(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict: try again soon. Otherwise any arguments will do, this time."""

    def busy(*_: Any) -> None:
        raise grammar_checks.CheckUnavailable("timed out waiting for the checker")

    monkeypatch.setattr(grammar_checks.WorkerPool, "trial", busy)
    schema = {"type": "object", "properties": {"unseen": {"type": "integer"}}}
    strict_schema = {**schema, "required": ["unseen"], "additionalProperties": False}
    path, body = chat(strict_schema, True)
    answer = client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    path, body = chat(schema, False)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
    monkeypatch.undo()
    path, body = chat(strict_schema, True)
    assert client.post(path, json={"model": MODEL, **body}).status_code == 200
