"""The stand-in's `tokenizer.json`, read once, for all servers that are forked from this process.

It is 12 MB. mlx-lm and transformers parse it, and a tokenizer is built of it twice, for the check
that the model is one of ours and for transformers: most of the seconds of a processor that a server
takes until it is healthy, and the same each time.
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
from typing import Any, TextIO

import tokenizers
from tokenizers import Tokenizer

VARIABLE = "SERVED_TOKENIZER"

_path = os.environ.get(VARIABLE, os.devnull)
_bytes = Path(_path).read_bytes()
_document: dict[str, Any] = json.loads(_bytes) if _bytes else {}
_unused: list[Any] = [Tokenizer.from_file(_path) for _ in range(2)] if _bytes else []
_used: list[Any] = []
"""Kept: to free one copies every page of it that is shared with the other servers."""
if _bytes:
    gc.freeze()  # no collection of a server looks at half a million objects that are not its own


def use() -> None:
    """From now on, reading this file again gives what is there."""
    from transformers import PreTrainedTokenizerFast

    json.load = _loading(json.load)
    module = sys.modules[PreTrainedTokenizerFast.__mro__[0].__module__]
    module.TokenizerFast = tokenizers.Tokenizer = _Tokenizers()  # type: ignore[attr-defined, misc]


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(file: TextIO, **options: Any) -> Any:
        if options or not str(getattr(file, "name", "")).endswith("tokenizer.json"):
            return load(file, **options)
        content = file.buffer.read()
        if content != _bytes:
            return json.loads(content)
        added = [dict(token) for token in _document["added_tokens"]]  # transformers empties it
        return {**_document, "added_tokens": added}

    return loaded


class _Tokenizers:
    """What a server uses of the class `tokenizers.Tokenizer`, which cannot be patched."""

    def __call__(self, *arguments: Any) -> Any:
        return Tokenizer(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(Tokenizer, name)

    def from_file(self, path: str) -> Any:
        if not _unused or Path(path).read_bytes() != _bytes:
            return Tokenizer.from_file(path)
        _used.append(_unused.pop())  # it can be changed: only one may have it
        return _used[-1]
