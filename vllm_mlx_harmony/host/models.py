"""Which models are Harmony models: those whose tokenizer really is o200k_harmony.

A name or a `model_type` proves nothing (a fine-tune may be called anything); ids do. Knows
tokenizers and model directories; refuses to know engines and routes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server.model_files import path_of

SPECIAL = {
    "<|start|>": vocab.START,
    "<|end|>": vocab.END,
    "<|message|>": vocab.MESSAGE,
    "<|channel|>": vocab.CHANNEL,
    "<|constrain|>": vocab.CONSTRAIN,
    "<|return|>": vocab.RETURN,
    "<|call|>": vocab.CALL,
}

PROBE = "Reasoning: high\n\n// déjà-vu 東京 Привет 12345\tnamespace functions {🙂}"
"""Scripts, digits, white space and an emoji: no other vocabulary splits it into the same ids."""

_known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class NotHarmony(HostError):
    """The model is not a Harmony model, although the flag says so."""

    code = "not_harmony"


def is_harmony(tokenizer: Any) -> bool:
    """Whether the tokenizer gives o200k_harmony's ids; for one asked about before, a look-up.

    Takes what engines hold: mlx-lm's TokenizerWrapper, a transformers or a `tokenizers` tokenizer;
    None (an engine that has not loaded yet) is not Harmony.
    """
    if tokenizer is None:
        return False
    try:
        known = _known.get(tokenizer)
    except TypeError:  # neither hashable nor weakly referable
        return _agrees(tokenizer)
    if known is None:
        known = _known[tokenizer] = _agrees(tokenizer)
    return known


def _agrees(tokenizer: Any) -> bool:
    id_of = getattr(tokenizer, "convert_tokens_to_ids", None) or getattr(
        tokenizer, "token_to_id", None
    )
    if id_of is None or not hasattr(tokenizer, "encode"):
        return False
    if any(id_of(token) != expected for token, expected in SPECIAL.items()):
        return False
    encoded = tokenizer.encode(PROBE, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded)) == vocab.encode(PROBE)


def is_harmony_directory(directory: Path) -> bool | None:
    """Whether a model directory holds a Harmony tokenizer; None when it has no `tokenizer.json`.

    Raises HostError when that file cannot be read.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise HostError(f"{file} cannot be read: {error}") from error
    return _agrees(tokenizer)


def is_harmony_model(model: str) -> bool | None:
    """The same of a directory, or of a repository in the Hugging Face cache; ``None``: unknown."""
    try:
        return is_harmony_directory(path_of(model, "tokenizer.json").parent)
    except (OSError, ValueError):  # a path that is not there is no repository id either
        return None


def not_harmony(name: str) -> NotHarmony:
    """The error for the model of this name."""
    return NotHarmony(
        f"{name} is not a gpt-oss (Harmony) model: its tokenizer is not o200k_harmony; "
        "serve it without --tool-call-parser harmony"
    )


def harmony_parser(ours: type[Any]) -> Callable[[type[Any] | None], type[Any]]:
    """A replacement of a registered parser: `ours` on a Harmony tokenizer, else vllm-mlx's."""

    def replacement(theirs: type[Any] | None) -> type[Any]:
        return ours if theirs is None else _by_tokenizer(ours, theirs)

    return replacement


def _by_tokenizer(ours: type[Any], theirs: type[Any]) -> type[Any]:
    class ByTokenizer(ours):  # type: ignore[misc]
        """What vllm-mlx asks the class, without a tokenizer, it asks for every model it serves."""

        SUPPORTS_NATIVE_TOOL_FORMAT = theirs.SUPPORTS_NATIVE_TOOL_FORMAT

        def __new__(cls, tokenizer: Any = None) -> Any:
            if tokenizer is not None and not is_harmony(tokenizer):
                return theirs(tokenizer)
            return super().__new__(cls)

    ByTokenizer.__name__ = ByTokenizer.__qualname__ = ours.__name__
    return ByTokenizer
