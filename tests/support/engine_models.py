"""Models without their tokenizers, which take a second to load, and engines with them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache
from waiting import wait_until_async

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings, Step

GENERATED = 4_096
"""Number of ids that random models choose from. With all 201,088, a step takes three times as long,
and ten times with eight rows."""

PLENTY = 1 << 30
"""Enough bytes for every cache of a test."""

IDS = list(range(1000, 1600))
"""A prompt, in pieces that end at ``PLACES``."""

PLACES = [150, 400, 600]


def load_module(directory: Path) -> Any:
    """The model in ``directory``, with mlx-lm 0.31 and 0.32."""
    if not standin.is_standin(directory):
        model = utils.load_model(directory)[0]
        model.lm_head.weight = model.lm_head.weight[:GENERATED]
        return model
    try:
        return utils.load_model(directory, trust_remote_code=True)[0]
    except TypeError:  # 0.31 always runs the code of the directory
        return utils.load_model(directory)[0]


def loading(
    model: Callable[[], Any], cache: Callable[[Any], PrefixCache] = PrefixCache
) -> Callable[[], tuple[Any, PrefixCache]]:
    """The argument of ``MlxEngine.load``."""

    def load() -> tuple[Any, PrefixCache]:
        module = model()
        return module, cache(module)

    return load


def open_engine(directory: Path, **options: Any) -> MlxEngine:
    cache = options.pop("cache", PrefixCache)
    engine = MlxEngine(str(directory), Options(**options))
    engine.load(loading(partial(load_module, directory), cache))
    return engine


def words(seed: int, length: int) -> tuple[int, ...]:
    luck = random.Random(seed)
    return tuple(luck.randrange(1000, GENERATED) for _ in range(length))


async def steps(engine: MlxEngine, prompt: tuple[int, ...], **changed: Any) -> list[Step]:
    settings = GenerationSettings(**{"max_tokens": 40, "temperature": 0.0, "top_p": 1.0, **changed})
    async with aclosing(engine.generate(GenerationRequest(prompt, settings, ""))) as stream:
        return [step async for step in stream if step.progress is None]


async def answer(engine: MlxEngine, prompt: tuple[int, ...], **changed: Any) -> tuple[int, ...]:
    return sum((step.ids for step in await steps(engine, prompt, **changed)), ())


def rows(engine: MlxEngine) -> int:
    """How many answers are being generated."""
    return sum(len(batch.rows) for batch in engine.loop.batches)


async def started(engine: MlxEngine, *arguments: Any, **changed: Any) -> asyncio.Task[Any]:
    """Starts another ``answer``. Returns when it is being generated."""
    before = rows(engine)
    task = asyncio.ensure_future(answer(engine, *arguments, **changed))
    await wait_until_async(lambda: rows(engine) > before, "an answer to be generated")
    return task


def of_mlx_lm(engine: MlxEngine, prompt: tuple[int, ...], most: int = 40) -> tuple[int, ...]:
    """The output of mlx-lm itself, generated on the engine's thread."""

    def generate() -> tuple[int, ...]:
        model, output = engine.loop.module, []
        cache = make_prompt_cache(model)
        for at in range(0, len(prompt) - 1, 512):
            model(mx.array([prompt[at : min(at + 512, len(prompt) - 1)]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        last = mx.array([prompt[-1:]])
        for _ in range(most):
            token = int(mx.argmax(model(last, cache=cache)[:, -1, :], axis=-1).item())
            output.append(token)
            if token in vocab.TURN_ENDS:
                break
            last = mx.array([[token]])
        return tuple(output)

    return engine.loop.thread.call(generate).result()
