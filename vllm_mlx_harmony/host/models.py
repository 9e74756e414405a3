"""Which models are Harmony models: those whose tokenizer really is o200k_harmony.

A name or a `model_type` proves nothing (a fine-tune may have any); token ids do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.server.model_files import path_of

if TYPE_CHECKING:
    from vllm_mlx.tool_parsers.abstract_tool_parser import ToolParser

PROBE = (
    "<|start|><|end|><|message|><|channel|><|constrain|><|return|><|call|>"
    "Reasoning: high\n\n// déjà-vu 東京 Привет 12345\tnamespace functions {🙂}"
)
"""Control tokens, scripts, digits, white space, an emoji: no other vocabulary has the same ids."""


class NotHarmony(HostError):
    """The model of this name is not a Harmony model, although the flag says so."""

    code = "not_harmony"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is not a gpt-oss (Harmony) model: its tokenizer is not o200k_harmony; "
            "serve it without --tool-call-parser harmony"
        )


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


def with_parser(ours: type, names: Iterable[str], theirs: Mapping[str, type]) -> dict[str, type]:
    """vllm-mlx's tool parsers, by name, with `ours` under `names`.

    It parses for Harmony models; vllm-mlx's own parser of that name still does for others.
    """
    named = {name: theirs.get(name) for name in names}
    return {**theirs, **{name: _by_tokenizer(ours, own) for name, own in named.items()}}


def _by_tokenizer(ours: type, theirs: type[ToolParser] | None) -> type:
    if theirs is None:
        return ours

    def make(cls: type, tokenizer: object = None) -> object:
        other = tokenizer is not None and not is_harmony(tokenizer)
        return theirs(tokenizer) if other else object.__new__(cls)

    # vllm-mlx reads the attribute from the class, for every model that it serves.
    native = theirs.SUPPORTS_NATIVE_TOOL_FORMAT
    return type(ours.__name__, (ours,), {"__new__": make, "SUPPORTS_NATIVE_TOOL_FORMAT": native})
