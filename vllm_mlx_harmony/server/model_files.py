"""A model's ``config.json`` and ``generation_config.json``. Nothing is downloaded."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

CONFIG = "config.json"
GENERATION = "generation_config.json"


def length_of(model: str) -> int | None:
    """The context length of a model in a directory or in the Hugging Face cache, if it is known."""
    config = configuration(model, CONFIG)
    for part in (config, config.get("text_config")):
        length = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(length, int) and length > 0:
            return length
    return None


@lru_cache(maxsize=32)
def configuration(model: str, file: str) -> dict[str, Any]:
    """The content of one of the model's JSON files; empty if there is no such file."""
    try:
        content = json.loads(path_of(model, file).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def path_of(model: str, file: str) -> Path:
    """The file in a local directory, or in a repository in the Hugging Face cache."""
    if Path(model).is_dir():
        return Path(model, file)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, file)
    if not isinstance(cached, str):
        raise FileNotFoundError(model)
    return Path(cached)
