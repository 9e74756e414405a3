"""The number of random examples: all of them, or with ``EXAMPLES=few`` a tenth, at least ten.

Legs for another version of Python or of a library use few, since failures that need many examples
do not depend on the version; `ci/leg.py everything` uses all.
"""

from __future__ import annotations

import os

FEW = os.environ.get("EXAMPLES") == "few"


def examples(most: int) -> int:
    """``most``, or a tenth of it with ``EXAMPLES=few``."""
    return max(most // 10, 10) if FEW else most
