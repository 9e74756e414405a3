"""Lone surrogates are replaced, wherever they are and however long the text is."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.protocols.validation import repair

A = "a" * 65_535
HIGH, LOW, BOTH, HALF = "\ud83d", "\ude00", "\U0001f600", "\ufffd"

# name: a value, the repaired value
REPAIRED: dict[str, tuple[Any, Any]] = {
    "nothing to mend": ({"a": [BOTH, 1, None, 1.5, True]}, {"a": [BOTH, 1, None, 1.5, True]}),
    "a value": ([f"a{HIGH}", f"{LOW}a"], [f"a{HALF}", f"{HALF}a"]),
    "a key": ({HIGH: {LOW: []}}, {HALF: {HALF: []}}),
    "both halves": (f"{HIGH}{LOW}", BOTH),
    "both halves, and one": (f"{HIGH}{HIGH}{LOW}{LOW}", f"{HALF}{BOTH}{HALF}"),
    "a long text": (f"{A}{HIGH}{LOW}{A}{LOW}", f"{A}{BOTH}{A}{HALF}"),
    "halves only": (HIGH * 100_000, HALF * 100_000),
}


@pytest.mark.parametrize(("value", "expected"), REPAIRED.values(), ids=REPAIRED.keys())
def test_lone_surrogates_are_replaced(value: Any, expected: Any) -> None:
    assert repair(value) == expected


@pytest.mark.parametrize("value", [[HIGH, float("inf")], [HIGH, float("nan")]])
def test_infinite_numbers_are_rejected(value: Any) -> None:
    with pytest.raises(RequestError, match=r"\[1\] must be a finite number"):
        repair(value)


def test_lone_surrogate_nested_too_deeply_is_rejected() -> None:
    deep: Any = HIGH
    for _ in range(600):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        repair(deep)
