"""gateway: the front end over vLLM, SGLang, llama.cpp, another vllm-mlx, or a model of its own.

Its flags are generated from the fields of ``GatewaySettings``.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from typing import get_type_hints

from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core.errors import HostError

EXAMPLES = """\
examples:
  vllm-mlx-harmony gateway --engine http://gpu:8000 --model openai/gpt-oss-120b --port 8080
  vllm-mlx-harmony gateway --engine http://gpu-1:8000 --engine http://gpu-2:8000 \\
      --model openai/gpt-oss-120b --host 0.0.0.0 --key alice=$ALICE_KEY --key ci=$CI_KEY
  vllm-mlx-harmony gateway --config gateway.toml
  vllm-mlx-harmony gateway mlx:mlx-community/gpt-oss-20b-MXFP4-Q8   # a model in this process
  vllm-mlx-harmony gateway keys add alice --config gateway.toml
  vllm-mlx-harmony gateway usage gateway-*.log      # who used how much yesterday
  vllm-mlx-harmony gateway stand-in --port 8001     # an engine without a model, to try it all out

Every setting can also be an environment variable (--tokens-per-day:
VLLM_MLX_HARMONY_GATEWAY_TOKENS_PER_DAY) or a line of the TOML file (tokens_per_day = 1000000).
Flags override variables, and variables override the file. SIGHUP reloads the file.
"""

LOCAL = "mlx:"
"""``mlx:MODEL`` as the first argument is ``--engine mlx:MODEL``."""

COMMANDS = {"keys": "gateway_keys", "usage": "gateway_usage", "stand-in": "gateway_standin"}
"""The commands around the gateway, and their modules."""


def parser() -> argparse.ArgumentParser:
    """A parser with a flag for each setting, which has no default, so that others can apply."""
    from vllm_mlx_harmony.gateway.settings import FLAGS, GROUPS, PREFIX, GatewaySettings, flag

    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony gateway",
        description="Serves Chat Completions, Responses and Messages for gpt-oss, using engines\n"
        "that accept and return token ids.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file with settings (also: {PREFIX}CONFIG)"
    )
    hints = get_type_hints(GatewaySettings, include_extras=True)
    flags: argparse._ActionsContainer = parser
    for field in fields(GatewaySettings):
        if field.name in GROUPS:
            flags = parser.add_argument_group(GROUPS[field.name])
        about = hints[field.name].__metadata__[-1]
        if isinstance(field.default, bool):
            yes_or_no = argparse.BooleanOptionalAction
            flags.add_argument(flag(field.name), action=yes_or_no, help=about.text)
            continue
        default = field.default not in (MISSING, None, "", ())
        flags.add_argument(
            flag(field.name),
            dest=field.name,
            action="append" if field.name in FLAGS else "store",
            metavar=about.metavar,
            help=f"{about.text} (default: {field.default})" if default else about.text,
        )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT, or runs one of the commands around the gateway.

    Raises ``UsageError`` for invalid settings.
    """
    if arguments and arguments[0] in COMMANDS:
        module = import_module(f"vllm_mlx_harmony.cli.{COMMANDS[arguments[0]]}")
        return int(module.main(arguments[1:]))
    if arguments and arguments[0].startswith(LOCAL):
        arguments = ["--engine", *arguments]
    return serve(parser().parse_args(arguments))


def serve(parsed: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT. Raises ``UsageError`` for invalid settings."""
    from vllm_mlx_harmony.gateway import app, workers
    from vllm_mlx_harmony.gateway.settings import load
    from vllm_mlx_harmony.server import defaults
    from vllm_mlx_harmony.server.settings import ServerSettings

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    flags = {name: value for name, value in vars(parsed).items() if name != "config"}
    try:
        settings = load(flags, file=parsed.config)
        defaults.read(settings.template_options, ServerSettings.read())
        workers.check(settings)
    except HostError as error:
        raise UsageError(error.message) from error
    return app.run(settings, partial(load, flags, file=parsed.config))
