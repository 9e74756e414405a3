"""Constraints of one output: its grammar, its reasoning budget, and when it may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("llguidance")

from harmony_text import ids_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.grammar import Compiled, Mask, Policy, compile_grammar, grammar_of
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import Tool, Turn, User

ANALYSIS = ids_of("<|channel|>analysis<|message|>")
THOUGHT = ids_of(".")
ANSWERING = ids_of("<|channel|>final<|message|>")


def matcher_after(spec: ConstraintSpec, *tokens: int) -> Constraint:
    matcher = Constraint(spec).start()
    for token in tokens:
        matcher.mask()
        matcher.consume(token)
    return matcher


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (ConstraintSpec(), False),
        (ConstraintSpec(binding=True, answering=True), False),
        (ConstraintSpec(reasoning_tokens=0), True),
        (ConstraintSpec(repetitions=8), True),
        (ConstraintSpec(min_tokens=1), True),
    ],
)
def test_spec_is_true_when_it_limits_anything(spec: ConstraintSpec, expected: bool) -> None:
    assert bool(spec) is expected
    assert (Constraint(spec).start().mask() is None) is (not spec.min_tokens)


def test_turn_does_not_end_before_min_tokens() -> None:
    matcher = Constraint(ConstraintSpec(min_tokens=2)).start()
    for token in ids_of("<|channel|>final")[:2]:
        mask = matcher.mask()
        assert mask is not None
        assert any(end not in mask for end in vocab.TURN_ENDS)
        assert vocab.END in mask
        matcher.consume(token)
    assert matcher.mask() is None


def test_exhausted_reasoning_budget_forces_end() -> None:
    constraint = Constraint(ConstraintSpec(reasoning_tokens=2, repetitions=8))
    assert (constraint.reasoning_ended_by, constraint.reasoning_tokens) == ("", 0)
    matcher = constraint.start()
    for token in (*ANALYSIS, *THOUGHT, *THOUGHT):
        assert matcher.mask() is None
        matcher.consume(token)
    forced = []
    while matcher.reasoning is not None and matcher.reasoning.forced:
        mask = matcher.mask()
        assert mask is not None
        assert len(mask) == 1
        token = mask.first()
        forced.append(token)
        matcher.consume(token)
    assert forced[0] == vocab.END
    assert (constraint.reasoning_ended_by, constraint.reasoning_tokens) == ("budget", 2)


def compiled_grammar() -> Compiled:
    """The grammar of a turn with one tool, which need not be called."""
    turn = Turn((User("Hi."),), (Tool("x", parameters={"type": "object"}),))
    grammar = grammar_of(turn, Names.of(turn), Policy.AUTO)
    assert grammar is not None
    return compile_grammar(grammar)


@pytest.mark.once
def test_grammar_and_limits_apply_together() -> None:
    spec = ConstraintSpec(grammar=compiled_grammar(), min_tokens=50, binding=True)
    assert spec
    constraint = Constraint(spec)
    matcher = constraint.start()
    output = [*ids_of("<|channel|>final<|message|>Hi."), vocab.RETURN]
    for token in output[:-1]:
        mask = matcher.mask()
        assert mask is not None and token in mask
        matcher.consume(token)
    mask = matcher.mask()
    assert mask is not None and vocab.RETURN not in mask  # not yet
    assert constraint.failure == ""
    unlimited = matcher_after(replace(spec, min_tokens=0), *output)
    assert unlimited.mask() is None  # it is at its end


TEXT = ids_of("Hi there, how are you?")
CALL = ids_of("<|start|>assistant<|channel|>commentary to=functions.x <|constrain|>json<|message|>")
CUT = [*ANALYSIS, *THOUGHT, *ids_of("<|end|><|start|>assistant")]
"""Reasoning that a budget of one id has ended."""


@pytest.mark.once
@pytest.mark.parametrize(
    ("spec", "before", "draft", "expected"),
    [
        (ConstraintSpec(min_tokens=3), [], TEXT, len(TEXT)),
        (ConstraintSpec(repetitions=8), [*ANALYSIS], TEXT, len(TEXT)),
        (ConstraintSpec(repetitions=8), ANALYSIS[:1], ANALYSIS[1:], len(ANALYSIS) - 1),
        (ConstraintSpec(repetitions=8), [*ANALYSIS, *THOUGHT, vocab.END], CALL, len(CALL)),
        (ConstraintSpec(reasoning_tokens=0), [vocab.CHANNEL], ANALYSIS[1:], 0),
        (ConstraintSpec(reasoning_tokens=1), [*CUT, vocab.CHANNEL], ANALYSIS[1:], 0),  # banned
        (ConstraintSpec(repetitions=2), [*ANALYSIS, *THOUGHT * 1495], TEXT, 0),  # nearly a loop
        (ConstraintSpec(reasoning_tokens=20), [*ANALYSIS], TEXT, len(TEXT)),
        (ConstraintSpec(reasoning_tokens=len(TEXT)), [*ANALYSIS], TEXT, 0),
        (ConstraintSpec(reasoning_tokens=1), ANSWERING, TEXT, len(TEXT)),
        (ConstraintSpec(reasoning_tokens=1), [*ANALYSIS, *THOUGHT], TEXT, 0),  # ids are forced
    ],
)
def test_masks_of_draft_equal_masks_of_single_ids(
    spec: ConstraintSpec, before: Sequence[int], draft: Sequence[int], expected: int
) -> None:
    check_draft(spec, before, draft, expected)


@pytest.mark.parametrize(
    ("before", "draft", "expected"),
    [
        ("<|channel|>final<|message|>", "Hi there", 2),
        ("<|channel|>commentary to=functions.x<|message|>", '{"a": 1}', 6),
        ("<|channel|>commentary to=functions.x<|message|>", '{"a": nil}', 3),
        ("<|channel|>commentary to=functions.x<|message|>", "Hi", 0),
        ("<|channel|>commentary", " to=functions.x <|constrain|>json<|message|>", 8),
        ("<|channel|>commentary", " to=functions.y<|message|>", 3),
        ("<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant<|channel|>final", 4),
    ],
)
def test_draft_ends_at_first_id_outside_grammar(before: str, draft: str, expected: int) -> None:
    spec = ConstraintSpec(grammar=compiled_grammar(), min_tokens=12, repetitions=8)
    check_draft(spec, ids_of(before), ids_of(draft), expected)


def check_draft(
    spec: ConstraintSpec, before: Sequence[int], draft: Sequence[int], expected: int
) -> None:
    def bits(mask: Mask | None) -> bytes | None:
        return None if mask is None else bytes(mask.words)

    matcher = matcher_after(spec, *before)
    masks = matcher.after(matcher.mask(), draft)
    assert len(masks) == expected
    for token, mask in zip(draft, masks, strict=False):
        matcher.consume(token)
        assert bits(mask) == bits(matcher.mask())


@pytest.mark.parametrize("binding", [True, False])
def test_id_outside_binding_grammar_is_a_failure(binding: bool) -> None:
    constraint = Constraint(ConstraintSpec(grammar=compiled_grammar(), binding=binding))
    assert constraint.failure == ""
    matcher = constraint.start()
    matcher.consume(vocab.STARTOFTEXT)
    assert matcher.error
    assert matcher.mask() is None
    assert bool(constraint.failure) is binding
    limits = Constraint(constraint.spec).start(grammar=False)
    limits.consume(vocab.STARTOFTEXT)
    assert limits.failure == ""
