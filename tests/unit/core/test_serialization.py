"""Generated turns as bytes: they are read back unchanged, and damaged bytes are not read."""

from __future__ import annotations

import json
from zlib import crc32

import pytest
from harmony_text import ids_of

from vllm_mlx_harmony.core.replay import GeneratedTurn, intern_ids
from vllm_mlx_harmony.core.turn import Answer, Call, Preamble, Reasoning

TURNS = {
    "an answer": GeneratedTurn((Answer,), (intern_ids(ids_of("Hi. 🙂")),), "Hi. 🙂", ()),
    "a call": GeneratedTurn(
        (Reasoning, Preamble, Call),
        tuple(intern_ids(ids_of(text)) for text in ("Hm.", "Let me look.", '{"a":1}')),
        "Let me look.",
        (Call("call_1", "x", '{"a":1}'),),
    ),
    "half a character": GeneratedTurn((Answer,), ((1,),), "content \ud83d", ()),
    "nothing": GeneratedTurn((), (), "", ()),
    "with tools that the server ran": GeneratedTurn(
        (Answer,), (intern_ids(ids_of("It is 4.")),), "It is 4.", (), "digest"
    ),
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_turn_is_read_back_unchanged(turn: GeneratedTurn) -> None:
    assert GeneratedTurn.from_bytes(turn.to_bytes()) == turn


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_damaged_bytes_are_not_read(turn: GeneratedTurn) -> None:
    content = turn.to_bytes()
    for at in range(len(content)):
        assert GeneratedTurn.from_bytes(content[:at]) is None
        assert (
            GeneratedTurn.from_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            is None
        )
    assert GeneratedTurn.from_bytes(b"") is None


def with_checksum(header: bytes, rest: bytes = b"") -> bytes:
    body = len(header).to_bytes(4, "little") + header + rest
    return crc32(body).to_bytes(4, "little") + body


HEADER = {"kinds": [], "lengths": [], "content": "", "calls": []}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(with_checksum(b"{"), id="no JSON"),
        pytest.param(with_checksum(b"[]"), id="another JSON"),
        pytest.param(with_checksum(b"{}"), id="nothing in it"),
        pytest.param(with_checksum(json.dumps(HEADER).encode(), b"abc"), id="half an id"),
        pytest.param(
            with_checksum(json.dumps({**HEADER, "kinds": ["Other"]}).encode()), id="another kind"
        ),
        pytest.param(
            with_checksum(json.dumps({**HEADER, "calls": [["x"]]}).encode()), id="half a call"
        ),
    ],
)
def test_entry_of_another_version_is_not_read(content: bytes) -> None:
    assert GeneratedTurn.from_bytes(content) is None
