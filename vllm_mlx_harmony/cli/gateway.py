"""gateway: the front end without vllm-mlx, over vLLM, SGLang, llama.cpp or another vllm-mlx.

Knows its flags, which are the fields of the settings. Refuses to know what they do (`gateway`).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.core.errors import HostError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting; none has a default, so that the environment and a file count."""
    from vllm_mlx_harmony.gateway.settings import PREFIX, REPEATABLE, GatewaySettings, flag

    parser.add_argument("--config", metavar="FILE.toml", help=f"settings; or {PREFIX}CONFIG")
    for each in fields(GatewaySettings):
        about = each.metadata["help"]
        if each.default not in (MISSING, None, "", ()):
            about += f" (default: {each.default})"
        repeatable: dict[str, Any] = {"action": "append"} if each.name in REPEATABLE else {}
        name = flag(each.name)
        metavar = name.removeprefix("--").replace("-", "_").upper()
        parser.add_argument(name, dest=each.name, metavar=metavar, help=about, **repeatable)


def main(arguments: Sequence[str]) -> int:
    """Serves until it is told to end. Raises ``UsageError`` for settings that cannot be."""
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony gateway",
        description="Chat Completions, Responses and Messages for gpt-oss, in front of engines "
        "that take and give token ids. Every flag is also a variable and a line of the file.",
    )
    add_flags(parser)
    parsed = parser.parse_args(arguments)
    from vllm_mlx_harmony.gateway import app
    from vllm_mlx_harmony.gateway.settings import load
    from vllm_mlx_harmony.server import defaults
    from vllm_mlx_harmony.server.responses.store import server_store

    flags = {name: value for name, value in vars(parsed).items() if name != "config"}
    try:
        settings = load(flags, file=parsed.config)
        defaults.read(settings.template_options)  # every request reads them again
        server_store()  # which is to be there before anybody asks for something
    except HostError as error:
        raise UsageError(error.message) from error
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    return app.run(settings, partial(load, flags, file=parsed.config))
