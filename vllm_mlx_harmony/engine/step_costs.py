"""What steps of several ids cost, and so how many ids are worth computing in one: no mlx."""

from __future__ import annotations

from dataclasses import dataclass

WIDTHS = (1, 2, 3, 4, 8, 16)
"""Ids of an answer in one step. On Metal, mlx computes the attention of up to four with a kernel of
its own: gpt-oss has eight heads of queries for each one of keys, and ids times these may be 32 at
most (``has_fused_kernel`` in ``mlx/backend/metal/scaled_dot_product_attention.cpp``)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """A step of ``ids[i]`` ids takes ``seconds[i]``; both ascend, and ``ids[0]`` is 1."""

    ids: tuple[int, ...] = (1,)
    seconds: tuple[float, ...] = (1.0,)

    def best_draft_length(self, accuracy: float, most: int) -> int:
        """Ids of the draft with the most expected ids per second; 0 if that is none."""
        best, rate = 0, 1 / self.seconds[0]
        for width, seconds in zip(self.ids[1:], self.seconds[1:], strict=True):
            if width - 1 > most:
                break
            # All of the draft up to the first wrong id, and the id that is sampled there.
            expected = (1 - accuracy**width) / (1 - accuracy) if accuracy < 1 else width
            if expected / seconds > rate:
                best, rate = width - 1, expected / seconds
        return best

    def max_known_ids(self, most: int) -> int:
        """How many known ids, at most ``most``, may follow the first one in the same step: more
        would take longer than steps of their own."""
        pairs = zip(self.ids, self.seconds, strict=True)
        widest = max(ids for ids, seconds in pairs if seconds <= ids * self.seconds[0])
        return min(most, widest - 1)


ASSUMED = Costs(WIDTHS, (1.0,) * len(WIDTHS))
"""Of a device that is not measured: several ids cost as much as one."""
