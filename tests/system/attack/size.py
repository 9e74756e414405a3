"""The size of the experiments: in full with ``ATTACK=full``, else thinned for every change.

``ATTACK_SEED`` is the seed of their random numbers, 10 by default.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("ATTACK") == "full"
SEED = int(os.environ.get("ATTACK_SEED", "10"))


def size(full: T, thinned: T) -> T:
    """``full`` with ``ATTACK=full``, else ``thinned``."""
    return full if FULL else thinned
