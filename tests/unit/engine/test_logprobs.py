"""Log probabilities of every id, as the model computes them, and only for requests that ask."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from engine_models import load_module, loading
from mlx.utils import tree_flatten

from vllm_mlx_harmony.core.deltas import LOWEST_LOGPROB, TokenLogprob
from vllm_mlx_harmony.engine import batch
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options
from vllm_mlx_harmony.engine.request import Request
from vllm_mlx_harmony.engine.sampler import log_probabilities
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings, Step

Run = Callable[[Coroutine[Any, Any, Any]], Any]

PROMPT = tuple(random.Random(3).randrange(1000, 150_000) for _ in range(150))
CHANGED: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 4,
    "presence_penalty": 1.5,
    "logit_bias": ((1234, 30.0), (77, -100.0)),
}
"""Settings that change which ids are sampled, but not their log probabilities."""


@pytest.fixture(scope="module", params=["off", "auto"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[MlxEngine]:
    engine = MlxEngine(str(tiny), Options(speculate=request.param))
    engine.load(loading(partial(load_module, tiny)))
    yield engine
    engine.close()


async def generate(engine: MlxEngine, prompt: tuple[int, ...], **changed: Any) -> list[Step]:
    settings = GenerationSettings(**{"max_tokens": 12, "temperature": 0.0, "top_p": 1.0, **changed})
    async with aclosing(engine.generate(GenerationRequest(prompt, settings, ""))) as steps:
        return [step async for step in steps if step.progress is None]


def model_logprobs(engine: MlxEngine, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Any:
    """The log probabilities of all ids at each place of ``ids``, computed in one pass."""

    def scores() -> Any:
        logits = engine.loop.module(mx.array([[*prompt, *ids]]))[0, len(prompt) - 1 : -1]
        logits = logits.astype(mx.float32)
        return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()

    return engine.loop.thread.call(scores).result()


def assert_logprobs(
    engine: MlxEngine, prompt: tuple[int, ...], steps: list[Step], most: int
) -> None:
    ids = sum((step.ids for step in steps), ())
    logprobs = sum((step.logprobs for step in steps), ())
    assert ids
    assert [entry.token for entry in logprobs] == [*ids]
    assert all(len(step.ids) == len(step.logprobs) for step in steps)
    for entry, scores in zip(logprobs, model_logprobs(engine, prompt, ids), strict=True):
        assert entry.logprob == pytest.approx(scores[entry.token], abs=1e-3)
        assert len(entry.top) == most == len({token for token, _ in entry.top})
        assert [score for _, score in entry.top] == sorted((s for _, s in entry.top), reverse=True)
        likeliest = heapq.nlargest(most, scores)
        assert [score for _, score in entry.top] == pytest.approx(likeliest, abs=1e-3)
        assert [scores[token] for token, _ in entry.top] == pytest.approx(likeliest, abs=1e-3)


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("most", [0, 1, 20])
@pytest.mark.parametrize("changed", [{}, CHANGED], ids=["greedy", "changed"])
def test_logprobs_are_those_of_model(
    engine: MlxEngine, run: Run, most: int, changed: dict[str, Any]
) -> None:
    steps = run(generate(engine, PROMPT, top_logprobs=most, **changed))
    assert_logprobs(engine, PROMPT, steps, most)
    plain = run(generate(engine, PROMPT, **changed))
    assert sum((step.ids for step in plain), ()) == sum((step.ids for step in steps), ())
    assert not any(step.logprobs for step in plain)


@pytest.mark.nightly(sample=2)
def test_mixed_batch_has_logprobs_only_where_requested(engine: MlxEngine, run: Run) -> None:
    prompts = [PROMPT[at:] for at in range(6)]
    counts = [None, 3, None, 0, 20, None]

    async def together() -> list[list[Step]]:
        answers = (
            generate(engine, prompt, top_logprobs=most, max_tokens=6 + 3 * at)
            for at, (prompt, most) in enumerate(zip(prompts, counts, strict=True))
        )
        return await asyncio.gather(*answers)

    for prompt, most, steps in zip(prompts, counts, run(together()), strict=True):
        if most is None:
            assert not any(step.logprobs for step in steps)
        else:
            assert_logprobs(engine, prompt, steps, most)


def test_each_id_of_step_keeps_its_logprobs(tiny: Path, run: Run) -> None:
    engine = MlxEngine(str(tiny), Options(interval=5))
    engine.load(loading(partial(load_module, tiny)))
    try:
        steps = run(generate(engine, PROMPT, top_logprobs=2))
        assert max(len(step.ids) for step in steps) > 1
        assert_logprobs(engine, PROMPT, steps, 2)
    finally:
        engine.close()


def test_requests_without_logprobs_compute_none(
    engine: MlxEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def count(logits: Any, sampled: Any, most: int) -> Any:
        calls.append(len(sampled))
        return log_probabilities(logits, sampled, most)

    monkeypatch.setattr(batch, "log_probabilities", count)
    run(generate(engine, PROMPT))
    assert not calls
    run(generate(engine, PROMPT, top_logprobs=1))
    assert {*calls} == {1}


def test_impossible_id_has_finite_log_probability() -> None:
    logits = mx.array([[0.0, -mx.inf, 1.0, -1e30]])
    own, ids, scores = log_probabilities(logits, mx.array([1]), 3)
    assert own.tolist() == [LOWEST_LOGPROB]
    assert ids.tolist()[0][:2] == [2, 0]
    assert scores.tolist()[0][2] == LOWEST_LOGPROB
    assert TokenLogprob(1, own.tolist()[0]).logprob > -1e4


def test_reading_scores_waits_for_no_step(
    engine: MlxEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that are read were submitted before the next step, which has other rows, too."""
    submitted: set[int] = set()
    kept: list[Any] = []  # so that no other array gets the same id
    read: list[bool] = []
    async_eval, take = mx.async_eval, Request.take_logprob

    def submit(*arrays: Any) -> None:
        kept.extend(array for _, array in tree_flatten(list(arrays)))
        submitted.update(map(id, kept))
        async_eval(*arrays)

    def take_logprob(request: Request, token: int) -> None:
        read.extend(id(score) in submitted for score in request.scores)
        take(request, token)

    monkeypatch.setattr(batch.mx, "async_eval", submit)
    monkeypatch.setattr(Request, "take_logprob", take_logprob)

    async def together() -> None:
        answers = (generate(engine, PROMPT[:length], top_logprobs=2) for length in (140, 150))
        await asyncio.gather(*answers, generate(engine, PROMPT))

    run(together())
    assert read and all(read)
