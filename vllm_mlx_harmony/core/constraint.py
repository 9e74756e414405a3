"""The constraints of one output (its grammar and its limits), and the ids that they allow next.

`ConstraintSpec` describes the constraints of a request. `Constraint` is one output's instance of
it, which the engine starts and consults, and whose results other threads read.

In order of precedence:

1. Forced ids, when reasoning has used up its budget or repeats itself (`core.reasoning`). They end
   one message and begin the next, which the grammar allows.
2. The grammar.
3. Banned ids: another analysis after the budget, the end of the turn before ``min_tokens``. They
   are allowed if the grammar allows nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import ReasoningCut
from vllm_mlx_harmony.core.expected_header import ExpectedHeader
from vllm_mlx_harmony.core.grammar import Compiled, Mask, Matcher
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.reasoning import ReasoningWatch


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """The constraints of one output.

    ``reasoning_tokens``, ``repetitions``, ``answering`` and ``names`` are those of a
    ``ReasoningWatch``. ``binding``: the caller was promised the grammar, so the answer fails if the
    grammar does. ``headers`` are expected (`ExpectedHeader`), not required.
    """

    grammar: Compiled | None = None
    reasoning_tokens: int | None = None
    repetitions: int = 0
    min_tokens: int = 0
    answering: bool = False
    names: Names | None = None
    binding: bool = False
    headers: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return self.grammar is not None or self.limits_reasoning or bool(self.min_tokens)

    @property
    def limits_reasoning(self) -> bool:
        return self.reasoning_tokens is not None or bool(self.repetitions)


class Constraint:
    """Follows one output id by id, once it is started. After an ``error`` everything is allowed.

    It is for the engine's thread, except for its properties and ``end_reasoning``.
    """

    def __init__(self, spec: ConstraintSpec) -> None:
        self.spec = spec
        self.error = ""
        self.header = ExpectedHeader(spec.headers, answering=spec.answering)
        self.reasoning: ReasoningWatch | None = None
        self._grammar: Matcher | None = None
        # Only made for engines that sample in this process.
        self._mask: Mask | None = None
        self._missing = spec.min_tokens
        self._end_reasoning = False

    def start(self, *, grammar: bool = True) -> Constraint:
        """Starts to follow the output; without ``grammar``, only its limits."""
        spec = self.spec
        if spec.limits_reasoning:
            self.reasoning = ReasoningWatch(
                spec.reasoning_tokens,
                spec.repetitions,
                answering=spec.answering,
                names=spec.names,
            )
            if self._end_reasoning:
                self.reasoning.end()
        self._grammar = spec.grammar.matcher() if grammar and spec.grammar is not None else None
        return self

    @property
    def failure(self) -> str:
        """Why a promised grammar is no longer enforced; empty if it is."""
        return self.error if self.spec.binding else ""

    def end_reasoning(self) -> None:
        """Ends the reasoning of this output, if it is limited. For any thread."""
        self._end_reasoning = True  # for an output that has not started
        if self.reasoning is not None:
            self.reasoning.end()

    @property
    def reasoning_ended_by(self) -> ReasoningCut:
        """Why reasoning was cut short; empty if it was not."""
        return "" if self.reasoning is None else self.reasoning.ended_by

    @property
    def reasoning_tokens(self) -> int:
        """Ids of reasoning; 0 if they were not counted."""
        return 0 if self.reasoning is None else self.reasoning.tokens

    def consume(self, token: int) -> None:
        self._missing -= 1
        self.header.consume(token)
        if self.reasoning is not None:
            self.reasoning.consume(token)
        if self._grammar is not None:
            self._grammar.consume(token)
            self.error = self.error or self._grammar.error

    def mask(self) -> Mask | None:
        """The ids that are allowed next, valid until the next call; ``None`` if all may."""
        if self.error:
            return None
        if self._mask is None:
            self._mask = Mask()
        forced = self.reasoning.forced if self.reasoning is not None else ()
        if forced:
            self._mask.only(forced[0])
            return self._mask
        written = False
        if self._grammar is not None:
            if self._grammar.done:
                # The engine computes one step ahead. The turn has ended, so this id is discarded.
                return None
            written = self._grammar.fill(self._mask)
            if self._grammar.error:
                self.error = self._grammar.error
                return None
        banned = self.reasoning.banned if self.reasoning is not None else frozenset()
        if self._missing > 0:
            banned |= vocab.TURN_ENDS
        return _without(banned, self._mask, written=written)

    def after(self, allowed: Mask | None, draft: Sequence[int]) -> list[Mask | None]:
        """The masks after each id of ``draft``, which is text or the rest of a header. Consumes
        nothing.

        ``allowed`` is the last result of ``mask``. The list ends before the first id that is not
        allowed, or where reasoning may be cut short.
        """
        masks: list[Mask | None] = []
        if self.error or (self.reasoning and not self.reasoning.idle_for(len(draft))):
            return masks
        matcher = None if self._grammar is None else self._grammar.copy()
        for at, token in enumerate(draft, start=1):
            if allowed is not None and token not in allowed:
                break
            mask = Mask()
            if matcher is not None and not (matcher.consume(token) and matcher.fill(mask)):
                break
            banned = vocab.TURN_ENDS if self._missing > at else frozenset[int]()
            allowed = _without(banned, mask, written=matcher is not None)
            masks.append(allowed)
        return masks


def _without(banned: frozenset[int], mask: Mask, *, written: bool) -> Mask | None:
    """``mask`` without ``banned``, or all other ids if it is not ``written``; ``None`` for all."""
    if not banned:
        return mask if written else None
    if not written:
        mask.allow_all()
    mask.discard(banned)
    return mask
