"""Reports of outcomes: rates, the results file, the page, and comparisons."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.verify import report
from vllm_mlx_harmony.verify.checks import Outcome
from vllm_mlx_harmony.verify.suite import CHECKS

LINK = "https://example.com/"


def outcome(name: str, state: Any, passed: int = 0, runs: int = 1, **texts: str) -> Outcome:
    return Outcome(name, "it holds", LINK, state, passed=passed, runs=runs, **texts)


MIXED = [
    outcome("wire.chat.stop", "passed", 1),
    outcome("wire.chat.key", "unsupported", problem="no --key is given"),
    outcome("wire.responses.key", "unsupported", problem="no --key is given"),
    outcome("format.chat.call-a", "passed", 4, 4),
    outcome("format.chat.call-b", "failed", 2, 4, problem="<b>bad</b>", sent="POST", received="{}"),
    outcome("format.chat.no-call-c", "failed", 2, 4, problem="a call"),
]


@pytest.mark.parametrize("width", [50, 120])
def test_verdict_fits_width_and_has_all_parts(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False)
    console.print(report.verdict(CHECKS, MIXED))
    for result in MIXED:
        if result.state == "failed":
            console.print(report.failure(result))
    shown = file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.split())
    for part in (
        "no --key is given wire.chat.key and 1 more",
        "tool calls: recall 75.0%, precision 75.0%",
        "pass@1 66.7%, pass^4 33.3% (of 3 checks)",
        "2 passed, 2 failed, 2 unsupported",
        "✗ format.chat.call-b: it holds <b>bad</b> → POST ← {}",
    ):
        assert part in words


def test_rates_need_checks_they_count() -> None:
    assert report.scores(MIXED[:3]) == []
    none = [outcome("format.chat.call-a", "failed"), outcome("format.chat.no-call-b", "passed", 1)]
    assert report.scores(none) == ["tool calls: recall 0.0%, precision 0.0%"]


class Page(HTMLParser):
    """The open tags, attributes that load something, and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.loaded += [name for name, _ in attrs if name in ("src", "onload", "onclick")]
        assert tag not in ("script", "link", "img", "b")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_complete_and_self_contained() -> None:
    results = report.document("a<model>", 4, MIXED)
    page = Page(report.html(CHECKS, results, MIXED))
    assert (page.open, page.loaded) == ([], [])
    for part in ("a<model>", "<b>bad</b>", "Failed: 2", "Not supported: 2", "call-b (2 of 4)"):
        assert part in page.text


def test_comparison_reports_regressions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worse = [outcome("wire.chat.stop", "failed", problem="x"), *MIXED[1:]]
    names = []
    for name, outcomes in (("a", MIXED), ("b", worse)):
        names.append(str(tmp_path / name))
        Path(names[-1]).write_text(json.dumps(report.document(name, 4, outcomes)), "utf-8")
    assert main(["verify", "--compare", *names]) == 1
    shown = capsys.readouterr().out
    assert "wire.chat.stop" in shown and "wire.chat.key" not in shown
    assert main(["verify", "--compare", *reversed(names)]) == 0
    Path(names[0]).write_text(json.dumps({"kind": "other"}))
    assert main(["verify", "--compare", *names]) == 2
    assert "is not a file that verify --json wrote" in capsys.readouterr().err
