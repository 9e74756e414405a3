"""What vllm-mlx has loaded is set aside from collections of garbage (`server.garbage`).

Knows when it loads and unloads. Two things go with that:

- At the first token that it generates vllm-mlx imports mlx_vlm, for pictures, and with it torch if
  that is installed: seconds in which others wait for up to 100 ms again and again, and half of all
  the objects that there will be. Whoever wants mlx_vlm imports it when a model is loaded; for
  Harmony alone nobody does (``only_loaded``).
- An engine that is stopped is garbage, in cycles: vllm-mlx collects it, to have its memory back.
  What was set aside is given back before that.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm_mlx_harmony.server.garbage import give_back

VISION = "mlx_vlm.generate"


def before_serving(load: Callable[..., Any]) -> Callable[..., Any]:
    """vllm-mlx's ``load_model`` or ``load_model_registry``: what it has loaded is set aside."""

    @wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        gc.freeze()
        return result

    return loading


def only_loaded(importlib: ModuleType) -> Any:
    """``importlib`` for vllm-mlx's ``mlx_streams``, which imports mlx_vlm to change a name in it.

    Where there is none, it does without. Drop when vllm-mlx looks into ``sys.modules`` there.
    """

    def import_module(name: str) -> ModuleType:
        if name == VISION and name not in sys.modules:
            raise ImportError(f"{name} is not used")
        module: ModuleType = importlib.import_module(name)
        return module

    return SimpleNamespace(import_module=import_module)


def giving_back(stop: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    """An engine's ``stop``, which can collect the engine."""

    @wraps(stop)
    async def stopping(self: Any) -> None:
        give_back()
        await stop(self)

    return stopping
