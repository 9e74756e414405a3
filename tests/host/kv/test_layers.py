"""Keys and values cut out and joined again are those the model would have computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.host.kv.layers import Misaligned, Segment, cut, join, kinds

WINDOW = 128


class Layers:
    """A model of nothing but caches, in gpt-oss's layout."""

    def __init__(self, *layout: type[Any] | int) -> None:
        self.layers: list[Any] = []
        self._layout = layout

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(one) if isinstance(one, int) else one() for one in self._layout]


GPT_OSS = Layers(WINDOW, KVCache, WINDOW, KVCache)


def fed(cache: list[Any], start: int, end: int, chunk: int = 1) -> list[Any]:
    """``cache`` with tokens start..end fed in: keys are the positions, values their negatives."""
    for at in range(start, end, chunk):
        here = mx.arange(at, min(at + chunk, end), dtype=mx.float32)[None, None, :, None]
        for number, layer in enumerate(cache):
            layer.update_and_fetch(here + number * 1e6, -here)
    return cache


def held(layer: Any) -> list[float]:
    keys = layer.keys
    if isinstance(layer, RotatingKVCache):
        return list(layer._temporal_order(keys)[0, 0, -layer.max_size :, 0].tolist())
    return list(keys[0, 0, : layer.offset, 0].tolist())


def same(cache: list[Any], length: int) -> bool:
    """Whether it is a cache into which ``length`` tokens were fed."""
    whole = [float(number) for number in range(length)]
    expected = [
        [
            position + number * 1e6
            for position in (whole if type(layer) is KVCache else whole[-128:])
        ]
        for number, layer in enumerate(cache)
    ]
    return [held(layer) for layer in cache] == expected and all(
        layer.offset == length for layer in cache
    )


@pytest.mark.parametrize("chunk", [1, 7, 300])
@pytest.mark.parametrize(
    "ends",
    [
        (1,),
        (40, 127, 128, 129),
        (200,),
        (50, 60, 61, 250, 290, 800),
        (500, 501, 502, 640, 641),
        tuple(range(3, 600, 17)),
    ],
)
def test_joined_is_what_was_fed(ends: tuple[int, ...], chunk: int) -> None:
    cache, segments, at = GPT_OSS.make_cache(), [], 0
    for end in ends:
        segments.append(cut(fed(cache, at, end, chunk), at, end))
        at = end
    for headroom in (0, 1, 700):
        joined = join(GPT_OSS, segments, headroom)
        assert same(joined, at)
        more = fed(joined, at, at + 300, chunk)
        assert [held(layer)[-128:] for layer in more] == [
            held(layer)[-128:] for layer in fed(GPT_OSS.make_cache(), 0, at + 300, 300)
        ]
    assert same(join(GPT_OSS, segments), at)  # nothing of it is in the segments


def test_segments_do_not_follow_the_cache_they_are_cut_from() -> None:
    cache = fed(GPT_OSS.make_cache(), 0, 200, 50)
    segment = cut(cache, 0, 200)
    fed(cache, 200, 500)
    assert same(join(GPT_OSS, [segment]), 200)


def test_size_is_that_of_the_tokens_alone() -> None:
    cache = fed(GPT_OSS.make_cache(), 0, 1000, 100)
    assert cut(cache, 0, 1000).nbytes == 2 * 4 * (2 * 1000 + 2 * WINDOW)
    assert cut(cache, 990, 1000).nbytes == 2 * 4 * (2 * 10 + 2 * 10)


@pytest.mark.parametrize("chunk", [1, 7, 300])
@pytest.mark.parametrize("length", [2, 40, 128, 129, 130, 400])
@pytest.mark.parametrize("step", [1, 2, 300])
def test_a_cache_that_holds_one_token_more(length: int, chunk: int, step: int) -> None:
    """What the next token looks at is there: itself and, of a window, as many before it."""
    cache = fed(GPT_OSS.make_cache(), 0, length + 1, chunk)
    segments = [cut(cache, 0, length)]
    joined = fed(join(GPT_OSS, segments), length, length + 1)
    assert [layer.offset for layer in joined] == [length + 1] * 4
    assert same(joined, length + 1)
    more = fed(join(GPT_OSS, segments), length, length + step, step)
    expected = fed(fed(GPT_OSS.make_cache(), 0, length), length, length + step, step)
    assert [held(layer) for layer in more] == [held(layer) for layer in expected]
    later = cut(more, length, length + step)
    assert same(join(GPT_OSS, [*segments, later]), length + step)


@pytest.mark.parametrize("end", [98, 101, 200])
def test_a_cache_that_holds_something_else_is_not_cut(end: int) -> None:
    with pytest.raises(Misaligned):
        cut(fed(GPT_OSS.make_cache(), 0, 100, 10), 0, end)


def test_a_window_with_a_token_that_does_not_count_is_not_cut() -> None:
    cache = fed(GPT_OSS.make_cache(), 0, 100, 10)
    for layer in cache:
        layer.offset = 99
    with pytest.raises(Misaligned):
        cut(cache, 0, 99)


@pytest.mark.parametrize("lengths", [(300, 300), (300, 40, 131), (5, 400), (129, 128, 127)])
def test_rows_of_a_batch(lengths: tuple[int, ...]) -> None:
    from mlx_lm.generate import _merge_caches

    singles = [fed(GPT_OSS.make_cache(), 0, length, 64) for length in lengths]
    batch = _merge_caches(singles)
    assert {type(layer) for layer in batch} == {BatchKVCache, BatchRotatingKVCache}
    for row, length in enumerate(lengths):
        assert same(join(GPT_OSS, [cut(batch, 0, length, row)]), length)
    for step in range(150):  # all rows generate together
        here = mx.array([length + step for length in lengths], dtype=mx.float32)
        for number, layer in enumerate(batch):
            layer.update_and_fetch(
                here[:, None, None, None] + number * 1e6, mx.zeros((len(lengths), 1, 1, 1))
            )
    for row, length in enumerate(lengths):
        with pytest.raises(Misaligned):
            cut(batch, 0, length, row)
        segments = [cut(singles[row], 0, length), cut(batch, length, length + 150, row)]
        assert same(join(GPT_OSS, segments), length + 150)
        one_less = [segments[0], cut(batch, length, length + 149, row)]
        joined = fed(join(GPT_OSS, one_less), length + 149, length + 150)
        assert same(joined, length + 150)
    for layer in batch:
        layer.filter([len(lengths) - 1])
    assert same(join(GPT_OSS, [cut(batch, 0, lengths[-1] + 150)]), lengths[-1] + 150)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ((WINDOW, KVCache), (WINDOW, 0)),
        ((KVCache,), (0,)),
        ((64,), (64,)),
        ((64, 128), None),
        ((KVCache, ConcatenateKVCache), None),
    ],
)
def test_kinds(layout: tuple[Any, ...], expected: tuple[int, ...] | None) -> None:
    assert kinds(Layers(*layout)) == expected


def test_layouts_of_one_kind() -> None:
    for model in (Layers(KVCache, KVCache), Layers(64, 64)):
        cache = fed(model.make_cache(), 0, 90, 10)
        segments = [cut(cache, 0, 90)]
        segments.append(cut(fed(cache, 90, 200, 10), 90, 200))
        assert [held(layer) for layer in join(model, segments)] == [held(layer) for layer in cache]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from mlx_lm.utils import load_model

    directory: Path = standin.write_tiny(tmp_path_factory.mktemp("tiny"), width=16)
    return load_model(directory)[0]


def test_real_architecture_goes_on_with_the_same_logits(tiny: Any) -> None:
    """Exactly the same: the same passes, on keys and values that were cut and joined between."""
    ids = [random.Random(3).randrange(200_000) for _ in range(700)]
    ends = [1, 60, 61, 400, 430, 699]
    plain, segments, at = tiny.make_cache(), list[Segment](), 0
    for end in ends:
        joined = join(tiny, segments, headroom=50) if segments else tiny.make_cache()
        expected = tiny(mx.array([ids[at:end]]), cache=plain)[:, -1]
        logits = tiny(mx.array([ids[at:end]]), cache=joined)[:, -1]
        assert mx.array_equal(logits, expected)
        segments.append(cut(joined, at, end))
        at = end


@pytest.mark.parametrize("step", [1, 60])
@pytest.mark.parametrize("length", [90, 400])
def test_real_architecture_goes_on_from_one_token_before(tiny: Any, length: int, step: int) -> None:
    ids = [random.Random(4).randrange(200_000) for _ in range(length + step)]
    plain, cache = tiny.make_cache(), tiny.make_cache()
    for tokens, into in ((ids[:length], plain), ([*ids[:length], 7], cache)):
        for token in tokens:
            tiny(mx.array([[token]]), cache=into)
    joined = join(tiny, [cut(cache, 0, length)])
    expected = tiny(mx.array([ids[length:]]), cache=plain)
    logits = tiny(mx.array([ids[length:]]), cache=joined)
    # One by one, a window stands in another order in the two: sums differ in the last bits.
    assert mx.allclose(logits, expected, rtol=0, atol=5e-6)
