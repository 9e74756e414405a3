"""All checks, in the order in which they run."""

from __future__ import annotations

from vllm_mlx_harmony.verify import format as formats
from vllm_mlx_harmony.verify import loop, wire

CHECKS = (*wire.CHECKS, *formats.CHECKS, *loop.CHECKS)
