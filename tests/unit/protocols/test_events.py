"""The wire format: the same JSON however it is written, and one event per frame."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_mlx_harmony.core.text_limits import (
    MAX_JSON_CHARACTERS,
    MAX_JSON_VALUES,
    is_quick_to_write,
)
from vllm_mlx_harmony.protocols.events import Event, encode, encode_in_chunks, frame, quote

LONG = 'é 🙂 " \\ \n \ud83d' * (MAX_JSON_CHARACTERS // 4)

DOCUMENTS: dict[str, Any] = {
    "little": {"a": [1, 2.5, None, True], "b": {}},
    "a long text": {"text": LONG},
    "a long name": {LONG: 1},
    "many numbers": {"tokens": (*range(MAX_JSON_VALUES), "x", None, 2.5)},
    "long, and all kinds": {
        "texts": [LONG, "", ("x", LONG)],
        "others": [1, -2.5, None, False, [], (), {}],
        "inner": {"one": {"two": [LONG]}},
    },
}


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_json_in_chunks_is_the_same(document: Any) -> None:
    assert is_quick_to_write(document) == (document is DOCUMENTS["little"])
    assert encode_in_chunks(document) == encode(document)
    assert "\n" not in encode(document)


def test_quoted_string_is_json() -> None:
    assert json.loads(quote(LONG)) == LONG


def test_one_event_is_one_frame() -> None:
    assert frame(Event('{"a":1}')) == 'data: {"a":1}\n\n'
    assert frame(Event("{}", "message_stop")) == "event: message_stop\ndata: {}\n\n"
