"""How ids are sampled from logits, without an engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.turn import VOCAB_SIZE
from vllm_mlx_harmony.engine import sampler as module
from vllm_mlx_harmony.engine.sampler import Sampler, sample
from vllm_mlx_harmony.engine_api.engine import GenerationSettings
from vllm_mlx_harmony.server.sampling import EPSILON

KINDS = ["bfloat16", "float16", "float32"]


def settings(**changed: Any) -> GenerationSettings:
    return GenerationSettings(**{"max_tokens": 100, "temperature": 1.0, "top_p": 1.0, **changed})


def samplers(*rows: GenerationSettings) -> list[Sampler]:
    return [Sampler(row) for row in rows]


def draw_ids(
    together: Sequence[Sampler], logits: Any, last: Sequence[int] | None = None
) -> list[int]:
    before = last or [vocab.MESSAGE] * len(together)
    ids: list[int] = sample(together, mx.array(before, dtype=mx.uint32), logits).tolist()
    return ids


def noise(seed: int, rows: int, columns: int, scale: float = 3.0) -> Any:
    return mx.random.normal((rows, columns), key=mx.random.key(seed)) * scale


def test_bias_of_unknown_id_is_ignored() -> None:
    """mlx would write beyond the end of the logits."""
    (sampler,) = samplers(settings(temperature=0.0, logit_bias=((2, 5.0), (VOCAB_SIZE - 1, 100.0))))
    (other,) = samplers(settings(temperature=0.0, logit_bias=((VOCAB_SIZE - 1, 100.0),)))
    logits = mx.zeros((1, 8))
    assert sampler.biased(logits).tolist() == [[0.0, 0.0, 5.0, *[0.0] * 5]]
    assert other.biased(logits).tolist() == [[0.0] * 8]


# --- Filters.


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_p", [0.9, 0.49, 0.1, 0.01, EPSILON])
def test_small_top_p_keeps_likeliest_id_in_any_dtype(kind: str, top_p: float) -> None:
    half = mx.log(mx.array(float(VOCAB_SIZE)))  # of the probability
    logits = mx.where(mx.arange(VOCAB_SIZE) == 17, half, 0.0)[None].astype(getattr(mx, kind))
    (sampler,) = samplers(settings(top_p=top_p))
    ids = {draw_ids([sampler], logits)[0] for _ in range(8)}
    assert ids == {17} if top_p < 0.5 else 17 in ids


def expected_ids(logits: list[float], wanted: GenerationSettings) -> set[int]:
    """By definition, in double precision; all or none of equal logits."""
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)

    def is_kept(row: int) -> bool:
        above = [weight for weight in weights if weight > weights[row]]
        by_mass = wanted.top_p == 1 or math.fsum(above) < wanted.top_p * total
        by_rank = not wanted.top_k or len(above) < wanted.top_k
        return by_mass and by_rank and weights[row] >= wanted.min_p

    return {row for row in range(len(logits)) if is_kept(row)}


FILTERS = [
    *({"top_p": share} for share in (0.999, 0.9, 0.5, 0.1)),
    *({"top_k": count} for count in (1, 2, 7, 299)),
    *({"min_p": share} for share in (1.0, 0.3, 0.001)),
    {"top_p": 0.7, "top_k": 5, "min_p": 0.01},
    {"top_p": 0.95, "top_k": 20},
]


@pytest.mark.parametrize("changed", FILTERS, ids=str)
def test_filters_match_their_definitions(changed: dict[str, Any]) -> None:
    together = samplers(*[settings(**changed)] * 6)
    logits = noise(1, 6, 300)
    allowed = module._allowed(together, logits).tolist()
    for row, flags in zip(logits.tolist(), allowed, strict=True):
        kept = {at for at, flag in enumerate(flags) if flag}
        assert kept == expected_ids(row, together[0].settings)


def test_ids_of_equal_logits_stay_together() -> None:
    logits = mx.array([[0.0, 1.0, 1.0, 1.0, 0.0]])
    (two,) = samplers(settings(top_k=2))
    assert module._allowed([two], logits).tolist() == [[False, True, True, True, False]]


def test_top_p_keeps_whole_uniform_vocabulary() -> None:
    (most,) = samplers(settings(top_p=0.999_999))
    assert module._allowed([most], mx.zeros((1, VOCAB_SIZE))).all().item()


# --- Sampling.


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_ids_are_sampled_by_probability(temperature: float) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    rows, steps = 500, 20
    together = samplers(*(settings(temperature=temperature, seed=seed) for seed in range(rows)))
    counts: Counter[int] = Counter()
    for _ in range(steps):
        counts.update(draw_ids(together, mx.array([logits] * rows)))
    total = math.fsum(math.exp(logit / temperature) for logit in logits)
    for at, logit in enumerate(logits):
        share = math.exp(logit / temperature) / total
        deviation = math.sqrt(share * (1 - share) / (rows * steps))
        assert abs(counts[at] / (rows * steps) - share) < 4 * deviation


SEEDS = [0, 1, 7, -1, -(2**63), 2**63 - 1]


def test_seeds_give_distinct_reproducible_draws() -> None:
    logits = mx.zeros((1, VOCAB_SIZE))

    def sequence(seed: int | None) -> tuple[int, ...]:
        (sampler,) = samplers(settings(seed=seed))
        return tuple(draw_ids([sampler], logits)[0] for _ in range(6))

    sequences = [sequence(seed) for seed in SEEDS]
    assert sequences == [sequence(seed) for seed in SEEDS]
    assert len({*sequences, sequence(None), sequence(None)}) == len(SEEDS) + 2
    assert all(len({*ids}) == 6 for ids in sequences)


MIXED = [
    settings(seed=1),
    settings(seed=1, top_p=0.9),
    settings(temperature=0.0),
    settings(seed=2, top_k=40, temperature=0.7),
    settings(seed=3, min_p=0.05),
    settings(seed=1),
    settings(seed=4, top_p=0.5, top_k=3, presence_penalty=1.0),
    settings(temperature=0.0, logit_bias=((9, 100.0),)),
    settings(seed=6, frequency_penalty=0.5, repetition_penalty=1.3),
]


@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_do_not_change_draws(kind: str) -> None:
    logits = noise(4, len(MIXED), 2000).astype(getattr(mx, kind))
    logits[5] = logits[0]
    together = samplers(*MIXED)
    alone = samplers(*MIXED)
    last = [vocab.MESSAGE] * len(MIXED)
    single = list(last)
    for _ in range(5):
        last = draw_ids(together, logits, last)
        single = [
            draw_ids([sampler], logits[row : row + 1], [single[row]])[0]
            for row, sampler in enumerate(alone)
        ]
        assert last == single
        assert last[0] == last[5]
    assert last[7] == 9


# --- Penalties.

GENERATED = [
    *(vocab.CHANNEL, 17, vocab.MESSAGE, 5, 6, 5, 17, *([7] * 40), vocab.END),
    *(vocab.START, 8, vocab.CHANNEL, 17, vocab.MESSAGE, 9, 5, vocab.RETURN),
]
PENALTIES = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "presence_penalty": 1.0, "frequency_penalty": -1.0},
]


def penalised(logits: list[float], generated: list[int], wanted: GenerationSettings) -> list[float]:
    """By definition: over all text of the answer, and not in headers."""
    counts: Counter[int] = Counter()
    in_text = False
    for token in generated:
        if token in {vocab.START, vocab.CHANNEL, vocab.CONSTRAIN, vocab.END}:
            in_text = False
        elif token == vocab.MESSAGE:
            in_text = True
        elif in_text and token < vocab.CONTROL.start:
            counts[token] += 1
    result = list(logits)
    for token, count in counts.items() if in_text else ():
        factor = wanted.repetition_penalty
        result[token] *= factor if result[token] < 0 else 1 / factor
        result[token] -= wanted.frequency_penalty * count + wanted.presence_penalty
    return result


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize("changed", PENALTIES, ids=str)
def test_penalties_count_text_without_control_ids(
    changed: dict[str, float],
) -> None:
    (sampler,) = samplers(settings(**changed))
    logits = noise(5, 1, VOCAB_SIZE)
    before, row = logits[0].tolist(), vocab.START
    for place, token in enumerate(GENERATED):
        last = mx.array([row], dtype=mx.uint32)
        sampler.count(last, VOCAB_SIZE)
        biased = sampler.biased(logits)
        expected = penalised(before, GENERATED[:place], sampler.settings)
        assert mx.allclose(biased[0], mx.array(expected), atol=1e-5).item(), place
        row = token


def test_continued_answer_starts_in_text() -> None:
    continued = Sampler(settings(presence_penalty=2.0), [vocab.START, 8, vocab.MESSAGE, 30])
    logits = mx.zeros((1, 100))
    for token in (30, 40, 41):
        continued.count(mx.array([token], dtype=mx.uint32), 100)
        biased = continued.biased(logits)
        assert biased[0, 30].item() == 0
    assert (biased[0, 40].item(), biased[0, 41].item(), biased[0, 42].item()) == (-2.0, -2.0, 0.0)


def test_plain_prompt_starts_in_text() -> None:
    """`/v1/completions` sends prompts without control ids."""
    plain = Sampler(settings(repetition_penalty=2.0), [30, 31])
    logits = mx.ones((1, 100))
    for token in (31, 40):
        plain.count(mx.array([token], dtype=mx.uint32), 100)
        biased = plain.biased(logits)
    assert (biased[0, 31].item(), biased[0, 40].item(), biased[0, 41].item()) == (1.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"temperature": 1e-40}, {17}),
        ({"temperature": 5e-324}, {17}),
        ({"temperature": 1e-5}, {17}),
        ({"temperature": 1e300}, None),
        ({"repetition_penalty": 1e300}, None),
        ({"repetition_penalty": 1e-300}, {17}),
        ({"frequency_penalty": 1e300}, None),
        ({"presence_penalty": -math.inf}, {17}),
        ({"logit_bias": ((3, math.inf), (4, math.inf))}, {3, 4}),
        ({"logit_bias": ((17, -1e308),)}, None),
        ({"top_p": 5e-324}, {17}),
        ({"min_p": 1.0}, {17}),
    ],
    ids=str,
)
def test_extreme_settings_give_finite_logits(
    changed: dict[str, Any], expected: set[int] | None
) -> None:
    """And sample a plausible id; from logits that are NaN, index 0 is sampled."""
    sampler = Sampler(settings(**changed), [30])
    logits = mx.where(mx.arange(100) == 17, 5.0, mx.arange(100) / 100 - 0.5)[None]
    for _ in range(2):
        sampler.count(mx.array([17], dtype=mx.uint32), 100)
    assert mx.isfinite(sampler.biased(logits)).all().item()
    ids = {draw_ids([sampler], logits, [17])[0] for _ in range(20)}
    assert ids <= expected if expected else len(ids) > 1


# --- Constraints.


class Ascending:
    """Allows only ids above the last one, and records its calls."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []

    def __call__(self, last: int | None, logits: Any) -> Any:
        assert logits.shape[0] == 1 and logits.dtype == mx.float32
        self.seen.append(last)
        return mx.where(mx.arange(logits.shape[-1]) > (last or 0), logits, -mx.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraint_gets_each_sampled_id_once(temperature: float) -> None:
    mask = Ascending()
    bound = Sampler(settings(temperature=temperature, top_k=50, seed=1), (), mask)  # type: ignore[arg-type]
    free = Sampler(settings(temperature=0.0))
    logits = noise(6, 2, 4000).astype(mx.bfloat16)
    last, generated = [vocab.START, vocab.START], []
    for _ in range(5):
        last = draw_ids([bound, free], logits, last)
        generated.append(last[0])
        assert last[1] == mx.argmax(logits[1]).item()
    assert generated == sorted(set(generated))
    assert mask.seen == [None, *generated[:-1]]
