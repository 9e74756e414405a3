"""What a run found: on the terminal while it runs and at its end, and as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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

from vllm_mlx_harmony.verify.apis import APIS
from vllm_mlx_harmony.verify.checks import Check, Outcome
from vllm_mlx_harmony.verify.values import Document

SHOWN = 400
"""Characters of a request and of its response on the terminal."""

STYLES = {"passed": "green", "failed": "bold red", "unsupported": "yellow"}


@dataclass(slots=True)
class Screen:
    """A table of kinds and APIs and a bar while checks run; failures stand above it."""

    console: Console
    checks: Sequence[Check]
    outcomes: list[Outcome] = field(default_factory=list)
    live: Live = field(init=False)
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        columns = (
            *(BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()),
            *(TimeRemainingColumn(), TextColumn("left · {task.description}", style="dim")),
        )
        self.progress = Progress(*columns, console=self.console)
        self.progress.add_task(self.checks[0].name, total=len(self.checks))
        self.live = Live(self._shown(), console=self.console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Screen:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def add(self, outcome: Outcome) -> None:
        """Shows one more outcome."""
        self.outcomes.append(outcome)
        if outcome.state == "failed":
            self.live.console.print(failure(outcome))
        following = [*self.checks[len(self.outcomes) :], None][0]
        name = following.name if following else ""
        self.progress.update(self.progress.task_ids[0], advance=1, description=name)
        self.live.update(self._shown())

    def _shown(self) -> Group:
        return Group(table(self.checks, self.outcomes), self.progress)


def table(checks: Sequence[Check], outcomes: Sequence[Outcome]) -> Table:
    """How many checks of each kind passed in each API, of those that are supported."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column()
    apis = [api.name for api in APIS if any(check.api.name == api.name for check in checks)]
    for api in apis:
        shown.add_column(api, justify="right")
    for kind in dict.fromkeys(check.kind for check in checks):
        cells = []
        for api in apis:
            start = f"{kind}.{api}."
            done = [each.state for each in outcomes if each.name.startswith(start)]
            count = sum(check.name.startswith(start) for check in checks)
            passed, failed = done.count("passed"), done.count("failed")
            absent = done.count("unsupported")
            style = "red" if failed else "green" if len(done) == count else "default"
            cell = Text(f"{passed}/{count - absent}", style if count > absent else "dim")
            cells.append(cell)
        shown.add_row(kind, *cells)
    return shown


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
    for each in outcomes:
        if each.state == "unsupported":
            reasons.setdefault(each.problem, []).append(each.name)
    for problem, (name, *others) in reasons.items():
        which = f"{name} and {len(others)} more" if others else name
        lines.append(Text.assemble((f"– not supported: {problem} ", "yellow"), (which, "dim")))
    count = {state: sum(each.state == state for each in outcomes) for state in STYLES}
    parts = [(f"{number} {state}", STYLES[state]) for state, number in count.items() if number]
    joined = Text(", ").join(Text(words, style) for words, style in parts)
    return Group(table(checks, outcomes), *lines, joined)


def document(model: str, repeat: int, outcomes: Sequence[Outcome]) -> Document:
    """The results file: ``--json``."""
    packages = ("vllm-mlx-harmony", "openai", "anthropic")
    versions = {name: _version(name) for name in packages}
    return {
        "kind": "vllm-mlx-harmony verify",
        "versions": {**versions, "python": python_version()},
        "model": model,
        "repeat": repeat,
        "checks": [
            {name: value for name, value in asdict(each).items() if value != ""}
            for each in outcomes
        ],
    }


def dumped(results: Document) -> str:
    """A results file's text."""
    return json.dumps(results, indent=1, ensure_ascii=False) + "\n"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
