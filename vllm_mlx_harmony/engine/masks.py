"""Puts the mask of what may come next on the logits an id is drawn from.

Knows the seat that ``sampler`` has for it, and logits; what may come is known to `core.constraint`.
Everything runs on the engine's thread.

Per step, one row: the id that was drawn is taken in, the grammar writes a mask of 201,088 bits, and
a compiled function puts -inf where a bit is 0. The logits stay where they are: only the mask,
25 KB, goes to the device. By the time Python has the id that was drawn the device is already at
work on the logits that follow it (``sampler`` sees to that), so the mask costs no time unless a
step is shorter than it.

Penalties, biases and filters come after it, and see only what is allowed: no bias brings back what
is not, and ``top_p`` and ``min_p`` keep the likeliest of what is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vllm_mlx_harmony.core.constraint import Constraint
from vllm_mlx_harmony.core.grammar import Mask
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

logger = logging.getLogger(__name__)


class LogitsMask:
    """Follows the output of ``constraint`` and masks its logits; a ``sampler.LogitsProcessor``.

    Never raises: all that run together would fail with it. What goes wrong is logged and is the
    matcher's ``error``; everything is allowed from then on.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._matcher = constraint.start()

    def __call__(self, last: int | None, logits: Any) -> Any:
        """``logits`` (1, vocabulary) with -inf for what may not follow ``last``."""
        matcher = self._matcher
        if matcher.error:
            return logits
        try:
            if last is not None:
                matcher.consume(last)
            mask = matcher.mask()
            return logits if mask is None else masked(mask, logits)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            matcher.error = f"{type(error).__name__}: {error}"
            return logits
        finally:
            if matcher.error:
                logger.error("an output is not held to its grammar any more: %s", matcher.error)


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
