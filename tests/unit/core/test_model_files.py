"""Which models are Harmony models, by their tokenizer or by the tokens that it lists."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.model_files import _lists_harmony, is_harmony
from vllm_mlx_harmony.standin.tokenizer import tokenizer_json


class Wrapped:
    """A wrapper like that of mlx-lm, which passes on the attributes that it lacks."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Harmony:
    """A tokenizer as of transformers, over the real vocabulary, in which ids can be moved."""

    def __init__(self, moved: str = "", shift: int = 0) -> None:
        self._moved, self._shift = moved, shift

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        moved = vocab.encoding().encode(self._moved, allowed_special="all")
        ids = vocab.encoding().encode(text, allowed_special="all")
        return [token + self._shift + (token in moved) for token in ids]


CONTROL = ["start", "end", "message", "channel", "constrain", "return", "call"]


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (None, False),
        (object(), False),
        (Harmony(), True),
        (Wrapped(Harmony()), True),
        (Wrapped(Wrapped(Harmony())), True),
        (Harmony(shift=1), False),
        *[(Harmony(moved=f"<|{name}|>"), False) for name in CONTROL],
    ],
)
def test_harmony_tokenizer_is_recognized(tokenizer: Any, expected: bool) -> None:
    assert is_harmony(tokenizer) is expected


@pytest.mark.nightly
@pytest.mark.once
@pytest.mark.parametrize("name", ["", *CONTROL])
def test_list_of_tokens_is_enough(name: str) -> None:
    """Unless one of them differs: then the tokenizer itself must be read."""
    content = tokenizer_json().encode()
    assert _lists_harmony(content)
    if name:
        moved = content.replace(b"<|%s|>" % name.encode(), b"<|moved|>")
        assert not _lists_harmony(moved)
