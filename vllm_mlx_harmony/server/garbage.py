"""Keeps Python's garbage collector from stopping the server.

A collection holds the interpreter lock while it visits every object. The modules and models that a
server has loaded take 200 ms and more, in whichever request happens to allocate many objects. So
they are excluded when the server starts (``gc.freeze``), and collections visit newer objects only.
Work that creates many lasting objects, such as parsing 20,000 messages, runs without collections:
each of them would visit these objects again and free nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

_R = TypeVar("_R")

_frozen = False


def freeze() -> None:
    """Excludes all existing objects from collections. Called when a server starts."""
    gc.collect()
    gc.freeze()


def unfreeze() -> None:
    """Includes them again, for example because an engine among them was stopped."""
    global _frozen
    gc.unfreeze()
    _frozen = False


def without_collections(function: Callable[..., _R], *arguments: object) -> _R:
    """Calls ``function`` with collections disabled.

    If calls overlap, the one that disabled them enables them again, even if others are still
    running.
    """
    global _frozen
    if not _frozen:
        _frozen = True
        gc.freeze()  # again, as the engine may have been loaded since the server started
    ours = gc.isenabled()
    gc.disable()
    try:
        return function(*arguments)
    finally:
        if ours:
            gc.enable()
