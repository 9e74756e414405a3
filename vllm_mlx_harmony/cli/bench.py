"""bench: measures how fast a server is, as a client sees it on the user's own machine."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vllm_mlx_harmony.cli.errors import UsageError, number
from vllm_mlx_harmony.cli.verify import add_server, connected, read_results, require, write_results

if TYPE_CHECKING:
    from vllm_mlx_harmony.bench.plan import Measurement, Point
    from vllm_mlx_harmony.bench.requests import Client, Message

PACKAGES = ("httpx", "httpx_sse")
RESTART = 8_000
"""Tokens of the prompt that is sent again after a restart."""


def main(arguments: Sequence[str]) -> int:
    """Measures a server and prints a table. Returns 0 unless a measurement failed."""
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony bench",
        description="Measures any server with Chat Completions: the time to the first token and "
        "the speed of one request and of several at once, a tool loop, and how much a long prompt "
        "slows down another answer.",
    )
    add_server(
        parser,
        model="name of the model at URL; without URL, a model's directory, for which this package "
        "starts a server",
        repeat="runs per measurement",
        defaults=(3, 600),
    )
    parser.add_argument(
        "--longest",
        type=number("a positive number"),
        default=100_000,
        metavar="TOKENS",
        help="longest prompt (default: 100000, or what the context allows)",
    )
    options = parser.parse_args(arguments)
    require("bench", PACKAGES)
    from vllm_mlx_harmony.bench import results

    console = Console(highlight=False)
    if options.compare:
        console.print(results.compared(*(read_results(name, "bench") for name in options.compare)))
        return 0
    run = Run(console, options)
    if options.url is not None:
        asyncio.run(run.connected(run.measure))
    elif options.model is not None:
        run.own(Path(options.model))
    else:
        raise UsageError("give the URL of a server, or --model with a model's directory")
    found = results.document(run.model, run.server, run.points)
    console.print(results.table(found))
    write_results(options, found, results.html(found))
    return int(run.failed)


class Run:
    """Measurements of one server and their progress on the terminal."""

    def __init__(self, console: Console, options: argparse.Namespace) -> None:
        self.console = console
        self.options = options
        self.points: list[Point] = []
        self.model = ""
        self.server: dict[str, str] = {}
        self.failed = False

    def own(self, model: Path) -> None:
        """Measures a server of this package, which is then started again with its disk cache."""
        from vllm_mlx_harmony.bench.plan import Point
        from vllm_mlx_harmony.bench.requests import SHORT_ANSWER_TOKENS
        from vllm_mlx_harmony.cli.process import serving
        from vllm_mlx_harmony.cli.screen import busy
        from vllm_mlx_harmony.cli.standin import home_directory

        if not model.is_dir():
            raise UsageError(f"{model} is not a model's directory")
        prompt: list[Message] = []

        async def first(client: Client, context: int | None) -> None:
            await self.measure(client, context)
            room = min(RESTART, self.options.longest, (context or RESTART) // 2)
            prompt.extend(client.prompt(room))
            await client.answer(prompt, SHORT_ANSWER_TOKENS)

        async def again(client: Client, _: int | None) -> None:
            # What only the first request costs is not measured.
            await client.answer(client.text(50), SHORT_ANSWER_TOKENS)
            timed = await client.answer(prompt, SHORT_ANSWER_TOKENS)
            self.points.append(Point("first token after a restart", timed.prompt, timed.first))

        with home_directory() as home:
            flags = ["--ssd-cache-dir", str(home / "cache")]
            for use in (first, again):
                with ExitStack() as stack:
                    with busy(self.console, "starting the server"):
                        server = stack.enter_context(serving(model, home, flags))
                    self.options.url = server.url
                    self.options.model = None
                    asyncio.run(self.connected(use))

    async def connected(
        self, use: Callable[[Client, int | None], Coroutine[None, None, None]]
    ) -> None:
        """Calls ``use`` with a client and the model's context. Raises ``UsageError``."""
        from vllm_mlx_harmony.bench.requests import Client
        from vllm_mlx_harmony.verify import trial

        async with connected(self.options, purpose="measured") as (http, self.model, context):
            self.server = await trial.versions(http)
            await use(Client(http, self.model), context)

    async def measure(self, client: Client, context: int | None) -> None:
        """Runs all measurements that fit the model's context.

        Round by round, so that what changes on the machine meanwhile is in the spread.
        """
        import httpx

        from vllm_mlx_harmony.bench.plan import plan
        from vllm_mlx_harmony.verify.report import progress
        from vllm_mlx_harmony.verify.values import Failed

        await client.calibrate()
        measurements: list[Measurement] = [*plan(context, self.options.longest)]
        failed: set[str] = set()
        with progress(self.console) as shown:
            task = shown.add_task("", total=len(measurements) * self.options.repeat)
            for measurement in measurements * self.options.repeat:
                shown.update(task, description=measurement.name)
                try:
                    if measurement.name not in failed:
                        self.points += [point async for point in measurement.run(client)]
                except (Failed, httpx.HTTPError) as error:
                    failed.add(measurement.name)
                    problem = str(error) or type(error).__name__
                    shown.console.print(f"✗ {measurement.name}: {problem}", style="red")
                shown.advance(task)
        self.failed = bool(failed)
