"""verify: checks whether a server does what its APIs promise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vllm_mlx_harmony.cli.errors import UsageError, read_text

if TYPE_CHECKING:
    from httpx import AsyncClient

    from vllm_mlx_harmony.verify.checks import Check
    from vllm_mlx_harmony.verify.report import Screen
    from vllm_mlx_harmony.verify.values import Document

KEY = "stand-in"
"""The stand-in's API key."""

PACKAGES = ("anthropic", "httpx", "httpx_sse", "jsonschema", "openai")


def run(
    *,
    url: str | None,
    model: str | None,
    key: str | None,
    only: Sequence[str],
    case: Sequence[str],
    repeat: int,
    timeout: float,
    stand_in: bool,
    json: str | None,
    html: str | None,
    compare: list[str] | None,
) -> int:
    """Prints what a server does right and wrong. Returns 0 if all that it supports passed, else 1.

    Raises ``UsageError`` if the checks cannot run.
    """
    require("verify", PACKAGES)
    from vllm_mlx_harmony.verify import report, suite
    from vllm_mlx_harmony.verify.checks import chosen

    console = Console(highlight=False)
    if compare:
        shown, right = report.compared(*(read_results(name, "verify") for name in compare))
        console.print(shown)
        return int(not right)
    if stand_in == (url is not None):
        raise UsageError("give the URL of a server, or --stand-in")
    cases = tuple(_case(name) for name in case)
    if not (checks := cases or chosen(suite.CHECKS, only)):
        raise UsageError(f"no check is called {' or '.join(only)}: see docs/verify.md")
    with ExitStack() as stack:
        if stand_in:
            url, key = stack.enter_context(_standing_in(console)), KEY
        screen = report.Screen(console, checks)
        found = asyncio.run(_run(url or "", model, key, timeout, repeat, screen))
    console.print(report.verdict(checks, screen.outcomes))
    results = report.document(found, repeat, screen.outcomes)
    if json:
        Path(json).write_text(report.dumped(results), "utf-8")
    if html:
        Path(html).write_text(report.html(checks, results, screen.outcomes), "utf-8")
    return int(any(each.state == "failed" for each in screen.outcomes))


def _case(name: str) -> Check:
    """The check of a file that the inspector saved."""
    from vllm_mlx_harmony.verify import saved

    try:
        return saved.check(Path(name).stem, read_text(name))
    except ValueError as error:
        raise UsageError(f"{name} is not a case of the inspector: {error}") from error


def require(command: str, packages: Sequence[str]) -> None:
    """Raises ``UsageError`` if a package that the command needs is not installed."""
    if missing := [name for name in packages if not find_spec(name)]:
        fix = "pip install 'vllm-mlx-harmony[verify]'"
        raise UsageError(f"{command} needs {', '.join(missing)}: {fix}")


def read_results(name: str, command: str) -> Document:
    """A file that the ``--json`` of a command wrote. Raises ``UsageError`` for any other."""
    try:
        results = loads(read_text(name))
        if results["kind"] == f"vllm-mlx-harmony {command}":
            return dict(results)
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{name} is not a file that {command} --json wrote")


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


@asynccontextmanager
async def connected(
    url: str, key: str | None, timeout: float, model: str | None, *, purpose: str
) -> AsyncIterator[tuple[AsyncClient, str, int | None]]:
    """A client of a server, the name of its model and the context length, if that is listed.

    Raises ``UsageError`` for a server that cannot be reached, or is not fit for the ``purpose``.
    """
    import httpx

    from vllm_mlx_harmony.verify import trial
    from vllm_mlx_harmony.verify.values import Failed

    try:
        async with trial.client(url, key, timeout) as client:
            yield client, *await trial.selected(client, model)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageError(f"{url!r} is not a server's address: {error}") from error
    except httpx.TransportError as error:
        raise UsageError(f"no server answers at {url}: {error}") from error
    except Failed as error:
        raise UsageError(f"the server at {url} cannot be {purpose}: {error}") from error


async def _run(  # noqa: PLR0917
    url: str, model: str | None, key: str | None, timeout: float, repeat: int, screen: Screen
) -> str:
    """Runs the checks of ``screen``. Returns the name of the model."""
    from vllm_mlx_harmony.verify import checks, trial

    async with connected(url, key, timeout, model, purpose="checked") as (client, name, context):
        server = trial.Server(client, name, key, context)
        with screen:
            await checks.run(server, screen.checks, repeat, screen.add)
    return name
