"""A stand-in directory, and the encoding of text to token ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.core import vocab

Encode = Callable[[str], list[int]]


@pytest.fixture(scope="session")
def encode() -> Encode:
    """Encodes text, in which control tokens are written out, to ids."""
    harmony = vocab.encoding()
    return lambda text: harmony.encode(text, allowed_special="all")


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in with two scripts. Shared: do not rescript it."""
    hello = standin.Script("Hello", "<|channel|>final<|message|>Hi there 🙂!<|return|>")
    weather = standin.Script(
        "weather",
        "<|channel|>analysis<|message|>Use the tool.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city":"Zürich"}<|call|>',
    )
    return standin.write(tmp_path_factory.mktemp("standin"), [hello, weather])
