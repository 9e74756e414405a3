"""Writes the model directories: configuration, tokenizer, weights, scripts, and a card."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.files import write_atomically
from vllm_mlx_harmony.standin import cursor, tiny
from vllm_mlx_harmony.standin.scripts import Encode, Script, dump_book
from vllm_mlx_harmony.standin.tokenizer import control_name, token_table, tokenizer_json

_CODE = ("cursor", "model", "vllm")
"""Files of this package that a stand-in directory has a copy of."""

_CONFIG: dict[str, object] = {
    **tiny.config(tiny.WIDTH),
    "head_dim": 64,
    "model_file": "standin_model.py",
}
"""For mlx-lm, the code in the directory. vLLM makes the network that the rest describes (`vllm`);
its attention for processors has no smaller heads."""

_IDS: dict[str, object] = {
    "bos_token_id": vocab.STARTOFTEXT,
    "eos_token_id": [vocab.RETURN, vocab.ENDOFTEXT, vocab.CALL],
    "pad_token_id": vocab.ENDOFTEXT,
}

_GREEDY: dict[str, object] = {"temperature": 0.0}
"""The script has all the weight: drawing from 201,088 ids would only take longer."""

_TOKENIZER: dict[str, object] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": control_name(vocab.STARTOFTEXT),
    "eos_token": control_name(vocab.RETURN),
    "pad_token": control_name(vocab.ENDOFTEXT),
    "clean_up_tokenization_spaces": False,
    "model_max_length": 131_072,
}

_STANDIN_CARD = """# A stand-in, not gpt-oss

This directory holds no language model. What it answers is scripted, token by token, in
`standin_scripts.json`; it was written by vllm-mlx-harmony for demonstrations and tests.
"""

_TINY_CARD = """# A tiny random model, not gpt-oss

The architecture is gpt-oss's, the weights are random numbers: what it says is nonsense. It was
written by vllm-mlx-harmony for tests.
"""


def write(directory: Path, scripts: Iterable[Script] = ()) -> Path:
    """Writes a model that mlx-lm and vLLM load, and that answers with ``scripts``.

    Creates ``directory`` if needed and returns it. Needs neither mlx nor other packages
    than openai-harmony, and takes about two seconds. Raises ``ValueError``
    for an invalid script (see `dump_book`).
    """
    _write_shared(directory, {**_CONFIG, **_IDS}, {**_IDS, **_GREEDY}, _STANDIN_CARD)
    write_atomically(directory / cursor.TABLE, token_table())
    write_atomically(directory / "model.safetensors", _weights())
    for name in _CODE:
        write_atomically(directory / f"standin_{name}.py", _source(f"{name}.py"))
    return rescript(directory, scripts)


def _weights() -> bytes:
    """A safetensors file with the stand-in's only parameter; mlx-lm loads no model without one."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": {"format": "mlx"}, "weight": entry}).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack("<f", 90.0)


def is_standin(directory: Path) -> bool:
    """Whether the code of a model directory is that of this package, byte for byte."""
    try:
        return all(
            (directory / f"standin_{name}.py").read_bytes() == _source(f"{name}.py")
            for name in _CODE
        )
    except OSError:
        return False


def write_tiny(directory: Path, *, seed: int = 0, width: int = tiny.WIDTH) -> Path:
    """Writes a real gpt-oss with random weights: 4 layers, full vocabulary, 110 MB if 64 wide.

    Creates ``directory`` if needed and returns it. The same ``seed`` gives the same model.
    """
    _write_shared(directory, {**tiny.config(width), **_IDS}, _IDS, _TINY_CARD)
    tiny.write_weights(directory / "model.safetensors", seed, width)
    return directory


def rescript(directory: Path, scripts: Iterable[Script]) -> Path:
    """Replaces the scripts of a stand-in. A running server follows them from its next token on.

    Returns ``directory``. Raises ``ValueError`` for an invalid script.
    """
    book = dump_book(scripts, _encoder(directory))
    write_atomically(directory / cursor.BOOK, book.encode())
    return directory


def _write_shared(
    directory: Path, config: dict[str, object], generation: dict[str, object], card: str
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "README.md": card,
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": json.dumps(_TOKENIZER, indent=2),
    }
    for name, text in texts.items():
        write_atomically(directory / name, text.encode())
    write_atomically(directory / "chat_template.jinja", _source("chat_template.jinja"))


def _source(name: str) -> bytes:
    return (files("vllm_mlx_harmony.standin") / name).read_bytes()


def _encoder(directory: Path) -> Encode:
    """Text to ids, with names of control tokens; by `tokenizers` without openai-harmony."""
    try:
        harmony = vocab.encoding()
    except ImportError:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
    return lambda text: harmony.encode(text, allowed_special="all")
