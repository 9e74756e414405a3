"""Prefix reuse, host against ours in one run: tokens computed, time to first token, memory.

Knows a tool loop of 20 turns, as ids: ours with what was generated, the host's with calls as its
chat template writes them. Needs vllm-mlx and the plugin in one environment. With ``--mechanisms``
it compares the alternatives that were considered; with ``--same`` the host gets our ids. The cache
on disk is measured by `bench_disk`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_table import Row, printed

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.prefix_tree import Counters, PrefixTree
from vllm_mlx_harmony.host import resources
from vllm_mlx_harmony.host.engine import HarmonyEngine
from vllm_mlx_harmony.server.sampling import Settings

TURNS = 20
RESULT = 500
"""Tokens of a tool's result."""
ANSWER = 24
"""Tokens of a call. (The model is random: what it says never ends by itself.)"""
ENGINES = ("simple", "batched")
CONVERSATIONS = 8
TENTH = 0.1
ONCE = 1.05


def main() -> int:
    """Prints the table; 1 when a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mechanisms", action="store_true", help="compare ways to remember")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--same", action="store_true", help="give the host our prompts as well")
    parsed = parser.parse_args()
    with tiny_model() as tiny:
        if parsed.mechanisms:
            mechanisms(tiny, parsed.turns)
            return 0
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
def plugged(on: bool, budget: int | None = None) -> Iterator[PrefixTree[Any] | None]:
    """A memory of its own for our engines; nothing for the host's side."""
    if not on:
        yield None
        return
    tree: PrefixTree[Any] = PrefixTree(budget or resources.budget())
    before = resources.tree
    resources.tree = lambda: tree  # type: ignore[assignment]
    try:
        yield tree
    finally:
        resources.tree = before


def make(kind: str, model: Path, ours: bool = True) -> Any:
    """Our engine, or that one of the host's, not started."""
    if ours:
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


async def our_ids(engine: Any, kind: str, prompt: list[int]) -> AsyncIterator[tuple[int, int]]:
    """The same with the plugin."""
    wanted = Settings(max_tokens=ANSWER, temperature=0.0, top_p=1.0)
    async with aclosing(engine.engine.generate(tuple(prompt), wanted, "", None)) as steps:
        async for step in steps:
            if step.progress is None:
                yield len(step.ids), step.cached_tokens


async def said(engine: Any, prompt: list[int]) -> list[int]:
    """The ids themselves, with the plugin."""
    wanted = Settings(max_tokens=ANSWER, temperature=0.0, top_p=1.0)
    async with aclosing(engine.engine.generate(tuple(prompt), wanted, "", None)) as steps:
        return [token async for step in steps for token in step.ids]


held: list[Counters] = []
"""The counters of every run of ours, before its engine was stopped and took all with it."""


@dataclass(frozen=True)
class Answer:
    """What one prompt cost: tokens computed, seconds to the first id."""

    computed: int
    seconds: float


async def ask(engine: Any, kind: str, prompt: list[int], ours: bool) -> Answer:
    """One prompt, to the end of its answer."""
    began, first, cached = time.perf_counter(), 0.0, 0
    stream = (our_ids if ours else host_ids)(engine, kind, prompt)
    async for _, known in stream:
        cached = known
        first = first or time.perf_counter() - began
    return Answer(len(prompt) - cached, first)


async def run(
    engine: Any,
    kind: str,
    prompts: list[list[int]],
    ours: bool,
    tree: PrefixTree[Any] | None = None,
) -> list[Answer]:
    """All prompts, one after another, on an engine that is warm."""
    await engine.start()
    try:
        for _ in range(2):
            await ask(engine, kind, filler(99, 40), ours)
        if tree is not None:
            tree.forget(lambda _: True)  # what made it warm
        return [await ask(engine, kind, prompt, ours) for prompt in prompts]
    finally:
        if tree is not None:
            held.append(tree.counters())
        await engine.stop()


def measured(model: Path, turns: int, same: bool) -> Iterator[Row]:
    """All rows, each as soon as it is there."""
    prompts, hosts = asyncio.run(conversation(model, turns))
    for kind in ENGINES:
        yield from loop(model, kind, prompts, prompts if same else hosts)
    for kind in ENGINES:
        yield from dropped(model, kind, prompts)
        yield from interleaved(model, kind)


TEMPLATE = " to=functions.x<|channel|>commentary json<|message|>"
"""What the model's chat template writes before the arguments of a call, and the model does not."""


async def conversation(model: Path, turns: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of a tool loop, each with what the model said to the last; and the host's."""
    with plugged(True):
        engine = make("batched", model)
        await engine.start()
        ours, hosts = [opening()], [opening()]
        for turn in range(turns - 1):
            answer = await said(engine, ours[-1])
            ours.append([*ours[-1], *answer, *result(turn)])
            hosts.append([*hosts[-1], *ids(TEMPLATE), *answer, *result(turn)])
        await engine.stop()
    return ours, hosts


def loop(model: Path, kind: str, prompts: list[list[int]], hosts: list[list[int]]) -> Iterator[Row]:
    """The tool loop: tokens computed, time to first token at its end, memory."""
    last = len(prompts[-1])
    with plugged(False):
        host = asyncio.run(run(make(kind, model, False), kind, hosts, False))
    with plugged(True) as tree:
        ours = asyncio.run(run(make(kind, model), kind, prompts, True, tree))
    times = [sum(asked.computed for asked in side) / last for side in (host, ours)]
    name = f"{kind}: {len(prompts)} turns, {last} tokens at last"
    yield Row(f"{name}, computed", "x last", times[0], times[1], f"<= {ONCE}", times[1] <= ONCE)
    # The median of the last three: one turn more or less is little of so many.
    seconds = [median(asked.seconds for asked in side[-3:]) * 1e3 for side in (host, ours)]
    met = seconds[1] <= TENTH * seconds[0]
    yield Row(
        f"{kind}: time to first token at last",
        "ms",
        seconds[0],
        seconds[1],
        f"<= {TENTH} of host",
        met,
    )
    yield memory(kind, held[-1], last + ANSWER)


def memory(kind: str, counters: Counters, tokens: int) -> Row:
    """Kilobytes per 1,000 tokens, and that the budget was kept."""
    each = counters.nbytes / tokens * 1000 / 1024
    goal = f"{counters.nbytes >> 10}K of {counters.budget >> 20}M"
    met = 0 < counters.nbytes <= counters.budget
    return Row(f"{kind}: held per 1k tokens", "KiB", None, each, goal, met)


def dropped(model: Path, kind: str, prompts: list[list[int]]) -> Iterator[Row]:
    """A second user turn, for which the reasoning of the first is left out."""
    first, calls = prompts[0], ids("<|channel|>commentary to=functions.x<|message|>{}<|call|>")
    again = [*first, *calls, *result(0), *ids("<|channel|>final<|message|>Done.<|end|>")]
    again += [*ids("<|start|>user<|message|>"), *filler(7, 100), *ids("<|end|><|start|>assistant")]
    asked = []
    for ours in (False, True):
        with plugged(ours):
            asked.append(
                asyncio.run(run(make(kind, model, ours), kind, [*prompts[:4], again], ours))[-1]
            )
    allowed = len(again) - len(first) + 1
    counts = [float(one.computed) for one in asked]
    name = f"{kind}: second user turn, reasoning dropped"
    yield Row(name, "tokens", counts[0], counts[1], f"<= {allowed}", counts[1] <= allowed)


def interleaved(model: Path, kind: str) -> Iterator[Row]:
    """Conversations in turns, with no more budget than they need together."""
    prompts = {seed: opening(seed * 31) for seed in range(CONVERSATIONS)}
    rounds: list[list[int]] = []
    for turn in range(4):
        rounds += [list(prompt) for prompt in prompts.values()]
        for seed in prompts:
            prompts[seed] += [*filler(seed * 7 + turn, ANSWER), *result(seed * 100 + turn)]
    asked = []
    for ours in (False, True):
        with plugged(ours):
            asked.append(asyncio.run(run(make(kind, model, ours), kind, rounds, ours)))
    least = sum(len(prompt) for prompt in rounds[-CONVERSATIONS:])
    times = [sum(one.computed for one in side) / least for side in asked]
    name = f"{kind}: {CONVERSATIONS} conversations, computed"
    yield Row(name, "x last", times[0], times[1], "<= 1", times[1] <= 1)


# --- Ways to remember, on the model itself


@dataclass
class Way:
    """A way to remember: take what is known of a prompt, put what is known now."""

    name: str
    take: Callable[[list[int]], tuple[int, list[Any]]]
    put: Callable[[list[int], list[Any]], None]
    nbytes: Callable[[], int]


def mechanisms(model: Path, turns: int) -> None:
    """Prints, for each way, what a loop and what follows it cost."""
    from mlx_lm.utils import load_model

    loaded = load_model(model)[0]
    print(
        f"{'':28}{'computed':>10}{'dropped':>10}{'KiB/1k':>10}{'take+put ms':>13}  (of last turn)"
    )
    for way in (nothing(loaded), copies(loaded), whole(loaded), segments(loaded)):
        gc.collect()
        print(_compared(loaded, way, turns), flush=True)


def _compared(model: Any, way: Way, turns: int) -> str:
    prompt, computed, spent = opening(), 0, 0.0
    first = list(prompt)
    for turn in range(turns):
        began = time.perf_counter()
        known, cache = way.take(prompt)
        spent = time.perf_counter() - began
        computed += len(prompt) - known
        _feed(model, cache, prompt[known:-1])
        began = time.perf_counter()
        way.put(prompt[:-1], cache)
        spent += time.perf_counter() - began
        answer = filler(1000 + turn, ANSWER)
        _feed(model, cache, [prompt[-1], *answer])
        began = time.perf_counter()
        way.put([*prompt, *answer], cache)
        spent += time.perf_counter() - began
        last, prompt = len(prompt), [*prompt, *answer, *result(turn)]
    known, _ = way.take([*first, *filler(5, 50)])
    kib = way.nbytes() / (last + ANSWER) * 1000 / 1024
    costs = f"{computed / last:9.2f}x{len(first) - known:10d}{kib:10.0f}{spent * 1e3:13.1f}"
    return f"{way.name:28}{costs}"


def _feed(model: Any, cache: list[Any], tokens: list[int]) -> None:
    import mlx.core as mx

    for at in range(0, len(tokens), 2048):
        model(mx.array([tokens[at : at + 2048]]), cache=cache)
        mx.eval([layer.state for layer in cache])


def nothing(model: Any) -> Way:
    """The host's simple engine."""
    return Way("nothing", lambda _: (0, model.make_cache()), lambda *_: None, lambda: 0)


def copies(model: Any) -> Way:
    """mlx-lm's own `LRUPromptCache`: a copy of everything at every place."""
    return _lru("copies (LRUPromptCache)", model.make_cache)


def whole(model: Any) -> Way:
    """Every layer keeps everything: can be cut back anywhere, in the same `LRUPromptCache`."""
    from mlx_lm.models.cache import KVCache

    return _lru("full-length KVCache", lambda: [KVCache() for _ in model.layers])


def _lru(name: str, make_cache: Callable[[], list[Any]]) -> Way:
    from copy import deepcopy

    from mlx_lm.models.cache import LRUPromptCache

    lru = LRUPromptCache(max_size=1_000_000)

    def take(prompt: list[int]) -> tuple[int, list[Any]]:
        import mlx.core as mx

        cache, rest = lru.fetch_nearest_cache("model", prompt)
        if cache is None:
            return 0, make_cache()
        mx.eval([layer.state for layer in cache])
        return len(prompt) - len(rest), cache

    def put(tokens: list[int], cache: list[Any]) -> None:
        import mlx.core as mx

        kept = deepcopy(cache)
        mx.eval([layer.state for layer in kept])
        lru.insert_cache("model", tokens, kept)

    return Way(name, take, put, lambda: lru.nbytes)


def segments(model: Any) -> Way:
    """Ours: a tree of pieces."""
    from vllm_mlx_harmony.engine.pieces import cut, join
    from vllm_mlx_harmony.engine.prefix_tree import pack

    tree: PrefixTree[Any] = PrefixTree(1 << 40)

    def take(prompt: list[int]) -> tuple[int, list[Any]]:
        known, pieces = tree.find([""], pack(prompt))
        return known, join(model, pieces, 800) if known else model.make_cache()

    def put(tokens: list[int], cache: list[Any]) -> None:
        tree.add([""], pack(tokens), lambda start, end: cut(cache, start, end))

    return Way("segments (ours)", take, put, lambda: tree.counters().nbytes)


if __name__ == "__main__":
    sys.exit(main())
