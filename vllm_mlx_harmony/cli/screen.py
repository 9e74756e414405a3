"""The output of the demo: the prompt, the model's output and the client's view of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_mlx_harmony.cli.client import Completion
from vllm_mlx_harmony.cli.paint import KIND_STYLES, colorize
from vllm_mlx_harmony.core.deltas import Kind

WIDE = 100
"""Minimum width in columns for a layout of two columns."""

LAST_LINES = 15

PARTS = {
    "reasoning": KIND_STYLES[Kind.REASONING],
    "content": KIND_STYLES[Kind.ANSWER],
    "tool_calls": KIND_STYLES[Kind.CALL],
}


@contextmanager
def busy(console: Console, what: str) -> Iterator[None]:
    """Prints ``what`` while the block runs, and then its duration."""
    began = time.monotonic()
    with console.status(what):
        yield
    console.print(f"{what}: {time.monotonic() - began:.1f} s", style="dim")


def show_turn(
    console: Console,
    title: str,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    answer: Completion,
    *,
    before: tuple[int, ...] = (),
) -> None:
    """Prints a request: its prompt, the scripted output, and the answer that the client received.

    ``before`` is the prompt of the previous turn, which is not printed again.
    """
    console.rule(title)
    known = len(before) if prompt[: len(before)] == before else 0
    text = colorize(prompt[known:], apart=True)
    if known:
        skipped = f"… the {known} tokens of the previous prompt, and then:\n"
        text = Text.assemble((skipped, "dim italic"), text)
    prompt_box = _box(text, f"the prompt: {len(prompt)} tokens")
    output_box = _box(colorize(output, apart=True), f"the model writes: {len(output)} tokens")
    parsed_box = _box(_fields(answer), "the client sees")
    if console.width < WIDE:
        console.print(prompt_box, output_box, parsed_box, sep="\n")
        return
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(prompt_box, Group(output_box, parsed_box))
    console.print(grid)


def show_log(console: Console, log: Path) -> None:
    """Prints the lines of the server's log that concern this plugin, and the last ones."""
    lines = log.read_text("utf-8", "replace").splitlines()
    ours = [line for line in lines[:-LAST_LINES] if "harmony" in line]
    console.print(Text("\n".join([*ours, *lines[-LAST_LINES:]]), "dim"), soft_wrap=True)


def _box(content: Text, title: str) -> Panel:
    content.overflow = "fold"  # nothing is truncated
    return Panel(content, title=title, title_align="left", border_style="dim")


def _fields(answer: Completion) -> Text:
    """The fields of the answer, with a bar between deltas."""
    lines, bar = [], Text.assemble(("|", "dim"))
    for part in answer.parts:
        style = PARTS[part.key]
        deltas = bar.join(Text(delta, style) for delta in part.deltas)
        name = f"{part.key} {part.name}".strip()
        lines.append(Text.assemble((f"{name}: ", f"underline {style}"), deltas))
    lines.append(Text(f"finish_reason: {answer.finish_reason}"))
    prompt, completion = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
    lines.append(Text(f"usage: {prompt} prompt tokens, {completion} completion tokens"))
    return Text("\n").join(lines)
