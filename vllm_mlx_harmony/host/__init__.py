"""The only package that knows vllm-mlx: activation, the patch table, and what the patches do.

Importing it imports nothing of vllm-mlx and changes nothing in it; `install()` puts the hook into
`serve_command`.
"""

from __future__ import annotations

from vllm_mlx_harmony.host.activation import Status, install, status, uninstall

__all__ = ["Status", "install", "status", "uninstall"]
