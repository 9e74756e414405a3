"""What the experiments measured: one line each, printed together at the end of a run."""

from __future__ import annotations

LINES: list[str] = []


def report(experiment: str, figures: str) -> None:
    """A line of the table, in plain English."""
    LINES.append(f"{experiment:6} {figures}")
