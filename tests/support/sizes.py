"""How many examples are drawn: all of them, or with ``EXAMPLES=few`` a tenth, at least ten.

Whoever looks at what depends on the version of Python or of a library draws few: what is found with
many does not depend on them; `ci/leg.py everything` draws all.
"""

from __future__ import annotations

import os

FEW = os.environ.get("EXAMPLES") == "few"


def examples(most: int) -> int:
    """``most``, or a tenth of it."""
    return max(most // 10, 10) if FEW else most
