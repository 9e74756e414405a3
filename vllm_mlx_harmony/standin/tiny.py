"""A real gpt-oss architecture with random weights, which generates nonsense on any machine."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator
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
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    packed = json.dumps(header).encode()
    source = random.Random(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        for name, shape in shapes.items():
            file.write(_values(name, math.prod(shape), source))


def _shapes(width: int) -> Iterator[tuple[str, Shape]]:
    """The names and shapes of the parameters of mlx-lm's `gpt_oss`."""
    queries, keys = _HEADS * _HEAD, _KEYS * _HEAD
    attention = {
        "q": (queries, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, queries),
    }
    yield "model.embed_tokens.weight", (VOCAB_SIZE, width)
    for layer in (f"model.layers.{number}" for number in range(4)):
        yield f"{layer}.self_attn.sinks", (_HEADS,)
        for name, shape in attention.items():
            yield f"{layer}.self_attn.{name}_proj.weight", shape
            yield f"{layer}.self_attn.{name}_proj.bias", shape[:1]
        yield f"{layer}.mlp.router.weight", (_EXPERTS, width)
        yield f"{layer}.mlp.router.bias", (_EXPERTS,)
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{layer}.mlp.experts.{name}.weight", (_EXPERTS, width, width)
            yield f"{layer}.mlp.experts.{name}.bias", (_EXPERTS, width)
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (VOCAB_SIZE, width)


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
