"""The integration into vllm-mlx: activation by a flag, the table of names, and our engine.

Importing this package imports and changes nothing of vllm-mlx; `install()` adds a hook to its
`serve_command`.
"""

from __future__ import annotations

from vllm_mlx_harmony.host.activation import install, uninstall

__all__ = ["install", "uninstall"]
