#!/usr/bin/env python3
"""What the gateway costs per request, token and stream, beside the same engine asked directly.

    python benchmarks/bench_gateway.py [--quick] [--litellm] [--redis URL] [--json FILE]

Three processes: an engine that speaks vLLM's completions and spends next to nothing on it, the
gateway, pinned to one processor, and this one, which asks both in turn. The gateway checks a key,
counts all its limits and writes an access log. A plain reverse proxy (aiohttp), which only copies
bytes, is measured beside it, in the same way; so is LiteLLM's proxy with ``--litellm``, which is
installed into an environment of its own. With ``--redis``, 600 streams at once go through one
worker and through two (``--workers``), which share that Redis. The engine writes the time into its
answers (microseconds of the monotonic clock, as digits), so that the way of every step to the
client is measured. Requests alternate, so that anything else on the machine affects all alike.
Processor time is that of the server's process: other work hardly changes it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

STEP = 0.02
"""Seconds between two steps of a paced stream: 50 tokens a second."""

DIGITS = 9
"""Of a stamp: microseconds, from the lowest nine digits of the clock."""

WRAP = 10**DIGITS
CHAT = "/v1/chat/completions"
CHAT_STREAM = (
    {"delta": {"role": "assistant", "content": "000000000"}, "finish_reason": None},
    {"delta": {}, "finish_reason": "stop"},
)
"""What the engine answers to LiteLLM, which uses its chat completions."""

COMPLETIONS = "/v1/completions"
KEY = "key-of-the-bench"
LIMITS = ("requests-per-minute", "tokens-per-minute", "requests-per-day", "tokens-per-day")
GOALS = {"request_ms": 1.0, "token_us": 5.0}


# --- the engine: a bare asyncio protocol


KNOWN: dict[str, Any] = {
    "/version": {"version": "0.32.0"},
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "m", "max_model_len": 131072}]},
}
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def engine(port: int, pace: float) -> None:
    """Serves until it is ended; ``pace``: seconds between two steps, 0: all at once."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        script = Script(pace)
        server = await loop.create_server(
            lambda: Connection(script), "127.0.0.1", port, backlog=4096
        )
        await server.serve_forever()

    _with_uvloop(serve())


def proxy(port: int, engine_port: int) -> None:
    """A reverse proxy that copies bytes, as a measure for what any server in between costs."""
    from aiohttp import ClientSession, web

    async def serve() -> None:
        async with ClientSession() as session:

            async def forward(request: web.BaseRequest) -> web.StreamResponse:
                url = f"http://127.0.0.1:{engine_port}{request.path_qs}"
                async with session.post(url, data=await request.read()) as answer:
                    response = web.StreamResponse(headers={"content-type": answer.content_type})
                    response.enable_chunked_encoding()
                    await response.prepare(request)
                    async for piece in answer.content.iter_any():
                        await response.write(piece)
                    await response.write_eof()
                    return response

            runner = web.ServerRunner(web.Server(forward))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await asyncio.Event().wait()

    _with_uvloop(serve())


class Script:
    """The events of an answer, as vLLM writes them."""

    def __init__(self, pace: float) -> None:
        from vllm_mlx_harmony.core import vocab

        self.pace = pace
        head = vocab.encoding().encode("<|channel|>final<|message|>", allowed_special="all")
        self.first = _event(list(head))
        self.last = _event([vocab.RETURN], "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._digits = [vocab.encode(f"{number:03}")[0] for number in range(1000)]

    def stamp(self) -> bytes:
        """The time, in three ids."""
        now, digits = time.monotonic_ns() // 1000 % WRAP, self._digits
        return _event([digits[now // 10**6], digits[now // 1000 % 1000], digits[now % 1000]])


def _event(ids: list[int], finish: str | None = None) -> bytes:
    choice = {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": ids,
    }
    data = {"id": "cmpl-a4a4b042414aac84", "object": "text_completion", "choices": [choice]}
    return _chunk(f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode())


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


class Connection(asyncio.Protocol):
    """One connection to the engine; one request at a time."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._received = b""
        self._task: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        lengths = [line[15:] for line in lines if line.lower().startswith("content-length:")]
        length = int(lengths[0]) if lengths else 0
        if not found or len(body) < length:
            return
        self._received = body[length:]
        path = lines[0].split(" ")[1]
        if path == COMPLETIONS:
            self._answer(json.loads(body[:length]))
            return
        if path == CHAT:
            about = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            events = ({**about, "choices": [{"index": 0, **choice}]} for choice in CHAT_STREAM)
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            end = b"data: [DONE]\n\n"
            self._transport.write(STREAM + _chunk(text.encode() + end) + b"0\r\n\r\n")
            return
        answer = json.dumps(KNOWN.get(path, {"detail": "Not Found"})).encode()
        status = b"200 OK" if path in KNOWN else b"404 Not Found"
        kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
        self._transport.write(b"HTTP/1.1 %b\r\n%b%b" % (status, kind, answer))

    def _answer(self, asked: dict[str, Any]) -> None:
        script, steps = self._script, asked["max_tokens"]
        grammar = asked.get("structured_outputs") or {}
        if str(grammar.get("grammar", "")).startswith("start: <["):
            self._transport.write(STREAM + script.last)
        elif script.pace and steps > 1:
            self._task = asyncio.ensure_future(self._paced(steps))
        else:
            steps_of_script = b"".join(script.stamp() for _ in range(steps))
            self._transport.write(STREAM + script.first + steps_of_script + script.last)

    async def _paced(self, steps: int) -> None:
        loop = asyncio.get_running_loop()
        self._transport.write(STREAM + self._script.first)
        due = loop.time()
        for _ in range(steps):
            due += self._script.pace
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._transport.write(self._script.stamp())
        self._transport.write(self._script.last)

    def connection_lost(self, _: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        if self._task is not None:
            self._task.cancel()


def _with_uvloop(coroutine: Any) -> Any:
    with suppress(ImportError):
        import uvloop

        uvloop.install()
    return asyncio.run(coroutine)


# --- a client: one connection, one stream at a time


class Client:
    """Asks one server, and reads stamps out of what it says."""

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        """Opens the connection."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def stream(self, steps: int) -> AsyncIterator[tuple[float, list[int]]]:
        """The time that each piece came at, and the stamps in it."""
        if self._writer is None or self._reader is None:
            await self.connect()
        reader, writer = self._reader, self._writer
        assert reader is not None
        assert writer is not None
        body = json.dumps(_body(self._path, steps)).encode()
        writer.write(
            f"POST {self._path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {KEY}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        status = await reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200"), status
        read = _direct if self._path == COMPLETIONS else _spoken
        rest = b""
        while True:
            rest += await reader.read(1 << 18)
            now = time.monotonic_ns() / 1000
            events, _, rest = rest.rpartition(b"\n\n") if b"\n\n" in rest else (b"", b"", rest)
            yield now, read(events)
            if b"\r\n0\r\n\r\n" in events + b"\n\n" + rest:
                return

    async def close(self) -> None:
        """Closes it."""
        if self._writer is not None:
            self._writer.close()


PROMPT: list[int] = []


def _body(path: str, steps: int) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"model": "m", "prompt": PROMPT, "max_tokens": steps, "stream": True}
    user = [{"role": "user", "content": "What time is it?"}]
    return {"model": "m", "messages": user, "max_tokens": steps, "stream": True}


_NUMBERS: dict[int, str] = {}


def _direct(events: bytes) -> list[int]:
    found = []
    for part in events.split(b'"token_ids":[')[1:]:
        ids = part[: part.index(b"]")].split(b",")
        text = "".join(_NUMBERS.get(int(token), "") for token in ids)
        if len(text) == DIGITS:
            found.append(int(text))
    return found


def _spoken(events: bytes) -> list[int]:
    parts = events.split(b'"content":"')[1:]
    text = b"".join(part[: part.index(b'"')] for part in parts).decode()
    return [int(text[at : at + DIGITS]) for at in range(0, len(text) - DIGITS + 1, DIGITS)]


# --- figures


@dataclass
class Figures:
    """What one run found. Times of requests in ms, of tokens in µs, memory in KiB. ``processor``:
    processor time of the server, in the same units."""

    request_direct_p50: float = 0.0
    request_added_p50: float = 0.0
    request_added_p99: float = 0.0
    request_proxy_added_p50: float = 0.0
    request_litellm_added_p50: float = 0.0
    request_processor: float = 0.0
    request_proxy_processor: float = 0.0
    request_litellm_processor: float = 0.0
    token_paced_direct_p50: float = 0.0
    token_paced_added_p50: float = 0.0
    token_paced_added_p99: float = 0.0
    token_at_once_added: float = 0.0
    token_paced_processor: float = 0.0
    streams_per_core_by_processor: int = 0
    streams_per_core: int = 0
    gaps_p99_ms: dict[str, dict[str, float]] | None = None
    workers: dict[str, dict[str, float]] | None = None
    memory_idle_connection: float = 0.0
    memory_active_stream: float = 0.0
    memory_process_mib: float = 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


async def requests(count: int, *clients: Client) -> list[list[float]]:
    """Milliseconds of whole requests of one step to each of ``clients``, in turn."""
    times: list[list[float]] = [[] for _ in clients]
    for number in range(count):
        for client, mine in zip(clients, times, strict=True):
            began = time.perf_counter()
            async for _ in client.stream(1):
                pass
            if number >= count // 10:  # the first ones warm up
                mine.append((time.perf_counter() - began) * 1e3)
    return times


async def at_once(direct: Client, gateway: Client, steps: int, rounds: int) -> float:
    """Microseconds that a step costs more, when the engine sends all it has: the best of rounds."""
    costs = []
    for _ in range(rounds):
        took = []
        for client in (direct, gateway):
            began = time.perf_counter()
            async for _ in client.stream(steps):
                pass
            took.append(time.perf_counter() - began)
        costs.append((took[1] - took[0]) / steps * 1e6)
    return min(costs)


async def paced(client: Client, steps: int) -> tuple[list[float], list[float]]:
    """Microseconds from the engine's stamp to here, and milliseconds between two steps."""
    ways: list[float] = []
    gaps: list[float] = []
    before = 0.0
    async for now, stamps in client.stream(steps):
        for stamp in stamps:
            ways.append((now - stamp) % WRAP)
            if before:
                gaps.append((now - before) / 1e3)
            before = now
    return ways, gaps


async def crowd(make: Callable[[], Client], count: int, steps: int) -> list[float]:
    """The gaps of ``count`` streams at once, begun over one step."""

    async def one(number: int) -> list[float]:
        await asyncio.sleep(number / count * min(2.0, count * STEP))
        client = make()
        try:
            return (await paced(client, steps))[1]
        finally:
            await client.close()

    found = await asyncio.gather(*(one(number) for number in range(count)))
    return [gap for gaps in found for gap in gaps[5:]]


def resident(pid: int) -> float:
    """KiB of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


# --- the run


def processor_seconds(pid: int, *, children: bool = False) -> float:
    """Seconds of processor time that a process, and with ``children`` those too, have used."""
    seconds = 0.0
    for path in Path("/proc").glob("[0-9]*/stat" if children else f"{pid}/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            if str(pid) in (path.parent.name, fields[1]):
                seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


LITELLM = Path("build/litellm")
"""The environment of LiteLLM."""

LITELLM_CONFIG = """\
model_list:
  - model_name: m
    litellm_params: {{model: hosted_vllm/m, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
litellm_settings: {{telemetry: false}}
"""


@contextmanager
def litellm(port: int, engine_port: int) -> Iterator[int]:
    """LiteLLM's proxy with a key, without limits and log; its process id."""
    command = LITELLM / "bin" / "litellm"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", LITELLM], check=True)
        packages = ["litellm[proxy]", "uvloop"]
        subprocess.run([LITELLM / "bin" / "pip", "install", "-q", *packages], check=True)
    config = LITELLM / "config.yaml"
    config.write_text(LITELLM_CONFIG.format(port=engine_port, key=KEY))
    words = [str(command), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    environment = {**os.environ, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait(port, "/health/liveliness")
        processors = sorted(os.sched_getaffinity(process.pid))
        os.sched_setaffinity(process.pid, processors[:1])  # as the others
        yield process.pid
    finally:
        process.terminate()
        process.wait(40)


@contextmanager
def processes(
    pace: float, port: int, workers: int = 1, redis: str = ""
) -> Iterator[tuple[int, int]]:
    """An engine on ``port``, a gateway and a proxy on the next ones; the process ids of both.

    With a ``redis``, no process is pinned to a processor.
    """
    context = multiprocessing.get_context("spawn")
    behind = context.Process(target=engine, args=(port, pace), daemon=True)
    behind.start()
    command = [sys.executable, "-m", "vllm_mlx_harmony", "gateway", "--model", "m"]
    flags = ["--engine", f"vllm-completions=http://127.0.0.1:{port}", "--port", str(port + 1)]
    flags += [
        "--workers",
        str(workers),
        "--key",
        KEY,
        "--access-log",
        "json",
        "--concurrent-requests",
        "9999",
    ]
    flags += [word for limit in LIMITS for word in (f"--{limit}", "999999999")]
    server = subprocess.Popen(
        [*command, *flags, "--log-level", "warning"],
        env={
            **os.environ,
            "VLLM_MLX_HARMONY_DATE": "2026-01-01",
            "VLLM_MLX_HARMONY_STORE": redis,
        },
        stdout=subprocess.DEVNULL,
    )
    proxied = context.Process(target=proxy, args=(port + 2, port), daemon=True)
    proxied.start()
    processors = sorted(os.sched_getaffinity(0))
    try:
        _wait(port + 1)
        if len(processors) > 1 and not redis:
            os.sched_setaffinity(server.pid, processors[:1])
            os.sched_setaffinity(0, processors[1:])
            os.sched_setaffinity(behind.pid or 0, processors[1:])
            os.sched_setaffinity(proxied.pid or 0, processors[:1])
        yield server.pid, proxied.pid or 0
    finally:
        os.sched_setaffinity(0, processors)
        server.terminate()
        server.wait(40)
        for process in (behind, proxied):
            process.terminate()
            process.join(10)


def _wait(port: int, path: str = "/ready") -> None:
    import urllib.request

    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"nothing answers on port {port}")


async def fast(port: int, pids: list[int], quick: bool, figures: Figures) -> None:
    """``pids`` are those of the gateway, of the proxy, and of LiteLLM if it is measured."""
    direct, gateway = Client(port, COMPLETIONS), Client(port + 1, CHAT)
    asked, answered, proxied = await measured(
        quick, pids[:2], direct, gateway, Client(port + 2, COMPLETIONS)
    )
    figures.request_direct_p50 = statistics.median(asked[0])
    figures.request_added_p50 = statistics.median(answered[0]) - figures.request_direct_p50
    figures.request_proxy_added_p50 = statistics.median(proxied[0]) - figures.request_direct_p50
    figures.request_processor, figures.request_proxy_processor = answered[1], proxied[1]
    if others := pids[2:]:  # by itself, since it goes on working after a response
        again, other = await measured(quick, others, direct, Client(port + 6, CHAT))
        added = statistics.median(other[0]) - statistics.median(again[0])
        figures.request_litellm_added_p50, figures.request_litellm_processor = added, other[1]
    figures.request_added_p99 = percentile(answered[0], 0.99) - percentile(asked[0], 0.99)
    steps, rounds = (200, 2) if quick else (5000, 7)
    figures.token_at_once_added = await at_once(direct, gateway, steps, rounds)


async def measured(
    quick: bool, pids: list[int], *clients: Client
) -> list[tuple[list[float], float]]:
    """Of each client: milliseconds of requests, and of processor time for one. ``pids`` are those
    of the servers behind all clients but the first."""
    await requests(10, *clients)  # warms up
    used, count = [processor_seconds(pid) for pid in pids], 30 if quick else 1000
    times = await requests(count, *clients)
    costs = [
        (processor_seconds(pid) - before) / count * 1e3
        for pid, before in zip(pids, used, strict=True)
    ]
    return list(zip(times, [0.0, *costs], strict=True))


async def slow(port: int, pid: int, quick: bool, figures: Figures) -> None:
    steps, rounds = (20, 1) if quick else (150, 5)
    ways: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for number, client in enumerate((Client(port, COMPLETIONS), Client(port + 1, CHAT))):
            ways[number].extend((await paced(client, steps))[0][3:])
            await client.close()
    figures.token_paced_direct_p50 = statistics.median(ways[0])
    figures.token_paced_added_p50 = statistics.median(ways[1]) - figures.token_paced_direct_p50
    figures.token_paced_added_p99 = percentile(ways[1], 0.99) - percentile(ways[0], 0.99)
    await memory(port, pid, 20 if quick else 200, figures)
    figures.gaps_p99_ms = {}
    limit = 0.0
    length = 50 if quick else 250
    for count in (1, 5) if quick else (1, 25, 50, 100, 150, 200, 300, 400, 600):
        asked = await crowd(partial(Client, port, COMPLETIONS), count, length)
        used = processor_seconds(pid)
        answered = await crowd(partial(Client, port + 1, CHAT), count, length)
        token_seconds = (processor_seconds(pid) - used) / (count * length)
        figures.token_paced_processor = token_seconds * 1e6
        figures.streams_per_core_by_processor = int(STEP / token_seconds)
        found = {"direct": percentile(asked, 0.99), "gateway": percentile(answered, 0.99)}
        figures.gaps_p99_ms[str(count)] = found
        limit = limit or 2 * found["gateway"]
        if found["gateway"] > limit:
            break
        figures.streams_per_core = count


async def crowded(port: int, pid: int, quick: bool) -> dict[str, float]:
    """Streams at once, more than a process can serve: what reaches the clients, and the cost."""
    count, length = (5, 50) if quick else (600, 250)
    await crowd(partial(Client, port + 1, CHAT), 5, 20)  # warms up
    used, began = processor_seconds(pid, children=True), time.perf_counter()
    gaps = await crowd(partial(Client, port + 1, CHAT), count, length)
    seconds = time.perf_counter() - began
    token_seconds = (processor_seconds(pid, children=True) - used) / (count * length)
    return {
        "tokens_per_second": round(count * length / seconds),
        "gaps_p99_ms": round(percentile(gaps, 0.99), 1),
        "token_processor_us": round(token_seconds * 1e6, 1),
        "streams_per_core_by_processor": int(STEP / token_seconds),
    }


async def memory(port: int, pid: int, count: int, figures: Figures) -> None:
    clients = [Client(port + 1, CHAT) for _ in range(count)]
    before = resident(pid)
    figures.memory_process_mib = before / 1024
    for client in clients:
        await client.connect()
    await asyncio.sleep(0.5)
    idle = resident(pid)
    running = [asyncio.ensure_future(paced(client, 150)) for client in clients]
    await asyncio.sleep(2.0)
    active = resident(pid)
    await asyncio.gather(*running)
    for client in clients:
        await client.close()
    figures.memory_idle_connection = max(0.0, idle - before) / count
    figures.memory_active_stream = max(0.0, active - before) / count


def main(argv: Sequence[str] | None = None) -> int:
    """0; figures on standard output, and in a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="whether it works, not how fast it is")
    parser.add_argument("--litellm", action="store_true", help="measure LiteLLM's proxy, too")
    parser.add_argument("--redis", metavar="URL", help="measure one and two workers, with it")
    parser.add_argument("--json", metavar="FILE", help="the figures as JSON")
    parser.add_argument(
        "--port", type=int, default=18400, help="this and the six after it are used"
    )
    parsed = parser.parse_args(argv)
    from vllm_mlx_harmony.core import vocab

    _NUMBERS.update({vocab.encode(f"{number:03}")[0]: f"{number:03}" for number in range(1000)})
    PROMPT.extend(vocab.encode("What time is it? " * 15))
    figures = Figures()
    with ExitStack() as stack:
        pids = [*stack.enter_context(processes(0.0, parsed.port))]
        if parsed.litellm:
            pids.append(stack.enter_context(litellm(parsed.port + 6, parsed.port)))
        _with_uvloop(fast(parsed.port, pids, parsed.quick, figures))
    with processes(STEP, parsed.port + 3) as (pid, _):
        _with_uvloop(slow(parsed.port + 3, pid, parsed.quick, figures))
    if parsed.redis:
        figures.workers = {}
        for count in (1, 2):
            with processes(STEP, parsed.port, count, parsed.redis) as (pid, _):
                found = _with_uvloop(crowded(parsed.port, pid, parsed.quick))
                figures.workers[str(count)] = found
    for name, value in asdict(figures).items():
        print(f"{name:26} {f'{value:.3f}' if isinstance(value, float) else value}")
    for name, value, goal in (
        ("added per request, p50", figures.request_added_p50, GOALS["request_ms"]),
        ("added per token", figures.token_at_once_added, GOALS["token_us"]),
    ):
        print(f"{name}: {value:.2f}, goal {goal:g}: {'met' if value <= goal else 'NOT met'}")
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(asdict(figures), indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
