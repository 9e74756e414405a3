"""Other names that a server with a single model answers to, in all its APIs.

Tools come with names of models built in (``claude-…``, ``gpt-…``). Knows one environment variable
and the name of the server's only model. With several models a name means one of them: none here.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

NAMES_VARIABLE = "VLLM_MLX_HARMONY_MODEL_NAMES"
"""Environment variable: names and shell patterns (``claude-*``), separated by commas."""


def other_names(model: str | None) -> tuple[str, ...]:
    """The names and patterns, as given, of ``model``, the only one; none when there are several."""
    if not model:
        return ()
    given = (name.strip() for name in os.environ.get(NAMES_VARIABLE, "").split(","))
    return tuple(dict.fromkeys(name for name in given if name and name != model))


def is_other_name(name: str, model: str | None) -> bool:
    """Whether ``model`` answers to ``name``, which is not its own."""
    known = other_names(model)
    return name != model and any(fnmatchcase(name, each) for each in known)


def own_name(name: str, model: str | None) -> str:
    """The server's name for the model that a request calls ``name``."""
    return str(model) if is_other_name(name, model) else name


def response_name(name: str, model: str | None) -> str:
    """What an answer says for the model that the request called ``name``: clients compare them."""
    return name if is_other_name(name, model) else model or name
