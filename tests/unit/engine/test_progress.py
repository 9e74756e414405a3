"""Progress of prompts, as reported to their requests and in the engine's status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

from engine_models import PLENTY, open_engine, rows, words
from waiting import wait_until_async

from vllm_mlx_harmony.core.deltas import Progress
from vllm_mlx_harmony.engine import loop as loop_module
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, RequestStatus
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.scheduler import BatchLimits
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings

Run = Callable[[Coroutine[Any, Any, Any]], Any]

CHUNK = 128


@pytest.fixture(autouse=True)
def _reports_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "REPORT_SECONDS", 0.0)


@pytest.fixture
def engine(tiny: Path) -> Iterator[MlxEngine]:
    """One prompt at a time, in small chunks."""

    def cache(model: Any) -> PrefixCache:
        return PrefixCache(model, PrefixTree(PLENTY))

    limits = BatchLimits(chunk=CHUNK, prompts=1)
    engine = open_engine(tiny, cache=cache, limits=limits, speculate="off")  # answers take a while
    yield engine
    engine.close()


async def reports(
    engine: MlxEngine, prompt: tuple[int, ...], most: int = 3, on_report: Callable[[], None] = int
) -> list[Progress]:
    """The reports of a prompt; calls ``on_report`` after each."""
    progress, generated = [], 0
    settings = GenerationSettings(max_tokens=most, temperature=0.0, top_p=1.0)
    async with aclosing(engine.generate(GenerationRequest(prompt, settings, ""))) as steps:
        async for step in steps:
            if step.progress is None:
                generated += len(step.ids)
                continue
            assert not step.ids and not generated and step.finish is None
            progress.append(step.progress)
            on_report()
    return progress


@pytest.mark.parametrize("length", [1, 2, 100, 500, 1000])
def test_prompt_is_reported_from_start_to_end(engine: MlxEngine, run: Run, length: int) -> None:
    """As in llama.cpp, the first report has the cached ids, and the last has all."""
    progress = [
        report for report in run(reports(engine, words(length, length))) if not report.place
    ]
    assert progress[0].processed == progress[0].cached == 0
    assert progress[-1].processed == length
    assert {report.total for report in progress} == {length}
    assert {report.cached for report in progress} == {0}
    assert all(a.processed <= b.processed for a, b in pairwise(progress))
    assert all(a.seconds <= b.seconds for a, b in pairwise(progress))
    assert len({report.processed for report in progress}) > length // CHUNK


def test_cached_tokens_count_as_processed(engine: MlxEngine, run: Run) -> None:
    prompt = words(1, 600)
    run(reports(engine, prompt))
    progress = run(reports(engine, (*prompt, *words(2, 300))))
    assert progress[0].processed == progress[0].cached
    assert {report.cached for report in progress} == {progress[-1].cached} and progress[
        -1
    ].cached >= 512
    assert progress[-1].processed == progress[-1].total == 900


def test_waiting_prompt_reports_its_place(engine: MlxEngine, run: Run) -> None:
    async def report_three() -> list[list[Progress]]:
        prompts = (words(seed, length) for seed, length in ((1, 900), (2, 1000), (3, 1100)))
        return await asyncio.gather(*(reports(engine, prompt) for prompt in prompts))

    first, second, third = run(report_three())
    assert {report.place for report in third} >= {0, 2}
    assert all(report.processed == 0 for report in third if report.place)
    places = [report.place for report in second]
    assert places == sorted(places, reverse=True) and {*places} <= {0, 1, 2, 3}
    assert [report.processed for report in (first[-1], second[-1], third[-1])] == [900, 1000, 1100]


def test_status_lists_requests_in_order(engine: MlxEngine, run: Run) -> None:
    """The generating request, then the one being computed, then those that wait."""
    snapshots: list[list[RequestStatus]] = []

    async def run_all() -> None:
        answer = asyncio.ensure_future(reports(engine, words(1, 50), most=3000))
        await wait_until_async(lambda: rows(engine), "the answer to be generated")
        look = partial(lambda: snapshots.append(engine.status()))
        await asyncio.gather(*(reports(engine, words(n, 900 + n), 1, look) for n in (2, 3, 4)))
        answer.cancel()
        await asyncio.wait({answer})

    run(run_all())
    full = next(
        snapshot
        for snapshot in reversed(snapshots)
        if [status.state for status in snapshot] == ["generating", "computing", "waiting"]
        and snapshot[1].computed > CHUNK
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


def test_estimate_is_missing_until_speed_is_known(engine: MlxEngine, run: Run) -> None:
    module, statuses = engine.loop.module, list[RequestStatus]()

    def record_status(*args: Any, **kwargs: Any) -> Any:
        statuses.extend(engine.status())
        return module(*args, **kwargs)

    engine.loop.module = record_status
    run(reports(engine, words(1, 900)))
    first, *later = statuses
    assert (first.computed, first.expected) == (0, None)
    assert later and None not in [status.expected for status in later]
