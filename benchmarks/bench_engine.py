"""One long prompt beside others, on the engine itself: who waits for whom, and what batching costs.

The models are gpt-oss with random weights: the tiny one of `standin`, and one of 12 layers, 256
wide. All figures are ratios within one run; the column ``host`` has what a figure is divided by.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench_table import Row, printed

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.turn import VOCAB_SIZE
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine
from vllm_mlx_harmony.engine.mlx_lm_compat import load_model, load_tokenizer
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings

LONG, MIDDLE, SHORT = 36_000, 13_000, 60
"""Ids of the long prompt (12,000 numbers), of one of an agent, and of the short one (50 words)."""

TOGETHER = 8
"""Short prompts at once."""

DECODED, ANSWER, RUNS = 150, 16, 5
ENDS = tuple((end, -100.0) for end in sorted(vocab.TURN_ENDS))
"""Biases that keep a random model from ending its answer."""


def main() -> int:
    """Prints the table; 1 when a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", type=int, default=LONG, help="ids of the long prompt")
    parsed = parser.parse_args()
    return printed(rows(parsed.long))


def rows(long: int) -> Iterator[Row]:
    """All measurements, as they are made, with a prefix cache as a server has one."""
    with tempfile.TemporaryDirectory() as directory:
        tiny = standin.write_tiny(Path(directory, "tiny"))
        tokenizer = load_tokenizer(tiny)
        engine = MlxEngine(str(tiny))
        engine.load(lambda: reusing(load_model(tiny)))
        try:
            yield from asyncio.run(beside(engine, long))
            yield from asyncio.run(between(engine))
            yield asyncio.run(at_once("tiny", engine))
            yield from decoding("tiny", engine, tokenizer)
        finally:
            engine.close()
        engine = MlxEngine("12 layers of 256")
        engine.load(lambda: reusing(wide()))
        try:
            yield asyncio.run(at_once("12 layers of 256", engine))
            yield from decoding("12 layers of 256", engine, tokenizer)
        finally:
            engine.close()


def reusing(model: Any) -> tuple[Any, PrefixCache]:
    return model, PrefixCache(model, PrefixTree(1 << 30))


def wide(width: int = 256) -> Any:
    """A random gpt-oss of 12 layers."""
    import mlx.core as mx
    from mlx_lm.models.gpt_oss import Model, ModelArgs

    config = {**standin.tiny.config(width), "num_hidden_layers": 12}
    config["layer_types"] = ["sliding_attention", "full_attention"] * 6
    model = Model(ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def ids(seed: int, count: int) -> tuple[int, ...]:
    """``count`` ordinary ids."""
    source = random.Random(seed)
    return tuple(source.randrange(1000, VOCAB_SIZE - 2000) for _ in range(count))


@dataclass
class Answer:
    """When its ids came, by the clock of the process."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)

    @property
    def wait(self) -> float:
        """Seconds to the first id."""
        return self.times[0] - self.sent

    def speed(self, start: float, end: float) -> float:
        """Ids per second from ``start`` to ``end``."""
        return sum(start <= seconds < end for seconds in self.times) / (end - start)

    def longest_pause(self, start: float, end: float) -> float:
        """Seconds between two ids, as long as they were in that time."""
        within = [start, *(seconds for seconds in self.times if start <= seconds < end), end]
        return max(after - before for before, after in pairwise(within))


async def ask(
    engine: MlxEngine, prompt: Sequence[int], most: int, answer: Answer | None = None
) -> Answer:
    """An answer, whose ids are drawn without end until there are ``most``."""
    answer = answer or Answer()
    settings = GenerationSettings(max_tokens=most, temperature=0.0, top_p=1.0, logit_bias=ENDS)
    answer.sent = time.perf_counter()
    async with aclosing(engine.generate(GenerationRequest(tuple(prompt), settings, ""))) as steps:
        async for step in steps:
            answer.times += [time.perf_counter()] * len(step.ids)
    return answer


async def beside(engine: MlxEngine, long: int) -> list[Row]:
    """The long prompt alone, beside a running answer, and before a short prompt."""
    await ask(engine, ids(0, 3000), 20)  # warm
    alone = (await ask(engine, ids(1, long), 1)).wait
    running = Answer()
    task = asyncio.ensure_future(ask(engine, ids(2, SHORT), 1_000_000, running))
    while not running.times:
        await asyncio.sleep(0.01)
    begun = time.perf_counter()
    await asyncio.sleep(3.0)
    alone_speed = running.speed(begun, time.perf_counter())
    among = await ask(engine, ids(3, long), 1)
    end = among.times[0]
    speed, pause = running.speed(among.sent, end), running.longest_pause(among.sent, end)
    task.cancel()
    await asyncio.wait({task})
    first = asyncio.ensure_future(ask(engine, ids(4, long), 1))
    await asyncio.sleep(alone / 10)
    behind = await ask(engine, ids(5, SHORT), 1)
    before = await first
    return [
        at_most(f"longest pause of an answer beside {long:,} ids", among.wait, pause, 0.03),
        at_least("its speed meanwhile", alone_speed, speed, 0.25),
        at_most(f"first id of {SHORT} ids sent behind them", before.wait, behind.wait, 0.15),
        at_most("first id of the long prompt beside an answer", alone, among.wait, 1.5),
    ]


async def between(engine: MlxEngine) -> list[Row]:
    """A short prompt with a short answer while one of an agent is computed, at any time of it."""
    luck, alone, beside, short = random.Random(1), list[float](), list[float](), list[float]()
    for run in range(RUNS):
        alone.append((await ask(engine, ids(40 + run, MIDDLE), 1)).wait)
        task = asyncio.ensure_future(ask(engine, ids(60 + run, MIDDLE), 1))
        await asyncio.sleep(median(alone) * luck.uniform(0.1, 0.8))
        short.append((await ask(engine, ids(80 + run, SHORT), ANSWER)).wait)
        beside.append((await task).wait)
    what = f"first id of {SHORT} ids beside {MIDDLE:,}"
    return [
        at_most(what, median(beside), median(short), 0.04),
        at_most(f"first id of the {MIDDLE:,} meanwhile", median(alone), median(beside), 1.2),
    ]


async def at_once(name: str, engine: MlxEngine) -> Row:
    """The last first id of several short prompts, beside the time that they take one by one: where
    each id costs the same, as on a processor, it cannot be much less."""
    one, several = [], []
    for run in range(2 * RUNS + 1):
        one.append((await ask(engine, ids(100 + run, SHORT), 1)).wait)
        prompts = [ids(200 + TOGETHER * run + number, SHORT) for number in range(TOGETHER)]
        found = await asyncio.gather(*(ask(engine, prompt, 1) for prompt in prompts))
        several.append(max(answer.times[0] for answer in found) - found[0].sent)
    what = f"first ids of {TOGETHER} times {SHORT} ids at once, {name}"
    return at_most(what, TOGETHER * median(one[1:]), median(several[1:]), 1.0)


def at_most(what: str, host: float, ours: float, goal: float) -> Row:
    """A row of seconds, whose ratio must not be more than ``goal``."""
    return Row(what, "s", host, ours, f"≤ {goal:g}", ours / host <= goal)


def at_least(what: str, host: float, ours: float, goal: float) -> Row:
    """A row of ids per second, whose ratio must not be less than ``goal``."""
    return Row(what, "ids/s", host, ours, f"≥ {goal:g}", ours / host >= goal)


def decoding(name: str, engine: MlxEngine, tokenizer: Any) -> Iterator[Row]:
    """One answer alone, beside ``mlx_lm.stream_generate`` on the same weights, by turns."""
    theirs, ours = [], []
    for run in range(RUNS + 1):
        prompt = ids(10 + run, SHORT)
        theirs.append(on_thread(engine, partial(by_mlx_lm, engine, tokenizer, prompt)))
        answer = asyncio.run(ask(engine, prompt, DECODED))
        ours.append((DECODED - 1) / (answer.times[-1] - answer.times[0]))
    host = median(theirs[1:])
    ratio = median(one / other for one, other in zip(ours[1:], theirs[1:], strict=True))
    yield at_least(f"one answer alone, {name}", host, host * ratio, 1.0)


def on_thread(engine: MlxEngine, function: Callable[[], float]) -> float:
    """What ``function`` returns where the model is."""
    return engine.loop.thread.call(function).result()


def by_mlx_lm(engine: MlxEngine, tokenizer: Any, prompt: Sequence[int]) -> float:
    """Ids per second behind the first one, as mlx-lm generates and spells them."""
    import mlx.core as mx
    from mlx_lm import stream_generate

    banned = mx.array([token for token, _ in ENDS])

    def never_ends(_: Any, logits: Any) -> Any:
        return logits.at[:, banned].add(-100.0)

    options = {"max_tokens": DECODED, "logits_processors": [never_ends]}
    chunks = stream_generate(engine.loop.module, tokenizer, list(prompt), **options)
    times = [time.perf_counter() for _ in chunks]
    return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    sys.exit(main())
