"""All checks, in the order in which they run."""

from __future__ import annotations

from vllm_mlx_harmony.verify import format as formats
from vllm_mlx_harmony.verify import loop, wire

CHECKS = tuple(
    sorted(
        (*wire.CHECKS, *formats.CHECKS, *loop.CHECKS),
        key=lambda check: check.name.endswith(".cancel"),
    )
)
"""Cancellation comes last: a server that fails it is still busy with an answer without a reader."""
