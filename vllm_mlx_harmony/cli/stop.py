"""stop: stops the server that `launch` has started."""

from __future__ import annotations

from vllm_mlx_harmony.cli import background


def run() -> int:
    """Stops the server, and prints which one it was."""
    server = background.stop()
    print("no server is running" if server is None else f"stopped {server.model} at {server.url}")
    return 0
