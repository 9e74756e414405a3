"""Masks the logits of a sequence whose output has to satisfy a constraint (`core.constraint`).

In each step, for each such row: the matcher consumes the id that was sampled, writes a mask of
201,088 bits, and a compiled function puts -inf where a bit is 0. Only the mask, 25 KB, goes to the
device. While Python waits for the id the device already computes the logits that follow it (see
``sampler``), so a mask costs no time unless it takes longer than a step.

Biases, penalties and filters come after the mask: a bias cannot bring back what it forbids, and
``top_p`` and ``min_p`` choose among what it allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import mlx.core as mx

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.grammar import Mask
from vllm_mlx_harmony.core.turn import VOCAB_SIZE
from vllm_mlx_harmony.engine_api.engine import Origin

T = TypeVar("T")

ApplyMask: TypeAlias = "Callable[[mx.array], mx.array]"
"""Takes logits (1, vocabulary), and returns them with -inf for what is not allowed."""

logger = logging.getLogger(__name__)


class LogitsMask:
    """Allows what ``constraint`` allows, in one sequence.

    Never raises, because that would fail every row of the batch. An error is logged and becomes the
    constraint's ``error``; from then on everything is allowed.

    With ``origins``, ``likeliest`` keeps the argmax of the unmasked logits for each id to be
    sampled. Evaluate it together with those ids; later, it would wait for the next step. ``origin``
    says how the first id of the last ``advance`` was chosen (``Step.origins``).
    """

    def __init__(self, constraint: Constraint, *, origins: bool = False) -> None:
        self.origin = Origin.SAMPLED
        self.likeliest: list[mx.array | None] = []
        self._origins = origins
        self._constraint = constraint.start()
        self._mask: Mask | None = None
        self._choices = VOCAB_SIZE
        self._current = False

    def __call__(self, last: int | None, logits: mx.array) -> mx.array:
        """``logits`` (1, vocabulary) with -inf for what may not follow ``last``."""
        if last is not None:
            self.advance(last)
        return self._applied(self._next(), logits)

    @property
    def choices(self) -> int:
        """The number of ids that may come next."""
        mask = self._next()
        if mask is not None and not self._choices:
            self._choices = len(mask)
        return self._choices

    def advance(self, *tokens: int) -> None:
        """Consumes the ids that have been sampled."""
        if self._origins and tokens:
            mask, likeliest = self._next(), self.likeliest[0] if self.likeliest else None
            if mask is not None and self.choices == 1:
                self.origin = Origin.FORCED
            elif mask is None or likeliest is None or int(likeliest.item()) in mask:
                self.origin = Origin.SAMPLED
            else:
                self.origin = Origin.MASKED
        self.likeliest = self.likeliest[len(tokens) :][:1]
        for token in tokens:
            self._guarded(partial(self._constraint.consume, token))
        self._current = False

    def forced(self) -> int | None:
        """The next id if only one is allowed."""
        return self._mask.first() if self.choices == 1 and self._mask is not None else None

    def follow(self, most: int) -> list[int]:
        """Consumes the next ids as long as only one is allowed, at most ``most``."""
        found: list[int] = []
        while len(found) < most and (token := self.forced()) is not None:
            self.advance(token)
            found.append(token)
        return found

    def expected(self, most: int) -> list[int]:
        """The ids of a header that are likely to come next, at most ``most``."""
        return self._constraint.header.next(most)

    def after(self, draft: Sequence[int]) -> list[ApplyMask]:
        """What masks the logits (1, vocabulary) of the next id, and of the id after each of
        ``draft`` that is allowed; nothing is consumed."""
        allowed = self._next()
        more = self._guarded(partial(self._constraint.after, allowed, draft)) or []
        return [partial(self._applied, mask) for mask in (allowed, *more)]

    def _applied(self, mask: Mask | None, logits: mx.array) -> mx.array:
        if self._origins:
            self.likeliest.append(None if mask is None else mx.argmax(logits, axis=-1))
        return logits if mask is None else _masked(mx.array(mask.words), logits)

    def _next(self) -> Mask | None:
        """The ids that may come next; ``None`` if all may."""
        if not self._current:
            self._mask = self._guarded(self._constraint.mask)
            # Counted only where it is asked for.
            self._choices = VOCAB_SIZE if self._mask is None else 0
            self._current = True
        return self._mask

    def _guarded(self, call: Callable[[], T]) -> T | None:
        constraint = self._constraint
        if constraint.error:
            return None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - the other rows must go on
            constraint.error = f"{type(error).__name__}: {error}"
        if constraint.error:
            logger.error("grammar enforcement stopped: %s", constraint.error)
            return None
        return result


def _where_allowed(words: mx.array, logits: mx.array) -> mx.array:
    bits = (words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(1, -1).astype(mx.bool_)
    size = logits.shape[-1]
    if size > VOCAB_SIZE:
        allowed = mx.pad(allowed, [(0, 0), (0, size - VOCAB_SIZE)])
    return mx.where(allowed[:, :size], logits, -mx.inf)


_masked: Callable[[mx.array, mx.array], mx.array] = mx.compile(_where_allowed)
