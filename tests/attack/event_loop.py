"""Does one request hold up others? Each of `inputs`, to each API, on both engines, with figures.

``python tests/attack/event_loop.py`` starts servers of its own. A process of its own asks for
`/health` every 10 ms and reads a streamed answer meanwhile, and notes two figures for each request:

- the *gap*: the longest that `/health` took, or that nothing came of the answer;
- of that what was *held*: no more than the processor time that the server took in the gap. On a
  busy machine everybody waits for a processor, which is no server's fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "served")]

import httpx  # noqa: E402
import inputs  # noqa: E402
import server as served  # noqa: E402

from vllm_mlx_harmony import standin  # noqa: E402
from vllm_mlx_harmony.standin import Script  # noqa: E402

LIMIT_MS = 50.0
EVERY = 0.01
WEBSOCKET = "websocket"
WAYS = (*inputs.PATHS, WEBSOCKET)

SCRIPTS = [
    Script(
        "<|message|>Go on.<|end|>",
        "<|channel|>final<|message|>" + " word" * 200 + "<|return|>",
        delay_ms=10,
    ),
    Script("<|end|>", "<|channel|>final<|message|>Hi.<|return|>"),
]


@dataclass(slots=True)
class Longest:
    """The longest gap, and the most that was held of one, in milliseconds."""

    gap: float = 0.0
    held: float = 0.0

    def note(self, gap: float, used: float) -> None:
        """A gap, and the processor time that the server used in it, in seconds."""
        self.gap = max(self.gap, gap * 1e3)
        self.held = max(self.held, min(gap, used) * 1e3)

    def __str__(self) -> str:
        return f"{self.held:.0f} of {self.gap:.0f}"


@dataclass(frozen=True, slots=True)
class Felt:
    """What others noticed of a request: who asked for `/health`, and who read an answer."""

    health: Longest
    stream: Longest

    def held(self, idle: Felt) -> float:
        """The worse of both, in milliseconds; of the stream, what it is more than when ``idle``.

        Its own making takes time, too.
        """
        return max(self.health.held, self.stream.held - idle.stream.held)


# --- the other client, in a process of its own


def observe(url: str, pid: int, model: str) -> None:
    """Writes what was felt since the last time for each line that comes in; ends with them."""
    address = urlsplit(url)
    to = address.hostname or "", address.port or 80
    head = f"HTTP/1.1\r\nHost: {address.netloc}\r\n"
    ask = f"GET /health {head}\r\n".encode()
    messages = [{"role": "user", "content": "Go on."}]
    fields = {"model": model, "messages": messages, "max_tokens": 1_000, "stream": True}
    body = json.dumps(fields)
    begin = f"POST {inputs.PATHS['chat']} {head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    health, stream = socket.create_connection(to), socket.create_connection(to)
    stream.sendall(begin)
    asked: tuple[float, float] | None = None
    told: tuple[float, float] | None = None
    felt = Felt(Longest(), Longest())
    due = 0.0
    while True:
        if asked is None and time.perf_counter() >= due:
            asked = _clocks(pid)
            due = asked[0] + EVERY
            health.sendall(ask)
        ready, _, _ = select.select([health, stream, sys.stdin], [], [], EVERY)
        now = _clocks(pid)
        if health in ready and asked is not None:
            health.recv(65_536)
            felt.health.note(now[0] - asked[0], now[1] - asked[1])
            asked = None
        if stream in ready:
            part = stream.recv(65_536)
            if told is not None:
                felt.stream.note(now[0] - told[0], now[1] - told[1])
            told = now if b"data: {" in part else None
            if not part or b"data: [DONE]" in part:
                stream.close()
                stream, told = socket.create_connection(to), None
                stream.sendall(begin)
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            figures = [[each.gap, each.held] for each in (felt.health, felt.stream)]
            print(json.dumps(figures), flush=True)
            felt = Felt(Longest(), Longest())


def _clocks(pid: int) -> tuple[float, float]:
    """Now, and the processor time of process ``pid`` so far: Linux has a clock for each process."""
    now = time.perf_counter()
    try:
        return now, time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return now, now


class Observer:
    """The other client: ``felt`` is what it noticed since it was asked last."""

    def __init__(self, server: served.Server, model: str) -> None:
        command = [sys.executable, __file__, "--observe", server.base_url, str(server.pid), model]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def felt(self) -> Felt:
        """Raises ``RuntimeError`` when the other client has died, as of a server that has."""
        asking, answer = self._pipes()
        asking.write("\n")
        asking.flush()
        line = answer.readline()
        if not line:
            raise RuntimeError("nobody observes the server any more")
        return Felt(*(Longest(*figures) for figures in json.loads(line)))

    def _pipes(self) -> tuple[TextIO, TextIO]:
        asking, answer = self._process.stdin, self._process.stdout
        if asking is None or answer is None:
            raise RuntimeError("the observer was started without pipes")
        return asking, answer

    def close(self) -> None:
        """Ends the process."""
        for pipe in self._pipes():
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait(10)


@contextlib.contextmanager
def observed(server: served.Server, model: str) -> Iterator[Observer]:
    """Somebody else uses the server."""
    observer = Observer(server, model)
    try:
        time.sleep(0.5)
        observer.felt()
        yield observer
    finally:
        observer.close()


# --- who sends what is large


def ready(server: served.Server) -> str:
    """The name of the model, once every API has answered for the first time."""
    with server.client(timeout=120) as client:
        model: str = client.get("/v1/models").json()["data"][0]["id"]
        for api, path in inputs.PATHS.items():
            client.post(path, json=inputs.described("d").body(api, model)).raise_for_status()
    return model


def idle_of(observer: Observer) -> Felt:
    """What is felt of nothing."""
    observer.felt()
    time.sleep(3)
    return observer.felt()


def felt_of(row: str, way: str, server: served.Server, model: str, observer: Observer) -> Felt:
    """What others notice of an input. Raises ``AssertionError`` when it has no proper answer."""
    body = inputs.encoded(row, "responses" if way == WEBSOCKET else way, model)
    observer.felt()
    if way == WEBSOCKET:
        _converse(server, body)
    else:
        _post(server, inputs.PATHS[way], body)
    return observer.felt()


def _post(server: served.Server, path: str, body: bytes) -> None:
    with server.client(timeout=120) as client:
        try:
            response = client.post(path, content=body)
        except httpx.TransportError:  # 413, and the connection is closed before all is sent
            assert len(body) > 32 * inputs.MIB
            return
    assert response.status_code in (200, 400, 413), response.text[:500]


def _converse(server: served.Server, body: bytes) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    # Its thread logs a traceback when the connection ends while it sends.
    logging.getLogger("websockets.client").disabled = True
    message = b'{"type": "response.create", ' + body[1:]
    url = server.base_url.replace("http", "ws", 1) + inputs.PATHS["responses"]
    try:
        with connect(url, max_size=None, compression=None) as connection:
            connection.send(message.decode())
            while _type(connection.recv(timeout=120)) not in _LAST:
                pass
    except ConnectionClosed:
        if len(message) <= 16 * inputs.MIB:  # as much as uvicorn takes in a message
            raise


_LAST = ("error", "response.completed", "response.incomplete", "response.failed")


def _type(event: str | bytes) -> Any:
    return json.loads(event)["type"]


# --- the command


def main() -> int:
    """Prints a row for each input and way; 1 when others were held up for too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=[*served.ENGINES], action="append")
    parser.add_argument("--row", choices=[*inputs.ROWS], action="append")
    parser.add_argument("--limit", type=float, default=LIMIT_MS, help="milliseconds (%(default)s)")
    parser.add_argument("--observe", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.observe:
        url, pid, model = asked.observe
        observe(url, int(pid), model)
        return 0
    over = [
        name
        for engine in asked.engine or served.ENGINES
        for name in measured(engine, asked.row or [*inputs.ROWS], asked.limit)
    ]
    print("\n".join(["", *(f"more than {asked.limit:.0f} ms: {name}" for name in over)]))
    return 1 if over else 0


def measured(engine: str, rows: Sequence[str], limit: float) -> list[str]:
    """The names of those inputs that were felt for longer than ``limit``."""
    over = []
    print(f"{engine}: held, of the longest gap, in ms: /health, and a stream")
    with tempfile.TemporaryDirectory() as home:
        model_dir = standin.write(Path(home) / "gpt-oss-standin")
        standin.rescript(model_dir, SCRIPTS)
        flags = (*served.ENGINES[engine], *served.FLAG)
        server = served.start(model_dir, *flags, home=Path(home) / "home", command=served.HARMONY)
        try:
            model = ready(server)
            with observed(server, model) as observer:
                idle = idle_of(observer)
                print(_line("nothing", "", idle))
                for row in rows:
                    for way in WAYS:
                        felt = felt_of(row, way, server, model, observer)
                        print(_line(row, way, felt), flush=True)
                        if felt.held(idle) > limit:
                            over.append(f"{engine}, {row}, {way}: {felt.held(idle):.0f} ms")
            if "Traceback" in server.log:
                over.append(f"{engine}: a traceback\n{server.log[-4_000:]}")
        finally:
            server.stop()
    return over


def _line(row: str, way: str, felt: Felt) -> str:
    return f"  {row:32}{way:12}{felt.health!s:>14}{felt.stream!s:>14}"


if __name__ == "__main__":
    raise SystemExit(main())
