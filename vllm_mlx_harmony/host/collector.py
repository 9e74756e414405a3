"""Python's collector of garbage lets no other thread run while it looks at all that there is.

At what a server has loaded (modules, models) it looks for 200 ms and more, in any request that
makes many objects. So what is there when the server begins to serve is set aside (``gc.freeze``):
a collection looks at what came since. Three things go with that:

- At the first token that it generates the host imports mlx_vlm, for pictures, and with it torch if
  that is installed: seconds in which others wait for up to 100 ms again and again, and half of all
  the objects that there will be. Whoever wants mlx_vlm imports it when a model is loaded; for
  Harmony alone nobody does (``only_loaded``).
- What makes many objects that stay, as the reading of 20,000 messages, is done without collections:
  each would walk over them again, and free nothing.
- An engine that is stopped is garbage, in cycles: the host collects it, to have its memory back.
  What was set aside is given back before that.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

_R = TypeVar("_R")

VISION = "mlx_vlm.generate"

_set_aside = False


def before_serving(load: Callable[..., Any]) -> Callable[..., Any]:
    """The host's ``load_model`` or ``load_model_registry``: what it has loaded is set aside."""

    @wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        gc.freeze()
        return result

    return loading


def only_loaded(importlib: ModuleType) -> Any:
    """``importlib`` for the host's ``mlx_streams``, which imports mlx_vlm to change a name in it.

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
        global _set_aside
        gc.unfreeze()
        _set_aside = False
        await stop(self)

    return stopping


def without_collections(function: Callable[..., _R], *arguments: object) -> _R:
    """``function`` of ``arguments``. Of several the first decides when there are some again."""
    global _set_aside
    if not _set_aside:
        _set_aside = True
        gc.freeze()  # the engine, too: it may have been loaded since the server began to listen
    ours = gc.isenabled()
    gc.disable()
    try:
        return function(*arguments)
    finally:
        if ours:
            gc.enable()
