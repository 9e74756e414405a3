"""What holds an output to its grammar and its limits while it is drawn: which ids may come next.

Knows the seat that ``sampler`` has for it, masks and logits. Everything but ``Constraining`` runs
on the engine's thread. Refuses to know turns and settings (`enforcement`).

Per step, one row: the id that was drawn is taken in, the grammar writes a mask of 201,088 bits, and
a compiled function puts -inf where a bit is 0. The logits stay where they are: only the mask,
25 KB, goes to the device. By the time Python has the id that was drawn the device is already at
work on the logits that follow it (``sampler`` sees to that), so the mask costs no time unless a
step is shorter than it. In this order:

1. Ids that must come, because reasoning has used up its budget or goes in circles
   (`core.reasoning`). The grammar has them: they end one message and begin the next.
2. The grammar.
3. Ids that should not come: another analysis after the budget, the end of the turn before
   ``min_tokens``. Where the grammar leaves nothing else, they may.

Penalties, biases and filters come after it, and see only what is allowed: no bias brings back what
is not, and ``top_p`` and ``min_p`` keep the likeliest of what is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.grammar import Compiled, Mask, Matcher
from vllm_mlx_harmony.core.reasoning import Reason, Reasoning
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
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


class Constraining:
    """Makes the constraint of one output, and says afterwards what became of it. Any thread."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._made: LogitsMask | None = None

    def __call__(self) -> LogitsMask:
        """A new one, at the beginning of the output: on the engine's thread."""
        self._made = LogitsMask(self.bounds)
        return self._made

    @property
    def failure(self) -> str:
        """Why the output is not held to a grammar that was promised; empty when it is."""
        return self._made.error if self._made is not None and self.bounds.binding else ""

    @property
    def reasoning_ended_by(self) -> Reason:
        """Why the model was made to answer; empty when it was not."""
        reasoning = self._made.reasoning if self._made is not None else None
        return "" if reasoning is None else reasoning.ended_by

    @property
    def reasoning_tokens(self) -> int:
        """Ids of reasoning, where they were counted."""
        reasoning = self._made.reasoning if self._made is not None else None
        return 0 if reasoning is None else reasoning.tokens


class LogitsMask:
    """Follows one output and masks its logits; a ``sampler.Constraint``.

    Never raises: all that run together would fail with it. What goes wrong is logged and is in
    ``error``; everything is allowed from then on.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.error = ""
        self.reasoning: Reasoning | None = None
        if bounds.reasoning_tokens is not None or bounds.repetitions:
            self.reasoning = Reasoning(
                bounds.reasoning_tokens, bounds.repetitions, answering=bounds.answering
            )
        grammar = bounds.grammar
        self._matcher: Matcher | None = None if grammar is None else grammar.matcher()
        self._mask = Mask()
        self._missing = bounds.min_tokens

    def __call__(self, last: int | None, logits: Any) -> Any:
        """``logits`` (1, vocabulary) with -inf for what may not follow ``last``."""
        if self.error:
            return logits
        try:
            if last is not None:
                self._consume(last)
            return masked(self._mask, logits) if self._fill() else logits
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            self._fail(f"{type(error).__name__}: {error}")
            return logits

    def _consume(self, token: int) -> None:
        self._missing -= 1
        if self.reasoning is not None:
            self.reasoning.consume(token)
        if self._matcher is not None:
            self._matcher.consume(token)
            if self._matcher.error:
                self._fail(self._matcher.error)

    def _fill(self) -> bool:
        """Writes the mask; false when everything is allowed."""
        if self.error:
            return False
        forced = self.reasoning.forced if self.reasoning is not None else ()
        if forced:
            self._mask.only(forced[0])
            return True
        written = False
        if self._matcher is not None:
            if self._matcher.done:
                return False  # the engine is one step ahead: nobody gets to see what comes now
            written = self._matcher.fill(self._mask)
            if self._matcher.error:
                self._fail(self._matcher.error)
                return False
        banned = self.reasoning.banned if self.reasoning is not None else frozenset()
        if self._missing > 0:
            banned |= vocab.TURN_ENDS
        if not banned:
            return written
        if not written:
            self._mask.allow_all()
        self._mask.discard(banned)
        return True

    def _fail(self, problem: str) -> None:
        self.error = problem
        logger.error("an output is not held to its grammar any more: %s", problem)


def masked(mask: Mask, logits: Any) -> Any:
    """``logits`` (1, vocabulary) with -inf where ``mask`` has no id; not computed yet."""
    import mlx.core as mx

    return _where()(mx.array(mask.words), logits)


@lru_cache(maxsize=1)
def _where() -> Callable[[Any, Any], Any]:
    import mlx.core as mx

    def where(words: Any, logits: Any) -> Any:
        bits = (words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        allowed = bits.reshape(1, -1).astype(mx.bool_)
        rows = logits.shape[-1]
        if rows > VOCAB_SIZE:
            allowed = mx.pad(allowed, [(0, 0), (0, rows - VOCAB_SIZE)])
        return mx.where(allowed[:, :rows], logits, -mx.inf)

    compiled: Callable[[Any, Any], Any] = mx.compile(where)
    return compiled
