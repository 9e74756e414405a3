"""Texts of the model as ids, and back."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mlx_harmony.core import vocab


def ids_of(text: str) -> tuple[int, ...]:
    """The ids of ``text``, in which control tokens are written out."""
    return tuple(vocab.encoding().encode(text, allowed_special="all"))


def text_of(ids: Sequence[int]) -> str:
    return vocab.encoding().decode(list(ids))
