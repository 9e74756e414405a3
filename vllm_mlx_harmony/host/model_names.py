"""Other names that a server with a single model answers to, in all its APIs.

Tools come with names of models built in (``claude-…``, ``gpt-…``). Knows one environment variable
and the host's own name for its model. With several models a name means one of them: none here.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

NAMES_VARIABLE = "VLLM_MLX_HARMONY_MODEL_NAMES"
"""Environment variable: names and shell patterns (``claude-*``), separated by commas."""


def other_names() -> tuple[str, ...]:
    """The names and patterns, as given; none when the server has several models."""
    from vllm_mlx import server

    if server._model_manager is not None or not server._model_name:
        return ()
    given = (name.strip() for name in os.environ.get(NAMES_VARIABLE, "").split(","))
    return tuple(dict.fromkeys(name for name in given if name and name != server._model_name))


def is_other_name(name: str) -> bool:
    """Whether the model answers to ``name``, which is not its own."""
    from vllm_mlx import server

    known = other_names()
    return name != server._model_name and any(fnmatchcase(name, each) for each in known)


def own_name(name: str) -> str:
    """The host's name for the model that a request calls ``name``."""
    from vllm_mlx import server

    return str(server._model_name) if is_other_name(name) else name


def response_name(name: str) -> str:
    """What an answer says for the model that the request called ``name``: clients compare them."""
    from vllm_mlx import server

    return name if is_other_name(name) else str(server._response_model_name(name))
