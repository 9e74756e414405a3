"""Checks any event stream of the Messages API: order, indexes, types.

Knows the protocol as Anthropic documents it, and reads only names and data of events, so that it
works with an emitter or a socket. It does not know what was generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
    "server_tool_use": {"input": {}},
}
"""The initial fields of each kind of block. Results of the server's tools are complete at once."""

DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def prompt_tokens(usage: dict[str, Any]) -> int:
    """The tokens of the prompt, as clients count them: the sum of all three kinds."""
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    counts = [usage.get(kind) or 0 for kind in kinds]
    assert min(counts) >= 0
    return sum(counts)


class Checker:
    """Takes a stream's events one by one, and fails on the first invalid one.

    ``message`` is the message, assembled from the events alone.
    """

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._stopped = False
        self._over = False

    def take(self, name: str, document: dict[str, Any]) -> None:
        """The next event: its name and its data."""
        assert not self._over, f"{name} behind the end"
        assert document["type"] == name
        if name in ("ping", "error", "message_start"):
            getattr(self, f"_{name}")(document)
            return
        assert self.message, f"{name} before message_start"
        assert not self._stopped or name == "message_stop", f"{name} behind message_delta"
        getattr(self, f"_{name}")(document)

    def close(self) -> None:
        """The stream has ended."""
        assert self._over, "the stream ends without message_stop or error"

    def _ping(self, document: dict[str, Any]) -> None:
        assert document == {"type": "ping"}

    def _error(self, document: dict[str, Any]) -> None:
        assert set(document) == {"type", "error", "request_id"}
        assert set(document["error"]) == {"type", "message"}
        self.error = document["error"]
        self._over = True

    def _message_start(self, document: dict[str, Any]) -> None:
        assert not self.message, "a second message_start"
        message = document["message"]
        assert message["content"] == []
        assert message["stop_reason"] is None
        assert message["usage"]["output_tokens"] == 0
        assert re.fullmatch(r"msg_[0-9A-Za-z]+", message["id"])
        self.message = {**message, "content": []}

    def _content_block_start(self, document: dict[str, Any]) -> None:
        assert self._open is None, "a block inside a block"
        assert document["index"] == len(self.message["content"])
        block = document["content_block"]
        if not block["type"].endswith("_tool_result"):
            assert EMPTY[block["type"]].items() <= block.items()
        if block["type"] == "tool_use":
            assert re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"])
            other_ids = [other_block.get("id") for other_block in self.message["content"]]
            assert block["id"] not in other_ids
        self._open, self._text = dict(block), ""

    def _content_block_delta(self, document: dict[str, Any]) -> None:
        assert self._open is not None, "a delta outside of a block"
        assert document["index"] == len(self.message["content"])
        assert not self._open.get("signature"), "a delta behind the signature"
        delta, kind = document["delta"], self._open["type"]
        if delta["type"] == "signature_delta":
            assert kind == "thinking"
            self._open["signature"] = delta["signature"]
            return
        expected, field = DELTAS[kind]
        assert set(delta) == {"type", field}
        assert delta["type"] == expected
        assert delta[field] != ""
        self._text += delta[field]

    def _content_block_stop(self, document: dict[str, Any]) -> None:
        block = self._open
        assert block is not None, "a stop without a start"
        assert document == {"type": "content_block_stop", "index": len(self.message["content"])}
        if block["type"].endswith("_tool_result") or block["type"] == "server_tool_use":
            assert not self._text
        elif block["type"] == "tool_use":
            block["input"] = json.loads(self._text) if self._text else {}
            assert isinstance(block["input"], dict)
        else:
            block[block["type"]] = self._text
        if block["type"] == "thinking":
            assert block["signature"], "thinking without a signature"
        self.message["content"].append(block)
        self._open = None

    def _message_delta(self, document: dict[str, Any]) -> None:
        assert self._open is None, "message_delta inside a block"
        delta, usage = document["delta"], document["usage"]
        reason = delta["stop_reason"]
        assert reason in ("end_turn", "tool_use", "max_tokens", "stop_sequence")
        assert (reason == "stop_sequence") == (delta["stop_sequence"] is not None)
        if reason == "tool_use":
            assert "tool_use" in {block["type"] for block in self.message["content"]}
        assert prompt_tokens(usage) == prompt_tokens(self.message["usage"])
        self.message |= {**delta, "usage": {**self.message["usage"], **usage}}
        self._stopped = True

    def _message_stop(self, document: dict[str, Any]) -> None:
        assert document == {"type": "message_stop"}
        assert self._stopped, "message_stop before message_delta"
        self._over = True


def check_stream(events: Iterable[tuple[str, str]]) -> Checker:
    """The checker after a whole stream of (name, data) events, all of which are valid."""
    checker = Checker()
    for name, data in events:
        checker.take(name, json.loads(data))
    checker.close()
    return checker
