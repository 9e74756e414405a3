"""What the files of a model say: how many tokens it can see, how it is sampled.

Refuses to download anything: what cannot be found out is no limit.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

CONFIG = "config.json"
GENERATION = "generation_config.json"


def length_of(model: str) -> int | None:
    """Tokens that a model can see, in a directory or in the Hugging Face cache, if it is known."""
    return _length(_content(model, CONFIG))


def configuration(model: str, file: str) -> dict[str, Any]:
    """What a JSON file of the model says; nothing when it is not at hand."""
    return _content(model, file)


def _length(configuration: dict[str, Any]) -> int | None:
    for part in (configuration, configuration.get("text_config")):
        length = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(length, int) and length > 0:
            return length
    return None


@lru_cache(maxsize=32)
def _content(model: str, file: str) -> dict[str, Any]:
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
