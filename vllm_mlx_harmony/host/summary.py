"""What the server says of itself when it starts: one line for each fact that a user needs.

Printed as vllm-mlx prints its own start, when its model is known and before it listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.host.units import size
from vllm_mlx_harmony.host.versions import versions
from vllm_mlx_harmony.server.model_files import length_of
from vllm_mlx_harmony.server.queue import places

WIDTH = 14

_idle: tuple[str, ...] = ()
_hosts_cache = False


def set_flags(idle: list[str], *, hosts_cache: bool) -> None:
    """What to say of flags: those without effect, and whether vllm-mlx's prefix cache is in use."""
    global _idle, _hosts_cache
    _idle, _hosts_cache = tuple(idle), hosts_cache


def of_model(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """vllm-mlx's ``load_model``, and then the summary of the model that it loaded."""

    @wraps(load_model)
    def load(model_name: str, use_batching: bool = False, **kwargs: Any) -> Any:
        result = load_model(model_name, use_batching, **kwargs)
        name, path = server()._model_name, server()._model_path
        engine = "batched, requests run together"
        if not use_batching:
            engine = f"simple, one request at a time, {places()} may wait"
        window = length_of(str(kwargs.get("model_path") or model_name))
        show(
            [
                ("model", f"{name}" if name == path else f"{name} ({path})"),
                ("engine", engine),
                ("context", "unknown: no config.json" if window is None else f"{window:,} tokens"),
            ]
        )
        return result

    return load


def of_registry(load_model_registry: Callable[..., Any]) -> Callable[..., Any]:
    """vllm-mlx's ``load_model_registry``, and then a summary without any model: none is loaded."""

    @wraps(load_model_registry)
    def load(config_path: str, **kwargs: Any) -> Any:
        result = load_model_registry(config_path, **kwargs)
        show([("models", f"{config_path}, loaded when they are asked for; gpt-oss among them")])
        return result

    return load


def show(facts: list[tuple[str, str]]) -> None:
    """Prints ``facts`` and those that are true of any model."""
    found = versions()
    ours = f"vllm-mlx-harmony {found.pop('vllm-mlx-harmony')}"
    others = ", ".join(f"{name} {version}" for name, version in found.items())
    print(f"{ours} ({others})")
    for name, value in (*facts, *_common()):
        print(f"  {name:<{WIDTH}}{value}")


def _common() -> Iterator[tuple[str, str]]:
    from vllm_mlx_harmony.host.kv import opening, prefix

    opening.show_metrics()
    budget = prefix.budget()
    ours = f"up to {size(budget)} in memory" if budget else "off"
    yield "prefix cache", "vllm-mlx's own" if _hosts_cache else ours
    yield from (("", line) for line in opening.found(server()._model_path))
    limiter = server()._rate_limiter
    access = "API key required" if server()._api_key else "open to whoever reaches it: no --api-key"
    rate = f", {limiter.requests_per_minute} requests a minute" if limiter.enabled else ""
    yield "access", access + rate
    yield from (("no effect", sentence) for sentence in _idle)
