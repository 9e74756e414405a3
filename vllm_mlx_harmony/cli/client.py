"""A small HTTP client, for the demos."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError

from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.process import LOCAL, send

READ_TIMEOUT = 120.0
"""Timeout of a read in seconds."""


@dataclass(slots=True)
class Part:
    """One field of the answer and its deltas. Tool calls have a ``name`` and an ``id``."""

    key: str
    name: str = ""
    id: str = ""
    deltas: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.deltas)


@dataclass(slots=True)
class Completion:
    """A streamed answer. Parts are in the order in which they began."""

    parts: list[Part] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.key == "tool_calls"]

    def message(self) -> dict[str, object]:
        """The assistant's message for the next request."""
        reasoning, content = (
            "".join(part.text for part in self.parts if part.key == key)
            for key in ("reasoning", "content")
        )
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in self.calls
        ]
        return {
            "role": "assistant",
            "content": content,
            "reasoning_content": reasoning,
            **({"tool_calls": calls} if calls else {}),
        }

    def add(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            for name in ("reasoning", "content"):
                if text := choice["delta"].get(name):
                    if not self.parts or self.parts[-1].key != name:
                        self.parts.append(Part(name))
                    self.parts[-1].deltas.append(text)
            for call in choice["delta"].get("tool_calls") or ():
                if call["index"] == len(self.calls):
                    self.parts.append(Part("tool_calls", call["function"]["name"], call["id"]))
                if arguments := call["function"].get("arguments"):
                    self.calls[call["index"]].deltas.append(arguments)


def ask(port: int, body: dict[str, object]) -> Completion:
    """Sends a Chat Completions request, streamed. Raises ``UsageError`` if it fails."""
    answer = Completion()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with post(port, "/v1/chat/completions", streamed) as response:
        for chunk in events(response):
            answer.add(chunk)
    return answer


@contextmanager
def post(port: int, path: str, body: dict[str, object]) -> Iterator[HTTPResponse]:
    """The response to a request. Raises ``UsageError`` if it fails."""
    try:
        with send(f"{LOCAL}:{port}{path}", body, timeout=READ_TIMEOUT) as response:
            yield response
    except HTTPError as error:
        raise UsageError(f"the server answered {error.code}: {error.read().decode()}") from error
    except (OSError, HTTPException) as error:
        raise UsageError(f"the connection to the server failed: {error}") from error


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The documents in a stream of server-sent events, up to ``[DONE]``.

    Raises ``UsageError`` for an error event and for an incomplete stream.
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
    raise UsageError("the stream ended without [DONE]")
