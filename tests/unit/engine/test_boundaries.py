"""Where prompts are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from harmony_text import ids_of

pytest.importorskip("mlx_lm")

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.prefix_cache import boundaries

LONG = " word" * 40
SYSTEM = f"<|start|>system<|message|>You are ChatGPT.{LONG}<|end|>"
DEVELOPER = f"<|start|>developer<|message|># Instructions{LONG}<|end|>"
QUESTION = f"<|start|>user<|message|>Weather?{LONG}<|end|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.x<|message|>{}<|call|>"
RESULT = f"<|start|>functions.x to=assistant<|channel|>commentary<|message|>{LONG}<|end|>"
ANSWER = f"<|start|>assistant<|channel|>final<|message|>Rain.{LONG}<|end|>"
OPENING = "<|start|>assistant"


HI = "<|start|>user<|message|>Hi<|end|>"


def cuts(*parts: str, after: int = 0) -> list[str]:
    """The text of each piece."""
    prompt = ids_of("".join(parts))
    places = [after, *boundaries(prompt, after)]
    assert places == sorted(set(places))
    decode = vocab.encoding().decode
    return [decode(prompt[start:end]) for start, end in pairwise(places)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((QUESTION, OPENING), [QUESTION + "<|start|>"]),
        ((SYSTEM, QUESTION, OPENING), [SYSTEM, QUESTION + "<|start|>"]),
        ((SYSTEM, DEVELOPER, QUESTION, OPENING), [SYSTEM + DEVELOPER, QUESTION + "<|start|>"]),
        (
            (SYSTEM, QUESTION, ANSWER, QUESTION, OPENING),
            [SYSTEM, QUESTION + ANSWER, QUESTION + "<|start|>"],
        ),
        (
            (SYSTEM, QUESTION, CALL, RESULT, OPENING),
            [SYSTEM, QUESTION + CALL + RESULT + "<|start|>"],
        ),
        # A later developer message belongs to the conversation.
        ((SYSTEM, QUESTION, DEVELOPER, OPENING), [SYSTEM, QUESTION + DEVELOPER + "<|start|>"]),
        # A piece too short to be worth storing is not cut off.
        (("<|start|>system<|message|>Hi<|end|>", QUESTION, OPENING), None),
        (("<|start|>system<|message|>Hi<|end|>", HI, OPENING), None),
        ((SYSTEM, QUESTION, ANSWER, HI, OPENING), [SYSTEM, QUESTION + ANSWER + HI + "<|start|>"]),
        # A prefix shared by many conversations is, however short the rest.
        ((SYSTEM, HI, OPENING), [SYSTEM, HI + "<|start|>"]),
        ((SYSTEM, OPENING), [SYSTEM, "<|start|>"]),
        ((OPENING,), ["<|start|>"]),
    ],
)
def test_prompt_is_cut_where_others_may_diverge(
    parts: tuple[str, ...], expected: list[str] | None
) -> None:
    whole = "".join(parts).removesuffix("assistant")
    assert cuts(*parts) == (expected or [whole])


def test_known_prefix_is_not_cut() -> None:
    prefix_length = len(ids_of(SYSTEM + QUESTION + CALL))
    pieces = cuts(SYSTEM, QUESTION, CALL, RESULT, OPENING, after=prefix_length)
    assert pieces == [RESULT + "<|start|>"]
    prompt = ids_of(SYSTEM + QUESTION + OPENING)
    assert boundaries(prompt, after=len(prompt) - 1) == []
    assert boundaries([vocab.START], after=0) == []
