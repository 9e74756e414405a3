"""Texts of the model as ids, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_mlx_harmony.core import vocab


def ids_of(text: str) -> tuple[int, ...]:
    """The ids of ``text``, in which control tokens are written out."""
    return tuple(vocab.encoding().encode(text, allowed_special="all"))


def text_of(ids: Sequence[int]) -> str:
    return vocab.encoding().decode(list(ids))


def script_for(prompt: Sequence[int], scripts: Mapping[str, str]) -> tuple[int, ...]:
    """The ids of the script whose key is last in ``prompt``. One key must be in it."""
    text = text_of(prompt)
    key = max(scripts, key=text.rfind)
    assert key in text, f"no script for {text[-300:]!r}"
    return ids_of(scripts[key])
