"""bench: measures how fast a server is, as a client sees it on the user's own machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.verify import connected, read_results, require

if TYPE_CHECKING:
    from vllm_mlx_harmony.measure.plan import Measurement, Point
    from vllm_mlx_harmony.measure.requests import Client, Message

PACKAGES = ("httpx", "httpx_sse")
RESTART = 8_000
"""Tokens of the prompt that is sent again after a restart."""


def run(
    *,
    url: str | None,
    model: str | None,
    key: str | None,
    repeat: int,
    longest: int,
    timeout: int,
    json: str | None,
    html: str | None,
    compare: Sequence[str] | None,
) -> int:
    """Measures a server and prints a table. Returns 0 unless a measurement failed.

    Raises ``UsageError`` if the server cannot be measured.
    """
    require("bench", PACKAGES)
    from vllm_mlx_harmony.measure import results

    console = Console(highlight=False)
    if compare:
        console.print(results.compared(*(read_results(name, "bench") for name in compare)))
        return 0
    run = Run(console, repeat, longest, timeout)
    if url is not None:
        asyncio.run(run.measure(url, model, key))
    elif model is not None:
        run.own(Path(model))
    else:
        raise UsageError("give the URL of a server, or --model with a model's directory")
    found = results.document(run.model, run.server, run.points)
    console.print(results.table(found))
    if json:
        Path(json).write_text(results.dumped(found), "utf-8")
    if html:
        Path(html).write_text(results.html(found), "utf-8")
    return int(run.failed)


class Run:
    """Measurements of one server and their progress on the terminal."""

    def __init__(self, console: Console, repeat: int, longest: int, timeout: int) -> None:
        self.console = console
        self.repeat = repeat
        self.longest = longest
        self.timeout = timeout
        self.points: list[Point] = []
        self.model = ""
        self.server: dict[str, str] = {}
        self.failed = False

    async def measure(self, url: str, model: str | None, key: str | None) -> None:
        """Runs all measurements that fit the model's context."""
        from vllm_mlx_harmony.measure.plan import plan

        async def all_of_them(client: Client, context: int | None) -> None:
            await client.calibrate()
            await self._run(client, [*plan(context, self.longest)])

        await self._connected(url, model, key, all_of_them)

    def own(self, model: Path) -> None:
        """Measures a server of this package, which is then started again with its disk cache."""
        from vllm_mlx_harmony.cli.demo import home_directory
        from vllm_mlx_harmony.cli.process import ADDRESS, serving
        from vllm_mlx_harmony.cli.screen import busy
        from vllm_mlx_harmony.measure.plan import Point
        from vllm_mlx_harmony.measure.requests import FEW

        if not model.is_dir():
            raise UsageError(f"{model} is not a model's directory")
        prompt: list[Message] = []

        async def remember(client: Client, context: int | None) -> None:
            await client.calibrate()
            prompt.extend(client.prompt(min(RESTART, self.longest, (context or RESTART) // 2)))
            await client.answer(prompt, FEW)

        async def again(client: Client, context: int | None) -> None:
            await client.answer(client.text(50), FEW)  # what only the first request costs
            timed = await client.answer(prompt, FEW)
            self.points.append(Point("first token after a restart", timed.prompt, timed.first))

        with home_directory() as home:
            flags = ["--ssd-cache-dir", str(home / "cache")]
            for measured in (True, False):
                with ExitStack() as stack:
                    with busy(self.console, "starting the server"):
                        server = stack.enter_context(serving(model, home, flags))
                    url = f"http://{ADDRESS}:{server.port}"
                    if measured:
                        asyncio.run(self.measure(url, None, None))
                    use = remember if measured else again
                    asyncio.run(self._connected(url, None, None, use))

    async def _connected(
        self,
        url: str,
        model: str | None,
        key: str | None,
        use: Callable[[Client, int | None], Coroutine[None, None, None]],
    ) -> None:
        """Calls ``use`` with a client and the model's context. Raises ``UsageError``."""
        from vllm_mlx_harmony.measure.requests import Client
        from vllm_mlx_harmony.verify import trial

        server = connected(url, key, self.timeout, model, purpose="measured")
        async with server as (http, self.model, context):
            self.server = await trial.versions(http)
            await use(Client(http, self.model), context)

    async def _run(self, client: Client, measurements: Sequence[Measurement]) -> None:
        """Round by round, so that what changes on the machine meanwhile is in the spread."""
        import httpx

        from vllm_mlx_harmony.measure.requests import Unusable

        columns = (
            *(BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
            TextColumn("left · {task.description}", style="dim"),
        )
        failed: set[str] = set()
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("", total=len(measurements) * self.repeat)
            for _ in range(self.repeat):
                for each in measurements:
                    progress.update(task, description=each.name)
                    try:
                        if each.name not in failed:
                            self.points += [point async for point in each.run(client)]
                    except (Unusable, httpx.HTTPError) as error:
                        failed.add(each.name)
                        problem = str(error) or type(error).__name__
                        progress.console.print(f"✗ {each.name}: {problem}", style="red")
                    progress.advance(task)
        self.failed |= bool(failed)
