"""Requests with schemas and syntaxes that would kill a server: strict ones must be refused, others
ignored, and no error may have a message of the library."""

from __future__ import annotations

from typing import Any

from grammar_texts import LARK, SCHEMAS
from scripted_host import MODEL
from starlette.testclient import TestClient

FINAL = "<|channel|>final<|message|>Good day.<|return|>"
HELLO = [{"role": "user", "content": "Hello!"}]


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


def check_schema(client: TestClient, api: str, name: str) -> None:
    for strict in (False, True):
        path, body = request(api, SCHEMAS[name], strict)
        answer = client.post(path, json={"model": MODEL, **body})
        assert answer.status_code == (400 if strict else 200), answer.text
        assert "panic" not in answer.text


def check_syntax(client: TestClient, name: str) -> None:
    syntax = {"type": "grammar", "syntax": "lark", "definition": LARK[name]}
    nested = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK[name]}}
    by_chat = {"type": "custom", "custom": {"name": "f", "format": nested}}
    by_responses = {"type": "custom", "name": "f", "format": syntax}
    # A tool whose format cannot be enforced stays without it; an answer cannot.
    requests: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", {"messages": HELLO, "tools": [by_chat]}, 200),
        ("/v1/responses", {"input": "Hello!", "tools": [by_responses]}, 200),
        ("/v1/chat/completions", {"messages": HELLO, "guided_grammar": LARK[name]}, 400),
    ]
    for path, body, status in requests:
        for _ in range(2):
            answer = client.post(path, json={"model": MODEL, **body})
            assert answer.status_code == status, answer.text
            assert "panic" not in answer.text
