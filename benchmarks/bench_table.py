"""The tables that benchmarks print: a line for each measurement, and whether it meets its goal; or,
in Markdown, one for each server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["--"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def compared(found: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> str:
    """A row for each server, ours first: its values, and ours divided by them, bold if it is more.

    A server has no value where it could not be measured.
    """
    ours = next(iter(found.values()), {})

    def cell(values: Mapping[str, float], column: str) -> str:
        value, own = values.get(column), ours.get(column)
        if value is None:
            return "–"
        if values is ours or own is None or value <= 0:  # less than what the clock shows
            return f"{value:,.2f}"
        ratio = f"{own / value:.2f}"
        return f"{value:,.2f} ({f'**{ratio}**' if own > value else ratio})"

    rows = [[name, *(cell(values, column) for column in columns)] for name, values in found.items()]
    return table(("", *columns), rows)
