"""Steps run one ahead: the device gets the next one before Python waits for the last one's ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from engine_models import open_engine, words

from vllm_mlx_harmony.core.constraint import Constraint, ConstraintSpec
from vllm_mlx_harmony.engine.batch import Batch
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings

STEPS = 20


class Trace:
    """Records what the engine's thread does in each step of a batch, in order.

    ``computes``: it calls the model, which only builds the graph. ``submits``: it gives work to the
    device. ``waits for the last``: it reads an array that was submitted in the step before; ``waits
    for this``: one that was not. Records only steps with the same rows as the step before:
    otherwise the last ids are in another array; but ``last`` is the last one in any case.
    """

    def __init__(self, engine: MlxEngine, patched: pytest.MonkeyPatch) -> None:
        self.steps: list[list[str]] = []
        self.last: list[str] = []
        self._now: list[str] | None = None
        self._rows: tuple[Any, ...] = ()
        self._before: list[mx.array] = []
        self._submitted: list[mx.array] = []
        self._model, self._step = engine.loop.module, Batch.step
        self.make_cache = self._model.make_cache
        engine.loop.module = self  # type: ignore[assignment]

        def step(batch: Batch, model: Any) -> Any:
            return self._stepped(batch, model)

        patched.setattr(Batch, "step", step)
        submit = mx.async_eval
        patched.setattr(mx, "async_eval", lambda *args: self._submits(submit, args))
        for name in ("tolist", "item"):
            patched.setattr(mx.array, name, self._reading(getattr(mx.array, name)))

    def __call__(self, ids: Any, cache: Any) -> Any:
        if self._now is not None:
            self._now.append("computes")
        return self._model(ids, cache=cache)

    def _stepped(self, batch: Batch, model: Any) -> Any:
        self._before, self._submitted = self._submitted, []
        rows, self._rows = self._rows, tuple(batch.rows)
        self.last = self._now = []
        if rows == self._rows:
            self.steps.append(self._now)
        try:
            return self._step(batch, model)
        finally:
            self._now = None

    def _submits(self, submit: Callable[..., None], args: Any) -> None:
        if self._now is not None:
            self._now.append("submits")
            self._submitted += arrays(args)
        submit(*args)

    def _reading(self, read: Callable[[mx.array], Any]) -> Callable[[mx.array], Any]:
        def reads(array: mx.array) -> Any:
            if self._now is not None:
                last = any(array is submitted for submitted in self._before)
                self._now.append("waits for the last" if last else "waits for this")
            return read(array)

        return reads


def arrays(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    return [array for item in value or () for array in arrays(item)]


ROWS: dict[str, list[dict[str, Any]]] = {
    "temperature 0": [{"temperature": 0.0}],
    "temperature 1": [{"top_p": 0.9}],
    "penalties": [{"presence_penalty": 0.5, "repetition_penalty": 1.1}],
    "biases": [{"logit_bias": ((1234, 1.0),)}],
    "log probabilities": [{"top_logprobs": 3}],
    "a constraint": [{"min_tokens": 100}],
    "origins of a constraint": [{"min_tokens": 100, "origins": True}],
    "all of these": [
        {"min_tokens": 100, "origins": True, "presence_penalty": 0.5, "top_logprobs": 3}
    ],
    "several answers": [{}, {"top_logprobs": 2}, {"presence_penalty": 0.5}],
    "one of several with a constraint": [{}, {"min_tokens": 100}],
}


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("speculate", ["off", "forced"])  # a draft needs the ids it continues
@pytest.mark.parametrize("settings", ROWS.values(), ids=ROWS)
def test_device_never_waits_for_python(
    tiny: Path,
    run: Callable[..., Any],
    settings: list[dict[str, Any]],
    speculate: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = open_engine(tiny, speculate=speculate)
    try:
        with monkeypatch.context() as patched:
            trace = Trace(engine, patched)
            run(generate(engine, settings))
    finally:
        engine.close()
    whole = [step for step in trace.steps if step.count("waits for the last")]
    assert len(whole) >= STEPS // 2
    for step in whole:
        if step is not trace.last:
            assert step[:2] == ["computes", "submits"]
        assert "waits for this" not in step
    # Nothing follows the last ids, for which the next prompt would wait.
    assert trace.last and not {"computes", "submits"} & {*trace.last}


async def generate(engine: MlxEngine, settings: list[dict[str, Any]]) -> None:
    """Generates answers of exactly ``STEPS`` ids."""
    ends = tuple((token_id, -100.0) for token_id in (200002, 200012, 199999))

    async def answer(seed: int, changed: dict[str, Any]) -> None:
        changed = {"logit_bias": (), **changed}
        constraint = None
        if least := changed.pop("min_tokens", 0):
            constraint = Constraint(ConstraintSpec(min_tokens=least))
        fields = {"max_tokens": STEPS, "temperature": 1.0, "top_p": 1.0, "seed": 1, **changed}
        fields["logit_bias"] = (*ends, *fields["logit_bias"])
        request = GenerationRequest(words(seed, 50), GenerationSettings(**fields), "", constraint)
        async with aclosing(engine.generate(request)) as steps:
            async for _ in steps:
                pass

    await asyncio.gather(*(answer(seed, row) for seed, row in enumerate(settings)))
