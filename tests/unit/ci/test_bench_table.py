"""The table of a benchmark of several servers: our value relative to each of theirs."""

from __future__ import annotations

import bench_table
import pytest


@pytest.mark.parametrize(
    ("ours", "theirs", "cells"),
    [
        ({"ms": 5.0}, {"ms": 10.0}, ["5.00", "10.00 (0.50)"]),
        ({"ms": 10.0}, {"ms": 8.0}, ["10.00", "8.00 (**1.25**)"]),
        ({"ms": 10.0}, {"ms": 10.0}, ["10.00", "10.00 (1.00)"]),
        ({"ms": 1234.5}, {"ms": 0.5}, ["1,234.50", "0.50 (**2469.00**)"]),
        ({"ms": 5.0}, {"ms": 0.0}, ["5.00", "0.00"]),
        ({"ms": 5.0}, {}, ["5.00", "–"]),
        ({}, {"ms": 10.0}, ["–", "10.00"]),
    ],
)
def test_value_of_another_server_is_compared_with_ours(
    ours: dict[str, float], theirs: dict[str, float], cells: list[str]
) -> None:
    shown = bench_table.compared({"we": ours, "they": theirs}, ("ms",)).splitlines()
    assert shown == ["|  | ms |", "| -- | -- |", f"| we | {cells[0]} |", f"| they | {cells[1]} |"]


def test_no_server_is_no_row() -> None:
    assert bench_table.compared({}, ("ms",)).splitlines() == ["|  | ms |", "| -- | -- |"]
