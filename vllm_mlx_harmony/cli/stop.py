"""stop: stops the server that `launch` started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vllm_mlx_harmony.cli import background


def main(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(
        prog="vllm-mlx-harmony stop", description="Stops the server that `launch` started."
    ).parse_args(arguments)
    server = background.stop()
    print("no server is running" if server is None else f"stopped {server.model} at {server.url}")
    return 0
