"""Other names of the model, in all APIs, on a server that has only one.

Agents come with built-in model names (``claude-…``, ``gpt-…``). On a server with several models a
name always means one of them.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

NAMES_VARIABLE = "VLLM_MLX_HARMONY_MODEL_NAMES"
"""Environment variable: names and shell patterns (``claude-*``), separated by commas."""


def other_names(model: str | None) -> tuple[str, ...]:
    """The other names and patterns of the only ``model``; empty if there are several models."""
    if not model:
        return ()
    given = (name.strip() for name in os.environ.get(NAMES_VARIABLE, "").split(","))
    return tuple(dict.fromkeys(name for name in given if name and name != model))


def is_other_name(name: str, model: str | None) -> bool:
    """Whether ``name`` is another name of ``model``."""
    known = other_names(model)
    return name != model and any(fnmatchcase(name, each) for each in known)


def own_name(name: str, model: str | None) -> str:
    """The server's name for the model that a request calls ``name``."""
    return str(model) if is_other_name(name, model) else name


def response_name(name: str, model: str | None) -> str:
    """The model's name in a response: as in the request, because clients compare them."""
    return name if is_other_name(name, model) else model or name
