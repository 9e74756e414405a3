"""Responses' other endpoints: their documents, and their errors."""

from __future__ import annotations

import pytest

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.core.turn import Defaults, Stamp, User
from vllm_mlx_harmony.protocols.responses import error_body, read
from vllm_mlx_harmony.protocols.responses.resource import deleted, input_tokens, not_found

STAMP = Stamp("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")


class Reverse:
    def seal(self, text: str) -> str:
        return text[::-1]

    def unseal(self, sealed: str) -> str | None:
        return sealed[::-1]


@pytest.mark.parametrize(
    ("param", "message", "code"),
    [
        (None, "response with id 'resp_1' not found", "not_found"),
        (
            "previous_response_id",
            "previous response with id 'resp_1' not found",
            "previous_response_not_found",
        ),
    ],
)
def test_not_found(param: str | None, message: str, code: str) -> None:
    error = not_found("resp_1", param=param)
    assert error.status == 404
    assert error_body(error) == {
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    }


def test_small_documents() -> None:
    assert deleted("resp_1") == {"id": "resp_1", "object": "response", "deleted": True}
    assert input_tokens(7) == {"object": "response.input_tokens", "input_tokens": 7}


def test_a_compacted_conversation_goes_on() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"role": "user", "content": "More"},
    ]
    asked = read({"model": "m", "input": items}, Defaults(), Reverse())
    compacted = asked.compaction("They greeted.", Reverse(), STAMP, Usage(9, 2, 1, 4))
    output = compacted.pop("output")
    assert compacted == {
        "id": f"resp_{STAMP.key}",
        "object": "response.compaction",
        "created_at": STAMP.created,
        "usage": {
            "input_tokens": 9,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 11,
        },
    }
    again = read({"model": "m", "input": output}, Defaults(), Reverse())
    assert again.turn.messages == (User("Hi"), User("More"), User("They greeted."))
