"""Validation of documents against the SDKs' types, and the errors it reports."""

from __future__ import annotations

import re
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest

from vllm_mlx_harmony.verify.apis import validate
from vllm_mlx_harmony.verify.values import Failed

RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "m",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 1,
        "output_tokens": 1,
        "total_tokens": 2,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}
DELTA = {
    "type": "response.output_text.delta",
    "sequence_number": 1,
    "item_id": "msg_1",
    "output_index": 0,
    "content_index": 0,
    "delta": "Hello.",
    "logprobs": [],
}
ERROR = "Input should be a valid string at"

CHANGES: dict[str, tuple[str, dict[str, Any], tuple[Any, ...], object, str]] = {
    "right": ("Response", RESPONSE, ("id",), "resp_2", ""),
    "a field that servers of older SDKs lack": (
        *("Response", RESPONSE, ("usage", "input_tokens_details", "cache_write_tokens"), None, ""),
    ),
    "a field of the same object": (
        *("Response", RESPONSE, ("usage", "input_tokens_details", "cached_tokens"), None),
        "Field required at usage.input_tokens_details.cached_tokens",
    ),
    "in a member of a union within another": (
        *("Response", RESPONSE, ("output", 0, "content", 0, "text"), 3),
        f"{ERROR} output.0.ResponseOutputMessage.content.0.ResponseOutputText.text",
    ),
    "in a union without types": (
        *("Response", RESPONSE, ("tool_choice",), "some"),
        "Input should be 'none', 'auto' or 'required' at tool_choice",
    ),
    "an item of no type": ("Response", RESPONSE, ("output", 0, "type"), "?", "unknown type '?'"),
    "an event": (
        *("ResponseStreamEvent", DELTA, ("delta",), 3),
        f"{ERROR} ResponseTextDeltaEvent.delta",
    ),
    "an event of no type": ("ResponseStreamEvent", DELTA, ("type",), "x.y", "unknown type 'x.y'"),
    "an event without a type": ("ResponseStreamEvent", DELTA, ("type",), None, "Field required at"),
}
"""Type, document, the path that is changed, its new value (``None``: removed), and the error."""


@pytest.mark.parametrize("name", CHANGES)
def test_error_names_matching_union_member(name: str) -> None:
    kind, document, (*path, last), value, problem = CHANGES[name]
    document = changed = deepcopy(document)
    for step in path:
        changed = changed[step]
    if value is None:
        del changed[last]
    else:
        changed[last] = value
    with pytest.raises(Failed, match=re.escape(problem)) if problem else nullcontext():
        validate(kind, document)
