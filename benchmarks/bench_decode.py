"""Decoding speed: streamed chats against the host's own raw completions, in one run, by turns.

Knows two servers of the same tiny random gpt-oss, one without the plugin and one with it, on each
engine of the host. A raw completion is all the host does per token without any parsing: what a
chat may cost is measured by it. Needs vllm-mlx and the plugin in one environment; run by the leg
`bench`. Every number is the median of several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx
from bench_table import Row, printed

from vllm_mlx_harmony import _startup, standin
from vllm_mlx_harmony.cli.process import ADDRESS, command, serving
from vllm_mlx_harmony.core import render, vocab
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.protocols import chat

GOAL = 0.97
"""Tokens per second of a chat beside a raw completion, at least."""
TOKENS = {1: 96, 8: 32}
"""Of each answer, by the number of streams."""
ENGINES = {"simple": (), "batched": ("--continuous-batching",)}

PLAIN = {"temperature": 1.0, "top_p": 1.0}
NUCLEUS = {"temperature": 1.0, "top_p": 0.9}
MIXED = (PLAIN, NUCLEUS, {"temperature": 0.7, "top_p": 1.0}, {"temperature": 0.0, "top_p": 1.0})
SETTINGS: dict[str, Sequence[dict[str, float]]] = {
    "top_p 1": (PLAIN,),
    "top_p 0.9": (NUCLEUS,),
    "mixed": MIXED,
}
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


def main() -> int:
    """Prints the table; 1 when a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--settings", choices=SETTINGS, action="append")
    parser.add_argument("--streams", type=int, choices=TOKENS, action="append")
    parsed = parser.parse_args()
    print("the model is a tiny gpt-oss with random weights: compare ratios, not numbers")
    with tempfile.TemporaryDirectory() as directory:
        model = standin.write_tiny(Path(directory, "tiny"))
        return printed(
            row
            for engine in parsed.engine or ENGINES
            for row in measured(
                model,
                engine,
                parsed.settings or list(SETTINGS),
                parsed.streams or list(TOKENS),
                parsed.runs,
            )
        )


def measured(
    model: Path, engine: str, settings: Sequence[str], counts: Sequence[int], runs: int
) -> Iterator[Row]:
    """A row for each number of streams and each way to sample."""
    with server(model, engine, False) as host, server(model, engine, True) as plugin:
        for streams in counts:
            for name in settings:
                if name == "mixed" and streams == 1:
                    continue
                load = Load(SETTINGS[name], streams, TOKENS[streams])
                sides = Raw(host), Chat(plugin)
                theirs, ours = asyncio.run(taken(sides, load, engine, runs))
                total = load.streams * load.tokens
                yield Row(
                    f"{engine}, {streams} at once, {name}" if streams > 1 else f"{engine}, {name}",
                    "tok/s",
                    total / theirs,
                    total / ours,
                    f"{GOAL} of raw",
                    theirs / ours >= GOAL,
                )


@dataclass(frozen=True)
class Load:
    """So many answers at once, of so many tokens; their settings in turn."""

    settings: Sequence[dict[str, float]]
    streams: int
    tokens: int


@dataclass(frozen=True)
class Raw:
    """The host's completions: text in, text out.

    It draws a whole batch by the settings of one request, which one is chance: of mixed ones it may
    be a greedy one, which costs next to nothing, or one that sorts all ids for everybody. So all
    requests ask for the same settings, for each of those of a load in turn, and the mean time of
    these batches is what the host would take if each request paid for its own.
    """

    base_url: str
    path: str = "/v1/completions"
    waits: bool = False
    mixes: bool = False

    def body(self) -> dict[str, Any]:
        """The prompt of the chat, as text."""
        prompt = render.render(chat.read({"model": "m", "messages": MESSAGES}, Defaults()).turn).ids
        return {"prompt": vocab.encoding().decode(list(prompt))}


@dataclass(frozen=True)
class Chat:
    """Chat Completions with the plugin."""

    base_url: str
    path: str = "/v1/chat/completions"
    waits: bool = True
    mixes: bool = True

    def body(self) -> dict[str, Any]:
        """A message."""
        return {"messages": MESSAGES}


async def taken(sides: Sequence[Raw | Chat], load: Load, engine: str, runs: int) -> list[float]:
    """Seconds each side takes, the median of ``runs``; by turns, so that both share the noise.

    The host's simple engine refuses a second request, ours lets it wait: the host gets them one
    after the other.
    """
    seconds: list[list[float]] = [[], []]
    async with httpx.AsyncClient(timeout=600) as client:
        for run in range(runs + 1):
            for side, results in zip(sides, seconds, strict=True):
                together = engine == "batched" or side.waits
                loads = (
                    [load] if side.mixes else [replace(load, settings=[s]) for s in load.settings]
                )
                took = [await once(client, side, load, together) for load in loads]
                if run:  # the first one warms up
                    results.append(fmean(took))
    return [median(results) for results in seconds]


async def once(client: httpx.AsyncClient, side: Raw | Chat, load: Load, together: bool) -> float:
    """Seconds until all answers are there; asked again when a random one ended by itself."""
    while True:
        asked = [
            answer(client, side, load.settings[at % len(load.settings)], load.tokens)
            for at in range(load.streams)
        ]
        began = time.perf_counter()
        whole = await asyncio.gather(*asked) if together else [await answer for answer in asked]
        if all(whole):
            return time.perf_counter() - began


async def answer(
    client: httpx.AsyncClient, side: Raw | Chat, settings: dict[str, float], tokens: int
) -> bool:
    """Reads one streamed answer; whether it has all its tokens."""
    body = {**side.body(), **settings, "model": "tiny", "max_tokens": tokens, "stream": True}
    finish = None
    async with client.stream("POST", side.base_url + side.path, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    finish = choice.get("finish_reason") or finish
    return finish == "length"


@contextmanager
def server(model: Path, engine: str, plugged: bool) -> Iterator[str]:
    """The host with or without the plugin, as a process; its base URL."""
    flags = ("--served-model-name", "tiny", *ENGINES[engine])
    made = command if plugged else without_plugin
    with (
        tempfile.TemporaryDirectory() as home,
        serving(model, Path(home), flags, command=made) as running,
    ):
        yield f"http://{ADDRESS}:{running.port}"


def without_plugin(model: Path, port: int, flags: Sequence[str]) -> list[str]:
    """The host's own command."""
    where = ("--host", ADDRESS, "--port", str(port))
    return [sys.executable, "-m", _startup.HOST, "serve", str(model), *where, *flags]


if __name__ == "__main__":
    sys.exit(main())
