"""What the demo shows: prompt, raw output and what the client saw, beside each other if it fits.

Knows terminals. Refuses to know servers and scripts.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_mlx_harmony.cli.client import Completion, Part
from vllm_mlx_harmony.cli.paint import KIND_STYLES, painted
from vllm_mlx_harmony.cli.process import Running
from vllm_mlx_harmony.core.deltas import Kind

WIDE = 100
"""Columns from which on prompt and output stand side by side."""

LAST_LINES = 15

PARTS = {
    "reasoning": KIND_STYLES[Kind.REASONING],
    "content": KIND_STYLES[Kind.ANSWER],
    "tool_calls": KIND_STYLES[Kind.CALL],
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its prompt, the script of what the model says to it, what the client saw.

    ``before`` is the prompt of the turn before.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    answer: Completion
    before: tuple[int, ...] = ()


class Screen:
    """A terminal, or a file the demo's output is piped to."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._began = time.monotonic()

    def opening(self) -> None:
        """What this is, and what it is not."""
        self._console.print(
            "[bold]vllm-mlx-harmony demo[/]: the real server, the real HTTP API, and in place of "
            "gpt-oss a [bold]scripted stand-in[/]. There are no weights: what the model says below "
            "was written by hand, token by token.\n"
        )

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Shows that something is going on, and then how long it took."""
        began = time.monotonic()
        with self._console.status(what):
            yield
        self._console.print(f"{what}: {time.monotonic() - began:.1f} s", style="dim")

    def serving(self, server: Running) -> None:
        """How the server was started."""
        line = shlex.join(["python", *server.command[1:]])
        self._console.print(f"$ {line}\n", style="dim", soft_wrap=True)

    def turn(self, title: str, turn: Turn) -> None:
        """One request with all there is to see of it."""
        self._console.rule(title)
        prompt = _box(_prompt(turn), f"the prompt: {len(turn.prompt)} tokens")
        output = _box(
            painted(turn.output, apart=True), f"the model says: {len(turn.output)} tokens"
        )
        seen = _box(_seen(turn.answer), f"the client sees: {turn.answer.chunks} chunks")
        if self._console.width < WIDE:
            self._console.print(prompt, output, seen, sep="\n")
            return
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1, overflow="fold")
        grid.add_column(ratio=1, overflow="fold")
        grid.add_row(prompt, Group(output, seen))
        self._console.print(grid)

    def closing(self, *, right: bool) -> None:
        """Whether it went as it should."""
        took = f"{time.monotonic() - self._began:.0f} s"
        if right:
            said = "reasoning, preamble, call and answer each arrived in their own field"
            self._console.print(f"\n[green]✓[/] {said}; the server is stopped ({took})")
        else:
            self._console.print("\n[bold red]✗ the client did not see what the model said[/]")

    def log(self, server: Running) -> None:
        """What the server printed of this plugin, and its last lines."""
        lines = server.log.read_text("utf-8", "replace").splitlines()
        ours = [line for line in lines[:-LAST_LINES] if "harmony" in line]
        self._console.print(Text("\n".join([*ours, *lines[-LAST_LINES:]]), "dim"), soft_wrap=True)


def _box(content: Text, title: str) -> Panel:
    content.overflow = "fold"  # nothing of it may be left out
    return Panel(content, title=title, title_align="left", border_style="dim")


def _prompt(turn: Turn) -> Text:
    """The prompt; of one that goes on where the one before ended, only what is new."""
    kept = len(turn.before)
    if not kept or turn.prompt[:kept] != turn.before:
        return painted(turn.prompt, apart=True)
    skipped = Text(f"… the {kept} tokens of the prompt before, and then:\n", "dim italic")
    return skipped + painted(turn.prompt[kept:], apart=True)


def _seen(answer: Completion) -> Text:
    """The fields of the answer; a bar stands between two deltas."""
    lines = [_field(part) for part in answer.parts]
    lines.append(Text(f"finish_reason: {answer.finish_reason}"))
    usage = f"{answer.prompt_tokens} prompt tokens, {answer.completion_tokens} completion tokens"
    lines.append(Text(f"usage: {usage}"))
    return Text("\n").join(lines)


def _field(part: Part) -> Text:
    style = PARTS[part.key]
    deltas = Text("|", "dim").join(Text(delta, style) for delta in part.deltas)
    name = f"{part.key} {part.name}".strip()
    return Text.assemble((f"{name}: ", f"underline {style}"), deltas)
