"""Prefix reuse, host against ours in one run: tokens computed, time to first token, memory.

Knows a tool loop of 20 turns, as ids: ours with what was generated, the host's with calls as its
chat template writes them. Needs vllm-mlx and the plugin in one environment. With ``--same`` the
host gets our ids. The cache on disk is measured by `bench_disk`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_table import Row, printed

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine import resources
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree, TreeCounters
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings
from vllm_mlx_harmony.host.vllm_mlx_engine import HarmonyEngine

TURNS = 20
RESULT = 500
"""Tokens of a tool's result."""
ANSWER = 24
"""Tokens of a call. (The model is random: what it says never ends by itself.)"""
HOSTS = ("simple", "batched")
OURS = "ours"
"""The host's engines, and ours, which serves whichever of them is asked for."""
CONVERSATIONS = 8
TENTH = 0.1
ONCE = 1.05


def main() -> int:
    """Prints the table; 1 when a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--same", action="store_true", help="give the host our prompts as well")
    parsed = parser.parse_args()
    with tiny_model() as tiny:
        return printed(measured(tiny, parsed.turns, parsed.same))


@contextmanager
def tiny_model() -> Iterator[Path]:
    """The model's directory, in a home directory that is removed afterwards."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HOME"] = directory  # the host keeps a prefix cache there
        print("the model is a tiny gpt-oss with random weights: compare ratios, not numbers")
        yield standin.write_tiny(Path(directory, "tiny"))


# --- Conversations, as ids


def ids(text: str) -> list[int]:
    """Text with its control tokens written out, as ids."""
    return list(vocab.encoding().encode(text, allowed_special="all"))


def filler(seed: int, count: int) -> list[int]:
    """``count`` ordinary ids."""
    source = random.Random(seed)
    return [source.randrange(1000, 100_000) for _ in range(count)]


def opening(seed: int = 0) -> list[int]:
    """System message, tools and the first message of a user."""
    system = [*ids("<|start|>system<|message|>"), *filler(0, 400), *ids("<|end|>")]
    user = [*ids("<|start|>user<|message|>"), *filler(seed + 1, 100), *ids("<|end|>")]
    return [*system, *user, *ids("<|start|>assistant")]


def result(seed: int) -> list[int]:
    """What a tool gave back, and the assistant's turn after it."""
    header = ids("<|start|>functions.x to=assistant<|channel|>commentary<|message|>")
    return [*header, *filler(seed, RESULT), *ids("<|end|><|start|>assistant")]


# --- Engines


@contextmanager
def plugged(budget: int | None = None) -> Iterator[PrefixTree[Any]]:
    """A memory of its own for our engines."""
    tree: PrefixTree[Any] = PrefixTree(budget or resources.cache_bytes())
    before = resources.tree
    resources.tree = lambda: tree  # type: ignore[assignment]
    try:
        yield tree
    finally:
        resources.tree = before


def make(kind: str, model: Path) -> Any:
    """Our engine, or one of the host's, not started."""
    if kind == OURS:
        return HarmonyEngine(str(model))
    from vllm_mlx.engine.batched import BatchedEngine
    from vllm_mlx.engine.simple import SimpleEngine

    return (SimpleEngine if kind == "simple" else BatchedEngine)(str(model))


async def host_ids(engine: Any, kind: str, prompt: list[int]) -> AsyncIterator[tuple[int, int]]:
    """How many ids come, and how many of the prompt were cached, as the host alone does it."""
    if kind == "simple":
        stream = engine.stream_generate(prompt=prompt, max_tokens=ANSWER, temperature=0.0)
        async with aclosing(stream) as outputs:
            async for _ in outputs:
                yield 1, 0
        return
    from vllm_mlx.request import SamplingParams

    core = engine._engine.engine
    wanted = SamplingParams(max_tokens=ANSWER, temperature=0.0, top_p=1.0)
    request_id = await core.add_request(prompt=prompt, sampling_params=wanted)
    request = core.scheduler.requests[request_id]
    async with aclosing(core.stream_outputs(request_id)) as outputs:
        async for output in outputs:
            yield len(output.new_token_ids), request.cached_tokens


async def our_ids(engine: Any, prompt: list[int]) -> AsyncIterator[tuple[int, int]]:
    """The same with the plugin."""
    wanted = GenerationSettings(max_tokens=ANSWER, temperature=0.0, top_p=1.0)
    async with aclosing(
        engine.engine.generate(GenerationRequest(tuple(prompt), wanted, ""))
    ) as steps:
        async for step in steps:
            if step.progress is None:
                yield len(step.ids), step.cached_tokens


async def generate(engine: Any, prompt: list[int]) -> list[int]:
    """The ids themselves, with the plugin."""
    wanted = GenerationSettings(max_tokens=ANSWER, temperature=0.0, top_p=1.0)
    async with aclosing(
        engine.engine.generate(GenerationRequest(tuple(prompt), wanted, ""))
    ) as steps:
        return [token async for step in steps for token in step.ids]


@dataclass(frozen=True)
class Answer:
    """What one prompt cost: tokens computed, seconds to the first id."""

    computed: int
    seconds: float


async def ask(engine: Any, kind: str, prompt: list[int]) -> Answer:
    """One prompt, to the end of its answer."""
    began, first, cached = time.perf_counter(), 0.0, 0
    stream = our_ids(engine, prompt) if kind == OURS else host_ids(engine, kind, prompt)
    async for _, known in stream:
        cached = known
        first = first or time.perf_counter() - began
    return Answer(len(prompt) - cached, first)


async def run(
    kind: str, model: Path, prompts: list[list[int]]
) -> tuple[list[Answer], TreeCounters]:
    """All prompts, one after another, on an engine that is warm; what our memory holds then."""
    with plugged() as tree:
        engine = make(kind, model)
        await engine.start()
        try:
            for _ in range(2):
                await ask(engine, kind, filler(99, 40))
            tree.forget(lambda _: True)  # what made it warm
            answers = [await ask(engine, kind, prompt) for prompt in prompts]
            return answers, tree.counters()
        finally:
            await engine.stop()


def measured(model: Path, turns: int, same: bool) -> Iterator[Row]:
    """All rows, each as soon as it is there."""
    prompts, hosts = asyncio.run(conversation(model, turns))
    yield from loop(model, prompts, prompts if same else hosts)
    yield from dropped(model, prompts)
    yield from interleaved(model)


TEMPLATE = " to=functions.x<|channel|>commentary json<|message|>"
"""What the model's chat template writes before the arguments of a call, and the model does not."""


async def conversation(model: Path, turns: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of a tool loop, each with what the model said to the last; and the host's."""
    with plugged():
        engine = make(OURS, model)
        await engine.start()
        ours, hosts = [opening()], [opening()]
        for turn in range(turns - 1):
            answer = await generate(engine, ours[-1])
            ours.append([*ours[-1], *answer, *result(turn)])
            hosts.append([*hosts[-1], *ids(TEMPLATE), *answer, *result(turn)])
        await engine.stop()
    return ours, hosts


def loop(model: Path, prompts: list[list[int]], hosts: list[list[int]]) -> Iterator[Row]:
    """The tool loop: tokens computed, time to first token at its end, memory."""
    last = len(prompts[-1])
    ours, counters = asyncio.run(run(OURS, model, prompts))
    for kind in HOSTS:
        host, _ = asyncio.run(run(kind, model, hosts))
        theirs, own = (sum(asked.computed for asked in side) / last for side in (host, ours))
        name = f"{kind}: {len(prompts)} turns, {last} tokens at last, computed"
        yield Row(name, "x last", theirs, own, f"<= {ONCE}", own <= ONCE)
        # The median of the last three: one turn more or less is little of so many.
        theirs, own = (median(asked.seconds for asked in side[-3:]) * 1e3 for side in (host, ours))
        name = f"{kind}: time to first token at last"
        yield Row(name, "ms", theirs, own, f"<= {TENTH} of host", own <= TENTH * theirs)
    held = counters.nbytes / (last + ANSWER) * 1000 / 1024
    goal = f"{counters.nbytes >> 10}K of {counters.budget >> 20}M"
    met = 0 < counters.nbytes <= counters.budget
    yield Row("held per 1k tokens", "KiB", None, held, goal, met)


def dropped(model: Path, prompts: list[list[int]]) -> Iterator[Row]:
    """A second user turn, for which the reasoning of the first is left out."""
    first, calls = prompts[0], ids("<|channel|>commentary to=functions.x<|message|>{}<|call|>")
    again = [*first, *calls, *result(0), *ids("<|channel|>final<|message|>Done.<|end|>")]
    again += [*ids("<|start|>user<|message|>"), *filler(7, 100), *ids("<|end|><|start|>assistant")]
    allowed = len(again) - len(first) + 1
    ours, *hosts = computed(model, [*prompts[:4], again], 1)
    for kind, host in zip(HOSTS, hosts, strict=True):
        name = f"{kind}: second user turn, reasoning dropped"
        yield Row(name, "tokens", host, ours, f"<= {allowed}", ours <= allowed)


def interleaved(model: Path) -> Iterator[Row]:
    """Conversations in turns, with no more budget than they need together."""
    prompts = {seed: opening(seed * 31) for seed in range(CONVERSATIONS)}
    rounds: list[list[int]] = []
    for turn in range(4):
        rounds += [list(prompt) for prompt in prompts.values()]
        for seed in prompts:
            prompts[seed] += [*filler(seed * 7 + turn, ANSWER), *result(seed * 100 + turn)]
    least = sum(len(prompt) for prompt in rounds[-CONVERSATIONS:])
    ours, *hosts = computed(model, rounds, len(rounds))
    for kind, host in zip(HOSTS, hosts, strict=True):
        name = f"{kind}: {CONVERSATIONS} conversations, computed"
        yield Row(name, "x last", host / least, ours / least, "<= 1", ours <= least)


def computed(model: Path, prompts: list[list[int]], last: int) -> list[int]:
    """Tokens computed of the last prompts: by our engine, and by each of the host's."""
    runs = [asyncio.run(run(kind, model, prompts)) for kind in (OURS, *HOSTS)]
    return [sum(answer.computed for answer in answers[-last:]) for answers, _ in runs]


if __name__ == "__main__":
    sys.exit(main())
