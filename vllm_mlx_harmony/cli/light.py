"""serve, where vllm-mlx is not installed: a gateway with the model in its own process.

It takes the flags of the gateway, and those of vllm-mlx that mean the same under another name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from vllm_mlx_harmony.cli import gateway
from vllm_mlx_harmony.cli.errors import UsageError

SAME = {
    "--served-model-name": "model",
    "--max-tokens": "default_max_output_tokens",
    "--max-request-tokens": "max_output_tokens",
    "--default-temperature": "temperature",
    "--default-top-p": "top_p",
    "--default-thinking-token-budget": "reasoning_tokens",
    "--rate-limit": "requests_per_minute",
}
"""Flags of vllm-mlx, and the gateway's settings that mean the same."""

ALWAYS = (
    *("--continuous-batching", "--enable-auto-tool-choice", "--enable-metrics"),
    "--enable-prefix-cache",
)
"""Flags of vllm-mlx for what is always so here."""

PARSERS = {
    "--tool-call-parser": ("harmony", "gpt-oss"),
    "--reasoning-parser": ("harmony", "gpt_oss"),
}
"""The parsers of vllm-mlx that mean what is always so here."""


INSTALL = "pip install vllm-mlx-harmony, or for gpt-oss alone 'vllm-mlx-harmony-server[mlx]'"
"""What to do where neither vllm-mlx nor mlx-lm is installed."""


def replaces_host() -> bool:
    """Whether vllm-mlx is not installed, but mlx-lm is."""
    return not is_installed("vllm_mlx") and is_installed("mlx_lm")


def is_installed(module: str) -> bool:
    """Whether a module can be imported, as far as can be told without importing it."""
    return module in sys.modules or find_spec(module) is not None


def parser() -> argparse.ArgumentParser:
    """The gateway's parser, with the model and the flags of vllm-mlx."""
    parser = gateway.parser()
    parser.prog, parser.allow_abbrev = "vllm-mlx-harmony serve", False
    parser.description = "Serves Chat Completions, Responses and Messages for gpt-oss."
    parser.epilog = "example: vllm-mlx-harmony serve 20b --port 8080"
    parser.add_argument("source", metavar="MODEL", help="20b, 120b, a directory or a repository")
    parser.add_argument("--api-key", dest="keys", action="append", help=argparse.SUPPRESS)
    for flag, setting in SAME.items():
        parser.add_argument(flag, dest=setting, help=argparse.SUPPRESS)
    off: dict[str, Any] = {"dest": "cache_memory_mb", "action": "store_const", "const": 0}
    parser.add_argument("--disable-prefix-cache", help=argparse.SUPPRESS, **off)
    for flag, parsers in PARSERS.items():
        parser.add_argument(flag, dest="ignored", choices=parsers, help=argparse.SUPPRESS)
    for flag in ALWAYS:
        parser.add_argument(flag, dest="ignored", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Serves a model until SIGTERM or SIGINT. Raises ``UsageError`` for flags that only vllm-mlx
    has."""
    from vllm_mlx_harmony.gateway.engines.detection import LOCAL
    from vllm_mlx_harmony.server.settings import ServerSettings

    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        raise UsageError(
            f"{unknown[0]} is not a flag of the gateway, which serves the model since vllm-mlx is "
            "not installed; if it is one of vllm-mlx: pip install vllm-mlx-harmony"
        )
    flags = vars(options)
    del flags["ignored"]
    source = flags.pop("source")
    flags["engines"] = [f"{LOCAL}{source}"]
    flags["model"] = flags["model"] or source
    if ServerSettings.read().inspect:
        flags["inspect"] = True
    return gateway.serve(options)
