"""serve: runs the host's own ``serve`` command in this process, after installing the plugin.

For environments in which Python does not read `.pth` files. Where vllm-mlx is not installed, the
model is served without it (`light`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_mlx_harmony import _startup
from vllm_mlx_harmony.cli import light, log_file
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.models import MODELS


def parser() -> argparse.ArgumentParser:
    """The flags that the host does not know; most set the environment variable of their name."""
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False, exit_on_error=False
    )
    own = parser.add_argument_group("vllm-mlx-harmony")

    def add(flag: str, about: str, **options: Any) -> None:
        variable = f"VLLM_MLX_HARMONY_{flag[2:].replace('-', '_').upper()}"
        setting = f"{variable}=1" if "const" in options else variable
        own.add_argument(flag, dest=variable, help=f"{about} (also: {setting})", **options)

    switch: dict[str, Any] = {"action": "store_const", "const": "1"}
    endpoint = "enable POST /harmony/v1/generate (token ids), for a gateway in front of this server"
    add("--id-endpoint", endpoint, **switch)
    add("--inspect", "show prompts and answers, token by token, at /harmony", **switch)
    own.add_argument(
        "--log-file",
        metavar="FILE",
        help="append all output to FILE; at 10 MB, rename it to FILE.1, older ones up to FILE.3",
    )
    steps = "compute several tokens per step where faster: off, forced or auto (default)"
    add("--speculate", steps, metavar="MODE")
    patterns = "URL patterns of MCP servers that requests may use, comma-separated"
    add("--tool-urls", patterns, metavar="PATTERNS")
    engine = "let requests search the web: ddgs, searxng:URL, brave or tavily"
    add("--web-search", engine, metavar="ENGINE")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs ``vllm-mlx serve`` with these arguments until it ends.

    As the first argument, ``20b`` and ``120b`` are the models that ``launch`` downloads.
    ``--tool-call-parser harmony`` comes first, so that ``arguments`` can override it.
    """
    arguments = _without_own(list(arguments))
    if _startup.switched_off():
        raise UsageError(
            f"{_startup.SWITCH} disables the plugin: unset it, or run `vllm-mlx serve`"
        )
    if light.replaces_host():
        return light.main(arguments)
    from vllm_mlx_harmony import host

    try:
        host.install()
    except ImportError as error:
        raise UsageError(f"vllm-mlx cannot be imported ({error}): {light.INSTALL}") from error
    sys.argv = ["vllm-mlx", "serve", "--tool-call-parser", "harmony", *arguments]
    try:
        importlib.import_module(_startup.HOST).main()
    except SystemExit as ended:
        if not ended.code and not {"-h", "--help"}.isdisjoint(arguments):
            print(f"\n{parser().format_help()}", end="")
        raise
    return 0


def _without_own(arguments: list[str]) -> list[str]:
    """The arguments of the host; what is for this command alone takes effect."""
    try:
        options, arguments = parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    own = vars(options)
    if log := own.pop("log_file"):
        try:
            log_file.redirect(Path(log))
        except OSError as error:
            raise UsageError(f"{log} cannot be opened: {error.strerror}") from error
    os.environ.update({name: value for name, value in own.items() if value is not None})
    if arguments and arguments[0] in MODELS:
        weights = MODELS[arguments[0]]
        arguments[:1] = [weights.source, "--served-model-name", weights.name]
    return arguments
