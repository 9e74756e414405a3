"""All checks, in the order in which they run."""

from __future__ import annotations

from vllm_mlx_harmony.verify import wire

CHECKS = wire.CHECKS
