"""One reader for all numbers and sizes of the environment."""

from __future__ import annotations

import logging

import pytest

from vllm_mlx_harmony.server import settings

VARIABLE = "VLLM_MLX_HARMONY_A_SETTING"


@pytest.fixture(autouse=True)
def fresh() -> None:
    settings._read.cache_clear()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0", 0),
        ("32", 32),
        ("200k", 200 << 10),
        ("16M", 16 << 20),
        ("16 MB", 16 << 20),
        ("16MiB", 16 << 20),
        ("1.5G", 3 << 29),
        (" 1T ", 1 << 40),
        ("", 7),
    ],
)
def test_what_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str, expected: int
) -> None:
    monkeypatch.setenv(VARIABLE, given)
    assert settings.number(VARIABLE, 7) == expected
    assert not caplog.records


@pytest.mark.parametrize("given", ["many", "-1", "0.5", "16X", "1G2", "1e6", "٣", "9" * 400])
def test_anything_else_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with caplog.at_level(logging.WARNING):
        assert [settings.number(VARIABLE, 7) for _ in range(3)] == [7] * 3
    (record,) = caplog.records
    assert VARIABLE in record.getMessage()
    assert ascii(given) in ascii(record.getMessage())
