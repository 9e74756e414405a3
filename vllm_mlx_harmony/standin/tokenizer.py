"""The o200k_harmony vocabulary as a `tokenizer.json`, and as bytes by id for the stand-in."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import lru_cache

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.turn import VOCAB_SIZE

Ranks = Mapping[bytes, int]

CONTROL_NAMES: dict[int, str] = {
    vocab.STARTOFTEXT: "<|startoftext|>",
    vocab.ENDOFTEXT: "<|endoftext|>",
    vocab.RETURN: "<|return|>",
    vocab.CONSTRAIN: "<|constrain|>",
    vocab.CHANNEL: "<|channel|>",
    vocab.START: "<|start|>",
    vocab.END: "<|end|>",
    vocab.MESSAGE: "<|message|>",
    vocab.CALL: "<|call|>",
}

# How o200k_base cuts text before it merges (tiktoken_ext/openai_public.py).
_SPLIT = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def control_name(token: int) -> str:
    """How a control or reserved id is written out, as openai-harmony writes it."""
    return CONTROL_NAMES.get(token, f"<|reserved_{token}|>")


def parse_ranks(tiktoken_file: bytes) -> dict[bytes, int]:
    """Token bytes to id, from the text of a `.tiktoken` file (base64, space, rank per line)."""
    pairs = (line.split() for line in tiktoken_file.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


@lru_cache(maxsize=1)
def shipped_ranks() -> Ranks:
    return parse_ranks(vocab.official_file())


def token_table() -> bytes:
    """The bytes of every id, each after one byte with their length; control ids by their name."""
    ranks = shipped_ranks()
    ordinary = sorted(ranks, key=ranks.__getitem__)
    control = [control_name(token).encode() for token in range(len(ordinary), VOCAB_SIZE)]
    return b"".join(bytes((len(token),)) + token for token in (*ordinary, *control))


@lru_cache(maxsize=1)
def tokenizer_json() -> str:
    """The vocabulary in the format of Hugging Face's `tokenizers`: byte-level BPE.

    tiktoken merges any two neighbours that make a token, lowest rank first. So every way to cut a
    token in two known tokens is a merge with that token's rank. Like tiktoken, the tokenizer takes
    a piece that is a token as it is. Written as it is read, so that no such package is needed.
    """
    ranks = shipped_ranks()
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        known.sort(key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
        merges += [(spell(left), spell(right)) for left, right in known]
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": token, "content": control_name(token), **plain, "special": True}
        for token in range(len(ranks), VOCAB_SIZE)
    ]
    model = {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token"), None),
        **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), None),
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        "vocab": {spell(token): rank for token, rank in ranks.items()},
        "merges": merges,
    }
    written = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, _byte_level(use_regex=False, add_prefix_space=False)],
        },
        "post_processor": None,
        "decoder": _byte_level(use_regex=True, add_prefix_space=True),
        "model": model,
    }
    return json.dumps(written, ensure_ascii=False)


def _byte_level(**flags: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "trim_offsets": True, **flags}


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = iter(range(256, 512))
_ALPHABET = {byte: byte if byte in _PRINTABLE else next(_OTHERS) for byte in range(256)}
"""A printable character for each byte: GPT-2's alphabet, in which byte-level BPE is written."""


def spell(token: bytes) -> str:
    """Token bytes in the printable alphabet of a byte-level BPE file."""
    return token.decode("latin-1").translate(_ALPHABET)
