"""What Metal keeps in memory, whatever models come and go."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from vllm_mlx_harmony.engine import device

RECOMMENDED, BEFORE = 1000, 7


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ((5, -5), (RECOMMENDED, BEFORE)),
        ((5, 9, -5, -9), (RECOMMENDED, RECOMMENDED, RECOMMENDED, BEFORE)),
        ((5, 9, -9, 3, -5, -3), (*[RECOMMENDED] * 5, BEFORE)),
        ((0, 5, 0, -5, 0), (BEFORE, RECOMMENDED, RECOMMENDED, BEFORE, BEFORE)),
        ((5, -5, 9, -9), (RECOMMENDED, BEFORE, RECOMMENDED, BEFORE)),
    ],
)
def test_models_are_wired_while_there_is_any(
    monkeypatch: pytest.MonkeyPatch, changes: tuple[int, ...], limits: tuple[int, ...]
) -> None:
    limit = BEFORE

    def set_limit(value: int) -> int:
        nonlocal limit
        limit, before = value, limit
        return before

    monkeypatch.setattr(device, "has_metal", lambda: True)
    monkeypatch.setattr(device, "memory", lambda: RECOMMENDED)
    monkeypatch.setattr(device, "_weights", 0)
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    for at, (change, expected) in enumerate(zip(changes, limits, strict=True)):
        device.add_weights(change)
        assert (limit, device.weights()) == (expected, sum(changes[: at + 1]))
