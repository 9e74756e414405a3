"""What a run found: on the terminal while it runs and at its end, and as a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from importlib import metadata
from platform import python_version

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from vllm_mlx_harmony.verify import page
from vllm_mlx_harmony.verify.apis import APIS
from vllm_mlx_harmony.verify.checks import Check, Outcome
from vllm_mlx_harmony.verify.values import Document

SHOWN = 400
"""Characters of a request and of its response on the terminal."""

STYLES = {"passed": "green", "failed": "bold red", "unsupported": "yellow"}


def progress(console: Console) -> Progress:
    """A bar, the time, and what is running."""
    columns = (
        *(BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
        TextColumn("left · {task.description}", style="dim"),
    )
    return Progress(*columns, console=console, transient=True)


class Screen(Live):
    """A table of kinds and APIs and a bar while checks run; failures stand above it."""

    def __init__(self, console: Console, checks: Sequence[Check]) -> None:
        self.checks = checks
        self.outcomes: list[Outcome] = []
        self.progress = progress(console)
        self.task = self.progress.add_task(checks[0].name, total=len(checks))
        super().__init__(console=console, refresh_per_second=8, transient=True)

    def get_renderable(self) -> Group:
        return Group(table(self.checks, self.outcomes), self.progress)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.state == "failed":
            self.console.print(failure(outcome))
        following = self.checks[len(self.outcomes) :]
        name = following[0].name if following else ""
        self.progress.update(self.task, advance=1, description=name)


def counts(checks: Sequence[Check], outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """For each kind, how many checks passed in each API, of those that are supported."""
    states = {outcome.name: outcome.state for outcome in outcomes}
    rows = []
    for kind in dict.fromkeys(check.kind for check in checks):
        cells = []
        for api in APIS:
            names = [
                check.name for check in checks if (check.kind, check.api.name) == (kind, api.name)
            ]
            found = [states.get(name, "") for name in names]
            cells.append(f"{found.count('passed')}/{len(names) - found.count('unsupported')}")
        rows.append((kind, *cells))
    return rows


def grid(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for the terminal: names, and columns with titles."""
    table = Table("", box=None, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def table(checks: Sequence[Check], outcomes: Sequence[Outcome]) -> Table:
    """``counts`` for the terminal."""
    return grid((api.name for api in APIS), counts(checks, outcomes))


def scores(outcomes: Sequence[Outcome]) -> list[str]:
    """Rates of the checks that depend on what the model writes."""
    supported = [outcome for outcome in outcomes if outcome.state != "unsupported"]
    calls, no_calls = (
        [outcome for outcome in supported if outcome.name.split(".")[2].startswith(start)]
        for start in ("call-", "no-call-")
    )
    called, runs = sum(call.passed for call in calls), sum(call.runs for call in calls)
    needless = sum(check.runs - check.passed for check in no_calls)
    lines = []
    if calls and no_calls:
        precision = called / (called + needless) if called else 0.0
        lines.append(f"tool calls: recall {called / runs:.1%}, precision {precision:.1%}")
    repeated = [outcome for outcome in supported if outcome.runs > 1]
    if repeated:
        rate = sum(outcome.passed for outcome in repeated) / sum(
            outcome.runs for outcome in repeated
        )
        always = sum(outcome.passed == outcome.runs for outcome in repeated) / len(repeated)
        k = repeated[0].runs
        lines.append(f"pass@1 {rate:.1%}, pass^{k} {always:.1%} (of {len(repeated)} checks)")
    return lines


def failure(outcome: Outcome) -> Group:
    """A check that failed, with the beginnings of what was sent and received."""
    title = Text.assemble(("✗ ", "bold red"), (outcome.name, "bold"), f": {outcome.holds}")
    lines = [Text(outcome.problem, "red")]
    for mark, text in (("→ ", outcome.sent), ("← ", outcome.received)):
        if text:
            lines.append(Text(mark + " ".join(text.split())[:SHOWN], "dim"))
    lines.append(Text(outcome.link, "dim underline"))
    return Group(title, Padding(Group(*lines), (0, 0, 1, 4)))


def verdict(checks: Sequence[Check], outcomes: Sequence[Outcome]) -> Group:
    """The end of a report: the table, what is not supported and why, and the numbers."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.state == "unsupported":
            reasons.setdefault(outcome.problem, []).append(outcome.name)
    for problem, (name, *more) in reasons.items():
        which = f"{name} and {len(more)} more" if more else name
        lines.append(Text.assemble((f"– not supported: {problem} ", "yellow"), (which, "dim")))
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in STYLES}
    parts = [(f"{number} {state}", STYLES[state]) for state, number in count.items() if number]
    joined = Text(", ").join(Text(words, style) for words, style in parts)
    return Group(table(checks, outcomes), *lines, *scores(outcomes), joined)


def document(model: str, repeat: int, outcomes: Sequence[Outcome]) -> Document:
    """The results file: ``--json``."""
    return {
        "kind": "vllm-mlx-harmony verify",
        "versions": versions("vllm-mlx-harmony-server", "openai", "anthropic"),
        "model": model,
        "repeat": repeat,
        "checks": [
            {name: value for name, value in asdict(outcome).items() if value != ""}
            for outcome in outcomes
        ],
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of packages, if installed, and of Python."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "python": python_version()}


def html(checks: Sequence[Check], results: Document, outcomes: Sequence[Outcome]) -> str:
    """One page: the table, the rates, and each check with what was sent and received."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    body = [f"<p>{escape(results['model'])} · {escape(versions)}</p>"]
    body.append(page.table(("", *(api.name for api in APIS)), counts(checks, outcomes)))
    body += [f"<p>{escape(line)}</p>" for line in scores(outcomes)]
    titles = {"failed": "Failed", "unsupported": "Not supported", "passed": "Passed"}
    for state, title in titles.items():
        rows = [_row(outcome) for outcome in outcomes if outcome.state == state]
        if rows:
            body.append(f"<h2>{title}: {len(rows)}</h2><table>{''.join(rows)}</table>")
    return page.page("vllm-mlx-harmony verify", *body)


def _row(outcome: Outcome) -> str:
    texts = (outcome.sent, outcome.received)
    exchange = "".join(f"<pre>{escape(text)}</pre>" for text in texts if text)
    runs = f" ({outcome.passed} of {outcome.runs})" if outcome.runs > 1 else ""
    return (
        f'<tr><td class="{outcome.state}">{escape(outcome.name)}{runs}</td>'
        f'<td><a href="{escape(outcome.link)}">{escape(outcome.holds)}</a>'
        f"<br>{escape(outcome.problem)}{exchange}</td></tr>"
    )


def compared(before: Document, after: Document) -> tuple[Table, bool]:
    """What differs between two results files, and whether nothing that passed fails now."""
    shown = Table("check", box=None, padding=(0, 2, 0, 0))
    for result in (before, after):
        passed = sum(check["state"] == "passed" for check in result["checks"])
        shown.add_column(f"{result['model']}: {passed} passed", overflow="fold")
    old, new = ({check["name"]: check for check in result["checks"]} for result in (before, after))
    worse = False
    for name in dict.fromkeys((*old, *new)):
        pair = [_state(states.get(name)) for states in (old, new)]
        worse |= pair[0].startswith("passed") and pair[1].startswith("failed")
        if pair[0] != pair[1]:
            shown.add_row(name, *(Text(text, STYLES.get(text.split()[0], "")) for text in pair))
    return shown, not worse


def _state(check: Document | None) -> str:
    if check is None:
        return "not run"
    runs = check.get("runs", 1)
    return f"{check['state']} {check['passed']} of {runs}" if runs > 1 else str(check["state"])
