"""How large the experiments are: ``ATTACK=full`` for a person, thinned for every change otherwise.

And which random numbers they draw: ``ATTACK_SEED`` (a number), the same ones unless it is given.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("ATTACK") == "full"
SEED = int(os.environ.get("ATTACK_SEED", "10"))


def size(full: T, thinned: T) -> T:
    """``full`` for a person, ``thinned`` in CI."""
    return full if FULL else thinned
