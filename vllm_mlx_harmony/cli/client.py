"""A small streaming client of the Chat Completions API: what any client sees, nothing added.

Knows HTTP, server-sent events and the fields of a chunk. Refuses to know Harmony.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any

from vllm_mlx_harmony.cli.errors import UsageError

ADDRESS = "127.0.0.1"
PATIENCE = 60.0
"""Seconds of silence after which a server is given up."""


@dataclass(slots=True)
class Part:
    """One field of the answer with its deltas, as they came. ``name`` and ``id`` are a call's."""

    key: str
    name: str = ""
    id: str = ""
    deltas: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The deltas joined."""
        return "".join(self.deltas)


@dataclass(slots=True)
class Completion:
    """A streamed answer, put together. Parts are in the order in which they began."""

    parts: list[Part] = field(default_factory=list)
    chunks: int = 0
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def text(self, key: str) -> str:
        """All text of a field."""
        return "".join(part.text for part in self.parts if part.key == key)

    @property
    def calls(self) -> list[Part]:
        """The calls, in order."""
        return [part for part in self.parts if part.key == "tool_calls"]

    def message(self) -> dict[str, Any]:
        """The assistant's message for the next request."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.text}}
            for c in self.calls
        ]
        return {
            "role": "assistant",
            "content": self.text("content"),
            "reasoning_content": self.text("reasoning"),
            **({"tool_calls": calls} if calls else {}),
        }


def ask(port: int, body: dict[str, Any]) -> Completion:
    """The streamed answer to a Chat Completions request. Raises ``UsageError`` if there is none."""
    answer = Completion()
    for chunk in chunks(port, {**body, "stream": True, "stream_options": {"include_usage": True}}):
        take_in(answer, chunk)
    return answer


def chunks(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer, one by one. Raises ``UsageError``."""
    connection = HTTPConnection(ADDRESS, port, timeout=PATIENCE)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:  # noqa: PLR2004 - the number is its name
            raise UsageError(f"the server answered {response.status}: {response.read().decode()}")
        yield from events(response)
    except (OSError, HTTPException) as error:
        raise UsageError(f"the server broke off: {error}") from error
    finally:
        connection.close()


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The documents in a stream of server-sent events, up to ``[DONE]``.

    Raises ``UsageError`` for an error event, and when the stream ends without a word.
    """
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            return
        document: dict[str, Any] = json.loads(data)
        if "error" in document:
            raise UsageError(f"the server failed: {document['error']['message']}")
        yield document
    raise UsageError("the server broke off: the stream ended without [DONE]")


def take_in(answer: Completion, chunk: dict[str, Any]) -> None:
    """Adds a chunk to the answer."""
    answer.chunks += 1
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
    for choice in chunk["choices"]:
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        for name in ("reasoning", "content"):
            if text := choice["delta"].get(name):
                _part(answer, name).deltas.append(text)
        for call in choice["delta"].get("tool_calls") or ():
            _take_in_call(answer, call)


def _part(answer: Completion, name: str) -> Part:
    if not answer.parts or answer.parts[-1].key != name:
        answer.parts.append(Part(name))
    return answer.parts[-1]


def _take_in_call(answer: Completion, call: dict[str, Any]) -> None:
    if call["index"] == len(answer.calls):
        answer.parts.append(Part("tool_calls", call["function"]["name"], call["id"]))
    if arguments := call["function"].get("arguments"):
        answer.calls[call["index"]].deltas.append(arguments)
