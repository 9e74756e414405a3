"""Reads a model's files: its configuration, and whether its tokenizer is o200k_harmony.

Only token ids show whether a model is a Harmony model; a fine-tune may have any name or
``model_type``. Nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Those of a repository that a server loads."""

PROBE = (
    "<|start|><|end|><|message|><|channel|><|constrain|><|return|><|call|>"
    "Reasoning: high\n\n// déjà-vu 東京 Привет 12345\tnamespace functions {🙂}"
)
"""Control tokens, scripts, digits, white space, an emoji: no other vocabulary has the same ids."""


TOKENS = (
    *((b"Service", 2038), (b"avigator", 18022), (b"identity", 34010), (b"Backup", 50010)),
    *((b"GROUND", 66000), (b"urning", 82021), (b"restrict", 98019), (b"xffffffff", 114004)),
    *((b"employment", 130032), (b"Integrated", 146023), (b"Controlled", 162001)),
    *((b"Departments", 178024), (b"ancode", 194000)),
)
"""Tokens of o200k_harmony from all of its range, which are spelled as they are in JSON."""

CONTROL_TOKENS = tuple(
    re.compile(rb'"id":\s*%d,\s*"content":\s*"<\|%s\|>"' % (token, name))
    for token, name in (
        *((vocab.RETURN, b"return"), (vocab.CONSTRAIN, b"constrain"), (vocab.CHANNEL, b"channel")),
        *((vocab.START, b"start"), (vocab.END, b"end"), (vocab.MESSAGE, b"message")),
        (vocab.CALL, b"call"),
    )
)


def length_of(model: str) -> int | None:
    """The context length of a model in a directory or in the Hugging Face cache, if it is known."""
    config = configuration(model, CONFIG)
    for part in (config, config.get("text_config")):
        length = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(length, int) and length > 0:
            return length
    return None


def configuration(model: str, file: str) -> dict[str, Any]:
    """The content of one of the model's JSON files; empty if there is no such file (yet)."""
    try:
        content = _content(model, file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@lru_cache(maxsize=32)
def _content(model: str, file: str) -> object:
    return json.loads(path_of(model, file).read_bytes())


def path_of(model: str, file: str) -> Path:
    """The file in a local directory, or in a repository in the Hugging Face cache."""
    if Path(model).is_dir():
        return Path(model, file)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, file)
    if not isinstance(cached, str):
        raise FileNotFoundError(model)
    return Path(cached)


def is_harmony(tokenizer: object) -> bool:
    """Whether the tokenizer gives o200k_harmony's ids.

    Takes mlx-lm's TokenizerWrapper, and tokenizers of `transformers` and `tokenizers`.
    """
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        return False
    encoded = encode(PROBE, add_special_tokens=False)
    ids = list(getattr(encoded, "ids", encoded))
    return ids == vocab.encoding().encode(PROBE, allowed_special="all")


def lists_harmony(model: str) -> bool:
    """Whether the vocabulary in ``tokenizer.json`` is that of o200k_harmony, by some of its tokens.

    Takes some 50 ms, while loading the tokenizer takes a second and 300 MB. How
    text is split and merged is not compared. Raises ``OSError`` if there is no such file.
    """
    return _lists_harmony(path_of(model, TOKENIZER).read_bytes())


def _lists_harmony(content: bytes) -> bool:
    return all(pattern.search(content) for pattern in CONTROL_TOKENS) and all(
        _id_of(token, content) == number for token, number in TOKENS
    )


def _id_of(token: bytes, content: bytes) -> int | None:
    """The id of ``token`` in the content of a ``tokenizer.json``."""
    key = b'"%s":' % token
    at = content.find(key)  # much faster than a search for a pattern
    number = _ID.match(content, at + len(key)) if at >= 0 else None
    return None if number is None else int(number[1])


_ID = re.compile(rb"\s*(\d+)")


def is_harmony_model(model: str) -> bool | None:
    """Whether the model's tokenizer is o200k_harmony; ``None`` without a ``tokenizer.json``.

    ``model`` is a directory or a repository in the Hugging Face cache. Only a tokenizer that does
    not list the vocabulary as `lists_harmony` expects it is loaded. Raises ``HostError`` if the
    file cannot be read.
    """
    try:
        file = path_of(model, TOKENIZER)
    except (OSError, ValueError):  # a path that does not exist is no repository id either
        return None
    if not file.is_file():
        return None
    return _is_harmony_tokenizer(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=64)  # reading a tokenizer takes a second
def _is_harmony_tokenizer(file: Path, modified: int) -> bool:
    if _lists_harmony(file.read_bytes()):
        return True
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise HostError(f"{file} cannot be read: {error}") from error
    return is_harmony(tokenizer)
