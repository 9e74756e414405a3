"""The stand-in's `tokenizer.json`, read once, for all servers that are forked from this process.

It is 12 MB. mlx-lm and transformers parse it, and tokenizers builds a tokenizer of it: three of
the five seconds of a processor that a server takes until it is healthy, and the same each time.
Imported before the fork, it reads the file that the environment names; a server that is to load
a file with these very bytes (`use`) is given what came of it, and reads any other.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tokenizers import Tokenizer

VARIABLE = "SERVED_TOKENIZER"

_path = os.environ.get(VARIABLE, os.devnull)
_text = Path(_path).read_text("utf-8")
_document: dict[str, Any] = json.loads(_text) if _text else {}
_unused: list[Any] = [Tokenizer.from_file(_path)] if _text else []
if _text:
    gc.freeze()  # no collection of a server looks at half a million objects that are not its own


def use() -> None:
    """From now on, reading this file again gives what is there."""
    from transformers import PreTrainedTokenizerFast

    json.load = _loading(json.load)
    module = sys.modules[PreTrainedTokenizerFast.__mro__[0].__module__]
    module.TokenizerFast = _Tokenizers()  # type: ignore[attr-defined]


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(file: IO[str], **options: Any) -> Any:
        if options or not str(getattr(file, "name", "")).endswith("tokenizer.json"):
            return load(file, **options)
        text = file.read()
        if text != _text:
            return json.loads(text)
        added = [dict(token) for token in _document["added_tokens"]]  # transformers empties it
        return {**_document, "added_tokens": added}

    return loaded


class _Tokenizers:
    """What transformers uses of the class `tokenizers.Tokenizer`, which cannot be patched."""

    def __call__(self, *arguments: Any) -> Any:
        return Tokenizer(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(Tokenizer, name)

    def from_file(self, path: str) -> Any:
        if _unused and Path(path).read_text("utf-8") == _text:
            return _unused.pop()  # it can be changed: only one may have it
        return Tokenizer.from_file(path)
