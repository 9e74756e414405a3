"""A real gpt-oss architecture with random weights, small enough for any machine. Says nonsense.

Knows names and shapes of mlx-lm's `gpt_oss` and the safetensors format. Refuses to know mlx.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_mlx_harmony.core.turn import VOCAB_SIZE

Shape = tuple[int, ...]

CONFIG: dict[str, object] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131_072,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
}

WIDTH = 64
_HEADS, _KEYS, _HEAD, _EXPERTS = 4, 2, 16, 4


def config(width: int) -> dict[str, object]:
    """The configuration of a model ``width`` wide."""
    return {**CONFIG, "hidden_size": width, "intermediate_size": width}


def write_weights(path: Path, seed: int, width: int) -> None:
    """A safetensors file (float32) of random weights; the same seed gives the same file."""
    shapes = dict(_shapes(width))
    header = json.dumps(_header(shapes)).encode()
    source = random.Random(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, shape in shapes.items():
            file.write(_values(name, _count(shape), source))


def _header(shapes: dict[str, Shape]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 4 * _count(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return header


def _shapes(width: int) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (VOCAB_SIZE, width)
    for layer in range(4):
        for name, shape in (*_attention(width), *_experts(width), *_norms(width)):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (VOCAB_SIZE, width)


def _attention(width: int) -> Iterator[tuple[str, Shape]]:
    yield "self_attn.sinks", (_HEADS,)
    queries, keys = _HEADS * _HEAD, _KEYS * _HEAD
    shapes = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
    for name, shape in shapes.items():
        yield f"self_attn.{name}_proj.weight", shape
        yield f"self_attn.{name}_proj.bias", shape[:1]


def _experts(width: int) -> Iterator[tuple[str, Shape]]:
    yield "mlp.router.weight", (_EXPERTS, width)
    yield "mlp.router.bias", (_EXPERTS,)
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield f"mlp.experts.{name}.weight", (_EXPERTS, width, width)
        yield f"mlp.experts.{name}.bias", (_EXPERTS, width)


def _norms(width: int) -> Iterable[tuple[str, Shape]]:
    yield "input_layernorm.weight", (width,)
    yield "post_attention_layernorm.weight", (width,)


def _count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _values(name: str, count: int, source: random.Random) -> bytes:
    """``count`` floats: ones for a norm, else of either sign and between 1/32 and 1/8."""
    if "norm" in name:
        return struct.pack("<f", 1.0) * count
    # Sign, top of the exponent and top of the mantissa from random bits, written without a loop:
    # 0x3D00.. to 0x3DFF.. are the floats from 1/32 up to (not with) 1/8.
    values = bytearray(4 * count)
    values[3::4] = source.randbytes(count).translate(_SIGNS)
    values[2::4] = source.randbytes(count)
    return bytes(values)


_SIGNS = bytes(0x3D if byte % 2 else 0xBD for byte in range(256))
