"""verify: whether a server does what its APIs promise, check by check."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vllm_mlx_harmony.cli.errors import UsageError

if TYPE_CHECKING:
    from vllm_mlx_harmony.verify.report import Screen

KEY = "stand-in"
"""The stand-in's API key."""

PACKAGES = ("anthropic", "httpx", "httpx_sse", "openai")


def run(
    *,
    url: str | None,
    model: str | None,
    key: str | None,
    only: Sequence[str],
    repeat: int,
    timeout: float,
    stand_in: bool,
    json: str | None,
) -> int:
    """Prints what a server does right and wrong. Returns 0 if all that it supports passed, else 1.

    Raises ``UsageError`` if the checks cannot run.
    """
    if missing := [name for name in PACKAGES if not find_spec(name)]:
        fix = "pip install 'vllm-mlx-harmony[verify]'"
        raise UsageError(f"verify needs {', '.join(missing)}: {fix}")
    if stand_in == (url is not None):
        raise UsageError("give the URL of a server, or --stand-in")
    from vllm_mlx_harmony.verify import report, suite
    from vllm_mlx_harmony.verify.checks import chosen

    if not (checks := chosen(suite.CHECKS, only)):
        raise UsageError(f"no check is called {' or '.join(only)}: see docs/verify.md")
    console = Console(highlight=False)
    with ExitStack() as stack:
        if stand_in:
            url, key = stack.enter_context(_standing_in(console)), KEY
        screen = report.Screen(console, checks)
        found = asyncio.run(_run(url or "", model, key, timeout, repeat, screen))
    console.print(report.verdict(checks, screen.outcomes))
    if json:
        text = report.dumped(report.document(found, repeat, screen.outcomes))
        Path(json).write_text(text, "utf-8")
    return int(any(each.state == "failed" for each in screen.outcomes))


@contextmanager
def _standing_in(console: Console) -> Iterator[str]:
    """A server of the scripted stand-in; its URL."""
    from vllm_mlx_harmony.cli.demo import home_directory, written
    from vllm_mlx_harmony.cli.process import ADDRESS, serving
    from vllm_mlx_harmony.cli.screen import busy
    from vllm_mlx_harmony.verify.samples import SCRIPTS

    with ExitStack() as stack:
        with busy(console, "starting a server with a scripted stand-in for the model"):
            home = stack.enter_context(home_directory())
            model = written("standin-verify", SCRIPTS, home)
            server = stack.enter_context(serving(model, home, ["--api-key", KEY]))
        yield f"http://{ADDRESS}:{server.port}"


async def _run(  # noqa: PLR0917
    url: str, model: str | None, key: str | None, timeout: float, repeat: int, screen: Screen
) -> str:
    """Runs the checks of ``screen``. Returns the name of the model."""
    import httpx

    from vllm_mlx_harmony.verify import checks, trial
    from vllm_mlx_harmony.verify.values import Failed

    try:
        async with trial.client(url, key, timeout) as client:
            try:
                listed = await trial.models(client)
            except Failed as error:
                if model is None:
                    raise UsageError(f"{error}: set --model, or --key") from error
                listed = {model: None}
            if model is None and len(listed) != 1:
                names = ", ".join(listed) or "none"
                raise UsageError(f"the server has {names}: choose a model with --model")
            name = model or next(iter(listed))
            server = trial.Server(client, name, key, listed.get(name))
            with screen:
                await checks.run(server, screen.checks, repeat, screen.add)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageError(f"{url!r} is not a server's address: {error}") from error
    except httpx.TransportError as error:
        raise UsageError(f"no server answers at {url}: {error}") from error
    return name
