"""render: prints the exact prompt of a Chat Completions request."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from vllm_mlx_harmony.cli.errors import UsageError, called, read_text
from vllm_mlx_harmony.cli.paint import painted, pieces
from vllm_mlx_harmony.core.render import render
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import chat
from vllm_mlx_harmony.server.defaults import current_date


def run(name: str, *, as_json: bool) -> int:
    """Prints the prompt of the request in a file, in colours on a terminal, or else unchanged.

    Raises ``UsageError`` for a file that is not JSON, and ``RequestError`` for a request that the
    server would reject.
    """
    ids = prompt(_document(name))
    if as_json:
        print(json.dumps(document(ids), ensure_ascii=False))
        return 0
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(painted(ids), soft_wrap=True)
        console.print(f"{len(ids)} tokens", style="dim")
    else:  # rich would expand tabs and drop control characters
        sys.stdout.write("".join(piece.text for piece in pieces(ids)))
    return 0


def prompt(body: object) -> tuple[int, ...]:
    """The prompt of a request on a server with no defaults of its own."""
    request = chat.read(body, Defaults(date=current_date()))
    return tuple(render(request.turn).ids)


def document(ids: Sequence[int]) -> dict[str, object]:
    """The output of ``--json``."""
    cut = [{"text": piece.text, "control": piece.control} for piece in pieces(ids)]
    return {"count": len(ids), "ids": list(ids), "pieces": cut}


def _document(name: str) -> object:
    try:
        return json.loads(read_text(name))
    except RecursionError as error:
        raise UsageError(f"{called(name)} is nested too deeply") from error
    except ValueError as error:
        raise UsageError(f"{called(name)} is not JSON: {error}") from error
