"""Whole numbers that the environment sets. Knows no variable: each stands where it is used."""

from __future__ import annotations

import os


def number(variable: str, default: int) -> int:
    """What the environment says, never less than 0; ``default`` where it says no whole number."""
    try:
        return max(0, int(os.environ.get(variable, "")))
    except ValueError:
        return default
