"""A real gpt-oss architecture with random weights, which generates nonsense on any machine."""

from __future__ import annotations

from pathlib import Path

from vllm_mlx_harmony.core.turn import VOCAB_SIZE

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
"""Hidden size: with the full vocabulary, the weights take 110 MB."""


def config(width: int) -> dict[str, object]:
    return {**CONFIG, "hidden_size": width, "intermediate_size": width}


def write_weights(path: Path, seed: int, width: int) -> None:
    """A safetensors file (float32) of random weights; the same seed gives the same file.

    Those of norms are ones, all others of either sign and less than 1/8.
    """
    import numpy
    from mlx.utils import tree_flatten
    from mlx_lm.models.gpt_oss import Model, ModelArgs
    from safetensors.numpy import save_file

    source = numpy.random.default_rng(seed)
    weights = {}
    for name, parameter in tree_flatten(Model(ModelArgs.from_dict(config(width))).parameters()):
        values = source.random(parameter.shape, numpy.float32)
        weights[name] = numpy.ones_like(values) if "norm" in name else values / 4 - 0.125
    save_file(weights, path, {"format": "mlx"})
