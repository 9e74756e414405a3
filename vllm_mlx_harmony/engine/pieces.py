"""Keys and values of a model's layers, cut out of a cache in use and joined into a new one.

A layer keeps either every token (`KVCache`) or the tokens of a sliding window (`RotatingKVCache`).
gpt-oss alternates the two, with one window of 128; in other models the window differs by layer. A
piece therefore has one buffer for each window that occurs, with its last tokens, no more than the
window holds. A long window makes a piece no larger than keeping every token would: the state at the
end of a piece takes what is missing from the pieces before it.

Everything here runs on the thread that owns the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from vllm_mlx_harmony.engine.disk.safetensors import WIDTHS, Tensor, Tensors
from vllm_mlx_harmony.engine.mlx_lm_compat import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

Windows: TypeAlias = tuple[int, ...]
"""Of each layer, how many tokens it keeps; ``WHOLE`` where it keeps every token."""

WHOLE = 0


class Misaligned(ValueError):
    """A cache does not hold what it should: nothing may be taken from it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a model computed for ``tokens`` ids of a sequence: keys and values of every layer.

    ``parts`` has one buffer per window, of shape (2 * layers with this window, heads, n, width),
    with keys and values in turn; n is ``tokens``, or the window where that is less. The buffers
    are copies: what they were cut from can be freed.
    """

    tokens: int
    parts: Mapping[int, Any]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def last(self, tokens: int) -> Piece:
        """The piece without what stands before its last ``tokens``."""
        if tokens == self.tokens:
            return self
        parts = {
            window: mx.contiguous(part[:, :, -min(tokens, part.shape[2]) :])
            for window, part in self.parts.items()
        }
        mx.eval(list(parts.values()))
        return Piece(tokens, parts)


def windows(model: Any) -> Windows | None:
    """The windows of the model's layers; ``None`` when some layer's cache cannot be cut."""
    found = [_window(layer) for layer in make_prompt_cache(model)]
    known = tuple(window for window in found if window is not None)
    return known if len(known) == len(found) else None


def _window(layer: Any) -> int | None:
    if type(layer) is KVCache:
        return WHOLE
    if type(layer) is RotatingKVCache and layer.keep == 0:
        return int(layer.max_size)
    return None


def cut(cache: Sequence[Any], start: int, end: int, row: int = 0) -> Piece:
    """The piece from ``start`` to ``end`` (in tokens) of what ``cache`` holds in ``row``.

    Raises ``Misaligned`` unless the cache holds ``end`` tokens, or one more: a window that has
    moved on cannot be moved back. By one it can: a token looks at itself and, with a window of n,
    at the n - 1 before it.
    """
    cuts: dict[int, list[Any]] = {}
    for layer in cache:
        keys, values, window = _rows(layer, row, end)
        if window == WHOLE:
            part = slice(start, end)
        else:
            part = slice(keys.shape[2] - min(end - start, window), None)
        cuts.setdefault(window, []).extend((keys[:, :, part], values[:, :, part]))
    # One buffer instead of two per layer: Metal limits how many there may be, too.
    parts = {window: mx.concatenate(cuts[window], axis=0) for window in sorted(cuts)}
    mx.eval(list(parts.values()))
    return Piece(end - start, parts)


def _rows(layer: Any, row: int, end: int) -> tuple[Any, Any, int]:
    """Keys and values of one row in the order of their tokens, and the layer's window.

    Those of a window end at ``end``.
    """
    if isinstance(layer, BatchKVCache):
        padding = int(layer.left_padding[row].item())
        _more(layer._idx - padding, end)
        ours = (slice(row, row + 1), slice(None), slice(padding, padding + end))
        return layer.keys[ours], layer.values[ours], WHOLE
    if isinstance(layer, BatchRotatingKVCache):
        layer = layer.extract(row)
    more = _more(layer.offset, end)
    if isinstance(layer, KVCache):
        return layer.keys, layer.values, WHOLE
    if not isinstance(layer, RotatingKVCache):
        raise Misaligned(f"{type(layer).__name__} cannot be cut")
    keys, values = layer._temporal_order(layer.keys), layer._temporal_order(layer.values)
    if min(keys.shape[2], layer.max_size) != min(layer.offset, layer.max_size):
        raise Misaligned(f"a window of {keys.shape[2]} tokens does not end at {layer.offset}")
    wanted = min(end, layer.max_size)
    return _moved_back(keys, more, wanted), _moved_back(values, more, wanted), layer.max_size


def _more(held: int, wanted: int) -> int:
    """How many tokens more are held than wanted."""
    if held - wanted not in (0, 1):
        raise Misaligned(f"the cache holds {held} tokens, not {wanted}")
    return held - wanted


def _moved_back(window: Any, by: int, wanted: int) -> Any:
    """``window`` without the ``by`` last tokens, ``wanted`` tokens at least.

    In the place of one that is lost the oldest stands twice: the next token does not look there.
    """
    left = window[:, :, : window.shape[2] - by]
    missing = wanted - left.shape[2]
    return mx.concatenate([left[:, :, :missing], left], axis=2) if missing > 0 else left


_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {2: np.uint16, 4: np.uint32}
"""What numpy takes elements for: it has no bfloat16, and copies nothing."""


def exported(piece: Piece) -> dict[str, Tensor]:
    """The bytes of a piece, without a copy; they stay valid as long as the result does.

    Raises ``KeyError`` for elements of a type that the files do not have.
    """
    return {
        _name(window): Tensor(
            _NAMES[part.dtype], tuple(part.shape), memoryview(np.frombuffer(part, "B"))
        )
        for window, part in piece.parts.items()
    }


def _name(window: int) -> str:
    return "whole" if window == WHOLE else f"window.{window}"


def imported(tokens: int, tensors: Tensors) -> Piece:
    """The piece with these bytes, copied."""
    parts = {
        WHOLE if name == _name(WHOLE) else int(name.rpartition(".")[2]): mx.array(
            np.frombuffer(tensor.data, _BITS[WIDTHS[tensor.dtype]])
        )
        .view(_DTYPES[tensor.dtype])
        .reshape(tensor.shape)
        for name, tensor in tensors.items()
    }
    mx.eval(list(parts.values()))
    return Piece(tokens, parts)


def join(model: Any, pieces: Sequence[Piece], headroom: int = 0) -> list[Any]:
    """A new cache for ``model`` that holds what the pieces do, one after another.

    Using it changes nothing in them. There is ``headroom`` for so many tokens more before the
    layers that keep everything have to grow.
    """
    cache: list[Any] = make_prompt_cache(model)
    length = sum(piece.tokens for piece in pieces)
    used: dict[int, int] = {}  # rows of each window's buffers
    for layer in cache:
        window = _window(layer)
        assert window is not None  # nothing is cut from such a model
        at = used.get(window, 0)
        used[window] = at + 2
        parts = [piece.parts[window] for piece in pieces]
        if window == WHOLE:
            layer.keys, layer.values = (_all(parts, row, headroom) for row in (at, at + 1))
        else:
            layer.keys, layer.values = (_last(parts, row, window) for row in (at, at + 1))
            layer._idx = layer.keys.shape[2]
        layer.offset = length
    mx.eval([(layer.keys, layer.values) for layer in cache])
    return cache


def _all(parts: Sequence[Any], at: int, headroom: int) -> Any:
    pieces = [part[at : at + 1] for part in parts]
    if headroom:
        _, heads, _, width = pieces[0].shape
        pieces.append(mx.zeros((1, heads, headroom, width), dtype=pieces[0].dtype))
    return mx.concatenate(pieces, axis=2)


def _last(parts: Sequence[Any], at: int, window: int) -> Any:
    """The last ``window`` tokens: a piece that is shorter is filled up from the ones before it."""
    pieces, missing = [], window
    for part in reversed(parts):
        length = part.shape[2]
        before = max(0, length - missing)
        pieces.append(part[at : at + 1, :, before:])
        missing -= length - before
        if not missing:
            break
    return mx.concatenate(pieces[::-1], axis=2)
