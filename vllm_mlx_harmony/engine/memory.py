"""The memory that a request needs until its end, and whether there is enough: arithmetic, no mlx.

A Mac on which mlx allocates more than Metal can keep in memory swaps, kills the process, or panics
(https://github.com/ml-explore/mlx/issues/2312, https://github.com/ml-explore/mlx-lm/issues/883).
So nothing is computed that would not fit:

    what is in use, without the caches of requests        weights, prefix cache, other models
    + of each request, its keys and values to its end     layers that keep all: every id;
                                                          windows: no more than the window
    + the padding of batches                              no more than ``may_be_padded`` allows
    + the work of a chunk                                 measured when a model is loaded
    ≤ limit                                               device × ``--gpu-memory-utilization``

What is stored in the prefix cache is a copy. It is made only of what is left of the limit
(`Budget.remaining`), after other cached prompts were evicted for it.

A request's end is its prompt and its ``max_tokens``. The requests of other models count with what
they hold now. What was read ahead from the disk is in plain memory and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mlx_harmony.engine.mlx_lm_compat import Layers

MAX_PADDING = 0.25
"""Part of a batch that may be padding; rows that would need more are in different batches."""

FREE_PADDING = 2048
"""Padding that a batch may always have, in ids: another batch would cost more."""

CACHE_STEP = 256
"""Ids by which mlx-lm's caches grow (``KVCache.step``)."""


def may_be_padded(lengths: Sequence[int]) -> bool:
    """Whether sequences of these lengths may be padded to the longest."""
    whole = len(lengths) * max(lengths)
    return whole - sum(lengths) <= max(FREE_PADDING, MAX_PADDING * whole)


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes of keys and values: ``per_id`` of the layers that keep all ids.

    ``windows``: pairs of length in ids and bytes per id, over all layers with that window.
    """

    per_id: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, layers: Layers) -> Layout:
        """The layout of caches that hold some ids."""
        per_id, windows = 0, Counter[int]()
        for layer in layers:
            nbytes = sum(array.nbytes // array.shape[2] for array in (layer.keys, layer.values))
            window = getattr(layer, "max_size", None)
            if window is None:
                per_id += nbytes
            else:
                windows[window] += nbytes
        return cls(per_id, tuple(sorted(windows.items())))

    def nbytes(self, ids: int) -> int:
        """Bytes that the caches of a sequence of ``ids`` ids allocate."""
        rounded = -(-ids // CACHE_STEP) * CACHE_STEP
        return rounded * self.per_id + sum(
            min(length, rounded) * nbytes for length, nbytes in self.windows
        )

    def piece(self, ids: int) -> int:
        """Bytes of ``ids`` ids in the prefix cache."""
        return ids * self.per_id + sum(min(length, ids) * nbytes for length, nbytes in self.windows)

    def longest(self, nbytes: int) -> int:
        """Ids of the longest sequence that takes no more than ``nbytes``."""
        left = nbytes - sum(length * of_an_id for length, of_an_id in self.windows)
        if not self.per_id:
            return 0 if left < 0 else 1 << 40
        return max(0, left) // self.per_id // CACHE_STEP * CACHE_STEP


def layout_of(config: Mapping[str, Any]) -> Layout | None:
    """The layout of a gpt-oss by its ``config.json``, in two bytes an element; ``None``: unknown.

    For a loaded model, ``Layout.of`` is exact.
    """
    match config:
        case {
            "layer_types": [_, *_] as layers,
            "sliding_window": int(window),
            "num_key_value_heads": int(heads),
            "head_dim": int(width),
        }:
            layer_bytes, whole = 4 * heads * width, layers.count("full_attention")
            windows = (window, (len(layers) - whole) * layer_bytes)
            return Layout(whole * layer_bytes, (windows,))
    return None


@dataclass(frozen=True, slots=True)
class Budget:
    """``limit`` bytes; ``work`` of them for a chunk while it is computed."""

    limit: int
    layout: Layout
    work: int

    def needed(self, max_lengths: Iterable[int]) -> int:
        """Bytes that requests of these ``max_length`` need together, with the work of one chunk."""
        sizes = [self.layout.nbytes(length) for length in max_lengths]
        whole = sum(sizes)
        if len(sizes) > 1:
            whole = int(whole / (1 - MAX_PADDING)) + FREE_PADDING * self.layout.per_id
        return whole + self.work

    def remaining(self, other_bytes: int, max_lengths: Iterable[int]) -> int:
        """Bytes that all of them leave of the limit, beside ``other_bytes``; negative if they
        exceed it."""
        return self.limit - other_bytes - self.needed(max_lengths)

    def missing(self, other_bytes: int, max_lengths: Iterable[int]) -> int:
        """Bytes by which all of them exceed the limit, beside ``other_bytes``; 0 if they fit."""
        return max(0, -self.remaining(other_bytes, max_lengths))

    def longest(self, weight_bytes: int) -> int:
        """Ids of the longest request that fits when it is alone, beside the weights."""
        return self.layout.longest(self.limit - weight_bytes - self.work)
