"""What the engine uses of mlx-lm. All differences between 0.31.3 and 0.32.x are in this file.

- *Custom code.* `config.json` may name a Python file of the model's directory (``model_file``).
  0.31 always runs it, 0.32 only with ``trust_remote_code``.
- *Caches.* ``state`` has keys and values in 0.31; in 0.32 it has numbers as well, which
  ``meta_state`` had before. The engine uses neither: it reads the attributes that `mlx_lm_names`
  lists, and writes four of them: ``keys``, ``values``, ``offset`` and ``_idx`` (`trim`,
  `pieces.join`).
- *Windows.* After a pass of several ids, a `RotatingKVCache` holds all of them and the window of
  the first; after a single id, exactly one window. With a window of n, an id attends to itself and
  to the n - 1 ids before it.
- *Batches.* What ``BatchGenerator`` takes (``state_machines``, now ``stop_sequences``) and makes
  (``_make_new_cache``) has changed, too: the engine has batches of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn import Module
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache
from tqdm import tqdm

Layer: TypeAlias = "KVCache | RotatingKVCache | BatchKVCache | BatchRotatingKVCache"

Layers: TypeAlias = "list[Layer]"
"""A cache for each layer of a model."""

Model: TypeAlias = "Callable[..., mx.array]"
"""A model as it is called: ids (rows, ids) and ``cache``, its `Layers`, to logits."""

AT_ONCE = 1 << 28
"""Bytes of weights that are read between two steps of the progress bar."""


def load_model(directory: Path, *, trust_remote_code: bool = False) -> Module:
    """The model in ``directory``, without its tokenizer. Shows its progress."""
    more = _accepted(utils.load_model, {"trust_remote_code": trust_remote_code})
    module = utils.load_model(directory, lazy=True, **more)[0]
    _read_weights(module)
    return module


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in ``directory``, which takes a second to read and 340 MB."""
    return utils.load_tokenizer(directory, {"trust_remote_code": trust_remote_code})


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of the ``options`` that this version of a function has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def _read_weights(module: Module) -> None:
    weights = [array for _, array in tree_flatten(module.parameters())]
    total, pending = sum(array.nbytes for array in weights), 0
    with tqdm(total=total, desc="Loading", unit="B", unit_scale=True, leave=False) as bar:
        for array in weights:
            mx.async_eval(array)
            pending += array.nbytes
            if pending >= AT_ONCE:
                mx.eval(array)
                bar.update(pending)
                pending = 0
        mx.eval(weights)
        bar.update(pending)


def evaluate(layers: Layers) -> None:
    mx.eval([(layer.keys, layer.values) for layer in layers])


def drop_outside_windows(layers: Layers) -> None:
    """Frees what a pass has left outside of the windows, and the next one would free."""
    for layer in layers:
        if type(layer) is RotatingKVCache and layer.keys.shape[2] > layer.max_size:
            last = slice(-layer.max_size, None)
            layer.keys = mx.contiguous(layer.keys[:, :, last])
            layer.values = mx.contiguous(layer.values[:, :, last])
            layer._idx = layer.max_size
    evaluate(layers)


def trim(layers: Layers, ids: int) -> None:
    """Removes the last ``ids`` ids. The last pass must have added more than that: then the windows
    are still complete. mlx-lm's own ``trim`` refuses, because after single ids they would not be.
    """
    for layer in layers:
        if isinstance(layer, RotatingKVCache):
            layer.keys, layer.values = layer.keys[:, :, :-ids], layer.values[:, :, :-ids]
            layer._idx -= ids
        layer.offset -= ids
