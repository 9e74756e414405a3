"""Prefix reuse where the host shows and empties its caches: `/v1/cache/stats`, `DELETE /v1/cache`.

Knows the methods behind those routes. Refuses to know what is remembered (`kv`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

from vllm_mlx_harmony.host.kv import prefix
from vllm_mlx_harmony.host.models import is_harmony

NAME = "harmony_prefix_reuse"
"""Of our counters among the host's."""

Method = Callable[[Any], Any]


def with_counters(original: Method) -> Method:
    """``get_cache_stats`` of an engine, with our counters beside the host's on a Harmony engine."""

    @wraps(original)
    def get_cache_stats(self: Any) -> Any:
        stats = original(self)
        if not is_harmony(getattr(self, "tokenizer", None)):
            return stats
        return {**(stats or {}), NAME: asdict(prefix.counters())}

    return get_cache_stats


def with_ours(original: Method) -> Method:
    """What empties the caches of an engine or a scheduler, ours for the same model as well."""

    @wraps(original)
    def clear(self: Any) -> Any:
        model = model_of(self)
        if model is not None:
            prefix.forget(model)
        return original(self)

    return clear


def model_of(holder: Any) -> Any:
    """The module of an engine or a scheduler; ``None`` when it is not loaded.

    A scheduler has it itself, the simple engine has the host's wrapper of it. A batched engine has
    the scheduler, two objects down.
    """
    core = getattr(getattr(holder, "_engine", None), "engine", None)
    if core is not None:
        return core.scheduler.model
    return getattr(getattr(holder, "_model", holder), "model", None)
