"""How many tokens a model can see, and what of them is left for the answer.

Knows where a loaded engine keeps the files of its model.
Refuses to download anything: a length that cannot be found out is no limit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mlx_harmony.core.errors import PromptTooLong

if (
    TYPE_CHECKING
):  # it needs the host's web framework, and the command line reads configurations, too
    from vllm_mlx_harmony.host.sampling import Settings


def fit(settings: Settings, prompt_tokens: int, window: int | None) -> Settings:
    """``settings`` with no more ``max_tokens`` than the window holds after the prompt.

    Raises ``PromptTooLong`` when not even one fits (semantics A11).
    """
    if window is None:
        return settings
    room = window - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, window)
    return replace(settings, max_tokens=min(settings.max_tokens, room))


CONFIG = "config.json"
GENERATION = "generation_config.json"


def context_length(engine: Any) -> int | None:
    """Tokens the engine's model can see, ``None`` when its configuration is not at hand."""
    return length_of(str(engine._model_path))


def length_of(model: str) -> int | None:
    """The same of a model directory, or of a repository in the Hugging Face cache."""
    return _length(_content(model, CONFIG))


def configuration(engine: Any, file: str) -> dict[str, Any]:
    """What a JSON file of the engine's model says; nothing when it is not at hand."""
    return _content(str(engine._model_path), file)


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
