"""Prediction of the rest of a header, from the headers that a turn may have."""

from __future__ import annotations

import pytest
from harmony_text import ids_of

from vllm_mlx_harmony.core.expected_header import ExpectedHeader
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.render import expected_headers
from vllm_mlx_harmony.core.turn import Tool, Turn, User

TOOLS = Names.of(Turn((User("Hi"),), tuple(map(Tool, ("read_file", "read_dir", "shell")))))
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
BEGIN = "<|start|>assistant<|channel|>"
PREAMBLE = "<|channel|>commentary<|message|>I<|end|>"
CALL = "<|channel|>commentary to=functions."

ROWS = [
    ("a turn begins with reasoning", TOOLS, "", "<|channel|>analysis<|message|>"),
    ("the channel", TOOLS, "<|channel|>", "analysis<|message|>"),
    ("reasoning", TOOLS, ANALYSIS[:-7], ""),
    ("the next message, of any kind", TOOLS, ANALYSIS, BEGIN),
    ("a final message", TOOLS, f"{ANALYSIS}{BEGIN}final", "<|message|>"),
    ("a call of any tool", TOOLS, f"{ANALYSIS}{BEGIN}commentary", " to=functions"),
    ("a call of one tool", TOOLS, f"{CALL}shell", " <|constrain|>json<|message|>"),
    ("two tools begin alike", TOOLS, f"{CALL}read", ""),
    ("a preamble", TOOLS, "<|channel|>commentary<|message|>I", ""),
    ("another way to write it", TOOLS, "<|channel|>commentary json", ""),
    (
        "once is no habit",
        TOOLS,
        f"<|channel|>commentary<|message|>I<|end|>{BEGIN}final",
        "<|message|>",
    ),
    ("no tools", Names(), f"{ANALYSIS}{BEGIN}", ""),
]


@pytest.mark.parametrize(
    ("names", "output", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_predicted_ids_complete_header(names: Names, output: str, expected: str) -> None:
    header = ExpectedHeader(expected_headers(names))
    for token in ids_of(output):
        header.consume(token)
    predicted = header.next(100)
    assert predicted == [*ids_of(expected)]
    assert [header.next(most) for most in range(4)] == [predicted[:most] for most in range(4)]


def test_unexpected_headers_stop_prediction() -> None:
    header = ExpectedHeader(expected_headers(TOOLS))
    for token in ids_of(PREAMBLE * 2):
        header.consume(token)
    assert header.next(9) == []
    for token in ids_of(BEGIN):
        header.consume(token)
    assert header.next(9) == []


def test_prefilled_answer_predicts_no_header() -> None:
    header = ExpectedHeader(expected_headers(TOOLS), answering=True)
    assert header.next(9) == []
    for token in ids_of("Hi<|end|>"):
        header.consume(token)
    assert header.next(9) == [*ids_of(BEGIN)]


def test_no_headers_predict_nothing() -> None:
    header = ExpectedHeader(())
    for token in ids_of(f"{ANALYSIS}{BEGIN}"):
        assert header.next(9) == []
        header.consume(token)
