"""Colours: what is painted as a message is what the parser reads as one."""

from __future__ import annotations

from itertools import groupby

import pytest
from harmony_text import ids_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sizes import examples

from vllm_mlx_harmony.cli.paint import CONTROL_STYLE, KIND_STYLES, colorize
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Text
from vllm_mlx_harmony.core.parse import Parser
from vllm_mlx_harmony.core.reasoning import ReasoningWatch

FRAGMENTS = [
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>",
    "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
    "<|start|>user<|message|>", "<|start|>functions.f to=assistant<|channel|>commentary<|message|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    "assistant", "analysis", "commentary", "final", " to=functions.f", "json", "user", "tool",
    "functions.f", "One two.", " three", '{"a":1}', " four" * 40, "\n", "é", "🧑🏽‍🚀",
]  # fmt: skip
RESERVED = 200_010
# Random ids, some in the middle of a character.
OUTPUTS = st.lists(
    st.sampled_from(FRAGMENTS).map(ids_of)
    | st.just([RESERVED])
    | st.just(vocab.encode("🧑🏽‍🚀")[:1])
    | st.just(vocab.encode("🧑🏽‍🚀")[1:2]),
    max_size=14,
).map(lambda parts: [token for part in parts for token in part])


def kinds_of(deltas: list[Delta]) -> list[Kind]:
    """The kinds of messages with a text; equal neighbours count once."""
    kinds: list[Kind] = []
    for delta in deltas:
        if isinstance(delta, Opened):
            kind, text = delta.kind, ""
        elif isinstance(delta, Text):
            text += delta.text
        elif isinstance(delta, Closed) and text.strip() and text != "{}":
            kinds.append(kind)
    return [kind for kind, _ in groupby(kinds)]


def painted_kinds(ids: list[int]) -> list[Kind]:
    text = colorize(ids)
    kinds = {style: kind for kind, style in KIND_STYLES.items()}
    spans = [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]
    shown = [kinds[style] for body, style in spans if body.strip() and style in kinds]
    return [kind for kind, _ in groupby(shown)]


@given(OUTPUTS)
@example(ids_of("final I forgot<|return|>"))
@example(ids_of("<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>"))
@example([*ids_of("<|channel|>final<|message|>a"), RESERVED, *ids_of("b")])
@example(ids_of("<|channel|>commentary?commentary?<|end|>"))
@example(ids_of("<|channel|>analysis<|message|>a<|end|>analysis<|message|>b<|end|>"))
@example(ids_of("to=functions.f<|end|>"))
@example([4103, 100, RESERVED, 100])
@settings(max_examples=examples(1_000), deadline=None)
def test_painter_and_reasoning_watch_agree_with_parser(ids: list[int]) -> None:
    whole = Parser()
    whole.feed(ids)
    turn = ids[: whole.done_at]
    parser, watch = Parser(), ReasoningWatch()
    deltas, closing = parser.feed(turn), parser.close("stop")
    assert painted_kinds(turn) == kinds_of([*deltas, *closing])
    for token in turn:
        watch.consume(token)
    finished = closing[-1]
    assert isinstance(finished, Finished)
    late = any(
        isinstance(delta, Opened) for delta in closing
    )  # text that turns out to be reasoning
    assert late or watch.tokens == finished.usage.reasoning_tokens


ROWS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a prompt": (
        "<|start|>system<|message|>A<|end|><|start|>user<|message|>B<|end|>"
        "<|start|>assistant<|channel|>final<|message|>C<|end|><|start|>assistant",
        [("A", "blue"), ("B", "green"), ("C", "bold")],
    ),
    "a call and its result": (
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
        "<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>D<|end|>",
        [("{}", "magenta"), ("D", "bright_blue")],
    ),
    "behind the end of a turn": (
        "<|channel|>final<|message|>A<|return|><|start|>user<|message|>B<|end|>",
        [("A", "bold"), ("B", "green")],
    ),
    "a forgotten header": ("<|channel|>final I forgot<|return|>", [("final I forgot", "bold")]),
    "a header given up, and nothing else": ("A word?<|end|>", [("A word?", "bold")]),
    "a header given up": (
        "A word?<|end|><|start|>assistant<|channel|>final<|message|>B",
        [("B", "bold")],
    ),
    "a reserved id in a body": (
        "<|channel|>final<|message|>A<|reserved_200010|>B",
        [("A", "bold"), ("B", "bold")],
    ),
}


@pytest.mark.parametrize(("text", "shown"), ROWS.values(), ids=ROWS)
def test_messages_have_the_colors_of_their_kinds(text: str, shown: list[tuple[str, str]]) -> None:
    painting = colorize(ids_of(text))
    spans = [(painting.plain[span.start : span.end], str(span.style)) for span in painting.spans]
    assert [span for span in spans if span[1] != CONTROL_STYLE] == shown
    assert painting.plain == text
