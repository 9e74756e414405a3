"""The model's scripts under attack (short by default, long and with tools by prompt), and the
requests of each API."""

from __future__ import annotations

import json
import re
from typing import Any

from vllm_mlx_harmony.standin import Script

Body = dict[str, Any]

PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
WEBSOCKET = "websocket"
ENDPOINTS = (*PATHS, WEBSOCKET)

WORDS = " word" * 12
LONG_WORDS = 2_000
STEP_CALL = "<|channel|>commentary to=functions.step <|constrain|>json<|message|>"

SCRIPTS = [
    Script("Twelve words.<|end|>", f"<|channel|>final<|message|>{WORDS}<|return|>"),
    Script("At length.<|end|>", "<|channel|>final<|message|>" + " word" * LONG_WORDS),
    Script(
        re.compile(r"Work\.|step \d+ is done"),
        "<|channel|>analysis<|message|>Next.<|end|>"
        f'<|start|>assistant{STEP_CALL}{{"wanted":1}}<|call|>',
    ),
    Script("all is done", "<|channel|>final<|message|>Done.<|return|>"),
    Script("", "<|channel|>final<|message|>Hi.<|return|>"),
]
ANSWER = WORDS

_LIMITS = {"responses": "max_output_tokens", WEBSOCKET: "max_output_tokens"}


def request_body(endpoint: str, model: str, text: str, max_tokens: int = 64, **fields: Any) -> Body:
    """The body of a request for a streamed answer, or the message on a WebSocket."""
    message = {"role": "user", "content": text}
    if endpoint in PATHS and endpoint != "responses":
        body: Body = {
            "model": model,
            "messages": [message],
            "max_tokens": max_tokens,
            "stream": True,
        }
    else:
        body = {"model": model, "input": [message], "max_output_tokens": max_tokens, "store": False}
        body |= {"stream": True} if endpoint in PATHS else {"type": "response.create"}
    return {**body, **fields}


def end_of(endpoint: str, data: str) -> str:
    """``completed`` or ``failed`` if ``data`` is of an answer's last event, else ``""``."""
    if data == "[DONE]":
        return ""
    event = json.loads(data)
    kind = event.get("type", "")
    if kind == "error" or "error" in event or kind == "response.failed":
        return "failed"
    if endpoint == "chat":
        choices = event.get("choices") or [{}]
        return "completed" if choices[0].get("finish_reason") else ""
    last = ("response.completed", "response.incomplete", "message_stop")
    return "completed" if kind in last else ""


def text_of_event(endpoint: str, data: str) -> str:
    """The text of the answer in ``data`` of an event."""
    if data == "[DONE]":
        return ""
    event = json.loads(data)
    if endpoint == "chat":
        return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    if endpoint == "messages":
        return str(event.get("delta", {}).get("text", ""))
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
