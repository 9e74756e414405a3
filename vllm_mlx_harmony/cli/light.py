"""serve, where vllm-mlx is not installed: a gateway with the model in its own process.

It takes the flags of the gateway, and those of vllm-mlx that mean the same under another name.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from vllm_mlx_harmony.cli import gateway
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.gateway import LOCAL

SAME = {
    "--served-model-name": "--model",
    "--api-key": "--key",
    "--rate-limit": "--requests-per-minute",
    "--max-tokens": "--default-max-output-tokens",
    "--max-request-tokens": "--max-output-tokens",
    "--default-temperature": "--temperature",
    "--default-top-p": "--top-p",
    "--default-thinking-token-budget": "--reasoning-tokens",
}
"""Flags of vllm-mlx, and the gateway's names of them."""

ALWAYS = ("--continuous-batching", "--enable-auto-tool-choice", "--enable-metrics")
"""Flags of vllm-mlx for what is always so here."""

PARSERS = ("--tool-call-parser", "--reasoning-parser")

INSPECT = "VLLM_MLX_HARMONY_INSPECT"
"""`inspector.VARIABLE`, which `serve --inspect` sets."""


def replaces_host() -> bool:
    """Whether vllm-mlx is not installed, but mlx-lm is."""
    return not _is_installed("vllm_mlx") and _is_installed("mlx_lm")


def _is_installed(module: str) -> bool:
    return module in sys.modules or find_spec(module) is not None


def main(arguments: Sequence[str]) -> int:
    """Serves a model until SIGTERM or SIGINT. Raises ``UsageError`` for flags that only vllm-mlx
    has."""
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag, name in SAME.items():
        made.add_argument(flag, dest=name)
    for flag in PARSERS:
        made.add_argument(flag)
    for flag in ALWAYS:
        made.add_argument(flag, action="store_true")
    given, rest = made.parse_known_args(arguments)
    if not rest or rest[0].startswith("-"):
        return gateway.main(["--help"])
    translated = [f"{LOCAL}{rest[0]}", "--model", rest[0], *rest[1:]]
    for flag in SAME.values():
        if (value := getattr(given, flag)) is not None:
            translated += [flag, value]
    if os.environ.get(INSPECT) == "1":
        translated.append("--inspect")
    _, unknown = gateway.parser().parse_known_args(["--engine", *translated])
    if unknown:
        raise UsageError(
            f"{unknown[0]} is not a flag of the gateway, which serves the model since vllm-mlx is "
            "not installed; if it is one of vllm-mlx: pip install vllm-mlx-harmony"
        )
    return gateway.main(translated)
