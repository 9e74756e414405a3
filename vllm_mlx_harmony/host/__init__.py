"""The only room that knows vllm-mlx: the gate, what is changed in the host, what the changes do.

Importing it imports nothing of the host and changes nothing in it; `install()` puts up the gate.
"""

from __future__ import annotations

from vllm_mlx_harmony.host.activation import Status, install, status, uninstall

__all__ = ["Status", "install", "status", "uninstall"]
