"""gpt-oss (Harmony) done right on vllm-mlx.

Imported at every interpreter start (through `_startup`), so it imports nothing.
"""

__version__ = "0.1.0"
