"""How far prompts are: what an engine reports of them, to their requests and as its status."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from engine_models import load_module, loading

from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.engine import loop as loop_module
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options, RequestStatus
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.scheduler import BatchLimits
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings

Run = Callable[[Coroutine[Any, Any, Any]], Any]

CHUNK = 128
PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def _reports_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "REPORTED", 0.0)


@pytest.fixture
def engine(tiny: Path) -> Iterator[MlxEngine]:
    """One prompt at a time, in small chunks."""

    def cache(model: Any) -> PrefixCache:
        return PrefixCache(model, PrefixTree(PLENTY))

    options = Options(BatchLimits(chunk=CHUNK, prompts=1), speculate="off")  # answers take a while
    made = MlxEngine(str(tiny), options)
    made.load(loading(partial(load_module, tiny), cache))
    yield made
    made.close()


def words(seed: int, length: int) -> tuple[int, ...]:
    luck = random.Random(seed)
    return tuple(luck.randrange(1000, 150_000) for _ in range(length))


async def reports(
    engine: MlxEngine, prompt: tuple[int, ...], most: int = 3, seen: Callable[[], None] = int
) -> list[Progress]:
    """What is reported of a prompt; ``seen`` is called at each report."""
    found, generated = [], 0
    settings = GenerationSettings(max_tokens=most, temperature=0.0, top_p=1.0)
    async with aclosing(engine.generate(GenerationRequest(prompt, settings, ""))) as steps:
        async for step in steps:
            if step.progress is None:
                generated += len(step.ids)
                continue
            assert not step.ids and not generated and step.finish is None
            found.append(step.progress)
            seen()
    return found


@pytest.mark.parametrize("length", [1, 2, 100, 500, 1000])
def test_a_prompt_is_reported_from_its_beginning_to_its_end(
    engine: MlxEngine, run: Run, length: int
) -> None:
    """As llama.cpp reports it: the first has what is cached, the last all of it."""
    found = [each for each in run(reports(engine, words(length, length))) if not each.place]
    assert found[0].processed == found[0].cached == 0
    assert found[-1].processed == length
    assert {each.total for each in found} == {length}
    assert {each.cached for each in found} == {0}
    assert all(a.processed <= b.processed for a, b in pairwise(found))
    assert all(a.seconds <= b.seconds for a, b in pairwise(found))
    assert len({each.processed for each in found}) > length // CHUNK


def test_cached_tokens_count_as_processed(engine: MlxEngine, run: Run) -> None:
    prompt = words(1, 600)
    run(reports(engine, prompt))
    found = run(reports(engine, (*prompt, *words(2, 300))))
    assert found[0].processed == found[0].cached
    assert {each.cached for each in found} == {found[-1].cached} and found[-1].cached >= 512
    assert found[-1].processed == found[-1].total == 900


def test_waiting_prompt_reports_its_place(engine: MlxEngine, run: Run) -> None:
    async def three() -> list[list[Progress]]:
        prompts = (words(seed, length) for seed, length in ((1, 900), (2, 1000), (3, 1100)))
        return await asyncio.gather(*(reports(engine, prompt) for prompt in prompts))

    first, second, third = run(three())
    assert {each.place for each in third} >= {0, 2}
    assert all(each.processed == 0 for each in third if each.place)
    places = [each.place for each in second]
    assert places == sorted(places, reverse=True) and {*places} <= {0, 1, 2, 3}
    assert [each.processed for each in (first[-1], second[-1], third[-1])] == [900, 1000, 1100]


def test_the_status_has_every_request(engine: MlxEngine, run: Run) -> None:
    """The one that generates first, then the one that is computed, then those that wait."""
    seen: list[list[RequestStatus]] = []

    async def all_of_them() -> None:
        answer = asyncio.ensure_future(reports(engine, words(1, 50), most=3000))
        while not any(each.generated for each in engine.status()):
            await asyncio.sleep(0.01)
        look = partial(lambda: seen.append(engine.status()))
        await asyncio.gather(*(reports(engine, words(n, 900 + n), 1, look) for n in (2, 3, 4)))
        answer.cancel()
        await asyncio.wait({answer})

    run(all_of_them())
    full = next(
        each
        for each in reversed(seen)
        if [one.state for one in each] == ["generating", "computing", "waiting"]
        and each[1].computed > CHUNK
    )
    generating, computing, waiting = full
    assert (generating.place, computing.place, waiting.place) == (0, 1, 2)
    assert generating.computed == generating.total == 50 and generating.generated > 0
    assert computing.generated == 0 < computing.computed < computing.total
    assert waiting.computed == waiting.cached == 0 and waiting.speed == 0
    assert generating.speed > 0 and computing.speed > 0
    assert computing.expected is not None and waiting.expected is not None
    assert 0 == generating.expected < computing.expected < waiting.expected
    assert engine.status() == []


def test_no_estimate_without_a_speed(engine: MlxEngine, run: Run) -> None:
    seen: list[RequestStatus] = []

    async def first() -> None:
        await reports(engine, words(1, 900), seen=lambda: seen.extend(engine.status()))

    run(first())
    assert seen[0].expected is None or seen[0].computed >= CHUNK
