"""Log probabilities: those of the model itself, of every id, only where they are requested."""

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
"""What changes which ids are drawn, and not how probable they were."""


@pytest.fixture(scope="module", params=["off", "auto"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[MlxEngine]:
    engine = MlxEngine(str(tiny), Options(speculate=request.param))
    engine.load(loading(partial(load_module, tiny)))
    yield engine
    engine.close()


async def generated(engine: MlxEngine, prompt: tuple[int, ...], **changed: Any) -> list[Step]:
    settings = GenerationSettings(**{"max_tokens": 12, "temperature": 0.0, "top_p": 1.0, **changed})
    async with aclosing(engine.generate(GenerationRequest(prompt, settings, ""))) as steps:
        return [step async for step in steps if step.progress is None]


def of_the_model(engine: MlxEngine, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Any:
    """The log probabilities of all ids where each of ``ids`` was generated, computed at once."""

    def scores() -> Any:
        logits = engine.loop.module(mx.array([[*prompt, *ids]]))[0, len(prompt) - 1 : -1]
        logits = logits.astype(mx.float32)
        return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()

    return engine._thread.call(scores).result()


def check(engine: MlxEngine, prompt: tuple[int, ...], steps: list[Step], most: int) -> None:
    ids = sum((step.ids for step in steps), ())
    found = sum((step.logprobs for step in steps), ())
    assert ids
    assert [each.token for each in found] == [*ids]
    assert all(len(step.ids) == len(step.logprobs) for step in steps)
    for each, scores in zip(found, of_the_model(engine, prompt, ids), strict=True):
        assert each.logprob == pytest.approx(scores[each.token], abs=1e-3)
        assert len(each.top) == most == len({token for token, _ in each.top})
        assert [score for _, score in each.top] == sorted((s for _, s in each.top), reverse=True)
        likeliest = heapq.nlargest(most, scores)
        assert [score for _, score in each.top] == pytest.approx(likeliest, abs=1e-3)
        assert [scores[token] for token, _ in each.top] == pytest.approx(likeliest, abs=1e-3)


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("most", [0, 1, 20])
@pytest.mark.parametrize("changed", [{}, CHANGED], ids=["greedy", "changed"])
def test_alone(engine: MlxEngine, run: Run, most: int, changed: dict[str, Any]) -> None:
    steps = run(generated(engine, PROMPT, top_logprobs=most, **changed))
    check(engine, PROMPT, steps, most)
    plain = run(generated(engine, PROMPT, **changed))
    assert sum((each.ids for each in plain), ()) == sum((each.ids for each in steps), ())
    assert not any(each.logprobs for each in plain)


@pytest.mark.nightly(sample=2)
def test_beside_others_that_do_not_ask(engine: MlxEngine, run: Run) -> None:
    prompts = [PROMPT[at:] for at in range(6)]
    asked = [None, 3, None, 0, 20, None]

    async def together() -> list[list[Step]]:
        coming = (
            generated(engine, prompt, top_logprobs=most, max_tokens=6 + 3 * at)
            for at, (prompt, most) in enumerate(zip(prompts, asked, strict=True))
        )
        return await asyncio.gather(*coming)

    for prompt, most, steps in zip(prompts, asked, run(together()), strict=True):
        if most is None:
            assert not any(step.logprobs for step in steps)
        else:
            check(engine, prompt, steps, most)


def test_several_ids_in_a_step_keep_theirs(tiny: Path, run: Run) -> None:
    engine = MlxEngine(str(tiny), Options(interval=5))
    engine.load(loading(partial(load_module, tiny)))
    try:
        steps = run(generated(engine, PROMPT, top_logprobs=2))
        assert max(len(step.ids) for step in steps) > 1
        check(engine, PROMPT, steps, 2)
    finally:
        engine.close()


def test_requests_without_logprobs_compute_none(
    engine: MlxEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(logits: Any, drawn: Any, most: int) -> Any:
        calls.append(len(drawn))
        return log_probabilities(logits, drawn, most)

    monkeypatch.setattr(batch, "log_probabilities", counted)
    run(generated(engine, PROMPT))
    assert not calls
    run(generated(engine, PROMPT, top_logprobs=1))
    assert {*calls} == {1}


def test_impossible_id_has_a_finite_log_probability() -> None:
    logits = mx.array([[0.0, -mx.inf, 1.0, -1e30]])
    own, ids, scores = log_probabilities(logits, mx.array([1]), 3)
    assert own.tolist() == [LOWEST_LOGPROB]
    assert ids.tolist()[0][:2] == [2, 0]
    assert scores.tolist()[0][2] == LOWEST_LOGPROB
    assert TokenLogprob(1, own.tolist()[0]).logprob > -1e4


def test_reading_scores_waits_for_no_step(
    engine: MlxEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read was given to the device before the next step, which other rows are part of."""
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
        asked = (generated(engine, PROMPT[:length], top_logprobs=2) for length in (140, 150))
        await asyncio.gather(*asked, generated(engine, PROMPT))

    run(together())
    assert read and all(read)
