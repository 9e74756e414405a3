"""The output of the demo: the prompt, the model's output and the client's view of it."""

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

from vllm_mlx_harmony.cli.client import Completion
from vllm_mlx_harmony.cli.paint import KIND_STYLES, painted
from vllm_mlx_harmony.cli.process import Running
from vllm_mlx_harmony.core.deltas import Kind

WIDE = 100
"""Minimum width in columns for a layout of two columns."""

LAST_LINES = 15

PARTS = {
    "reasoning": KIND_STYLES[Kind.REASONING],
    "content": KIND_STYLES[Kind.ANSWER],
    "tool_calls": KIND_STYLES[Kind.CALL],
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: its prompt, the scripted output, and the answer that the client received.

    ``before`` is the prompt of the previous turn.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    answer: Completion
    before: tuple[int, ...] = ()


class Screen:
    """A terminal, or a file that the output is redirected to."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._began = time.monotonic()

    def opening(self) -> None:
        """Prints what the demo shows."""
        self._console.print(
            "[bold]vllm-mlx-harmony demo[/]: the real server, the real HTTP API, and in place of "
            "gpt-oss a [bold]scripted stand-in[/]. There are no weights: the output of the model "
            "was written by hand, token by token.\n"
        )

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Prints ``what`` while the block runs, and then its duration."""
        began = time.monotonic()
        with self._console.status(what):
            yield
        self._console.print(f"{what}: {time.monotonic() - began:.1f} s", style="dim")

    def serving(self, server: Running) -> None:
        """Prints the command that started the server."""
        line = shlex.join(["python", *server.command[1:]])
        self._console.print(f"$ {line}\n", style="dim", soft_wrap=True)

    def turn(self, title: str, turn: Turn) -> None:
        """Prints a turn."""
        self._console.rule(title)
        known = len(turn.before)
        if known and turn.prompt[:known] == turn.before:
            skipped = Text(
                f"… the {known} tokens of the previous prompt, and then:\n", "dim italic"
            )
            prompt_text = skipped + painted(turn.prompt[known:], apart=True)
        else:
            prompt_text = painted(turn.prompt, apart=True)
        prompt = _box(prompt_text, f"the prompt: {len(turn.prompt)} tokens")
        output = _box(
            painted(turn.output, apart=True), f"the model writes: {len(turn.output)} tokens"
        )
        seen = _box(_fields(turn.answer), f"the client sees: {turn.answer.chunks} chunks")
        if self._console.width < WIDE:
            self._console.print(prompt, output, seen, sep="\n")
            return
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1, overflow="fold")
        grid.add_column(ratio=1, overflow="fold")
        grid.add_row(prompt, Group(output, seen))
        self._console.print(grid)

    def closing(self, *, right: bool) -> None:
        """Prints the result of the demo."""
        took = f"{time.monotonic() - self._began:.0f} s"
        if right:
            result = "reasoning, preamble, call and answer each arrived in their own field"
            self._console.print(f"\n[green]✓[/] {result}; the server is stopped ({took})")
        else:
            self._console.print("\n[bold red]✗ the client did not receive the scripted output[/]")

    def log(self, server: Running) -> None:
        """Prints the lines of the server's log that concern this plugin, and the last ones."""
        lines = server.log.read_text("utf-8", "replace").splitlines()
        ours = [line for line in lines[:-LAST_LINES] if "harmony" in line]
        self._console.print(Text("\n".join([*ours, *lines[-LAST_LINES:]]), "dim"), soft_wrap=True)


def _box(content: Text, title: str) -> Panel:
    content.overflow = "fold"  # nothing is truncated
    return Panel(content, title=title, title_align="left", border_style="dim")


def _fields(answer: Completion) -> Text:
    """The fields of the answer, with a bar between deltas."""
    lines = []
    for part in answer.parts:
        style = PARTS[part.key]
        deltas = Text("|", "dim").join(Text(delta, style) for delta in part.deltas)
        name = f"{part.key} {part.name}".strip()
        lines.append(Text.assemble((f"{name}: ", f"underline {style}"), deltas))
    lines.append(Text(f"finish_reason: {answer.finish_reason}"))
    usage = f"{answer.prompt_tokens} prompt tokens, {answer.completion_tokens} completion tokens"
    lines.append(Text(f"usage: {usage}"))
    return Text("\n").join(lines)
