"""mlx-lm as the engine uses it; what differs between 0.31.3 and 0.32.x stands here and only here.

- *Custom code.* `config.json` may name a Python file of the model's directory (``model_file``).
  0.31 always runs it, 0.32 only with ``trust_remote_code``.
- *Caches.* ``state`` has keys and values in 0.31; in 0.32 it has numbers as well, which
  ``meta_state`` had before. The engine uses neither, only ``keys``, ``values`` and ``offset``.
- *Batches.* What ``BatchGenerator`` takes (``state_machines``, now ``stop_sequences``) and makes
  (``_make_new_cache``) has changed, too: the engine has batches of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

__all__ = [
    "BatchKVCache",
    "BatchRotatingKVCache",
    "KVCache",
    "RotatingKVCache",
    "evaluate",
    "load",
    "load_module",
    "make_prompt_cache",
]


def load(path: str, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The model in ``path``, a directory or a repository, and its tokenizer."""
    tokenizer_config = {"trust_remote_code": trust_remote_code}
    trust = _trust(utils.load, trust_remote_code=trust_remote_code)
    module, tokenizer = utils.load(path, tokenizer_config=tokenizer_config, **trust)[:2]
    return module, tokenizer


def load_module(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The model in ``directory``, without its tokenizer."""
    trust = _trust(utils.load_model, trust_remote_code=trust_remote_code)
    return utils.load_model(directory, **trust)[0]


def _trust(function: Any, *, trust_remote_code: bool) -> dict[str, bool]:
    taken = "trust_remote_code" in inspect.signature(function).parameters
    return {"trust_remote_code": trust_remote_code} if taken else {}


def evaluate(layers: Sequence[Any]) -> None:
    """Computes what ``layers`` (caches, one of each layer) hold."""
    mx.eval([(layer.keys, layer.values) for layer in layers])
