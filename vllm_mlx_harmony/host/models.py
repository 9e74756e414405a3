"""Which models are Harmony models: those whose tokenizer really is o200k_harmony.

A name or a `model_type` proves nothing (a fine-tune may have any); token ids do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class NotHarmony(HostError):
    """The model is not a Harmony model, although the flag says so."""

    code = "not_harmony"


def not_harmony(name: str) -> NotHarmony:
    """The error for the model of this name."""
    return NotHarmony(
        f"{name} is not a gpt-oss (Harmony) model: its tokenizer is not o200k_harmony; "
        "serve it without --tool-call-parser harmony"
    )


def is_harmony(tokenizer: Any) -> bool:
    """Whether the tokenizer gives o200k_harmony's ids.

    Takes mlx-lm's TokenizerWrapper, and tokenizers of `transformers` and `tokenizers`.
    """
    id_of = getattr(tokenizer, "convert_tokens_to_ids", None) or getattr(
        tokenizer, "token_to_id", None
    )
    if id_of is None or not hasattr(tokenizer, "encode"):
        return False
    if any(id_of(token) != expected for token, expected in SPECIAL.items()):
        return False
    encoded = tokenizer.encode(PROBE, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded)) == vocab.encode(PROBE)


def is_harmony_model(model: str) -> bool | None:
    """The same for a directory or a repository in the Hugging Face cache; None if there is no
    `tokenizer.json`. Raises HostError if that file cannot be read."""
    try:
        file = path_of(model, "tokenizer.json")
    except (OSError, ValueError):  # a path that does not exist is no repository id either
        return None
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise HostError(f"{file} cannot be read: {error}") from error
    return is_harmony(tokenizer)


def harmony_parser(ours: type[Any]) -> Callable[[type[Any] | None], type[Any]]:
    """A replacement of a registered tool parser: `ours` for Harmony models, else vllm-mlx's."""
    return lambda theirs: ours if theirs is None else _by_tokenizer(ours, theirs)


def _by_tokenizer(ours: type[Any], theirs: type[Any]) -> type[Any]:
    class ByTokenizer(ours):  # type: ignore[misc]
        # vllm-mlx reads this from the class, for every model that it serves.
        SUPPORTS_NATIVE_TOOL_FORMAT = theirs.SUPPORTS_NATIVE_TOOL_FORMAT

        def __new__(cls, tokenizer: Any = None) -> Any:
            if tokenizer is not None and not is_harmony(tokenizer):
                return theirs(tokenizer)
            return super().__new__(cls)

    ByTokenizer.__name__ = ByTokenizer.__qualname__ = ours.__name__
    return ByTokenizer
