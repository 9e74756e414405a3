"""What a grammar costs: its masks, id by id, and its making.

Outputs are those of a model that does what it was asked: reasoning, then a call or an answer.
Numbers are processor time, and medians of several runs where they name no percentile. Then what it
costs an engine: the host's own, with a tiny random model whose step is made to take 10 ms of the
device, held to a grammar and not, by turns, in time on the clock.

A plain request has a small grammar, which says that nothing can be called: its cost is a row of its
own. With the setting ``off`` there is nothing at all beside what draws an answer anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from bench_table import Row, printed

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import grammar as grammars
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.core.grammar import (
    Compiled,
    Grammar,
    Mask,
    Policy,
    any_order,
    compile_grammar,
    matching,
    strict,
    weakenings,
)
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Tool, ToolChoice, Turn, User
from vllm_mlx_harmony.engine.masks import LogitsMask
from vllm_mlx_harmony.engine.sampler import Sampler
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine
from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.settings import Enforcement

TOOLS = (1, 20, 100)
P50_US, P99_US, MEAN_US = 10.0, 500.0, 30.0
REMEMBERED_MS = 5.0
STEP_PERCENT = 0.1
PLAIN = "plain text"
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
        start = median(timed(compile_grammar(made(turn)).matcher) for _ in range(runs))
        yield row(f"a matcher, {count} tools", "ms", start)
    for what, turn, output in outputs():
        masks, consumed, forced = followed(turn, output)
        percentiles = quantiles(masks, n=100)
        yield row(f"mask, {what}: p50 of {len(masks)} ids", "µs", percentiles[49], P50_US)
        yield row(f"mask, {what}: p99", "µs", percentiles[98], P99_US)
        yield row(f"an id consumed, {what}", "µs", median(consumed))
        yield row(f"ids without a choice, {what}", "%", 100 * forced / len(masks))
        if what == PLAIN:
            percent = (median(masks) + median(consumed)) / (STEP_MS * 1e3) * 100
            yield row("a plain request, of a step of 10 ms", "%", percent, STEP_PERCENT)
    for what, schema, value in hard():
        turn = Turn((User("Hi."),), response_format=ResponseFormat(schema))
        output = written("<|channel|>final<|message|>", json.dumps(value), "<|return|>")
        followed(turn, output)
        masks, consumed, _ = followed(turn, output)
        taken = mean(map(sum, zip(masks, consumed, strict=True)))
        yield row(f"mask and id, {what}: mean of {len(masks)} ids", "µs", taken, MEAN_US)
    yield off()
    yield from decoding(max(3, runs // 2))


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
    grammar = next(weakenings(turn, Names.of(turn)), None)
    if grammar is None:
        raise RuntimeError("no grammar")
    compile_grammar(grammar)
    return grammar


def cold(turn: Turn) -> float:
    """With everything that is remembered forgotten."""
    for remembered in (
        strict._cache,
        matching._compiled,
        any_order._cache,
    ):
        remembered.cache_clear()
    return timed(partial(made, turn))


def off() -> Row:
    """What draws a plain answer has nothing to do but to draw it."""
    turn, settings = Turn((User("Hi."),)), GenerationSettings(TOKENS, 1.0, 1.0)
    wanted = Enforcement(Policy.OFF, repetitions=0, budgets=False)
    held = asyncio.run(enforcement.constraint_for(turn, Names.of(turn), wanted))
    constraint = None if held is None else LogitsMask(held)
    steps = int(Sampler(settings, (), constraint).adjusts)
    return row("what is done to the logits of a plain request, off", "steps", steps, 0)


def followed(turn: Turn, output: Sequence[int]) -> tuple[list[float], list[float], int]:
    """Microseconds of each mask and of each id taken in, and how many ids were the only ones."""
    matcher, mask = compile_grammar(made(turn)).matcher(), Mask()
    masks, consumed, forced = [], [], 0
    for token in output:
        masks.append(timed(partial(matcher.fill, mask), 1e6))
        if token not in mask:
            raise RuntimeError(f"{vocab.encoding().decode([token])!r} is not in the grammar")
        forced += sum(word.bit_count() for word in mask.words if word) == 1
        consumed.append(timed(partial(matcher.consume, token), 1e6))
    return masks, consumed, forced


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
    yield PLAIN, Turn((User("Hi."),)), thought + written(final, TEXT, "<|return|>")
    forced = ToolChoice(required=True)
    for count in (20, 100):
        turn = asking(count, tool_choice=forced)
        yield f"a call of {count} tools", turn, thought + written(call, arguments, "<|call|>")
    typed = Turn((User("Hi."),), response_format=ResponseFormat(REPORT))
    answer = json.dumps(report, ensure_ascii=False, indent=2)
    yield "a typed answer", typed, written(final, answer, "<|return|>")


def hard() -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Schemas without ``strict`` that are much work to follow, and what is valid for them."""
    text: dict[str, Any] = {"type": "string"}
    names = [f"name_of_{number}" for number in range(48)]
    chance = random.Random(1)
    for extra in ({}, {"additionalProperties": False}):
        wide = {"type": "object", "properties": dict.fromkeys(names, text), "required": names[:8]}
        value = dict.fromkeys(chance.sample([*names[:8], *names[20:24]], 12), TEXT[:60])
        what = "closed" if extra else "open"
        yield f"8 required and 40 optional names, {what}", {**wide, **extra}, value
    yield "100 KB of text", {"properties": {"a": text}}, {"a": (TEXT * 9)[:100_000]}
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    yield "an array of 5,000 numbers", numbers, [*range(5000)]
    yield "an object of 3,000 members", {"minProperties": 2}, {f"k{n}": n for n in range(3000)}
    tree = {"type": "object", "properties": {"of": {"$ref": "#"}, "name": text}}
    nested: dict[str, Any] = {"name": "leaf"}
    for number in range(100):
        nested = {"of": nested, "name": f"level {number}"}
    yield "100 levels", {**tree, "required": ["name"]}, nested


def written(before: str, text: str, after: str) -> list[int]:
    marks = [vocab.encoding().encode(mark, allowed_special="all") for mark in (before, after)]
    return [*marks[0], *vocab.encode(text), *marks[1]]


# --- on an engine ---

STEP_MS = 10.0
TOKENS = 64
STREAMS = (1, 8)
SLOWER = 1.05


def decoding(runs: int) -> Iterator[Row]:
    """Milliseconds per step, free in the column of the host's and held to a grammar in ours."""
    turns = {
        PLAIN: Turn((User("Hi."),)),
        "a call of 20 tools": asking(20, tool_choice=ToolChoice(required=True)),
    }
    held = {what: compile_grammar(made(turn)) for what, turn in turns.items()}
    with tempfile.TemporaryDirectory() as directory, loaded():
        model = str(standin.write_tiny(Path(directory, "tiny")))
        for streams in STREAMS:
            taken = asyncio.run(steps(model, streams, runs, held))
            free = median(taken[""])
            for what in held:
                bound = median(taken[what])
                goal, met = f"at most {SLOWER:g} times", bound <= SLOWER * free
                title = f"a step of {streams}, {what}"
                yield Row(title, "ms", free, bound, goal, met)


async def steps(
    model: str, streams: int, runs: int, held: Mapping[str, Compiled]
) -> dict[str, list[float]]:
    """Milliseconds per step of each run, under the name of what it was held to."""
    engine = HarmonyEngine(model)
    await engine.start()
    taken: dict[str, list[float]] = {"": [], **{what: [] for what in held}}
    try:
        for number in range(runs + 1):
            for what, times in taken.items():
                spec = ConstraintSpec(grammar=held.get(what))
                times.append(await step(engine, spec, streams, number))
    finally:
        await engine.stop()
    return {what: times[1:] for what, times in taken.items()}


async def step(engine: Any, spec: ConstraintSpec, streams: int, seed: int) -> float:
    """Milliseconds per step of ``streams`` outputs that begin together."""
    settings = GenerationSettings(max_tokens=TOKENS, temperature=1.0, top_p=1.0, seed=seed)
    prompt = written("<|start|>user<|message|>", "Hi.", "<|end|><|start|>assistant")

    async def one() -> float:
        held = Constraint(spec) if spec else None
        first = 0.0
        steps = engine.engine.generate(GenerationRequest(tuple(prompt), settings, "", held))
        async with aclosing(steps) as generated:
            async for step in generated:
                if step.ids:
                    first = first or time.perf_counter()
        return (time.perf_counter() - first) / (TOKENS - 1) * 1e3

    return median(await asyncio.gather(*(one() for _ in range(streams))))


@contextmanager
def loaded() -> Iterator[None]:
    """A model whose step takes the device ``STEP_MS``."""
    import mlx.core as mx
    from mlx_lm.models.gpt_oss import Model

    call = Model.__call__
    burden: list[Any] = []

    def burdened(self: Any, *args: Any, **keywords: Any) -> Any:
        if not burden:  # on the engine's thread: what it made is its own
            burden.extend(measured_burden(mx))
        weight, times = burden[:2]
        product = weight
        for _ in range(times):
            product = product @ weight
        return call(self, *args, **keywords) + 0 * product[0, 0]

    Model.__call__ = burdened
    try:
        yield
    finally:
        Model.__call__ = call


def measured_burden(mx: Any) -> tuple[Any, int]:
    """A matrix, and how often it is multiplied with itself in ``STEP_MS``."""
    weight = mx.eye(384)
    mx.eval(weight @ weight)
    began, often = time.perf_counter(), 20
    product = weight
    for _ in range(often):
        product = product @ weight
    mx.eval(product)
    product_ms = (time.perf_counter() - began) / often * 1e3
    return weight, max(1, round(STEP_MS / product_ms))


if __name__ == "__main__":
    sys.exit(main())
