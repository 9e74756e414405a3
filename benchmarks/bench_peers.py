#!/usr/bin/env python3
"""How fast the MLX servers of PyPI are beside this one, on the same random weights, over HTTP.

    python benchmarks/bench_peers.py            all servers
    python benchmarks/bench_peers.py NAME…      this project's and these
    python benchmarks/bench_peers.py --quick    short answers, one round, the tiny model: a trial
    python benchmarks/bench_peers.py --model "12 layers"    with one of the two models
    python benchmarks/bench_peers.py --page     writes the tables to docs/speed.md, too

Each peer is the newest on PyPI, in an environment of its own below `build/peers`. These are kept,
and used again; remove one to install what is newest then. This project's own server runs in the
environment of this program.

All servers of a model are started, and stopped (SIGSTOP) but for the one that is measured. They
take turns at each measurement, so whatever else the machine does is shared. Answers of random
weights mean nothing, and parsers may hold them back, so time is that of whole streams: of one token
for a first token, and what further tokens add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from bench_start import family, processor_time
from bench_table import compared, table
from peers import KEY, PEERS, REPOSITORY, Peer, install, serving, version

from vllm_mlx_harmony import standin

BUILD, PAGE = REPOSITORY / "build" / "peers", REPOSITORY / "docs" / "speed.md"
OURS = "light"
TITLE = "## Beside other servers"
INTRODUCTION = """\
The newest MLX servers of PyPI, with the same weights: a gpt-oss of random numbers, tiny (4 layers,
64 wide) or of 12 layers, 256 wide. Asked over HTTP on {date}, on {processors} processors of Linux,
by `python3 ci/leg.py peers`. Each value is the median of {rounds}, measured in turns, and one
of a first token that of {repeats} in each turn. In parentheses is this project's value divided by
the peer's, bold where the peer is better: less is better in all columns.

- **processor** and **one stream**: what each further token of an answer takes at temperature 0, of
  the processors with all processes of the server, and on the clock; **first token**: of a prompt of
  {short} words, alone; **slowest of {together}**: the last of so many such prompts at once.
- **long prompt**: its first token, alone; **short beside it**: that of a short prompt sent
  meanwhile, as a part of the long one's time; **the long one meanwhile**, in units of its time
  alone.
- **tool loop**: an agent's turns of 16 tokens, behind 1,000 words, each with a call and its 500
  words.

This says nothing about a Mac, for which all of these servers are made: there, a GPU computes, and
memory is the limit. Nor does it say whether an answer is right ([yardstick.md](yardstick.md)).
"""

SIZE = """\
**{model}**: an answer of {answer} tokens, a long prompt of {long:,} words, {turns} turns
"""

SERVERS = {
    **{name: peer for name, peer in PEERS.items() if name != "vllm"},  # that is no server for mlx
    # Not in the yardstick: it has models of its own, and runs no code of a stand-in's directory.
    "mlx-beam": Peer(
        "mlx-beam",
        ("mlx-beam", "mlx[cpu]; sys_platform == 'linux'"),
        "beam serve --model {model} --host {host} --port {port} --api-key {key}",
    ),
}

SHORT, TOGETHER, REPEATS, READ_TIMEOUT = 50, 8, 5, 900.0
WORDS = ("time", "year", "people", "way", "man", "woman", "child", "world")
"""Each is one token, with the space before it."""

HEADERS = {"Authorization": f"Bearer {KEY}"}

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FILE = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
FAULTS = (RuntimeError, httpx.HTTPError, psutil.Error, KeyError, ValueError)
"""What a server that cannot be measured raises."""


@dataclass(frozen=True)
class Size:
    """How much is measured: tokens of the answer, words of the long prompt, turns of the loop."""

    answer: int
    long: int
    turns: int


WHOLE = {"tiny": Size(150, 8_000, 10), "12 layers": Size(60, 1_500, 3)}
QUICK = {"tiny": Size(8, 800, 2)}


@dataclass
class Server:
    """A running server. ``model`` is what requests call its model."""

    url: str
    process: subprocess.Popen[bytes]
    model: str

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Lets the server run within the block, and only there."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def processor(self) -> float:
        return sum(processor_time(process) for process in family(self.process))

    async def seconds(self, messages: Sequence[Any], most: int = 1, **fields: Any) -> float:
        """Until an answer of ``most`` tokens has been streamed. Raises ``RuntimeError`` if the
        server does not count so many."""
        body = {"model": self.model, "messages": messages, "max_tokens": most, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **fields}
        began = time.perf_counter()
        async with httpx.AsyncClient(headers=HEADERS, timeout=READ_TIMEOUT) as http:
            response = await http.post(f"{self.url}/v1/chat/completions", json=body)
        taken = time.perf_counter() - began
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        usages = [usage for event in events if (usage := json.loads(event).get("usage"))]
        if not usages or usages[-1]["completion_tokens"] != most:
            raise RuntimeError(f"{most} tokens: {response.status_code} {response.text[-300:]}")
        return taken


# --- What is measured


def user(count: int) -> list[Any]:
    """A prompt of about ``count`` tokens of its own."""
    return [{"role": "user", "content": " ".join(random.choices(WORDS, k=count))}]


async def stream(server: Server, size: Size) -> list[float]:
    """One answer alone: milliseconds per token, of the processor and of time; its first token."""
    firsts = []
    for _ in range(REPEATS):
        before = server.processor()
        seconds = await server.seconds(user(SHORT))
        firsts.append((server.processor() - before, seconds))
    processor, first = (median(values) for values in zip(*firsts, strict=True))
    before = server.processor()
    seconds = await server.seconds(user(SHORT), size.answer + 1)
    per_token = 1000 / size.answer
    processor = server.processor() - before - processor
    return [processor * per_token, (seconds - first) * per_token, first]


async def together(server: Server, _size: Size) -> list[float]:
    """The slowest first token of several at once."""
    slowest = []
    for _repeat in range(REPEATS):
        several = [server.seconds(user(SHORT)) for _request in range(TOGETHER)]
        slowest.append(max(await asyncio.gather(*several)))
    return [median(slowest)]


async def beside(server: Server, size: Size) -> list[float]:
    """A long prompt, a short one beside it as its part of that time, and the long one meanwhile."""
    alone = await server.seconds(user(size.long))
    task = asyncio.ensure_future(server.seconds(user(size.long)))
    await asyncio.sleep(alone * random.uniform(0.1, 0.6))
    short = await server.seconds(user(SHORT))
    return [alone, short / alone, await task / alone]


async def loop(server: Server, size: Size) -> list[float]:
    """An agent's turns: seconds of all."""
    messages, seconds = user(1000), 0.0
    for turn in range(size.turns):
        seconds += await server.seconds(messages, 16, tools=[FILE])
        function = {"name": "read", "arguments": json.dumps({"path": f"file-{turn}"})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": user(500)[0]["content"]},
        ]
    return [seconds]


Measurement = Callable[[Server, Size], Coroutine[Any, Any, list[float]]]

MEASUREMENTS: dict[Measurement, tuple[str, ...]] = {
    stream: ("processor, ms/token", "one stream, ms/token", "first token, s"),
    together: (f"slowest of {TOGETHER}, s",),
    beside: ("long prompt, s", "short beside it, part", "the long one meanwhile, ×"),
    loop: ("tool loop, s",),
}
"""Columns, in all of which less is better."""
COLUMNS = tuple(column for columns in MEASUREMENTS.values() for column in columns)

Values = dict[str, float]


# --- The session


def main() -> int:
    """Prints the tables; returns 1 if this project's own server could not be measured."""
    parser = argparse.ArgumentParser(description="Speed beside other servers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--quick", action="store_true", help="a trial")
    parser.add_argument("--model", choices=WHOLE, help="only this model")
    parser.add_argument("--page", action="store_true", help="write docs/speed.md, too")
    parsed = parser.parse_args()
    if unknown := set(parsed.names) - set(SERVERS):
        parser.error(f"no server is called {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stopped servers would stay for ever
    sizes, rounds = (QUICK, 1) if parsed.quick else (WHOLE, 3)
    if parsed.model:
        sizes = {name: size for name, size in sizes.items() if name == parsed.model}
    if not sizes or (parsed.model and parsed.page):
        parser.error("--quick has the tiny model only, and --page needs both")
    places, problems = installed([OURS, *(parsed.names or SERVERS)])
    words = {"date": datetime.now(UTC).date(), "processors": os.cpu_count(), "rounds": rounds}
    words |= {"short": SHORT, "together": TOGETHER, "repeats": REPEATS}
    parts = [INTRODUCTION.format(**words)]
    parts.append(table(("Server", "Version", "mlx", "mlx-lm"), map(versions, places.items())))
    measured = True
    for model, size in sizes.items():
        found = session(model, size, rounds, places, problems)
        titled = {SERVERS[name].title: found.get(name, {}) for name in places}
        parts += [SIZE.format(model=model, **vars(size)), compared(titled, COLUMNS)]
        measured = measured and COLUMNS[0] in found.get(OURS, {})
    parts += [f"- {SERVERS[name].title}: {why}" for name, why in problems.items()]
    print("\n".join(parts))
    if parsed.page:
        before = PAGE.read_text("utf-8").partition(TITLE)[0].rstrip()
        PAGE.write_text("\n".join([f"{before}\n\n{TITLE}\n", *parts, ""]), "utf-8")
        subprocess.run([sys.executable, "-m", "mdformat", PAGE], check=True)
    return int(not measured)


Problems = dict[str, str]
"""The first of each server."""


def installed(names: Sequence[str]) -> tuple[dict[str, Path], Problems]:
    """The environments of those that can be installed."""
    places, problems = {OURS: Path(sys.prefix)}, Problems()
    for name in dict.fromkeys(names):
        place = BUILD / name
        try:
            if name != OURS and not (place / "installed").exists():
                shutil.rmtree(place, ignore_errors=True)
                install(place, SERVERS[name])
                (place / "installed").touch()
            places.setdefault(name, place)
        except subprocess.CalledProcessError as error:
            problems[name] = f"cannot be installed: {error}"
    return places, problems


def versions(item: tuple[str, Path]) -> list[str]:
    name, place = item
    of_server = version(place, SERVERS[name].distribution or name)
    return [SERVERS[name].title, of_server, version(place, "mlx"), version(place, "mlx-lm")]


def session(
    model: str, size: Size, rounds: int, places: Mapping[str, Path], problems: Problems
) -> dict[str, Values]:
    """The medians of all servers that start, which take turns at each measurement."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        directory = written(Path(home, "models", f"gpt-oss-{model.replace(' ', '-')}"), model)
        servers: dict[str, Server] = {}
        for name, place in places.items():
            log = Path(home, name, "log")
            log.parent.mkdir()
            try:
                begun = stack.enter_context(serving(SERVERS[name], place, directory, log))
                server = servers[name] = Server(*begun, called(begun[0], directory))
                stack.callback(os.killpg, server.process.pid, signal.SIGCONT)  # so that it ends
                with server.awake():
                    asyncio.run(stream(server, size))  # warm
            except FAULTS as error:
                problems.setdefault(name, f"{model}: {reason(error)}")
        for turn in range(rounds):
            for measurement, columns in MEASUREMENTS.items():
                for name, server in servers.items():
                    random.seed(f"{turn} {columns}")
                    try:
                        with server.awake():
                            found = asyncio.run(measurement(server, size))
                    except FAULTS as error:
                        problems.setdefault(name, f"{model}, {columns[0]}: {reason(error)}")
                        continue
                    print(model, name, *columns, *found, file=sys.stderr)
                    for column, value in zip(columns, found, strict=True):
                        values[name][column].append(value)
    return {name: {column: median(of) for column, of in by.items()} for name, by in values.items()}


def reason(error: Exception) -> str:
    """Its end: a log's and a response's is what tells most."""
    text = " ".join(f"{type(error).__name__}: {error}".replace("`", "'").split())
    return f"`{text[-200:]}`"


def called(url: str, directory: Path) -> str:
    """What requests call the model."""
    document = httpx.get(f"{url}/v1/models", headers=HEADERS, timeout=READ_TIMEOUT).json()
    listed: list[str] = [model["id"] for model in document["data"]]
    return next((name for name in listed if directory.name in name), str(directory))


def written(directory: Path, model: str) -> Path:
    """Writes a model: the tiny one, or the one of 12 layers that `bench_engine.py` measures."""
    if model == "tiny":
        return standin.write_tiny(directory)
    import mlx.core as mx
    from bench_engine import wide

    standin.write_tiny(directory, width=256)
    mx.random.seed(0)
    deep = wide()
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": 12, "layer_types": deep.args.layer_types}
    (directory / "config.json").write_text(json.dumps(config))
    deep.save_weights(str(directory / "model.safetensors"))
    return directory


if __name__ == "__main__":
    sys.exit(main())
