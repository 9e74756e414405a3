"""The time limit of a request."""

from __future__ import annotations

import time
from dataclasses import dataclass

from vllm_mlx_harmony.core.errors import HostError

TIMED_OUT = 504


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit of ``total`` seconds that ends at ``at`` on the monotonic clock."""

    total: float
    at: float

    @property
    def left(self) -> float:
        """Never negative."""
        return max(0.0, self.at - time.monotonic())

    def passed(self) -> HostError:
        """The error of a request that has no time left."""
        problem = f"Request timed out after {self.total:.1f} seconds"
        return HostError(problem, status=TIMED_OUT, code="timeout")
