"""Text into ids: long runs are encoded in parts, everything else as the library does it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx_harmony.core import vocab

LONG = vocab.LONGEST_RUN


def library(text: str) -> list[int]:
    return vocab.encoding().encode(text, disallowed_special=())


@given(text=st.text(max_size=200))
def test_without_long_runs_as_the_library(text: str) -> None:
    assert vocab.encode(text) == library(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"key": [1, 2, "three"]},' * 500, id="minified"),
        pytest.param("0123456789" * 500, id="digits"),
        pytest.param("def f():\n        return 1\n" * 500, id="code"),
        pytest.param("a" * LONG, id="a run of just the limit"),
    ],
)
def test_long_text_without_long_runs_as_the_library(text: str) -> None:
    assert vocab.encode(text) == library(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a" * 5000, id="letters"),
        pytest.param(" " * 5000, id="spaces"),
        pytest.param("\n \t" * 2000, id="mixed spaces"),
        pytest.param("=" * 5000, id="signs"),
        pytest.param("_" * 5000, id="underscores"),
        pytest.param("é" * 5000 + " end", id="letters, then more"),
        pytest.param("begin " + "你" * 5000, id="no spaces in this language"),
    ],
)
def test_long_runs_are_the_same_text_in_parts(text: str) -> None:
    ids = vocab.encode(text)
    assert vocab.encoding().decode(ids) == text
    assert not any(token in vocab.CONTROL for token in ids)
    runs = (run for part in vocab._parts(text) for run in vocab._RUNS.findall(part))
    assert max(map(len, runs)) <= LONG
