"""What one output is held to, and which ids may come next in it: its grammar and its limits.

Knows ids and masks. Refuses to know turns (`core.grammar` makes the grammar of one), and how a mask
is put on logits.

Which ids may come, in this order:

1. Ids that must come, because reasoning has used up its budget or goes in circles
   (`core.reasoning`). The grammar has them: they end one message and begin the next.
2. The grammar.
3. Ids that should not come: another analysis after the budget, the end of the turn before
   ``min_tokens``. Where the grammar leaves nothing else, they may.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Reason
from vllm_mlx_harmony.core.grammar import Compiled, Mask, Matcher
from vllm_mlx_harmony.core.reasoning import ReasoningWatch


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """Everything that one output is held to.

    ``reasoning_tokens`` and ``repetitions`` are those of ``Reasoning``; ``answering``: the prompt
    has begun the answer. ``binding``: its caller was promised the grammar, so that an answer it
    cannot be followed in has failed.
    """

    grammar: Compiled | None = None
    reasoning_tokens: int | None = None
    repetitions: int = 0
    min_tokens: int = 0
    answering: bool = False
    binding: bool = False

    def __bool__(self) -> bool:
        """Whether there is anything to hold an output to."""
        limited = self.reasoning_tokens is not None or self.repetitions or self.min_tokens
        return self.grammar is not None or bool(limited)


class Constraint:
    """One output that is held to ``spec``, and what became of it. Read from any thread."""

    def __init__(self, spec: ConstraintSpec) -> None:
        self.spec = spec
        self._matcher: ConstraintMatcher | None = None

    def start(self, *, grammar: bool = True) -> ConstraintMatcher:
        """A new matcher, at the beginning of the output: on the engine's thread.

        Without ``grammar`` it follows the limits alone.
        """
        self._matcher = ConstraintMatcher(
            self.spec if grammar else replace(self.spec, grammar=None)
        )
        return self._matcher

    @property
    def failure(self) -> str:
        """Why the output is not held to a grammar that was promised; empty when it is."""
        matcher = self._matcher
        return matcher.error if matcher is not None and self.spec.binding else ""

    @property
    def reasoning_ended_by(self) -> Reason:
        """Why the model was made to answer; empty when it was not."""
        reasoning = self._matcher.reasoning if self._matcher is not None else None
        return "" if reasoning is None else reasoning.ended_by

    @property
    def reasoning_tokens(self) -> int:
        """Ids of reasoning, where they were counted."""
        reasoning = self._matcher.reasoning if self._matcher is not None else None
        return 0 if reasoning is None else reasoning.tokens


class ConstraintMatcher:
    """Follows one output id by id. ``error`` says what went wrong: then everything may come."""

    def __init__(self, spec: ConstraintSpec) -> None:
        self.error = ""
        self.reasoning: ReasoningWatch | None = None
        if spec.reasoning_tokens is not None or spec.repetitions:
            self.reasoning = ReasoningWatch(
                spec.reasoning_tokens, spec.repetitions, answering=spec.answering
            )
        grammar = spec.grammar
        self._grammar: Matcher | None = None if grammar is None else grammar.matcher()
        self._mask = Mask()
        self._missing = spec.min_tokens

    def consume(self, token: int) -> None:
        """Takes in the id that came."""
        self._missing -= 1
        if self.reasoning is not None:
            self.reasoning.consume(token)
        if self._grammar is not None:
            self._grammar.consume(token)
            self.error = self.error or self._grammar.error

    def mask(self) -> Mask | None:
        """What may come next, valid until the next call; ``None`` when everything may."""
        if self.error:
            return None
        forced = self.reasoning.forced if self.reasoning is not None else ()
        if forced:
            self._mask.only(forced[0])
            return self._mask
        written = False
        if self._grammar is not None:
            if self._grammar.done:
                return None  # an engine is one step ahead: nobody gets to see what comes now
            written = self._grammar.fill(self._mask)
            if self._grammar.error:
                self.error = self._grammar.error
                return None
        banned = self.reasoning.banned if self.reasoning is not None else frozenset()
        if self._missing > 0:
            banned |= vocab.TURN_ENDS
        if banned:
            if not written:
                self._mask.allow_all()
            self._mask.discard(banned)
        return self._mask if written or banned else None
