"""How fast this machine computes a prompt, for `doctor`.

Prompts slow down by half or more without an error: in Low Power Mode, on a hot machine, while
another program uses the GPU, or with a build of mlx that lacks kernels for the chip. So `doctor`
measures two layers of gpt-oss with random, quantized weights, and compares the rate with the
highest one that it has measured on this chip. The rate is not that of a model, which has more and
wider layers: those would take gigabytes.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

import mlx.core as mx
from mlx import nn
from mlx_lm.models.gpt_oss import Model, ModelArgs

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.files import write_atomically

WIDTH = 1_024
"""Hidden size. The weights take 25 MB, so there is memory for them beside any model."""

TOKENS = 2_048
"""As many as the longest chunk that a server computes by default (``BatchLimits.chunk``)."""

RUNS = 4
"""The fastest counts: another program may have had the GPU during one."""

SLOW = 0.6
"""The share of the highest rate below which a machine is slower than it should be: what slows
prompts down costs half of it, or more."""


def rate(width: int = WIDTH, tokens: int = TOKENS) -> float:
    """Tokens per second of the fastest of a few runs."""
    model = Model(
        ModelArgs(
            num_hidden_layers=2,
            num_local_experts=4,
            vocab_size=1_024,
            hidden_size=width,
            intermediate_size=width,
            layer_types=["sliding_attention", "full_attention"],
        )
    )
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4")
    mx.eval(model.parameters())
    prompt = mx.arange(tokens)[None] % 1_024
    shortest = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter()
        mx.eval(model(prompt))
        shortest = min(shortest, time.perf_counter() - began)
    return tokens / shortest


def usual(now: float, chip: str) -> float:
    """The highest rate of the chip so far; ``now`` is remembered if it is higher."""
    path, known = vocab.cache_dir() / "prefill.json", {}
    with suppress(OSError, ValueError, TypeError):
        known = {
            str(name): float(best) for name, best in dict(json.loads(path.read_bytes())).items()
        }
    best = known.get(chip, now)
    if now >= best:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({**known, chip: now}).encode())
    return best
