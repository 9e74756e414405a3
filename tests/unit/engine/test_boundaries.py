"""Where prompts are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rows import ids

pytest.importorskip("mlx_lm")

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.prefix_cache import boundaries

LONG = " word" * 40
SYSTEM = f"<|start|>system<|message|>You are ChatGPT.{LONG}<|end|>"
DEVELOPER = f"<|start|>developer<|message|># Instructions{LONG}<|end|>"
ASKED = f"<|start|>user<|message|>Weather?{LONG}<|end|>"
CALLED = "<|start|>assistant<|channel|>commentary to=functions.x<|message|>{}<|call|>"
RESULT = f"<|start|>functions.x to=assistant<|channel|>commentary<|message|>{LONG}<|end|>"
ANSWERED = f"<|start|>assistant<|channel|>final<|message|>Rain.{LONG}<|end|>"
OPENING = "<|start|>assistant"


HI = "<|start|>user<|message|>Hi<|end|>"


def cuts(*parts: str, after: int = 0) -> list[str]:
    """The pieces as text, instead of where they end."""
    prompt = ids("".join(parts))
    places = [after, *boundaries(prompt, after)]
    assert places == sorted(set(places))
    decode = vocab.encoding().decode
    return [decode(prompt[start:end]) for start, end in pairwise(places)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((ASKED, OPENING), [ASKED + "<|start|>"]),
        ((SYSTEM, ASKED, OPENING), [SYSTEM, ASKED + "<|start|>"]),
        ((SYSTEM, DEVELOPER, ASKED, OPENING), [SYSTEM + DEVELOPER, ASKED + "<|start|>"]),
        (
            (SYSTEM, ASKED, ANSWERED, ASKED, OPENING),
            [SYSTEM, ASKED + ANSWERED, ASKED + "<|start|>"],
        ),
        (
            (SYSTEM, ASKED, CALLED, RESULT, OPENING),
            [SYSTEM, ASKED + CALLED + RESULT + "<|start|>"],
        ),
        # A later developer message belongs to the conversation.
        ((SYSTEM, ASKED, DEVELOPER, OPENING), [SYSTEM, ASKED + DEVELOPER + "<|start|>"]),
        # No piece too short to be worth it.
        (("<|start|>system<|message|>Hi<|end|>", ASKED, OPENING), None),
        (("<|start|>system<|message|>Hi<|end|>", HI, OPENING), None),
        ((SYSTEM, ASKED, ANSWERED, HI, OPENING), [SYSTEM, ASKED + ANSWERED + HI + "<|start|>"]),
        # What many conversations share is, however short the rest.
        ((SYSTEM, HI, OPENING), [SYSTEM, HI + "<|start|>"]),
        ((SYSTEM, OPENING), [SYSTEM, "<|start|>"]),
        ((OPENING,), ["<|start|>"]),
    ],
)
def test_prompts_are_cut_where_another_may_leave_them(
    parts: tuple[str, ...], expected: list[str] | None
) -> None:
    whole = "".join(parts).removesuffix("assistant")
    assert cuts(*parts) == (expected or [whole])


def test_only_what_follows_the_known_is_cut() -> None:
    known = len(ids(SYSTEM + ASKED + CALLED))
    pieces = cuts(SYSTEM, ASKED, CALLED, RESULT, OPENING, after=known)
    assert pieces == [RESULT + "<|start|>"]
    prompt = ids(SYSTEM + ASKED + OPENING)
    assert boundaries(prompt, after=len(prompt) - 1) == []
    assert boundaries([vocab.START], after=0) == []
