"""What the server says of itself when it starts: one line for each fact that a user needs.

Printed as vllm-mlx prints its own start, when its model is known and before it listens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_mlx_harmony.host.server_globals import server
from vllm_mlx_harmony.host.units import size
from vllm_mlx_harmony.host.versions import versions
from vllm_mlx_harmony.server.model_files import length_of

WIDTH = 14

_idle: tuple[str, ...] = ()
_access = ""


def set_flags(idle: list[str], *, key: bool, rate: int) -> None:
    """Sets the sentences about flags without effect; whether there is a key, requests a minute."""
    global _idle, _access
    _idle = tuple(idle)
    _access = "API key required" if key else "open to whoever reaches it: no --api-key"
    if rate > 0:
        _access += f", {rate} requests a minute"


def of_model(path: str, engine: Any) -> None:
    """Shows the server's only model, in ``path``, and its ``engine``, unless it is loaded later."""
    name, given = server()._model_name, server()._model_path
    window = length_of(path)
    context = "unknown: no config.json" if window is None else f"{window:,} tokens"
    facts = [("model", f"{name}" if name == given else f"{name} ({given})")]
    within = None if engine is None else engine.engine
    if within is None:
        facts.append(("engine", "loaded when it is asked for"))
    else:
        limits = within.options.limits
        budget = within.budget
        facts += [
            ("engine", f"up to {min(limits.answers, limits.sequences)} answers at once"),
            ("memory", f"{size(within.weights)} used, of {size(budget.limit)}"),
        ]
        if window is not None and within.context_length < window:
            context = f"{within.context_length:,} tokens fit in memory, of {window:,}"
    show([*facts, ("context", context)])


def of_registry(config_path: str) -> None:
    """Shows that there are several models, of which none is loaded."""
    show([("models", f"{config_path}, loaded when they are asked for; gpt-oss among them")])


def show(facts: list[tuple[str, str]]) -> None:
    """Prints ``facts`` and those that are true of any model."""
    found = versions()
    ours = f"vllm-mlx-harmony {found.pop('vllm-mlx-harmony')}"
    others = ", ".join(f"{name} {version}" for name, version in found.items())
    print(f"{ours} ({others})")
    for name, value in (*facts, *_common()):
        print(f"  {name:<{WIDTH}}{value}")


def _common() -> Iterator[tuple[str, str]]:
    from vllm_mlx_harmony.host import resources

    budget = resources.budget()
    yield "prefix cache", f"up to {size(budget)} in memory" if budget else "off"
    yield from (("", line) for line in resources.found(server()._model_path))
    yield "access", _access
    yield from (("no effect", sentence) for sentence in _idle)
