"""serve: runs the host's own ``serve`` command in this process, after installing the plugin.

For environments in which Python does not read `.pth` files.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_mlx_harmony import _startup, host
from vllm_mlx_harmony.cli import log_file
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.models import MODELS

ID_FLAG = "--id-endpoint"
"""Enables the id endpoint, for a gateway in front of this server."""

SWITCHES = {
    ID_FLAG: "VLLM_MLX_HARMONY_ID_ENDPOINT",
    "--inspect": "VLLM_MLX_HARMONY_INSPECT",
}
"""Flags without a value, and the environment variables that they set to 1."""

URLS_FLAG = "--tool-urls"
"""Comma-separated patterns of the tool servers that requests may name by URL."""

SPECULATE_FLAG = "--speculate"
"""Whether several tokens may be computed in one step."""

LOG_FLAG = "--log-file"
"""Where all output goes."""

OWN_FLAGS = f"""
vllm-mlx-harmony:
  {ID_FLAG}         enable POST /harmony/v1/generate (token ids), for a gateway in
                        front of this server; or VLLM_MLX_HARMONY_ID_ENDPOINT=1
  --inspect             show prompts and answers, token by token, at /harmony;
                        or VLLM_MLX_HARMONY_INSPECT=1
  {LOG_FLAG} FILE       append all output to FILE; at 10 MB, FILE is renamed to
                        FILE.1, and so on up to FILE.3
  {SPECULATE_FLAG} MODE      tokens in one step: off (one), forced or auto (several, if
                        that is faster; default); or VLLM_MLX_HARMONY_SPECULATE
  {URLS_FLAG} PATTERNS  MCP servers that requests may name by URL, comma-separated;
                        or VLLM_MLX_HARMONY_TOOL_URLS"""
"""Added to the host's ``--help``."""


def main(arguments: Sequence[str]) -> int:
    """Runs ``vllm-mlx serve`` with these arguments until it ends.

    As the first argument, ``20b`` and ``120b`` are the models that ``launch`` downloads.
    ``--tool-call-parser harmony`` comes first, so that ``arguments`` can override it.
    Raises ``UsageError`` if the plugin is disabled, the host cannot be imported, or the file of
    ``--log-file`` cannot be opened.
    """
    arguments = _without_own(list(arguments))
    if _startup.switched_off():
        raise UsageError(
            f"{_startup.SWITCH} disables the plugin: unset it, or run `vllm-mlx serve`"
        )
    try:
        host.install()
    except ImportError as error:
        raise UsageError(f"vllm-mlx cannot be imported ({error}): pip install vllm-mlx") from error
    sys.argv = ["vllm-mlx", "serve", "--tool-call-parser", "harmony", *arguments]
    try:
        importlib.import_module(_startup.HOST).main()
    except SystemExit as ended:
        if not ended.code and not {"-h", "--help"}.isdisjoint(arguments):
            print(OWN_FLAGS)
        raise
    return 0


def _without_own(arguments: list[str]) -> list[str]:
    """The arguments of the host; what is for this command alone takes effect."""
    urls, arguments = _value(URLS_FLAG, arguments, f"patterns: {URLS_FLAG} 'https://*.example.com'")
    if urls is not None:
        os.environ["VLLM_MLX_HARMONY_TOOL_URLS"] = urls
    mode, arguments = _value(SPECULATE_FLAG, arguments, "a mode: off, forced or auto")
    if mode is not None:
        os.environ["VLLM_MLX_HARMONY_SPECULATE"] = mode
    log, arguments = _value(LOG_FLAG, arguments, f"a file: {LOG_FLAG} server.log")
    if log is not None:
        try:
            log_file.redirect(Path(log))
        except OSError as error:
            raise UsageError(f"{log} cannot be opened: {error.strerror}") from error
    if arguments and arguments[0] in MODELS:
        weights = MODELS[arguments[0]]
        arguments[:1] = [weights.source, "--served-model-name", weights.name]
    for switch, variable in SWITCHES.items():
        if switch in arguments:
            arguments = [each for each in arguments if each != switch]
            os.environ[variable] = "1"
    return arguments


def _value(flag: str, arguments: list[str], example: str) -> tuple[str | None, list[str]]:
    """The value of a flag, None if it is not given, and the other arguments."""
    for at, each in enumerate(arguments):
        name, equals, given = each.partition("=")
        if name != flag:
            continue
        if not equals:
            if at + 1 == len(arguments):
                raise UsageError(f"{flag} needs {example}")
            given = arguments[at + 1]
        return given, [*arguments[:at], *arguments[at + (1 if equals else 2) :]]
    return None, arguments
