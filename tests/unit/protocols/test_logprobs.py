"""Log probabilities in the wire format of both of OpenAI's APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ciphers import Reverse

from vllm_mlx_harmony.core.deltas import (
    Closed,
    Delta,
    Finished,
    Kind,
    Opened,
    Started,
    Text,
    TextLogprob,
)
from vllm_mlx_harmony.core.turn import Defaults, ResponseInfo
from vllm_mlx_harmony.protocols import chat, responses
from vllm_mlx_harmony.protocols.events import DONE
from vllm_mlx_harmony.protocols.openai_answer import entries

INFO = ResponseInfo("0123456789abcdef0123456789abcdef", 1_754_352_000, "gpt-oss-20b")
WORD = TextLogprob(" word", b" word", -1.0)

ROWS: dict[str, tuple[TextLogprob, dict[str, Any]]] = {
    "a word": (
        WORD,
        {"token": " word", "logprob": -1.0, "bytes": [*b" word"], "top_logprobs": []},
    ),
    "part of a character": (
        TextLogprob("\ufffd", b"\xf0", -9999.0),
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xF0], "top_logprobs": []},
    ),
    "with the likeliest": (
        TextLogprob(" word", b" word", -1.0, (TextLogprob("<|return|>", None, -0.5), WORD)),
        {
            "token": " word",
            "logprob": -1.0,
            "bytes": [*b" word"],
            "top_logprobs": [
                {"token": "<|return|>", "logprob": -0.5, "bytes": None},
                {"token": " word", "logprob": -1.0, "bytes": [*b" word"]},
            ],
        },
    ),
}


@pytest.mark.parametrize(("logprob", "entry"), ROWS.values(), ids=ROWS)
def test_logprob_is_written_as_entry(logprob: TextLogprob, entry: dict[str, Any]) -> None:
    assert entries([logprob]) == [entry]


def test_missing_bytes_are_an_empty_list_in_responses() -> None:
    (entry,) = entries([TextLogprob("<|end|>", None, -1.0)], no_bytes=[])
    assert entry["bytes"] == []


ONE, TWO = (TextLogprob(" word", b" word", -1.0 * at, (WORD,)) for at in (1, 2))
DELTAS: list[Delta] = [
    Started(3),
    Opened(0, Kind.REASONING),
    Text("Hm."),
    Closed(),
    Opened(1, Kind.PREAMBLE),
    Text(" word", (ONE,)),
    Closed(),
    Opened(2, Kind.ANSWER),
    Text(" word word", (ONE, TWO)),
    Text("!"),
    Closed(),
    Finished("stop"),
]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}


def test_chat_sends_logprobs() -> None:
    emitter = chat.read({**CHAT, "stream": True}, Defaults()).emitter(INFO)
    events = [event for delta in DELTAS for event in emitter.feed(delta)]
    choices = [json.loads(event.data)["choices"][0] for event in events if event != DONE]
    sent = [
        (chunk_choice["delta"].get("content"), chunk_choice["logprobs"]) for chunk_choice in choices
    ]
    assert sent == [
        (None, None),  # the role
        (None, None),
        (" word", {"content": entries([ONE]), "refusal": None}),
        ("\n word word", {"content": entries([ONE, TWO]), "refusal": None}),
        ("!", None),
        (None, None),
    ]
    collecting = chat.read(CHAT, Defaults()).emitter(INFO)
    assert not [event for delta in DELTAS for event in collecting.feed(delta)]
    (choice,) = collecting.result()["choices"]
    assert choice["logprobs"] == {"content": entries([ONE, ONE, TWO]), "refusal": None}


@pytest.mark.parametrize("stream", [False, True])
def test_responses_sends_logprobs(stream: bool) -> None:
    body = {"model": "m", "input": "Hi", "top_logprobs": 1, "stream": stream}
    emitter = responses.read(body, Defaults(), Reverse()).emitter(INFO)
    events = [event for delta in DELTAS for event in emitter.feed(delta)]
    sent = [json.loads(event.data) for event in events if event != DONE]
    assert bool(sent) == stream
    if stream:
        deltas = [
            (event["delta"], event["logprobs"])
            for event in sent
            if "output_text.delta" in event["type"]
        ]
        assert deltas == [
            (" word", entries([ONE], [])),
            (" word word", entries([ONE, TWO], [])),
            ("!", []),
        ]
        done_logprobs = [event["logprobs"] for event in sent if "output_text.done" in event["type"]]
        assert done_logprobs == [entries([ONE], []), entries([ONE, TWO], [])]
    parts = [item["content"][0] for item in emitter.result()["output"]]
    assert [part.get("logprobs") for part in parts] == [
        None,
        entries([ONE], []),
        entries([ONE, TWO], []),
    ]
