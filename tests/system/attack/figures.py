"""The measurements of the experiments, one line each, printed at the end of a run."""

from __future__ import annotations

LINES: list[str] = []


def report(experiment: str, figures: str) -> None:
    """Adds a line to the table."""
    LINES.append(f"{experiment:6} {figures}")
