"""A causal language model without weights, which follows scripts (`cursor`); not gpt-oss.

The keys in its mlx-lm caches are the token ids, so it has no state of its own. This file is copied
into each stand-in directory, where mlx-lm loads it as the `model_file` of `config.json`.
"""

# No `from __future__ import annotations`: mlx-lm leaves the module out of `sys.modules`, where
# dataclasses would look the names up.
import importlib.util
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import KVCache, RotatingKVCache

WEIGHT = 90.0
"""Logit of the scripted token. A bias of -100 bans it, one of 100 on another beats it."""

EXACT = 16
"""How many positions at the end of an input get logits: as many as the widest step has
(`engine.step_costs`). A prefill never reads those before."""


def _sibling(name: str) -> ModuleType:
    """A module beside this file: mlx-lm loads `model_file` from outside any package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"no {name}.py beside {__file__}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@dataclass
class ModelArgs(BaseModelArgs):  # type: ignore[misc, unused-ignore]
    """What the stand-in reads of its `config.json`, by gpt-oss's names."""

    vocab_size: int
    model_type: str = "gpt_oss"
    sliding_window: int = 128
    layer_types: list[str] = field(default_factory=lambda: ["sliding_attention", "full_attention"])


class Layer(nn.Module):  # type: ignore[misc, unused-ignore]
    """A layer that only stores the ids that it is given in its cache."""

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        """Takes ids (rows, positions), and returns all ids in the cache, oldest first."""
        keys = ids.astype(mx.float32)[:, None, :, None]
        return cache.update_and_fetch(keys, mx.zeros_like(keys))[0][:, 0, :, 0]


class Model(nn.Module):  # type: ignore[misc, unused-ignore]
    """Ids in, logits out: all weight on the next scripted token.

    Where that is forbidden (by a grammar, a bias), the weight is on what ends things soon
    (`cursor.INSTEAD`): a model that wants something else, and can be made to answer all the same.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.layers = [Layer() for _ in args.layer_types]
        self.weight = mx.array([WEIGHT])
        self._full = args.layer_types.index("full_attention")
        cursor, here = _sibling("standin_cursor"), Path(__file__).parent
        self._cursor, self._here = cursor, here
        table = cursor.read_table((here / cursor.TABLE).read_bytes())
        self._decode = cursor.decoder(table)
        instead = cursor.instead(table)
        self._instead = mx.array([instead.get(row, 0.0) for row in range(args.vocab_size)])

    def make_cache(self) -> list[Any]:
        """One cache per layer, in gpt-oss's layout."""
        window, kinds = self.args.sliding_window, self.args.layer_types
        full = [kind == "full_attention" for kind in kinds]
        return [KVCache() if keeps else RotatingKVCache(window) for keeps in full]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Logits (rows, positions, vocabulary) after each of ``inputs`` (rows, positions).

        Raises ``RuntimeError`` if the script fails here, and for a bounded cache (``max_kv_size``).
        """
        caches = self.make_cache() if cache is None else cache
        held = [layer(inputs, cache) for layer, cache in zip(self.layers, caches, strict=True)]
        full = caches[self._full]
        if hasattr(full, "max_size"):
            raise RuntimeError("the stand-in needs a KV cache that keeps everything")
        rows = held[self._full].astype(mx.int32).tolist()
        padding = getattr(full, "left_padding", None)
        skipped = [0] * len(rows) if padding is None else padding.tolist()
        length = inputs.shape[1]
        exact = min(length, EXACT)
        book = self._cursor.read_book(self._here)
        scripted = []
        for row, skip in zip(rows, skipped, strict=True):
            history = row[skip:]
            ends = range(len(history) - exact + 1, len(history) + 1)
            steps = [self._cursor.next_step(history[:end], book, self._decode) for end in ends]
            if length == 1 or (length == exact and self._answers(history[: ends[0]], book)):
                for place, step in enumerate(steps):  # a prefill does not fail
                    if step.fails:
                        raise RuntimeError("the stand-in's script says: fail here")
                    if step.delay_ms:
                        time.sleep(step.delay_ms / 1000)
                    if row[len(row) - length + place + 1 :][:1] != [step.token]:
                        break  # what follows was tried, and is wrong
            elif slow := self._cursor.prompt_ms(history, book, self._decode):
                time.sleep(length * slow / 1000)
            scripted.append([0] * (length - exact) + [step.token for step in steps])
        tokens = mx.array(scripted)[..., None]
        logits = mx.broadcast_to(self._instead, (*tokens.shape[:2], self.args.vocab_size))
        weights = mx.broadcast_to(self.weight, tokens.shape)
        return mx.put_along_axis(logits, tokens, weights, axis=-1)

    def _answers(self, history: list[int], book: Any) -> bool:
        """Whether the last message is one that the model has begun."""
        opening = book.opening
        last = max((at for at, token in enumerate(history) if token == opening[0]), default=0)
        begun: bool = tuple(history[last : last + len(opening)]) == opening
        return begun
