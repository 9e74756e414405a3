"""Python's collector of garbage lets no other thread run while it looks at all that there is.

At what a server has loaded (modules, models) it looks for 200 ms and more, in any request that
makes many objects. So what is there when the server begins to serve is set aside (``gc.freeze``):
a collection looks at what came since. And what makes many objects that stay, as the reading of
20,000 messages, is done without collections: each would walk over them again, and free nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

_R = TypeVar("_R")

_set_aside = False


def set_aside() -> None:
    """What there is now is not looked at any more: a server begins to serve."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """What was set aside can be collected again: an engine that is stopped is in it."""
    global _set_aside
    gc.unfreeze()
    _set_aside = False


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
