"""render: prints the exact prompt of a Chat Completions request."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from vllm_mlx_harmony.cli.errors import UsageError, called, read_text
from vllm_mlx_harmony.cli.paint import colorize, pieces
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server.defaults import current_date
from vllm_mlx_harmony.server.settings import ServerSettings


def main(arguments: Sequence[str]) -> int:
    """Prints the prompt, in colours on a terminal. Raises ``RequestError`` as the server does."""
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony render",
        description="Prints the exact prompt that a Chat Completions request becomes.",
    )
    body = "the request body; - is standard input"
    parser.add_argument("name", metavar="REQUEST.json", help=body)
    printed = "print the token ids, their count and the text as JSON"
    parser.add_argument("--json", action="store_true", help=printed)
    options = parser.parse_args(arguments)
    ids = prompt(_document(options.name))
    if options.json:
        cut = [{"text": piece.text, "control": piece.control} for piece in pieces(ids)]
        document = {"count": len(ids), "ids": ids, "pieces": cut}
        print(json.dumps(document, ensure_ascii=False))
        return 0
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(colorize(ids), soft_wrap=True)
        console.print(f"{len(ids)} tokens", style="dim")
    else:  # rich would expand tabs and drop control characters
        sys.stdout.write("".join(piece.text for piece in pieces(ids)))
    return 0


def prompt(body: object) -> tuple[int, ...]:
    """The prompt of a request on a server with no defaults of its own."""
    request = chat.read(body, Defaults(date=current_date(ServerSettings.read().date)))
    return tuple(render(request.turn).ids)


def _document(name: str) -> object:
    try:
        return json.loads(read_text(name))
    except RecursionError as error:
        raise UsageError(f"{called(name)} is nested too deeply") from error
    except ValueError as error:
        raise UsageError(f"{called(name)} is not JSON: {error}") from error
