"""Numbers as a person reads them."""

from __future__ import annotations

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(nbytes: int) -> str:
    """Bytes as a person reads them."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}".replace(".0 ", " ")
    return f"{nbytes} bytes"
