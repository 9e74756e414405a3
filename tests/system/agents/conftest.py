"""A table at the end of a run: which version of each agent passed or failed."""

from __future__ import annotations

from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    reports = [
        (dict(report.user_properties), report)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
    ]
    terminalreporter.section("agents")
    for properties, report in reports:
        if agent := properties.get("agent"):
            terminalreporter.line(f"{agent:72} {report.outcome:8} {report.duration:4.0f} s")
