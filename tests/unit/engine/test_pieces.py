"""Keys and values that are cut and joined again equal those the model computes."""

from __future__ import annotations

import copy
import random
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

from vllm_mlx_harmony.engine.disk.cache import Loaded
from vllm_mlx_harmony.engine.disk.safetensors import encoded
from vllm_mlx_harmony.engine.pieces import (
    Misaligned,
    Piece,
    cut,
    exported,
    imported,
    join,
    windows,
)

WINDOW = 128


class Layers:
    """A model that only has caches, in gpt-oss's layout or another."""

    def __init__(self, *layout: type[Any] | int) -> None:
        self.layers: list[Any] = []
        self._layout = layout

    def make_cache(self) -> list[Any]:
        return [
            RotatingKVCache(layer) if isinstance(layer, int) else layer() for layer in self._layout
        ]


GPT_OSS = Layers(WINDOW, KVCache, WINDOW, KVCache)
SEVERAL_WINDOWS = Layers(64, KVCache, 300, 64, KVCache, WINDOW)


@pytest.fixture(params=[GPT_OSS, SEVERAL_WINDOWS], ids=["gpt-oss", "several windows"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param


def feed(cache: list[Any], start: int, end: int, chunk: int = 1) -> list[Any]:
    """Feeds tokens start..end to ``cache``: keys are the positions, values their negatives."""
    for at in range(start, end, chunk):
        here = mx.arange(at, min(at + chunk, end), dtype=mx.float32)[None, None, :, None]
        for number, layer in enumerate(cache):
            layer.update_and_fetch(here + number * 1e6, -here)
    return cache


def keys_of(layer: Any) -> list[float]:
    keys = layer.keys
    if isinstance(layer, RotatingKVCache):
        return list(layer._temporal_order(keys)[0, 0, -layer.max_size :, 0].tolist())
    return list(keys[0, 0, : layer.offset, 0].tolist())


def same(cache: list[Any], length: int) -> bool:
    """Whether ``cache`` is one to which ``length`` tokens were fed."""
    whole = [float(number) for number in range(length)]
    expected = [
        [
            position + number * 1e6
            for position in (whole if type(layer) is KVCache else whole[-layer.max_size :])
        ]
        for number, layer in enumerate(cache)
    ]
    return [keys_of(layer) for layer in cache] == expected and all(
        layer.offset == length for layer in cache
    )


@pytest.mark.nightly(sample=4)
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
def test_joined_pieces_equal_fed_cache(model: Any, ends: tuple[int, ...], chunk: int) -> None:
    cache, pieces, at = model.make_cache(), [], 0
    for end in ends:
        pieces.append(cut(feed(cache, at, end, chunk), at, end))
        at = end
    for headroom in (0, 1, 700):
        joined = join(model, pieces, headroom)
        assert same(joined, at)
        assert same(feed(joined, at, at + 400, chunk), at + 400)
    assert same(join(model, pieces), at)  # the pieces are unchanged


@pytest.mark.parametrize("ends", [(300, 7_000, 9_000, 9_050), (9_000, 20_000), (8_192, 8_193)])
def test_long_window_is_joined_from_several_pieces(ends: tuple[int, ...]) -> None:
    """No piece holds more of a window than its own tokens, and none more than the window."""
    model = Layers(WINDOW, KVCache, 8_192, KVCache)
    cache, pieces, at = model.make_cache(), [], 0
    for end in ends:
        pieces.append(cut(feed(cache, at, end, 2048), at, end))
        lengths = {window: part.shape[2] for window, part in pieces[-1].parts.items()}
        own = end - at
        assert lengths == {0: own, WINDOW: min(own, WINDOW), 8_192: min(own, 8_192)}
        at = end
        assert same(join(model, pieces), end)
    assert same(feed(join(model, pieces), at, at + 100), at + 100)


def test_pieces_are_independent_of_their_cache(model: Any) -> None:
    cache = feed(model.make_cache(), 0, 200, 50)
    piece = cut(cache, 0, 200)
    feed(cache, 200, 500)
    assert same(join(model, [piece]), 200)


def test_size_counts_only_own_tokens() -> None:
    cache = feed(GPT_OSS.make_cache(), 0, 1000, 100)
    assert cut(cache, 0, 1000).nbytes == 2 * 4 * (2 * 1000 + 2 * WINDOW)
    assert cut(cache, 990, 1000).nbytes == 2 * 4 * (2 * 10 + 2 * 10)
    cache = feed(SEVERAL_WINDOWS.make_cache(), 0, 1000, 100)
    assert cut(cache, 0, 1000).nbytes == 2 * 4 * (2 * 1000 + 2 * 64 + 300 + WINDOW)
    assert cut(cache, 800, 1000).nbytes == 2 * 4 * (2 * 200 + 2 * 64 + 200 + WINDOW)


@pytest.mark.nightly(sample=4)
@pytest.mark.parametrize("chunk", [1, 7, 300])
@pytest.mark.parametrize("length", [2, 40, 128, 129, 130, 400])
@pytest.mark.parametrize("step", [1, 2, 300])
def test_cache_with_one_more_token_is_cut(model: Any, length: int, chunk: int, step: int) -> None:
    """The piece still has a full window before the next token."""
    cache = feed(model.make_cache(), 0, length + 1, chunk)
    pieces = [cut(cache, 0, length)]
    joined = feed(join(model, pieces), length, length + 1)
    assert [layer.offset for layer in joined] == [length + 1] * len(joined)
    assert same(joined, length + 1)
    more = feed(join(model, pieces), length, length + step, step)
    expected = feed(feed(model.make_cache(), 0, length), length, length + step, step)
    assert [keys_of(layer) for layer in more] == [keys_of(layer) for layer in expected]
    later = cut(more, length, length + step)
    assert same(join(model, [*pieces, later]), length + step)


@pytest.mark.parametrize("length", [40, 100, 700])
def test_piece_survives_export_and_import(model: Any, length: int) -> None:
    piece = cut(feed(model.make_cache(), 0, length, 50), 0, length)
    content = b"".join(encoded(exported(piece), {}))
    assert same(join(model, [imported(Loaded(0, length, content), 0, length)]), length)


@pytest.mark.parametrize(("held", "end"), [(100, 101), (100, 200), (300, 290), (300, 298)])
def test_cache_of_another_length_is_not_cut(held: int, end: int) -> None:
    with pytest.raises(Misaligned):
        cut(feed(GPT_OSS.make_cache(), 0, held), 0, end)


@pytest.mark.parametrize("start", [0, 5, 127, 128, 129, 500])
def test_pass_can_be_cut_anywhere(model: Any, start: int) -> None:
    """The cache keeps all of its tokens and the window of its first."""
    cache, end = feed(model.make_cache(), 0, start, 100), start + 400
    before = [cut(cache, 0, start)] if start else []
    feed(cache, start, end, end)
    for place in (start + 1, start + 128, start + 300, end - 1, end):
        first = [*before, cut(cache, start, place)]
        assert same(join(model, first), place)
        if place < end:
            assert same(join(model, [*first, cut(cache, place, end)]), end)


def test_window_with_extra_token_is_not_cut() -> None:
    cache = feed(GPT_OSS.make_cache(), 0, 100, 10)
    for layer in cache:
        layer.offset = 99
    with pytest.raises(Misaligned):
        cut(cache, 0, 99)


@pytest.mark.parametrize("lengths", [(300, 300), (300, 40, 131), (5, 400), (129, 128, 127)])
def test_batch_rows_are_cut(model: Any, lengths: tuple[int, ...]) -> None:
    from mlx_lm.generate import _merge_caches

    singles = [feed(model.make_cache(), 0, length, 64) for length in lengths]
    batch = _merge_caches(singles)
    assert {type(layer) for layer in batch} == {BatchKVCache, BatchRotatingKVCache}
    for row, length in enumerate(lengths):
        assert same(join(model, [cut(batch, 0, length, row)]), length)
    for step in range(320):  # all rows generate together
        here = mx.array([length + step for length in lengths], dtype=mx.float32)
        for number, layer in enumerate(batch):
            layer.update_and_fetch(
                here[:, None, None, None] + number * 1e6, mx.zeros((len(lengths), 1, 1, 1))
            )
    for row, length in enumerate(lengths):
        with pytest.raises(Misaligned):
            cut(batch, 0, length, row)
        pieces = [cut(singles[row], 0, length), cut(batch, length, length + 320, row)]
        assert same(join(model, pieces), length + 320)
        one_less = [pieces[0], cut(batch, length, length + 319, row)]
        joined = feed(join(model, one_less), length + 319, length + 320)
        assert same(joined, length + 320)
    for layer in batch:
        layer.filter([len(lengths) - 1])
    assert same(join(model, [cut(batch, 0, lengths[-1] + 320)]), lengths[-1] + 320)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ((WINDOW, KVCache), (WINDOW, 0)),
        ((KVCache,), (0,)),
        ((64,), (64,)),
        ((128, 64, KVCache, 64), (128, 64, 0, 64)),
        ((KVCache, ConcatenateKVCache), None),
    ],
)
def test_windows_are_read_from_layouts(
    layout: tuple[Any, ...], expected: tuple[int, ...] | None
) -> None:
    assert windows(Layers(*layout)) == expected


def test_layouts_of_one_kind_are_joined() -> None:
    for model in (Layers(KVCache, KVCache), Layers(64, 64)):
        cache = feed(model.make_cache(), 0, 90, 10)
        pieces = [cut(cache, 0, 90)]
        pieces.append(cut(feed(cache, 90, 200, 10), 90, 200))
        assert [keys_of(layer) for layer in join(model, pieces)] == [
            keys_of(layer) for layer in cache
        ]


@pytest.mark.parametrize("length", [90, 330, 700])
def test_piece_holds_what_windows_keep(random_model: Any, length: int) -> None:
    cache = random_model.make_cache()
    random_model(mx.array([list(range(1000, 1000 + length))]), cache=cache)
    parts = cut(cache, 0, length).parts
    expected = {window: min(window or length, length) for window in windows(random_model) or ()}
    assert {window: part.shape[2] for window, part in parts.items()} == expected


@pytest.mark.nightly(sample=2)
def test_real_model_continues_with_equal_logits(random_model: Any) -> None:
    """Exactly equal: the same passes, on keys and values that were cut and joined in between."""
    ids = [random.Random(3).randrange(200_000) for _ in range(420)]
    ends = [1, 60, 61, 350, 380, 419]  # the longest window is 320
    plain, pieces, at = random_model.make_cache(), list[Piece](), 0
    for end in ends:
        joined = join(random_model, pieces, headroom=50) if pieces else random_model.make_cache()
        expected = random_model(mx.array([ids[at:end]]), cache=plain)[:, -1]
        logits = random_model(mx.array([ids[at:end]]), cache=joined)[:, -1]
        assert mx.array_equal(logits, expected)
        pieces.append(cut(joined, at, end))
        at = end


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize("length", [90, 400])
def test_real_model_continues_from_one_token_earlier(random_model: Any, length: int) -> None:
    ids = [random.Random(4).randrange(200_000) for _ in range(length + 60)]
    plain, cache = random_model.make_cache(), random_model.make_cache()
    one_by_one = min(length, 150)
    for tokens, into in ((ids[:length], plain), ([*ids[:length], 7], cache)):
        if first := tokens[:-one_by_one]:
            random_model(mx.array([first]), cache=into)
        for token in tokens[-one_by_one:]:
            random_model(mx.array([[token]]), cache=into)
    for step in (1, 60):
        following = mx.array([ids[length:][:step]])
        expected = random_model(following, cache=copy.deepcopy(plain))
        logits = random_model(following, cache=join(random_model, [cut(cache, 0, length)]))
        # The two windows are in different orders, so sums differ in the last bits.
        assert mx.allclose(logits, expected, rtol=0, atol=5e-6)
