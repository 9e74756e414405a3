"""What a grammar costs: its masks, id by id, and its making.

Needs no host and no model. Outputs are those of a model that does what it was asked: reasoning,
then a call or an answer. Numbers are processor time, and medians of several runs where they name
no percentile.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench_table import Row, printed

from vllm_mlx_harmony.core import grammar as grammars
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.grammar import Grammar, Mask, compiled, expressible, grammar_of, matching
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Tool, ToolChoice, Turn, User

TOOLS = (1, 20, 100)
P50_US, P99_US = 10.0, 500.0
REMEMBERED_MS = 5.0
TEXT = Path(__file__).resolve().parents[1].joinpath("README.md").read_text()


def main() -> int:
    """Prints the table; 1 when a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs, for a look")
    runs = 3 if parser.parse_args().quick else 15
    return printed(measured(runs))


def measured(runs: int) -> Iterator[Row]:
    """All rows, each as soon as it is there."""
    yield row("the tokenizer, once per process", "ms", timed(grammars.prepare))
    for count in TOOLS:
        turn = asking(count)
        yield row(f"made cold, {count} tools", "ms", median(cold(turn) for _ in range(runs)))
        warm = median(timed(partial(made, turn)) for _ in range(runs))
        yield row(f"made again, {count} tools", "ms", warm, REMEMBERED_MS)
        start = median(timed(compiled(made(turn)).matcher) for _ in range(runs))
        yield row(f"a matcher, {count} tools", "ms", start)
    for what, turn, output in outputs():
        masks, consumed = followed(turn, output)
        percentiles = quantiles(masks, n=100)
        yield row(f"mask, {what}: p50 of {len(masks)} ids", "µs", percentiles[49], P50_US)
        yield row(f"mask, {what}: p99", "µs", percentiles[98], P99_US)
        yield row(f"an id consumed, {what}", "µs", median(consumed))


def row(what: str, unit: str, taken: float, limit: float | None = None) -> Row:
    """What was ``taken``, and how much it may be."""
    if limit is None:
        return Row(what, unit, None, taken)
    return Row(what, unit, None, taken, f"at most {limit:g}", taken <= limit)


def timed(function: Callable[[], object], scale: float = 1e3) -> float:
    began = time.thread_time()
    function()
    return (time.thread_time() - began) * scale


def made(turn: Turn) -> Grammar:
    grammar = grammar_of(turn, Names.of(turn))
    if grammar is None:
        raise RuntimeError("no grammar")
    compiled(grammar)
    return grammar


def cold(turn: Turn) -> float:
    """With everything that is remembered forgotten."""
    expressible._remembered.cache_clear()
    matching._compiled.cache_clear()
    return timed(partial(made, turn))


def followed(turn: Turn, output: Sequence[int]) -> tuple[list[float], list[float]]:
    """Microseconds of each mask, and of each id taken in."""
    matcher, mask = compiled(made(turn)).matcher(), Mask()
    masks, consumed = [], []
    for token in output:
        masks.append(timed(partial(matcher.fill, mask), 1e6))
        if token not in mask:
            raise RuntimeError(f"{vocab.encoding().decode([token])!r} is not in the grammar")
        consumed.append(timed(partial(matcher.consume, token), 1e6))
    return masks, consumed


# --- what is asked, and what comes ---


def asking(count: int, **more: Any) -> Turn:
    tools = tuple(tool(number) for number in range(count))
    return Turn((User("Look it up."),), tools=tools, **more)


def tool(number: int) -> Tool:
    """As agents declare them: about eight parameters, some nested."""
    name = f"{('read', 'write', 'find', 'list', 'run')[number % 5]}_thing_{number}"
    return Tool(name, f"Does thing number {number}.", parameters(number))


def parameters(number: int) -> dict[str, Any]:
    chance = random.Random(number)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "description": "What to look for."},
        {"type": "integer", "minimum": 1, "maximum": 1000},
        {"type": "boolean", "default": False},
        {"enum": ["content", "files_with_matches", "count"]},
        {"type": "array", "items": {"type": "string"}, "maxItems": 20},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ]
    optional = {f"option_{at}": chance.choice(kinds) for at in range(6)}
    return {
        "type": "object",
        "properties": {"path": kinds[0], "limit": kinds[1], **optional},
        "required": ["path"],
        "additionalProperties": False,
    }


REPORT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "sections": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"heading": {"type": "string"}, "words": {"type": "integer"}},
                "required": ["heading", "words"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "sections"],
    "additionalProperties": False,
}


def outputs() -> Iterator[tuple[str, Turn, list[int]]]:
    thought = written("<|channel|>analysis<|message|>", TEXT[:4000], "<|end|><|start|>assistant")
    arguments = json.dumps({"path": TEXT[:3000], "limit": 7}, ensure_ascii=False)
    call = "<|channel|>commentary to=functions.read_thing_0 <|constrain|>json<|message|>"
    report = {
        "title": "README",
        "sections": [
            {"heading": line.strip("# "), "words": len(line)} for line in TEXT.splitlines()[:60]
        ],
    }
    final = "<|channel|>final<|message|>"
    yield "plain text", Turn((User("Hi."),)), thought + written(final, TEXT, "<|return|>")
    forced = ToolChoice(required=True)
    for count in (20, 100):
        turn = asking(count, tool_choice=forced)
        yield f"a call of {count} tools", turn, thought + written(call, arguments, "<|call|>")
    typed = Turn((User("Hi."),), response_format=ResponseFormat(REPORT))
    answer = json.dumps(report, ensure_ascii=False, indent=2)
    yield "a typed answer", typed, written(final, answer, "<|return|>")


def written(before: str, text: str, after: str) -> list[int]:
    marks = [vocab.encoding().encode(mark, allowed_special="all") for mark in (before, after)]
    return [*marks[0], *vocab.encode(text), *marks[1]]


if __name__ == "__main__":
    sys.exit(main())
