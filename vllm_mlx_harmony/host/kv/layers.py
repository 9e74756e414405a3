"""Keys and values of gpt-oss's layers: cut out of a cache that is in use, and joined to a new one.

Knows mlx-lm's caches: full-length and sliding-window ones, of one sequence or a row of a batch.
And the bytes of what was cut: a disk has them.
Refuses to know which sequence they belong to. Runs on the thread that owns the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from vllm_mlx_harmony.host.kv.files import WIDTHS, Tensor, Tensors

Kinds: TypeAlias = tuple[int, ...]
"""A number per layer: how many tokens it keeps, ``WHOLE`` when it keeps all."""

WHOLE = 0


class Misaligned(ValueError):
    """A cache does not hold what it should: nothing may be taken from it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What a model computed for a piece of a sequence: n tokens, of each layer its keys and values.

    ``whole`` are those of the layers that keep everything, (2 * layers, heads, n, width); ``tail``
    those of sliding-window layers, no more than the window of them. Both are buffers of their own:
    what they were cut from can be freed. ``None`` when the model has no such layers.
    """

    tokens: int
    whole: Any | None
    tail: Any | None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in (self.whole, self.tail) if part is not None)

    def last(self, tokens: int) -> Segment:
        """The piece without what stands before its last ``tokens``."""
        if tokens == self.tokens:
            return self
        parts = (
            None if part is None else mx.contiguous(part[:, :, -min(tokens, part.shape[2]) :])
            for part in (self.whole, self.tail)
        )
        segment = Segment(tokens, *parts)
        mx.eval([part for part in (segment.whole, segment.tail) if part is not None])
        return segment


def kinds(model: Any) -> Kinds | None:
    """What the model's layers keep; ``None`` for layers of another kind, which cannot be cut."""
    cache = make_prompt_cache(model)
    found = tuple(kind for kind in map(_kind, cache) if kind is not None)
    windows = {kind for kind in found if kind != WHOLE}
    return None if len(found) < len(cache) or len(windows) > 1 else found


def _kind(layer: Any) -> int | None:
    if type(layer) is KVCache:
        return WHOLE
    if type(layer) is RotatingKVCache and layer.keep == 0:
        return int(layer.max_size)
    return None


def cut(cache: Sequence[Any], start: int, end: int, row: int = 0) -> Segment:
    """The piece from ``start`` to ``end`` (in tokens) of what ``cache`` holds in ``row``.

    Raises ``Misaligned`` unless the cache holds ``end`` tokens, or one more: a window that has
    moved on cannot be moved back. By one it can: a token looks at itself and, with a window of n,
    at the n - 1 before it.
    """
    whole, tail = [], []
    for layer in cache:
        keys, values, kind = _rows(layer, row, end)
        if kind == WHOLE:
            whole += [keys[:, :, start:end], values[:, :, start:end]]
        else:
            before = keys.shape[2] - min(end - start, kind)
            tail += [keys[:, :, before:], values[:, :, before:]]
    segment = Segment(end - start, _stacked(whole), _stacked(tail))
    mx.eval([part for part in (segment.whole, segment.tail) if part is not None])
    return segment


def _stacked(parts: list[Any]) -> Any | None:
    """One buffer instead of two per layer: how many there may be is limited, too, on Metal."""
    return mx.concatenate(parts, axis=0) if parts else None


def _rows(layer: Any, row: int, end: int) -> tuple[Any, Any, int]:
    """Keys and values of one row in the order of their tokens, and what the layer keeps.

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


def exported(segment: Segment) -> dict[str, Tensor]:
    """The bytes of a segment where they are: they stay as long as anybody holds the result.

    Raises ``KeyError`` for elements of another type than the files have.
    """
    parts = {"whole": segment.whole, "tail": segment.tail}
    return {
        name: Tensor(_NAMES[part.dtype], tuple(part.shape), memoryview(np.frombuffer(part, "B")))
        for name, part in parts.items()
        if part is not None
    }


def fits(model: Any, tokens: int, tensors: Tensors) -> bool:
    """Whether ``tensors`` are a piece of ``tokens`` ids of this model. On any thread."""
    found = kinds(model)
    if found is None or tokens < 1:
        return False
    lengths = {"whole": tokens, "tail": min(tokens, max(found))}
    counts = {"whole": 2 * found.count(WHOLE), "tail": 2 * (len(found) - found.count(WHOLE))}
    expected = {name: (count, lengths[name]) for name, count in counts.items() if count}
    try:
        shapes = {name: (at[0], at[2]) for name, at in _shapes(tensors)}
        others = {(heads, width) for _, (_, heads, _, width) in _shapes(tensors)}
    except (ValueError, IndexError):  # not of four dimensions
        return False
    types = {tensor.dtype for tensor in tensors.values()}
    return shapes == expected and len(others) == 1 and len(types) == 1


def _shapes(tensors: Tensors) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tensor.shape) for name, tensor in tensors.items()]


def imported(tokens: int, tensors: Tensors) -> Segment:
    """A segment of such bytes, copied."""
    parts = {
        name: mx.array(np.frombuffer(tensor.data, _BITS[WIDTHS[tensor.dtype]]))
        .view(_DTYPES[tensor.dtype])
        .reshape(tensor.shape)
        for name, tensor in tensors.items()
    }
    mx.eval(list(parts.values()))
    return Segment(tokens, parts.get("whole"), parts.get("tail"))


def same_kind(one: Segment, other: Segment) -> bool:
    """Whether the two can be joined: layers, heads, widths and types of both are the same."""
    return [_signature(part) for part in (one.whole, one.tail)] == [
        _signature(part) for part in (other.whole, other.tail)
    ]


def _signature(part: Any) -> Any:
    return None if part is None else (part.dtype, part.shape[:2], part.shape[3])


def join(model: Any, segments: Sequence[Segment], headroom: int = 0) -> list[Any]:
    """A new cache for ``model`` that holds what the segments do, one after another.

    Using it changes nothing in them. There is ``headroom`` for so many tokens more before the
    layers that keep everything have to grow.
    """
    cache: list[Any] = make_prompt_cache(model)
    length = sum(segment.tokens for segment in segments)
    whole, tail = count(0, 2), count(0, 2)
    for layer in cache:
        if _kind(layer) == WHOLE:
            at = next(whole)
            layer.keys = _all([segment.whole for segment in segments], at, headroom)
            layer.values = _all([segment.whole for segment in segments], at + 1, headroom)
        else:
            at, window = next(tail), layer.max_size
            layer.keys = _last([segment.tail for segment in segments], at, window)
            layer.values = _last([segment.tail for segment in segments], at + 1, window)
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
