"""Short prompts in one pass: each is answered as if it were alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from engine_models import answer, loading, of_mlx_lm, opened, steps, words

from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.scheduler import BatchLimits

Run = Callable[..., Any]


class Watched:
    """A model that notes the shapes of its passes; ``before`` is called with each."""

    def __init__(self, engine: MlxEngine) -> None:
        self.model = engine.loop.module
        self.make_cache = self.model.make_cache
        self.shapes: list[tuple[int, int]] = []
        self.before: Callable[[int, int], None] = lambda rows, ids: None

    def __call__(self, ids: Any, cache: Any) -> Any:
        self.shapes.append(ids.shape)
        self.before(*ids.shape)
        return self.model(ids, cache=cache)

    @property
    def together(self) -> list[tuple[int, int]]:
        """The passes of several prompts: rows and ids."""
        return [shape for shape in self.shapes if min(shape) > 1]


def watched(engine: MlxEngine) -> Watched:
    engine.loop.module = found = Watched(engine)  # type: ignore[assignment]
    return found


@pytest.fixture
def engine(tiny: Path) -> Iterator[MlxEngine]:
    engine = opened(tiny, cache=reusing, limits=BatchLimits(pause=60))
    yield engine
    engine.close()


def reusing(model: Any) -> PrefixCache:
    return PrefixCache(model, PrefixTree(1 << 30))


async def sent_at_once(engine: MlxEngine, *asked: Any) -> list[asyncio.Task[Any]]:
    """Tasks whose requests all wait before the engine looks at the first."""
    held = threading.Event()
    engine._thread.call(partial(held.wait, 10))
    tasks = [asyncio.ensure_future(each) for each in asked]
    await asyncio.sleep(0.1)
    held.set()
    return tasks


async def at_once(engine: MlxEngine, *asked: Any) -> list[Any]:
    tasks = await sent_at_once(engine, *asked)
    return await asyncio.gather(*tasks, return_exceptions=True)


LENGTHS = [
    (61,) * 8,
    (41, 46, 61),
    (2, 3, 3),
    (2, 2),
    (128, 129, 130, 131),
    (200, 260, 301),
    (600, 501),
]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "-".join(map(str, lengths)))
def test_each_is_what_mlx_lm_generates(
    engine: MlxEngine, run: Run, lengths: tuple[int, ...]
) -> None:
    asked = [words(seed, length) for seed, length in enumerate(lengths)]
    expected = [of_mlx_lm(engine, each) for each in asked]
    model = watched(engine)
    assert run(at_once(engine, *(answer(engine, each) for each in asked))) == expected
    assert model.together == ([(len(lengths), max(lengths) - 1)] if max(lengths) > 2 else [])
    # The cache holds each of them, as if it had been alone.
    for each, ids in zip(asked, expected, strict=True):
        again = run(steps(engine, each))
        assert sum((step.ids for step in again), ()) == ids
        assert again[-1].cached_tokens == len(each) - 1


def test_in_any_architecture(load_random: Callable[[], Any], run: Run) -> None:
    engine = MlxEngine("random", Options(speculate="off"))
    engine.load(loading(load_random))
    try:
        asked = [words(seed, length) for seed, length in enumerate((300, 340, 420))]
        expected = [of_mlx_lm(engine, each) for each in asked]
        model = watched(engine)
        assert run(at_once(engine, *(answer(engine, each) for each in asked))) == expected
        assert model.together == [(3, 419)]
    finally:
        engine.close()


def test_prompts_with_cached_prefixes_among_them(engine: MlxEngine, run: Run) -> None:
    """Windows of 128 have wrapped in some, are full in others, or empty."""
    known = {seed: words(seed, length) for seed, length in enumerate((40, 127, 128, 129, 400))}
    for each in known.values():
        run(answer(engine, each, max_tokens=1))
    asked = [(*each, *words(90 + seed, 30 + seed)) for seed, each in known.items()]
    asked.append(words(7, 35))
    expected = [of_mlx_lm(engine, each) for each in asked]
    model = watched(engine)
    found = run(at_once(engine, *(steps(engine, each) for each in asked)))
    assert [sum((step.ids for step in each), ()) for each in found] == expected
    assert [each[-1].cached_tokens for each in found] == [39, 126, 127, 128, 399, 0]
    assert model.together == [(6, 34)]


@pytest.mark.nightly
def test_beside_answers_that_run(engine: MlxEngine, run: Run) -> None:
    """They join their batch, whether it has one row or several."""
    asked = [words(seed, 60 + seed) for seed in range(6)]
    expected = [of_mlx_lm(engine, each, 200 if at < 2 else 30) for at, each in enumerate(asked)]
    model = watched(engine)

    async def test() -> list[Any]:
        running = asyncio.ensure_future(answer(engine, asked[0], max_tokens=200))
        while not any(each.generated for each in engine.status()):
            await asyncio.sleep(0.001)
        second = answer(engine, asked[1], max_tokens=200)
        pairs = [answer(engine, each, max_tokens=30) for each in asked[2:]]
        some = await at_once(engine, pairs[0], pairs[1], second)
        others = await at_once(engine, *pairs[2:])
        return [await running, some[2], *some[:2], *others]

    assert run(test()) == expected
    assert [rows for rows, _ in model.together] == [3, 2]


@pytest.mark.parametrize("when", ["its pass", "its answer"])
def test_a_row_is_cancelled(engine: MlxEngine, run: Run, when: str) -> None:
    asked = [words(seed, 60 + seed) for seed in range(4)]
    expected = [of_mlx_lm(engine, each) for each in asked]
    model, computing, may_go_on = watched(engine), threading.Event(), threading.Event()

    def wait(rows: int, ids: int) -> None:
        if rows == 4 and (ids > 1) == (when == "its pass") and not computing.is_set():
            computing.set()
            assert may_go_on.wait(10)

    model.before = wait

    async def test() -> list[Any]:
        tasks = await sent_at_once(engine, *(answer(engine, each) for each in asked))
        assert await asyncio.to_thread(computing.wait, 10)
        tasks[1].cancel()
        await asyncio.sleep(0.05)
        may_go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = run(test())
    assert isinstance(found[1], asyncio.CancelledError)
    assert [found[0], *found[2:]] == [expected[0], *expected[2:]]
    assert not engine.loop.requests and not engine.loop.batches


def test_failed_pass_ends_only_its_prompts(engine: MlxEngine, run: Run) -> None:
    asked = [words(seed, 60 + seed) for seed in range(4)]
    expected = of_mlx_lm(engine, asked[0], 60)
    model = watched(engine)

    def fail(rows: int, ids: int) -> None:
        if min(rows, ids) > 1:
            raise AssertionError("a bug")

    model.before = fail

    async def test() -> list[Any]:
        running = asyncio.ensure_future(answer(engine, asked[0], max_tokens=60))
        while not any(each.generated for each in engine.status()):
            await asyncio.sleep(0.001)
        failed = await at_once(engine, *(answer(engine, each) for each in asked[1:]))
        assert [type(each) for each in failed] == [OutputError] * 3
        return await running

    assert run(test()) == expected
    assert not engine.loop.requests and not engine.loop.batches
    assert run(answer(engine, asked[1])) == of_mlx_lm(engine, asked[1])


def test_only_as_many_as_fit_begin(tiny: Path, run: Run) -> None:
    """The others wait until these have ended; what is in use never exceeds the limit."""
    engine = opened(tiny)
    try:
        asked = [words(seed, 200 + seed) for seed in range(6)]
        expected = [of_mlx_lm(engine, each) for each in asked]
        budget = engine.loop.budget
        ends = [240] * 3
        limit = device.used() + budget.needed(ends) + 1000
        engine.loop.budget = type(budget)(limit, budget.layout, budget.work)
        model, used = watched(engine), list[int]()
        model.before = lambda rows, ids: used.append(device.used())
        assert run(at_once(engine, *(answer(engine, each) for each in asked))) == expected
        assert model.together and max(rows for rows, _ in model.shapes) == 3
        assert max(used) <= limit
    finally:
        engine.close()


def test_no_more_than_may_begin(tiny: Path, run: Run) -> None:
    engine = opened(tiny, limits=BatchLimits(prompts=3, chunk=200))
    try:
        asked = [words(seed, 60) for seed in range(8)]
        expected = [of_mlx_lm(engine, each) for each in asked]
        model = watched(engine)
        assert run(at_once(engine, *(answer(engine, each) for each in asked))) == expected
        assert model.together == [(3, 59), (3, 59), (2, 59)]
    finally:
        engine.close()


def test_prompts_without_an_answer_among_them(engine: MlxEngine, run: Run) -> None:
    """Such as those that warm the cache."""
    asked = [words(seed, 60) for seed in range(3)]
    expected = [of_mlx_lm(engine, each) for each in asked]
    coming = (steps(engine, each, max_tokens=40 if at else 0) for at, each in enumerate(asked))
    found = run(at_once(engine, *coming))
    assert [sum((step.ids for step in each), ()) for each in found] == [(), *expected[1:]]
    assert [each[-1].finish for each in found[:1]] == ["length"]
    assert run(steps(engine, asked[0]))[-1].cached_tokens == 59
