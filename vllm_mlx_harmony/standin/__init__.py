"""Model directories for demos and tests without weights: a scripted stand-in, a tiny gpt-oss."""

from vllm_mlx_harmony.standin.directory import is_standin, rescript, write, write_tiny
from vllm_mlx_harmony.standin.scripts import FALLBACK, Script

__all__ = ["FALLBACK", "Script", "is_standin", "rescript", "write", "write_tiny"]
