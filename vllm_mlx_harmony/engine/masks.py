"""Masks the logits of a sequence whose output has to satisfy a constraint (`core.constraint`).

In each step, for each such row: the matcher consumes the id that was drawn, writes a mask of
201,088 bits, and a compiled function puts -inf where a bit is 0. Only the mask, 25 KB, goes to the
device. While Python waits for the id the device already computes the logits that follow it (see
``sampler``), so a mask costs no time unless it takes longer than a step.

Biases, penalties and filters come after the mask: a bias cannot bring back what it forbids, and
``top_p`` and ``min_p`` choose among what it allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx

from vllm_mlx_harmony.core.constraint import Constraint, ConstraintMatcher
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

logger = logging.getLogger(__name__)


class LogitsMask:
    """A ``sampler.LogitsProcessor`` that allows what ``constraint`` does.

    Never raises, because that would fail every row of the batch. An error is logged and becomes the
    matcher's ``error``; from then on everything is allowed.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._matcher: ConstraintMatcher | None = None

    def __call__(self, last: int | None, logits: mx.array) -> mx.array:
        """``logits`` (1, vocabulary) with -inf for what may not follow ``last``."""
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self._constraint.start()
        if matcher.error:
            return logits
        try:
            if last is not None:
                matcher.consume(last)
            mask = matcher.mask()
            return logits if mask is None else _masked(mx.array(mask.words), logits)
        except Exception as error:  # noqa: BLE001 - the other rows must go on
            matcher.error = f"{type(error).__name__}: {error}"
            return logits
        finally:
            if matcher.error:
                logger.error("an output is no longer held to its grammar: %s", matcher.error)


def _where_allowed(words: mx.array, logits: mx.array) -> mx.array:
    bits = (words[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(1, -1).astype(mx.bool_)
    size = logits.shape[-1]
    if size > VOCAB_SIZE:
        allowed = mx.pad(allowed, [(0, 0), (0, size - VOCAB_SIZE)])
    return mx.where(allowed[:, :size], logits, -mx.inf)


_masked: Callable[[mx.array, mx.array], mx.array] = mx.compile(_where_allowed)
