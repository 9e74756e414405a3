"""stop: ends the server that `launch` has started."""

from __future__ import annotations

from vllm_mlx_harmony.cli import background


def run() -> int:
    """Ends the server and says so."""
    server = background.stop()
    print("no server runs" if server is None else f"{server.model} at {server.url} is stopped")
    return 0
