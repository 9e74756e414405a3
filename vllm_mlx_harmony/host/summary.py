"""What the server says of itself when it starts: one line for each fact that a user needs.

Printed as the host prints its own start, when its model is known and before it listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from vllm_mlx_harmony.host import gate
from vllm_mlx_harmony.host.waiting import places
from vllm_mlx_harmony.host.window import length_of

WIDTH = 14
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

_idle: tuple[str, ...] = ()


def set_idle(sentences: list[str]) -> None:
    """What to say of flags that were given and have no effect."""
    global _idle
    _idle = tuple(sentences)


def of_model(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """The host's ``load_model``, and then the summary of the model that it loaded."""

    @wraps(load_model)
    def load(model_name: str, use_batching: bool = False, **kwargs: Any) -> Any:
        result = load_model(model_name, use_batching, **kwargs)
        directory = str(kwargs.get("model_path") or model_name)
        show([("model", _model()), *_engine(use_batching), ("context", _context(directory))])
        return result

    return load


def of_registry(load_model_registry: Callable[..., Any]) -> Callable[..., Any]:
    """The host's ``load_model_registry``, and then a summary without any model: none is loaded."""

    @wraps(load_model_registry)
    def load(config_path: str, **kwargs: Any) -> Any:
        result = load_model_registry(config_path, **kwargs)
        show([("models", f"{config_path}, loaded when they are asked for; gpt-oss among them")])
        return result

    return load


def show(facts: list[tuple[str, str]]) -> None:
    """Prints ``facts`` and those that are true of any model."""
    versions = gate.versions()
    ours = f"vllm-mlx-harmony {versions.pop('vllm-mlx-harmony')}"
    others = ", ".join(f"{name} {version}" for name, version in versions.items())
    print(f"{ours} ({others})")
    for name, value in (*facts, *_common()):
        print(f"  {name:<{WIDTH}}{value}")


def _model() -> str:
    from vllm_mlx import server

    name, path = server._model_name, server._model_path
    return name if name == path else f"{name} ({path})"


def _engine(batched: bool) -> list[tuple[str, str]]:
    if batched:
        return [("engine", "batched, requests run together")]
    return [("engine", f"simple, one request at a time, {places()} may wait")]


def _context(directory: str) -> str:
    window = length_of(directory)
    return "unknown: no config.json" if window is None else f"{window:,} tokens"


def _common() -> Iterator[tuple[str, str]]:
    from vllm_mlx import server

    from vllm_mlx_harmony.host.kv import opening, prefix

    opening.show_metrics()
    budget = prefix.budget()
    yield "prefix cache", f"up to {size(budget)} in memory" if budget else "off"
    yield from (("", line) for line in opening.found(server._model_path))
    limited = server._rate_limiter.enabled
    access = "API key required" if server._api_key else "open to whoever reaches it: no --api-key"
    rate = f", {server._rate_limiter.requests_per_minute} requests a minute" if limited else ""
    yield "access", access + rate
    yield from (("no effect", sentence) for sentence in _idle)


def size(nbytes: int) -> str:
    """Bytes as a person reads them."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}".replace(".0 ", " ")
    return f"{nbytes} bytes"
