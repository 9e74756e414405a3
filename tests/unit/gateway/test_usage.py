"""``gateway usage``: who used how much on a day, from the lines that gateways write."""

from __future__ import annotations

import gzip
import io
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.gateway.access_log import Entry

TODAY = datetime.now(UTC).date()
YESTERDAY, BEFORE = TODAY - timedelta(days=1), TODAY - timedelta(days=2)


def lines(form: Any) -> str:
    """A log with the end of one day, all of yesterday, the beginning of today, and noise."""
    alice = Entry(form, "POST", "/v1/responses", "m", 0.0, "alice", 200, "success", 1000, 90, 7, 5)
    broken = Entry(form, "POST", "/v1/responses", "m", 0.0, "alice", 200, "error", 10)
    full = Entry(form, "POST", "/v1/responses", "m", 0.0, "bob", 429)
    forged = Entry(form, "POST", f'/x time={TODAY} key="alice" input=9', "m", 0.0, None, 401)
    written = (
        (alice, f"{BEFORE}T23:59:59.999"),
        (alice, f"{YESTERDAY}T00:00:00.000"),
        (full, f"{YESTERDAY}T10:00:00.000"),
        (forged, f"{YESTERDAY}T10:00:00.000"),
        (broken, f"{YESTERDAY}T10:00:00.000"),
        (alice, f"{YESTERDAY}T23:59:59.999"),
        (alice, f"{TODAY}T00:00:00.000"),
    )
    log = [entry.line(f"{time}+00:00", 1.0) for entry, time in written]
    noise = (f"INFO: {YESTERDAY} time=now key=carol", f'{{"time": "{YESTERDAY}"}}', "", "\ufffd{")
    return "\n".join((*log, *noise, f"gateway-1  | {log[1]}")) + "\n"


def shown(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()[2:]]


ROWS = [
    ["alice", "4", "1", "3,010", "270", "21", "15"],
    ["bob", "1", "1", "0", "0", "0", "0"],
    ["-", "1", "1", "0", "0", "0", "0"],
]


@pytest.mark.parametrize("form", ["json", "text"])
def test_yesterday_is_the_default(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the logs of two gateways, one of them rotated and compressed."""
    first, second = tmp_path / "gateway-1.log", tmp_path / "gateway-2.log.gz"
    first.write_text(lines(form))
    second.write_bytes(gzip.compress(lines(form).encode()))
    assert main(["gateway", "usage", str(first)]) == 0
    assert shown(capsys) == ROWS
    assert main(["gateway", "usage", str(first), str(second)]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == f"{YESTERDAY} (UTC): 12 requests"
    assert columns.split() == [
        "key",
        "requests",
        "failed",
        "input",
        "cached",
        "output",
        "reasoning",
    ]
    assert rows[0] == f"alice {8:>14} {2:>14} {'6,020':>14} {540:>14} {42:>14} {30:>14}"
    assert [row.split()[:3] for row in rows[1:]] == [["bob", "2", "2"], ["-", "2", "2"]]


@pytest.mark.parametrize("day", ["today", str(TODAY), str(BEFORE)])
def test_another_day_is_read_from_standard_input(
    day: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = io.BytesIO(b"\xff\n" + lines("json").encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    assert main(["gateway", "usage", "--day", day]) == 0
    assert shown(capsys) == [["alice", "1", "0", "1,000", "90", "7", "5"]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no.log"], "no.log cannot be read: No such file or directory"),
        (["cut.gz"], "cut.gz cannot be read: Compressed file ended"),
        (["--day", "monday"], "argument --day: invalid day value: 'monday'"),
    ],
)
def test_unreadable_logs_are_errors(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cut.gz").write_bytes(gzip.compress(lines("json").encode())[:-20])
    try:
        code = main(["gateway", "usage", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert expected in capsys.readouterr().err
