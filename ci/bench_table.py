"""The table that a benchmark prints: a line for each measurement, and whether it meets its goal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measurement: what, the host's and our number, and whether ours is good enough."""

    what: str
    unit: str
    host: float | None
    ours: float
    goal: str = ""
    met: bool = True

    def line(self) -> str:
        """The row as it is printed; the ratio is ours to the host's."""
        host = "" if self.host is None else f"{self.host:.2f}"
        ratio = f"{self.ours / self.host:.3f}" if self.host else ""
        met = ("yes" if self.met else "NO") if self.goal else ""
        return _columns(self.what, host, f"{self.ours:.2f}", self.unit, ratio, self.goal, met)


def _columns(*texts: str) -> str:
    what, host, ours, unit, ratio, goal, met = texts
    return f"{what:56}{host:>10}{ours:>10} {unit:7}{ratio:>8}  {goal:20}{met}".rstrip()


def printed(rows: Iterable[Row]) -> int:
    """Prints each row as soon as it is there; 1 when a goal is not met."""
    print(_columns("", "host", "ours", "", "ratio", "goal", "met"), flush=True)
    goals = missed = 0
    for row in rows:
        print(row.line(), flush=True)
        goals += bool(row.goal)
        missed += not row.met
    print(f"{goals - missed} of {goals} goals met")
    return 1 if missed else 0
