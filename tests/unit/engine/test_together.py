"""Short prompts computed in one pass: each is answered as if it ran alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from engine_models import answer, loading, of_mlx_lm, open_engine, started, steps, words
from waiting import wait_until_async

from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.engine import device
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.scheduler import BatchLimits

Run = Callable[..., Any]


class Watched:
    """A model that records the shapes of its passes; calls ``before`` with each."""

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


def watch(engine: MlxEngine) -> Watched:
    engine.loop.module = model = Watched(engine)  # type: ignore[assignment]
    return model


@pytest.fixture
def engine(tiny: Path) -> Iterator[MlxEngine]:
    engine = open_engine(tiny, cache=new_cache, limits=BatchLimits(pause=60))
    yield engine
    engine.close()


def new_cache(model: Any) -> PrefixCache:
    return PrefixCache(model, PrefixTree(1 << 30))


async def start_at_once(engine: MlxEngine, *coroutines: Any) -> list[asyncio.Task[Any]]:
    """Starts tasks whose requests all wait before the engine handles the first."""
    holding, held = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        held.wait(60)

    engine.loop.thread.call(hold)
    await asyncio.to_thread(holding.wait, 60)
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    calls = engine.loop.thread._calls
    await wait_until_async(lambda: calls.qsize() >= 2 * len(tasks), "`enqueue` of each")
    held.set()
    return tasks


async def gather_at_once(engine: MlxEngine, *coroutines: Any) -> list[Any]:
    tasks = await start_at_once(engine, *coroutines)
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


@pytest.mark.nightly(sample=8)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "-".join(map(str, lengths)))
def test_answers_equal_mlx_lm(engine: MlxEngine, run: Run, lengths: tuple[int, ...]) -> None:
    prompts = [words(seed, length) for seed, length in enumerate(lengths)]
    expected = [of_mlx_lm(engine, prompt) for prompt in prompts]
    model = watch(engine)
    assert run(gather_at_once(engine, *(answer(engine, prompt) for prompt in prompts))) == expected
    assert model.together == ([(len(lengths), max(lengths) - 1)] if max(lengths) > 2 else [])
    # The cache holds each prompt as if it had run alone.
    for prompt, ids in zip(prompts, expected, strict=True):
        again = run(steps(engine, prompt))
        assert sum((step.ids for step in again), ()) == ids
        assert again[-1].cached_tokens == len(prompt) - 1


@pytest.mark.nightly(sample=2)
def test_answers_equal_mlx_lm_in_any_architecture(load_random: Callable[[], Any], run: Run) -> None:
    engine = MlxEngine("random", Options(speculate="off"))
    engine.load(loading(load_random))
    try:
        prompts = [words(seed, length) for seed, length in enumerate((300, 340, 420))]
        expected = [of_mlx_lm(engine, prompt) for prompt in prompts]
        model = watch(engine)
        assert (
            run(gather_at_once(engine, *(answer(engine, prompt) for prompt in prompts))) == expected
        )
        assert model.together == [(3, 419)]
    finally:
        engine.close()


def test_prompts_with_cached_prefixes_share_pass(engine: MlxEngine, run: Run) -> None:
    """Windows of 128 are empty, partly filled, full or wrapped."""
    prefixes = {seed: words(seed, length) for seed, length in enumerate((40, 127, 128, 129, 400))}
    for prefix in prefixes.values():
        run(answer(engine, prefix, max_tokens=1))
    prompts = [(*prefix, *words(90 + seed, 30 + seed)) for seed, prefix in prefixes.items()]
    prompts.append(words(7, 35))
    expected = [of_mlx_lm(engine, prompt) for prompt in prompts]
    model = watch(engine)
    results = run(gather_at_once(engine, *(steps(engine, prompt) for prompt in prompts)))
    assert [sum((step.ids for step in result), ()) for result in results] == expected
    assert [result[-1].cached_tokens for result in results] == [40, 127, 128, 129, 400, 0]
    assert model.together == [(6, 34)]


@pytest.mark.nightly
def test_prompts_join_running_answers(engine: MlxEngine, run: Run) -> None:
    """Whether the batch has one row or several."""
    prompts = [words(seed, 60 + seed) for seed in range(6)]
    expected = [
        of_mlx_lm(engine, prompt, 200 if at < 2 else 30) for at, prompt in enumerate(prompts)
    ]
    model = watch(engine)

    async def test() -> list[Any]:
        running = await started(engine, prompts[0], max_tokens=200)
        second = answer(engine, prompts[1], max_tokens=200)
        pairs = [answer(engine, prompt, max_tokens=30) for prompt in prompts[2:]]
        some = await gather_at_once(engine, pairs[0], pairs[1], second)
        others = await gather_at_once(engine, *pairs[2:])
        return [await running, some[2], *some[:2], *others]

    assert run(test()) == expected
    assert [rows for rows, _ in model.together] == [3, 2]


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("when", ["its pass", "its answer"])
def test_cancelled_row_does_not_affect_others(engine: MlxEngine, run: Run, when: str) -> None:
    prompts = [words(seed, 60 + seed) for seed in range(4)]
    expected = [of_mlx_lm(engine, prompt) for prompt in prompts]
    model, computing, may_go_on = watch(engine), threading.Event(), threading.Event()

    def wait(rows: int, ids: int) -> None:
        if rows == 4 and (ids > 1) == (when == "its pass") and not computing.is_set():
            computing.set()
            assert may_go_on.wait(10)

    model.before = wait

    async def test() -> list[Any]:
        tasks = await start_at_once(engine, *(answer(engine, prompt) for prompt in prompts))
        assert await asyncio.to_thread(computing.wait, 10)
        tasks[1].cancel()
        await wait_until_async(engine.loop.thread._calls.qsize, "`cancel`")
        may_go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(test())
    assert isinstance(results[1], asyncio.CancelledError)
    assert [results[0], *results[2:]] == [expected[0], *expected[2:]]
    assert not engine.loop.requests and not engine.loop.batches


def test_failed_pass_ends_only_its_prompts(engine: MlxEngine, run: Run) -> None:
    prompts = [words(seed, 60 + seed) for seed in range(4)]
    expected = of_mlx_lm(engine, prompts[0], 300)
    model = watch(engine)

    def fail(rows: int, ids: int) -> None:
        if min(rows, ids) > 1:
            raise AssertionError("a bug")

    model.before = fail

    async def test() -> list[Any]:
        running = await started(engine, prompts[0], max_tokens=300)
        failed = await gather_at_once(engine, *(answer(engine, prompt) for prompt in prompts[1:]))
        assert [type(error) for error in failed] == [OutputError] * 3
        return await running

    assert run(test()) == expected
    assert not engine.loop.requests and not engine.loop.batches
    assert run(answer(engine, prompts[1])) == of_mlx_lm(engine, prompts[1])


def test_prompts_begin_as_memory_allows(tiny: Path, run: Run) -> None:
    """The others wait until these have ended; memory in use never exceeds the limit."""
    engine = open_engine(tiny)
    try:
        prompts = [words(seed, 200 + seed) for seed in range(6)]
        expected = [of_mlx_lm(engine, prompt) for prompt in prompts]
        budget = engine.loop.budget
        ends = [240] * 3
        limit = device.used() + budget.needed(ends) + 1000
        engine.loop.budget = type(budget)(limit, budget.layout, budget.work)
        model, used = watch(engine), list[int]()
        model.before = lambda rows, ids: used.append(device.used())
        assert (
            run(gather_at_once(engine, *(answer(engine, prompt) for prompt in prompts))) == expected
        )
        assert model.together and max(rows for rows, _ in model.shapes) == 3
        assert max(used) <= limit
    finally:
        engine.close()


@pytest.mark.nightly
def test_prompts_begin_up_to_limit(tiny: Path, run: Run) -> None:
    engine = open_engine(tiny, limits=BatchLimits(prompts=3, chunk=200))
    try:
        prompts = [words(seed, 60) for seed in range(8)]
        expected = [of_mlx_lm(engine, prompt) for prompt in prompts]
        model = watch(engine)
        assert (
            run(gather_at_once(engine, *(answer(engine, prompt) for prompt in prompts))) == expected
        )
        assert model.together == [(3, 59), (3, 59), (2, 59)]
    finally:
        engine.close()


def test_prompt_without_answer_is_computed_beside_others(engine: MlxEngine, run: Run) -> None:
    """Such as a prompt that warms the cache."""
    prompts = [words(seed, 60) for seed in range(3)]
    expected = [of_mlx_lm(engine, prompt) for prompt in prompts]
    coroutines = (
        steps(engine, prompt, max_tokens=40 if at else 0) for at, prompt in enumerate(prompts)
    )
    results = run(gather_at_once(engine, *coroutines))
    assert [sum((step.ids for step in result), ()) for result in results] == [(), *expected[1:]]
    assert [result[-1].finish for result in results[:1]] == ["length"]
    assert run(steps(engine, prompts[0]))[-1].cached_tokens == 59
