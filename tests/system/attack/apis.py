"""What the model says under attack: briefly, to every request; at length and in turns when asked.

And requests that ask for it, as each API spells them.
"""

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
WAYS = (*PATHS, WEBSOCKET)

WORDS = " word" * 12
LONG_WORDS = 2_000
CALLING = "<|channel|>commentary to=functions.step <|constrain|>json<|message|>"

SCRIPTS = [
    Script("Twelve words.<|end|>", f"<|channel|>final<|message|>{WORDS}<|return|>"),
    Script("At length.<|end|>", "<|channel|>final<|message|>" + " word" * LONG_WORDS),
    Script(
        re.compile(r"Work\.|step \d+ is done"),
        "<|channel|>analysis<|message|>Next.<|end|>"
        f'<|start|>assistant{CALLING}{{"wanted":1}}<|call|>',
    ),
    Script("all is done", "<|channel|>final<|message|>Done.<|return|>"),
    Script("", "<|channel|>final<|message|>Hi.<|return|>"),
]
ANSWER = WORDS

_LIMITS = {"responses": "max_output_tokens", WEBSOCKET: "max_output_tokens"}


def asking(way: str, model: str, text: str, most: int = 64, **fields: Any) -> Body:
    """A request for a streamed answer; over a WebSocket, the message."""
    message = {"role": "user", "content": text}
    if way in PATHS and way != "responses":
        body: Body = {"model": model, "messages": [message], "max_tokens": most, "stream": True}
    else:
        body = {"model": model, "input": [message], "max_output_tokens": most, "store": False}
        body |= {"stream": True} if way in PATHS else {"type": "response.create"}
    return {**body, **fields}


def ends(way: str, data: str) -> str:
    """``completed`` or ``failed`` for the data of the last event but ``[DONE]``, else ``""``."""
    if data == "[DONE]":
        return ""
    event = json.loads(data)
    kind = event.get("type", "")
    if kind == "error" or "error" in event or kind == "response.failed":
        return "failed"
    if way == "chat":
        choices = event.get("choices") or [{}]
        return "completed" if choices[0].get("finish_reason") else ""
    last = ("response.completed", "response.incomplete", "message_stop")
    return "completed" if kind in last else ""


def text_of_event(way: str, data: str) -> str:
    """The text of the answer in an event's data."""
    if data == "[DONE]":
        return ""
    event = json.loads(data)
    if way == "chat":
        return "".join(each["delta"].get("content") or "" for each in event.get("choices", ()))
    if way == "messages":
        return str(event.get("delta", {}).get("text", ""))
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
