"""The memory that requests take up to their end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_mlx_harmony.engine.memory import (
    CACHE_STEP,
    FREE_PADDING,
    MAX_PADDING,
    Budget,
    Layout,
    layout_of,
    may_be_padded,
)

GPT_OSS = Layout(per_id=12 * 2 * 8 * 64 * 2, windows=((128, 12 * 2 * 8 * 64 * 2),))
"""gpt-oss-20b: 24 layers, every other one with a window; 8 heads of 64 elements of two bytes."""

GIB = 1 << 30


@pytest.mark.parametrize(
    ("layout", "ids", "expected"),
    [
        (Layout(), 1000, 0),
        (Layout(per_id=10), 0, 0),
        (Layout(per_id=10), 1, 2560),
        (Layout(per_id=10), 256, 2560),
        (Layout(per_id=10), 257, 5120),
        (Layout(windows=((128, 3),)), 10_000, 384),
        (Layout(per_id=10, windows=((128, 3), (1024, 5))), 256, 2560 + 384 + 1280),
        (Layout(per_id=10, windows=((128, 3), (1024, 5))), 4096, 40960 + 384 + 5120),
        (GPT_OSS, 131_072, 131_072 * 24_576 + 128 * 24_576),
    ],
)
def test_sequence_takes_expected_bytes(layout: Layout, ids: int, expected: int) -> None:
    assert layout.nbytes(ids) == expected


@pytest.mark.parametrize("nbytes", [0, 10**6, 10**8, GIB, 3 * GIB + 12_345])
def test_longest_sequence_just_fits(nbytes: int) -> None:
    longest = GPT_OSS.longest(nbytes)
    assert not longest or GPT_OSS.nbytes(longest) <= nbytes
    assert GPT_OSS.nbytes(longest + CACHE_STEP) > nbytes or longest == 0


def test_layout_is_read_from_config() -> None:
    config: dict[str, object] = {
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    assert layout_of(config) == GPT_OSS
    for name in config:
        assert layout_of({key: config[key] for key in config if key != name}) is None


def test_windows_alone_do_not_limit_length() -> None:
    layout = Layout(windows=((128, 100),))
    assert layout.longest(128 * 100) > 1 << 30
    assert layout.longest(128 * 100 - 1) == 0


BUDGET = Budget(limit=16 * GIB, layout=GPT_OSS, work=GIB)

ROWS: list[tuple[int, Sequence[int], bool]] = [
    (12 * GIB, (), True),
    (12 * GIB, (1000,), True),
    (12 * GIB, (130_000,), True),
    (12 * GIB, (132_000,), False),
    (12 * GIB, (40_000, 40_000), True),
    (12 * GIB, (60_000, 60_000), False),  # with padding
    (15 * GIB, (1000,), False),
    (15 * GIB + 1, (), False),
]


@pytest.mark.parametrize(("others", "ends", "fits"), ROWS)
def test_missing_bytes_are_computed(others: int, ends: Sequence[int], fits: bool) -> None:
    missing = BUDGET.missing(others, ends)
    assert (missing == 0) == fits
    assert BUDGET.missing(others - missing, ends) == 0


def test_longest_request_just_fits() -> None:
    longest = BUDGET.longest(12 * GIB)
    assert BUDGET.missing(12 * GIB, [longest]) == 0
    assert BUDGET.missing(12 * GIB, [longest + CACHE_STEP]) > 0


@pytest.mark.parametrize(
    ("lengths", "allowed"),
    [
        ((5,), True),
        ((5, 5), True),
        ((5, FREE_PADDING), True),
        ((5, 100_000), False),
        ((80_000, 100_000), True),
        ((40_000, 100_000), False),
        ((100_000,) * 7 + (5,), True),
        ((100_000,) + (5,) * 7, False),
    ],
)
def test_similar_or_short_lengths_may_be_padded(lengths: Sequence[int], allowed: bool) -> None:
    assert may_be_padded(lengths) == allowed
    if allowed:
        padded = len(lengths) * max(lengths) * BUDGET.layout.per_id
        assert padded <= BUDGET.needed(lengths) - BUDGET.work
    assert MAX_PADDING < 1
