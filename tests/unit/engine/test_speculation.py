"""Steps of several ids give the same answers as steps of one."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from engine_models import loading
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.engine import measure_costs
from vllm_mlx_harmony.engine import sampler as sampling
from vllm_mlx_harmony.engine.batch import Batch
from vllm_mlx_harmony.engine.disk.cache import DiskCache
from vllm_mlx_harmony.engine.drafts import Drafts
from vllm_mlx_harmony.engine.masks import LogitsMask
from vllm_mlx_harmony.engine.measure_costs import load_or_measure, measure_step_costs
from vllm_mlx_harmony.engine.mlx_engine import MlxEngine, Options
from vllm_mlx_harmony.engine.prefix_cache import PrefixCache
from vllm_mlx_harmony.engine.prefix_tree import PrefixTree
from vllm_mlx_harmony.engine.request import Request
from vllm_mlx_harmony.engine.sampler import Sampler
from vllm_mlx_harmony.engine.step_costs import ASSUMED, WIDTHS, Costs
from vllm_mlx_harmony.engine_api.engine import GenerationRequest, GenerationSettings, Origin, Step

SIZE = 64
CHEAP = Costs((1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.03, 1.04))
"""A device on which drafts always pay."""

SLOW = Costs((1, 2, 4), (1.0, 4.0, 16.0))
"""A device on which no draft pays."""


class Recall:
    """A model whose caches hold ids and whose logits are exact: the row of a table for the sums of
    the ids that each layer sees. Its likeliest id is mostly the next in a cycle of eight."""

    def __init__(self) -> None:
        scale = mx.random.normal((1009, SIZE), key=mx.random.key(5))
        self.table = scale + 0.0
        self.sizes: list[int] = []

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(128), KVCache()]

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        self.sizes.append(inputs.shape[1])
        ids = inputs.astype(mx.float32) % SIZE
        total = mx.zeros(ids.shape)
        for layer, window in zip(cache, (128, None), strict=True):
            mask = create_attention_mask(ids[:, :, None], layer, window_size=window)
            keys = ids[:, None, :, None]
            seen = layer.update_and_fetch(keys, keys)[0][:, 0, None, :, 0]
            if mask == "causal" and isinstance(mask, str):
                length, width = ids.shape[1], seen.shape[-1]
                mask = mx.arange(width - length, width)[:, None] >= mx.arange(width)[None]
            if isinstance(mask, mx.array):
                seen = mx.where(mask if mask.ndim < 4 else mask[:, 0], seen, 0.0)
            total = total * 3 + seen.sum(axis=-1)
        rows = self.table[(total % 1009).astype(mx.int32)]
        step = (ids + 1) % 8 + 16
        return rows + 6 * (mx.arange(SIZE) == step[:, :, None])


MODEL = Recall()


class Guess:
    """Like `ExpectedHeader`: after 18, expects one of ``guesses`` until it is wrong."""

    def __init__(self, *guesses: list[int]) -> None:
        self.guesses = itertools.cycle(guesses or [[]])
        self.rest: list[int] = []

    def consume(self, token: int) -> None:
        if token == 18:
            self.rest = next(self.guesses)
        else:
            self.rest = self.rest[1:] if self.rest[:1] == [token] else []

    def next(self, most: int) -> list[int]:
        return self.rest[:most]


class Forcing:
    """Like `Constraint`: 3 and 4 follow each multiple of 5, and ``forbidden`` ids are never
    allowed."""

    def __init__(self, forbidden: Sequence[int] = (9,), *guesses: list[int]) -> None:
        self.error = ""
        self.header = Guess(*guesses)
        self.forbidden = forbidden
        self.queue: tuple[int, ...] = ()

    def start(self) -> Forcing:
        return self

    def consume(self, token: int) -> None:
        self.header.consume(token)
        if self.queue:
            assert token == self.queue[0]
            self.queue = self.queue[1:]
        elif token % 5 == 0:
            self.queue = (3, 4)

    def mask(self) -> Any:
        from vllm_mlx_harmony.core.grammar import Mask

        mask = Mask()
        if self.queue:
            mask.only(self.queue[0])
        else:
            mask.allow_all()
            mask.discard(self.forbidden)
        return mask

    def after(self, allowed: Any, draft: Sequence[int]) -> list[Any]:
        other, masks = Forcing(self.forbidden), []
        other.queue = self.queue
        for token in draft:
            if token not in allowed:
                break
            other.consume(token)
            masks.append(allowed := other.mask())
        return masks


def row(
    prompt: Sequence[int],
    settings: GenerationSettings,
    costs: Costs | None,
    *,
    held: bool,
    forbidden: Sequence[int] = (9,),
    guesses: Sequence[list[int]] = (),
) -> Batch:
    forcing: Any = Forcing(forbidden, *guesses)
    mask = LogitsMask(forcing, origins=settings.origins) if held else None
    event_loop: Any = None
    request = Request(
        1, tuple(prompt), settings, "", Sampler(settings, prompt, mask), event_loop=event_loop
    )
    layers = MODEL.make_cache()
    if len(prompt) > 1:
        MODEL(mx.array([prompt[:-1]]), cache=layers)
    request.ids = list(prompt)
    if costs in (CHEAP, SLOW):
        request.drafts = Drafts(prompt)
    return Batch([request], layers, costs)


def ids_of(batch: Batch, settings: GenerationSettings) -> tuple[list[int], int]:
    """The answer and its number of steps."""
    (request,) = batch.rows
    steps = 0
    while request.generated < settings.max_tokens:
        for _, token in batch.step(MODEL):
            request.ids.append(token)
        steps += 1
        held = len(batch.held(request)) if request.stepped else len(request.ids) - 1
        assert [layer.offset for layer in batch.layers] == [held, held]
        assert batch.layers[0].keys.shape[2] <= 128 + 16
    return request.ids[len(request.prompt) :], steps


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8, "top_k": 6},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": ((17, 2.0), (20, -3.0))},
    {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.1},
    {"temperature": 0.8, "repetition_penalty": 1.2},
]
LENGTHS = [1, 2, 60, 112, 126, 127, 128, 129, 145, 300]


@pytest.mark.nightly(sample=6)
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
@pytest.mark.parametrize("changed", SETTINGS, ids=str)
def test_drafts_do_not_change_answers(changed: dict[str, Any], held: bool) -> None:
    luck = random.Random(str(changed))
    steps = ids = accepted = rejected = 0
    # All settings use windows alike, so a few lengths suffice for the others.
    for length in LENGTHS if changed in SETTINGS[:2] else LENGTHS[::3]:
        settings = GenerationSettings(**{"max_tokens": 60, "top_p": 1.0, "seed": length, **changed})
        cycle = [16, 17, 18, 19, 20, 21, 22, 23, luck.randrange(SIZE)]
        prompt = [vocab.MESSAGE, *(cycle * 40)][:length]
        expected, _ = ids_of(row(prompt, settings, None, held=held), settings)
        for costs in (CHEAP, ASSUMED, SLOW):
            batch = row(prompt, settings, costs, held=held)
            output, took = ids_of(batch, settings)
            assert output == expected, (length, costs)
            if costs is CHEAP:
                steps, ids = steps + took, ids + len(output)
                accepted += batch.rows[0].accepted
                rejected += batch.rows[0].rejected
    assert min(accepted, rejected) > 10
    assert ids > 1.1 * steps


@pytest.mark.nightly(sample=6)
@pytest.mark.parametrize("changed", SETTINGS, ids=str)
def test_expected_headers_do_not_change_answers(changed: dict[str, Any]) -> None:
    guesses = ([19, 20, 3, 4], [19, 20, 21], [19, 63], [62], [9, 9])
    steps = ids = copied = 0
    for length in (1, 60, 127, 140):
        settings = GenerationSettings(**{"max_tokens": 60, "top_p": 1.0, "seed": length, **changed})
        prompt = [vocab.MESSAGE, *(list(range(16, 24)) * 40)][:length]
        expected, _ = ids_of(row(prompt, settings, None, held=True), settings)
        for costs in (CHEAP, ASSUMED, SLOW):
            batch = row(prompt, settings, costs, held=True, guesses=guesses)
            (request,) = batch.rows
            request.drafts = None
            output, took = ids_of(batch, settings)
            assert output == expected, (length, costs)
            assert request.accepted == request.rejected == 0  # these count copies only
            if costs is SLOW:
                assert Origin.COPIED not in request.origins
            else:
                steps, ids = steps + took, ids + len(output)
                copied += request.origins.count(Origin.COPIED)
    assert copied >= 5 and steps < ids - copied


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
@pytest.mark.parametrize("changed", SETTINGS[:2], ids=str)
def test_origin_of_each_id_is_reported(changed: dict[str, Any], held: bool) -> None:
    """Expected origins come from logits of the whole answer, without a mask."""
    counts: Counter[str] = Counter()
    for seed in range(2):
        settings = GenerationSettings(**{"max_tokens": 80, "top_p": 1.0, "seed": seed, **changed})
        with_origins = replace(settings, origins=True)
        prompt = [vocab.MESSAGE, *range(16, 24)] * 6
        for costs in (None, CHEAP, ASSUMED):
            expected, _ = ids_of(row(prompt, settings, costs, held=held, forbidden=(18,)), settings)
            batch = row(prompt, with_origins, costs, held=held, forbidden=(18,))
            output, _ = ids_of(batch, with_origins)
            (request,) = batch.rows
            assert output == expected  # reporting changes nothing
            assert len(request.origins) == len(output)
            logits = MODEL(mx.array([[*prompt, *output]]), cache=MODEL.make_cache())[0]
            likeliest = mx.argmax(logits, axis=-1).tolist()[len(prompt) - 1 : -1]
            forcing, right = Forcing((18,)), "" if held else "." * len(output)
            for token, first in zip(output, likeliest if held else [], strict=held):
                right += "f" if forcing.queue else "m" if first == 18 else "."
                forcing.consume(token)
            pairs = list(zip(request.origins, right, strict=True))
            differ = {pair for pair in pairs if pair[0] != pair[1]}
            assert differ <= {("c", "."), ("c", "m")}, pairs
            assert request.origins.count("c") == request.accepted
            counts.update(request.origins)
    assert set(counts) == set(".mfc" if held else ".c") and min(counts.values()) >= 5, counts


# --- Through the engine: cancellation, batches, and caches of drafted answers.

Run = Callable[[Coroutine[Any, Any, Any]], Any]
PROMPT = tuple([1, *range(16, 24)] * 20)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[MlxEngine, MlxEngine]]:
    """One that speculates, on which any draft is cheap, and one that does not."""

    def open_engine(**options: Any) -> MlxEngine:
        cache = lambda model: PrefixCache(model, PrefixTree(1 << 30))  # noqa: E731
        engine = MlxEngine("recall", Options(**options))
        engine.load(loading(Recall, cache))
        return engine

    both = open_engine(speculate="auto"), open_engine()
    both[0].loop.costs = CHEAP
    yield both
    for engine in both:
        engine.close()


async def answer(engine: MlxEngine, prompt: Sequence[int], **changed: Any) -> tuple[int, ...]:
    settings = GenerationSettings(**{"max_tokens": 90, "temperature": 0.7, "top_p": 0.9, **changed})
    ids: tuple[int, ...] = ()
    async with aclosing(engine.generate(GenerationRequest(tuple(prompt), settings, ""))) as steps:
        async for step in steps:
            ids += step.ids
    return ids


def test_drafts_do_not_change_answers_of_changing_batches(
    engines: tuple[MlxEngine, MlxEngine], run: Run
) -> None:
    """Each runs alone for a while and beside others; some are cancelled."""

    async def answer_all(engine: MlxEngine) -> list[Any]:
        async def later(at: int) -> tuple[int, ...] | None:
            await asyncio.sleep(0.02 * at)
            generating = answer(engine, PROMPT[at:], seed=at, max_tokens=40 + 60 * (at % 3))
            if at % 4 != 3:
                return await generating
            task = asyncio.ensure_future(generating)
            await asyncio.sleep(0.01)
            task.cancel()
            return None

        return await asyncio.gather(*map(later, range(8)))

    wide, narrow = engines
    assert run(answer_all(wide)) == run(answer_all(narrow))
    assert max(wide.loop.module.sizes) > 1  # type: ignore[union-attr]
    assert not wide.loop.requests


def test_cancellation_while_drafting_frees_engine(
    engines: tuple[MlxEngine, MlxEngine], run: Run
) -> None:
    wide, narrow = engines
    settings = GenerationSettings(max_tokens=10_000, temperature=0.7, top_p=0.9, seed=4)
    totals = wide.totals.drafts_accepted

    async def cancel() -> int:
        async with aclosing(wide.generate(GenerationRequest(PROMPT, settings, ""))) as steps:
            async for step in steps:
                if step.accepted > 50:
                    break
        return step.accepted

    accepted = run(cancel())
    assert not wide.loop.requests and wide.totals.drafts_accepted - totals >= accepted
    assert run(answer(wide, PROMPT, seed=4)) == run(answer(narrow, PROMPT, seed=4))


async def answer_counting_drafts(
    engine: MlxEngine, settings: GenerationSettings
) -> tuple[tuple[int, ...], int, int]:
    """The answer to a prompt without repetitions, and its accepted and rejected drafts."""
    ids: tuple[int, ...] = ()
    async with aclosing(
        engine.generate(GenerationRequest(tuple(range(40)), settings, ""))
    ) as steps:
        async for step in steps:
            ids += step.ids
    return ids, step.accepted, step.rejected


def test_origins_are_those_of_the_ids_of_their_step(
    engines: tuple[MlxEngine, MlxEngine], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one step of the model yields several ids."""
    loop, steps = engines[0].loop, list[Step]()
    put = loop._put

    def record(request: Request, item: Any) -> None:
        put(request, item)
        steps.append(item)

    monkeypatch.setattr(loop, "_put", record)
    ids = run(answer(engines[0], PROMPT, seed=1, origins=True))
    assert sum((step.ids for step in steps), ()) == ids
    assert [len(step.origins) for step in steps] == [len(step.ids) for step in steps]
    assert {Origin.SAMPLED, Origin.COPIED} <= set("".join(step.origins for step in steps))


def test_prediction_is_source_of_drafts(engines: tuple[MlxEngine, MlxEngine], run: Run) -> None:
    """The answer is the same whether the prediction is right or wrong."""
    wide, narrow = engines
    settings = GenerationSettings(max_tokens=60, temperature=4.0, top_p=1.0, seed=1)
    ids, *none = run(answer_counting_drafts(narrow, settings))
    assert none == [0, 0] and len(set(ids)) > 30
    totals = wide.totals.drafts_accepted
    right = run(answer_counting_drafts(wide, replace(settings, prediction=ids)))
    assert right[0] == ids and 45 < right[1] < 60
    assert wide.totals.drafts_accepted - totals == right[1]
    wrong = [*ids[:20], *ids[40:]]
    assert run(answer_counting_drafts(wide, replace(settings, prediction=tuple(wrong))))[0] == ids


def test_drafted_answer_is_reused_from_disk(
    run: Run, engines: tuple[MlxEngine, MlxEngine], open_disk: Callable[..., DiskCache]
) -> None:
    """Another process continues it as if it had computed the answer itself."""
    ids: tuple[int, ...] = ()
    for speculate in ("auto", "off"):
        disk = open_disk()
        cache = lambda model: PrefixCache(model, PrefixTree(1 << 30), disk, b"w")  # noqa: B023, E731
        engine = MlxEngine("recall", Options(speculate=speculate))  # type: ignore[arg-type]
        engine.load(loading(Recall, cache))
        try:
            if not ids:
                engine.loop.costs = CHEAP
                ids = (*PROMPT, *run(answer(engine, PROMPT, seed=1, max_tokens=150)))
                totals = engine.totals
                assert totals.drafts_accepted > 20
                assert totals.drafts_rejected > 20
                disk.flush(60.0)
                continue
            assert run(engine.reusable_tokens([*ids, 7], "")) == len(ids)
            continued = run(answer(engine, [*ids, 7, 16], seed=2))
        finally:
            engine.close()
            disk.close(60.0)
    assert continued == run(answer(engines[1], [*ids, 7, 16], seed=2))


def test_close_while_drafting_ends_stream(run: Run) -> None:
    engine = MlxEngine("recall", Options(speculate="auto"))
    engine.load(loading(Recall))
    engine.loop.costs = CHEAP

    async def close_while_drafting() -> None:
        settings = GenerationSettings(max_tokens=100_000, temperature=0.7, top_p=0.9)
        async with aclosing(engine.generate(GenerationRequest(PROMPT, settings, ""))) as steps:
            async for step in steps:
                if step.accepted > 50:
                    break
            closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
            with pytest.raises(HostError, match="the engine was stopped"):
                async for _ in steps:
                    pass
            await closing

    run(close_while_drafting())
    assert not engine.loaded and not engine.loop.requests


def test_drafted_answer_is_cached_correctly(engines: tuple[MlxEngine, MlxEngine], run: Run) -> None:
    """Its pieces hold accepted ids of a draft, and no rejected ones."""
    wide, narrow = engines
    prompt = [5, *PROMPT]
    for turn in range(6):
        output = run(answer(wide, prompt, seed=turn, max_tokens=30 + turn))
        assert output == run(answer(narrow, prompt, seed=turn, max_tokens=30 + turn))
        history = [*prompt, *output]
        # Not the last id of an answer that is cut (`batch`).
        assert run(wide.reusable_tokens([*history, 7], "")) == len(history) - 1
        prompt = [*history, 7, *range(16, 20)]


# --- The distribution.


@pytest.mark.nightly(sample=3)
@pytest.mark.once
@pytest.mark.parametrize("tried", [0, 2, 4])
def test_drafts_do_not_change_distribution(tried: int) -> None:
    """Chi-squared over 200,000 ids, with ``tried`` drafted at each place."""
    logits, places = [0.0, 1.0, 2.0, -1.0, 0.5], 4
    samplers = [Sampler(GenerationSettings(1, 0.9, 1.0, seed=seed)) for seed in range(500)]
    counts: Counter[int] = Counter()
    rows = mx.array([logits] * places)
    while counts.total() < 200_000:
        keys, parts = [], []
        for sampler in samplers:
            keys += [sampler.key() for _ in range(places)]
            parts += [sampler] * places
        sampled = sampling._sample_alike(parts, mx.concatenate([rows] * len(samplers)), keys)
        for ids in sampled.reshape(-1, places).tolist():
            right = sampling.accepted_count([tried] * (places - 1), ids)
            counts.update(ids[: right + 1])
    total = math.fsum(math.exp(logit / 0.9) for logit in logits)
    shares = [counts.total() * math.exp(logit / 0.9) / total for logit in logits]
    squared = sum((counts[at] - share) ** 2 / share for at, share in enumerate(shares))
    assert squared < 18.5  # four degrees of freedom: one in a thousand is above


# --- Costs.


def test_step_costs_are_measured() -> None:
    layers = MODEL.make_cache()
    MODEL(mx.array([[1, 2, 3]]), cache=layers)
    costs = measure_step_costs(MODEL, layers)
    assert costs.ids[0] == 1 and len(costs.ids) == len(costs.seconds) >= 3
    assert all(a <= b for a, b in zip(costs.seconds, costs.seconds[1:], strict=False))


def test_slow_device_measures_only_single_ids() -> None:
    now = itertools.count()
    layers = MODEL.make_cache()
    MODEL(mx.array([[1, 2, 3]]), cache=layers)
    MODEL.sizes.clear()
    costs = measure_step_costs(MODEL, layers, lambda: float(next(now)))
    assert costs.ids == (1,) and len(MODEL.sizes) == 2
    assert costs.best_draft_length(1.0, 15) == 0


@pytest.mark.parametrize(
    ("milliseconds", "ids"),
    [
        ({1: 1.0, 2: 1.2, 3: 1.4, 4: 1.5, 8: 2.0, 16: 3.0}, (1, 2, 3, 4, 8, 16)),
        ({1: 1.0, 2: 2.5, 3: 2.8, 4: 3.0, 8: 8.5, 16: 9.0}, (1, 2, 3, 4, 8, 16)),
        ({1: 1.0, 2: 2.5, 3: 3.5, 4: 4.5, 8: 3.0, 16: 3.0}, (1, 2, 3)),
        ({1: 1.0, 2: 1.5, 3: 2.0, 4: 4.1, 8: 8.1, 16: 3.0}, (1, 2, 3, 4, 8)),
    ],
    ids=["cheap", "in part", "not", "not later"],
)
def test_measuring_stops_where_wide_steps_do_not_pay(
    milliseconds: dict[int, float], ids: tuple[int, ...]
) -> None:
    now = 0.0

    def model(inputs: mx.array, cache: Any) -> mx.array:
        nonlocal now
        now += milliseconds[inputs.shape[1]] / 1000
        return MODEL(inputs, cache)

    layers = MODEL.make_cache()
    MODEL(mx.array([[1, 2, 3]]), cache=layers)
    costs = measure_step_costs(model, layers, lambda: now)
    assert costs.ids == ids
    assert [round(1000 * seconds, 6) for seconds in costs.seconds][:2] == [1.0, milliseconds[2]]


def test_step_of_one_id_is_measured_to_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices compute asynchronously, and waiting for an id that is already there takes no time: a
    step of one id would seem to be free, and no draft would ever pay."""
    now, computing = 0.0, list[int]()

    def wait(array: mx.array) -> None:
        nonlocal now
        while id(array) in computing:
            computing.pop(0)
            now += 0.01
        mx.eval(array)

    def model(inputs: mx.array, cache: Any) -> mx.array:
        nonlocal now
        now += 0.001 if inputs.shape[1] == 1 else 0.011 * 1.2
        return MODEL(inputs, cache)

    device = SimpleNamespace(
        array=mx.array,
        uint32=mx.uint32,
        eval=wait,
        async_eval=lambda array: computing.append(id(array)),
    )
    monkeypatch.setattr(measure_costs, "mx", device)
    layers = MODEL.make_cache()
    MODEL(mx.array([[1, 2, 3]]), cache=layers)
    costs = measure_step_costs(model, layers, lambda: now)
    assert [round(1000 * seconds, 6) for seconds in costs.seconds] == [11.0, *[13.2] * 5]


@pytest.mark.parametrize(
    ("shallow", "deep", "expected"),
    [
        ((1.0, 1.2, 1.3, 1.4, 1.5, 1.6), (2.0, 2.4, 2.6, 2.8, 6.0, 12.0), (1, 1.2, 1.3, 1.4, 3, 6)),
        ((1.0, 1.2, 1.3, 1.4), (2.0, 2.2, 2.4), (1.0, 1.2, 1.3)),
        ((1.0, 3.0), (2.0, 2.2, 2.4), (1.0, 3.0)),
    ],
    ids=["wide steps are slow behind many ids", "fewer were measured there", "or here"],
)
def test_draft_must_pay_at_both_depths(
    shallow: tuple[float, ...], deep: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    first, second = (Costs(WIDTHS[: len(seconds)], seconds) for seconds in (shallow, deep))
    worse = measure_costs.worse(first, second)
    assert worse == Costs(WIDTHS[: len(expected)], pytest.approx(expected))


def test_steps_are_measured_at_both_depths() -> None:
    now, offsets = 0.0, set[int]()

    def model(inputs: mx.array, cache: Any) -> mx.array:
        """More than four ids at once are slow where they attend to many."""
        nonlocal now
        offset, width = cache[-1].offset, inputs.shape[1]
        offsets.add(offset // measure_costs.DEPTH)
        now += 0.001 + (width > 4) * offset * 1e-6
        return MODEL(inputs, cache)

    costs = {}
    for deep in (False, True):
        layers = MODEL.make_cache()
        MODEL(mx.array([[1, 2, 3]]), cache=layers)
        costs[deep] = measure_costs.measure_at_depths(model, layers, deep, lambda: now)
    assert offsets == {0, 1}
    assert costs[False].best_draft_length(0.98, 15) == 15
    assert costs[True].best_draft_length(0.98, 15) == 3, "four ids at once are as fast as one"


def test_measured_costs_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to three measurements, of which the fastest steps count."""
    monkeypatch.setattr(measure_costs, "_measured", {})
    path, measured = tmp_path / "new" / "costs.json", list[tuple[float, ...]]()
    measurements = [(1.0, 9.0), (3.0, 3.5, 4.0), (1.5, 1.6, 1.7)]

    def measure() -> Costs:
        seconds = measurements[len(measured) % 3]
        measured.append(seconds)
        return Costs(WIDTHS[: len(seconds)], seconds)

    assert load_or_measure(None, "a", measure).seconds == (1.0, 9.0)
    assert load_or_measure(path, "a", measure).seconds == (1.0, 3.5, 4.0)
    for _ in range(3):
        assert load_or_measure(path, "a", measure).seconds == (1.0, 1.6, 1.7)
    assert len(measured) == 3
    assert json.loads(path.read_text())["a"] == [list(seconds) for seconds in measurements]
    assert load_or_measure(path, "b", measure).seconds == (1.0, 9.0)
    assert len(json.loads(path.read_text())) == 2
    good = [list(seconds) for seconds in measurements]
    values = ("7", '["x"]', "[[]]", "[1, 2]", "[[0]]", "[[NaN]]", "[[1, Infinity]]", "[[-1, 1]]")
    for damaged in ("", "[]", "7", *(f'{{"a": {value}}}' for value in values), "{"):
        path.write_text(damaged)
        assert load_or_measure(path, "a", measure).seconds == (1.0, 1.6, 1.7), damaged
        assert json.loads(path.read_text())["a"] == good
    assert load_or_measure(path / "a file, no directory", "a", measure).seconds == (1.0, 1.6, 1.7)
    assert len(measured) == 4
    monkeypatch.setattr(measure_costs, "_measured", {})
    assert load_or_measure(path, "a", measure).seconds == (1.0, 1.6, 1.7), "another process"
    assert len(measured) == 4
