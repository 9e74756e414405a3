"""verify: checks whether a server does what its APIs promise."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vllm_mlx_harmony.cli.errors import UsageError, number, read_text

if TYPE_CHECKING:
    from httpx import AsyncClient

    from vllm_mlx_harmony.verify.checks import Check
    from vllm_mlx_harmony.verify.report import Screen
    from vllm_mlx_harmony.verify.values import Document

KEY = "stand-in"
"""The stand-in's API key."""

PACKAGES = ("anthropic", "httpx", "httpx_sse", "jsonschema", "openai")


def main(arguments: Sequence[str], prog: str = "vllm-mlx-harmony verify") -> int:
    """Prints what a server does right and wrong. Returns 0 if all that it supports passed."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Checks any server of OpenAI's or Anthropic's APIs. The exit code is 0 only if "
        "everything that it supports passed; with --compare, if no check that passed now fails.",
    )
    add_server(
        parser,
        model="name of the model (default: the server's only one)",
        repeat="runs of each check that depends on what the model writes",
        defaults=(1, 300),
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="run only these checks: a name, its beginning or a pattern, such as wire, "
        "format.chat or *.messages.stop; repeatable",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="FILE",
        help="run only the case that the inspector saved in FILE; repeatable",
    )
    parser.add_argument(
        "--stand-in",
        dest="standin",
        action="store_true",
        help="check this package's own server, with a scripted stand-in model",
    )
    parser.add_argument(
        "--write-stand-in",
        dest="write_standin",
        metavar="DIR",
        help="write the scripted stand-in model to DIR, for any server of mlx-lm's models",
    )
    options = parser.parse_args(arguments)
    require("verify", PACKAGES)
    from vllm_mlx_harmony.verify import report, suite
    from vllm_mlx_harmony.verify.checks import chosen

    console = Console(highlight=False)
    if options.compare:
        shown, right = report.compared(*(read_results(name, "verify") for name in options.compare))
        console.print(shown)
        return int(not right)
    if options.write_standin:
        from vllm_mlx_harmony import standin
        from vllm_mlx_harmony.verify.samples import SCRIPTS

        console.print(
            f"serve {standin.write(Path(options.write_standin), SCRIPTS)}", soft_wrap=True
        )
        return 0
    if options.standin == (options.url is not None):
        raise UsageError("give the URL of a server, or --stand-in")
    cases = tuple(_case(name) for name in options.case)
    if not (checks := cases or chosen(suite.CHECKS, options.only)):
        raise UsageError(f"no check is called {' or '.join(options.only)}: see docs/verify.md")
    screen = report.Screen(console, checks)
    with ExitStack() as stack:
        if options.standin:
            options.url, options.key = stack.enter_context(_standin_server(console)), KEY
        model = asyncio.run(_run(options, screen))
    console.print(report.verdict(checks, screen.outcomes))
    results = report.document(model, options.repeat, screen.outcomes)
    write_results(options, results, report.html(checks, results, screen.outcomes))
    return int(any(outcome.state == "failed" for outcome in screen.outcomes))


async def _run(options: argparse.Namespace, screen: Screen) -> str:
    """Runs the checks of ``screen``. Returns the name of the model."""
    from vllm_mlx_harmony.verify import checks, trial

    async with connected(options, purpose="checked") as (client, name, context):
        server = trial.Server(client, name, options.key, context)
        with screen:
            async for outcome in checks.run(server, screen.checks, options.repeat):
                screen.add(outcome)
    return name


def _case(name: str) -> Check:
    """The check of a file that the inspector saved."""
    from vllm_mlx_harmony.verify import saved

    try:
        return saved.check(Path(name).stem, read_text(name))
    except ValueError as error:
        raise UsageError(f"{name} is not a case of the inspector: {error}") from error


@contextmanager
def _standin_server(console: Console) -> Iterator[str]:
    """A server of the scripted stand-in; its URL."""
    from vllm_mlx_harmony.cli.process import serving
    from vllm_mlx_harmony.cli.screen import busy
    from vllm_mlx_harmony.cli.standin import home_directory, written
    from vllm_mlx_harmony.verify.samples import SCRIPTS

    with ExitStack() as stack:
        with busy(console, "starting a server with a scripted stand-in model"):
            home = stack.enter_context(home_directory())
            model = written("standin-verify", SCRIPTS, home)
            server = stack.enter_context(serving(model, home, ["--api-key", KEY]))
        yield server.url


# --- What `bench` uses, too


def add_server(
    parser: argparse.ArgumentParser, *, model: str, repeat: str, defaults: tuple[int, int]
) -> None:
    """Adds the arguments of the commands for any server: which one, how often, the results.

    ``defaults`` are those of ``--repeat`` and ``--timeout``.
    """
    repeated, timeout = defaults
    positive, default = number("a positive number"), "(default: %(default)s)"
    add = parser.add_argument
    add("url", nargs="?", metavar="URL", help="URL of the server, with or without /v1")
    add("--model", help=model)
    add("--key", help="the server's API key")
    add("--repeat", type=positive, default=repeated, metavar="N", help=f"{repeat} {default}")
    add(
        "--timeout",
        type=positive,
        default=timeout,
        metavar="SECONDS",
        help=f"read timeout in seconds {default}",
    )
    add("--json", metavar="FILE", help="write the results to FILE as JSON")
    add("--html", metavar="FILE", help="write the results to FILE as an HTML page")
    add(
        "--compare",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="compare two files written with --json",
    )


def require(command: str, packages: Sequence[str]) -> None:
    """Raises ``UsageError`` if a package that the command needs is not installed."""
    if missing := [name for name in packages if not find_spec(name)]:
        fix = "pip install 'vllm-mlx-harmony-server[verify]'"
        raise UsageError(f"{command} needs {', '.join(missing)}: {fix}")


@asynccontextmanager
async def connected(
    options: argparse.Namespace, *, purpose: str
) -> AsyncIterator[tuple[AsyncClient, str, int | None]]:
    """A client of the server, the name of its model and the context length, if that is listed.

    Raises ``UsageError`` for a server that cannot be reached, or is not fit for the ``purpose``.
    """
    import httpx

    from vllm_mlx_harmony.verify import trial
    from vllm_mlx_harmony.verify.values import Failed

    try:
        async with trial.client(options.url, options.key, options.timeout) as client:
            yield client, *await trial.selected(client, options.model)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageError(f"{options.url!r} is not a server's address: {error}") from error
    except httpx.TransportError as error:
        raise UsageError(f"no server answers at {options.url}: {error}") from error
    except Failed as error:
        raise UsageError(f"the server at {options.url} cannot be {purpose}: {error}") from error


def write_results(options: argparse.Namespace, results: Document, page: str) -> None:
    """Writes the files of ``--json`` and ``--html``."""
    if options.json:
        text = json.dumps(results, indent=1, ensure_ascii=False)
        Path(options.json).write_text(f"{text}\n", "utf-8")
    if options.html:
        Path(options.html).write_text(page, "utf-8")


def read_results(name: str, command: str) -> Document:
    """A file that the ``--json`` of a command wrote. Raises ``UsageError`` for any other."""
    try:
        results = json.loads(read_text(name))
        if results["kind"] == f"vllm-mlx-harmony {command}":
            return dict(results)
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{name} is not a file that {command} --json wrote")
