"""Keys and values of a model's layers, cut out of a cache in use and joined into a new one.

A layer keeps either every token (`KVCache`) or the tokens of a sliding window (`RotatingKVCache`).
gpt-oss alternates the two, with one window of 128; in other models the window differs by layer. A
piece therefore has one buffer for each window size, with its last tokens, at most as many as the
window holds. What a window is missing at the end of a piece comes from the pieces before it.

Everything here runs on the thread that owns the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.nn import Module
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from vllm_mlx_harmony.engine.disk.cache import Loaded
from vllm_mlx_harmony.engine.disk.safetensors import Tensor
from vllm_mlx_harmony.engine.mlx_lm_compat import Layer, Layers, evaluate

Windows: TypeAlias = tuple[int, ...]
"""How many tokens each layer keeps; ``WHOLE`` for all."""

WHOLE = 0


class Misaligned(ValueError):
    """A cache does not hold what it should: nothing may be taken from it."""


@dataclass(frozen=True, eq=False)  # without slots: weakly referenced
class Piece:
    """What a model computed for ``tokens`` ids of a sequence: keys and values of every layer.

    ``parts`` has one buffer per window, of shape (2 * layers with this window, heads, n, width),
    with keys and values in turn; n is ``tokens``, or the window where that is less. The buffers
    are copies: what they were cut from can be freed.
    """

    tokens: int
    parts: Mapping[int, mx.array]

    def __post_init__(self) -> None:
        mx.eval(list(self.parts.values()))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def windows(model: Module) -> Windows | None:
    """The windows of the model's layers; ``None`` when some layer's cache cannot be cut."""
    found = []
    for layer in make_prompt_cache(model):
        if type(layer) is KVCache:
            found.append(WHOLE)
        elif type(layer) is RotatingKVCache and layer.keep == 0:
            found.append(int(layer.max_size))
        else:
            return None
    return tuple(found)


def cut(cache: Layers, start: int, end: int, row: int = 0) -> Piece:
    """The piece from ``start`` to ``end`` (in tokens) of what ``cache`` holds in ``row``.

    Raises ``Misaligned`` unless its windows have what they held after ``end`` tokens. They do
    (`mlx_lm_compat`) if ``end`` is in the last pass. If a single token has followed, it has
    overwritten the oldest one of the window at ``end``, which no later token attends to: the
    second-oldest takes its place.
    """
    cuts: dict[int, list[mx.array]] = {}
    for layer in cache:
        keys, values, window = _row(layer, row, end)
        if window == WHOLE:
            part = slice(start, end)
        else:
            part = slice(keys.shape[2] - min(end - start, window), None)
        cuts.setdefault(window, []).extend((keys[:, :, part], values[:, :, part]))
    # One buffer instead of two per layer: Metal limits the number of buffers as well.
    parts = {window: mx.concatenate(cuts[window], axis=0) for window in sorted(cuts)}
    return Piece(end - start, parts)


def _row(layer: Layer, row: int, end: int) -> tuple[mx.array, mx.array, int]:
    """Keys and values of one row up to ``end``, in the order of their tokens, and the window."""
    padding = 0
    if isinstance(layer, BatchKVCache):
        padding = int(layer.left_padding[row].item())
        held = layer._idx - padding
    else:
        if isinstance(layer, BatchRotatingKVCache):
            layer = layer.extract(row)
        row, held = 0, layer.offset
    if held < end:
        raise Misaligned(f"the cache holds {held} tokens, not {end}")
    if isinstance(layer, (KVCache, BatchKVCache)):
        ours = slice(row, row + 1), slice(None), slice(padding, padding + end)
        return layer.keys[ours], layer.values[ours], WHOLE
    window = layer.max_size
    found = []
    for array in (layer.keys, layer.values):
        ordered = layer._temporal_order(array)
        if min(ordered.shape[2], window) != min(held, window):
            raise Misaligned(f"a window of {ordered.shape[2]} tokens does not end at {held}")
        ordered = ordered[:, :, : max(0, ordered.shape[2] - (held - end))]
        missing = min(end, window) - ordered.shape[2]
        overwritten = 1 if held == end + 1 else 0
        if missing > overwritten:
            raise Misaligned(f"a window at {held} has moved on from {end}")
        if missing > 0:
            ordered = mx.concatenate([ordered[:, :, :missing], ordered], axis=2)
        found.append(ordered)
    return found[0], found[1], window


_NAMES = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32"}


def exported(piece: Piece) -> dict[str, Tensor]:
    """The bytes of a piece, not copied. Raises ``KeyError`` for a type that files do not have."""
    return {
        "whole" if window == WHOLE else f"window.{window}": Tensor(
            _NAMES[part.dtype], tuple(part.shape), memoryview(np.frombuffer(part, "B"))
        )
        for window, part in piece.parts.items()
    }


def imported(loaded: Loaded, start: int, end: int) -> Piece:
    """The ids from ``start`` to ``end`` of a piece that was read and ends there, copied.

    Raises ``Misaligned`` if it begins later: what it continues was evicted.
    """
    if start < loaded.start:
        raise Misaligned("what the piece continues was evicted")
    tensors: Any = mx.load(BytesIO(loaded.content), format="safetensors")
    parts = {
        WHOLE if name == "whole" else int(name.rpartition(".")[2]): mx.contiguous(
            part[:, :, -min(end - start, part.shape[2]) :]
        )
        for name, part in tensors.items()
    }
    return Piece(end - start, parts)


def join(model: Module, pieces: Sequence[Piece], headroom: int = 0) -> Layers:
    """A new cache for ``model`` with copies of the pieces, one after another, and room for
    ``headroom`` more tokens before the layers that keep everything have to grow."""
    cache: Layers = make_prompt_cache(model)
    used = dict.fromkeys(pieces[0].parts, 0)  # rows of each window's buffers
    for layer in cache:
        window = getattr(layer, "max_size", WHOLE)
        at = used[window]
        used[window] += 2
        parts = [piece.parts[window] for piece in pieces]
        layer.keys, layer.values = (
            _joined([part[row : row + 1] for part in parts], window, headroom)
            for row in (at, at + 1)
        )
        if window != WHOLE:
            layer._idx = layer.keys.shape[2]
        layer.offset = sum(piece.tokens for piece in pieces)
    evaluate(cache)
    return cache


Shapes: TypeAlias = "list[tuple[mx.array, mx.array]]"
"""Keys and values of each layer, without tokens."""


def shapes(layers: Layers) -> Shapes:
    """The shapes and types of layers that hold some tokens."""
    return [(_room(layer.keys, 0), _room(layer.values, 0)) for layer in layers]


def reserve(layers: Layers, like: Shapes, tokens: int) -> None:
    """Gives empty layers that keep everything room for ``tokens``: mlx-lm's would be copied each
    time they have grown by 256."""
    for layer, (keys, values) in zip(layers, like, strict=True):
        if type(layer) is KVCache and layer.keys is None:
            layer.keys, layer.values = _room(keys, tokens), _room(values, tokens)


def _room(like: mx.array, tokens: int) -> mx.array:
    _, heads, _, width = like.shape
    return mx.zeros((1, heads, tokens, width), dtype=like.dtype)


def _joined(parts: Sequence[mx.array], window: int, headroom: int) -> mx.array:
    """All tokens plus headroom, or the last ``window`` tokens, collected from the last pieces
    backwards."""
    if window == WHOLE:
        return mx.concatenate([*parts, _room(parts[0], headroom)] if headroom else parts, axis=2)
    found: list[mx.array] = []
    for part in reversed(parts):
        found.insert(0, part[:, :, max(0, part.shape[2] - window) :])
        window -= found[0].shape[2]
        if not window:
            break
    return mx.concatenate(found, axis=2)
