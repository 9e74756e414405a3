"""Two gateways and three engines, as in docs/gateway.md: limits hold at both gateways, and a
rolling upgrade of engines and gateways fails no request."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_server import run_server
from fake_engines import FakeEngine
from real_redis import RedisServer
from sse import arriving
from waiting import wait_until

from vllm_mlx_harmony.cli.process import free_port
from vllm_mlx_harmony.server.peers.connection import key_of

MODEL = "gpt-oss-20b"
TEXT = "word " * 20
SCRIPTS = {"Count": f"<|channel|>final<|message|>{TEXT}<|return|>"}
KEYS = {f"person-{number}": f"key-of-person-{number}" for number in range(6)}
GRACE = "shutdown_grace = 170\n"
LIMITS = {"requests": "requests_per_day = 3", "tokens": "tokens_per_day = 50"}
LIMITS["answers"] = "concurrent_requests = 1"
APIS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


class Cluster:
    """Two gateways with files of their own, as on two machines, and three engines."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self.redis = stack.enter_context(RedisServer(directory))
        self._ports = [free_port() for _ in range(3)]
        self.engines: list[FakeEngine] = []
        self._running: list[ExitStack] = []
        for _ in self._ports:
            self._running.append(stack.enter_context(ExitStack()))
            self.engines.append(FakeEngine("vllm", SCRIPTS, pause=0.01))
        for number in range(3):
            self._serve(number)
        self.gateways = [free_port(), free_port()]
        self._files = [directory / f"{port}.toml" for port in self.gateways]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._write_files(0, 1, 2)
        for number in range(2):
            self._processes.append(self._start(number))

    def _serve(self, number: int) -> None:
        app = self.engines[number].app
        self._running[number].enter_context(run_server(app, port=self._ports[number]))

    def _write_files(self, *engines: int) -> None:
        """Writes the engines into the files."""
        keys = "".join(f'{name} = "{key}"\n' for name, key in KEYS.items())
        for name, limit in LIMITS.items():
            keys += f'{name} = {{ key = "key-of-{name}", {limit} }}\n'
        listed = "".join(
            f'[[engines]]\nurl = "http://127.0.0.1:{self._ports[number]}"\nkind = "vllm"\n'
            for number in engines
        )
        for port, file in zip(self.gateways, self._files, strict=True):
            file.write_text(f'model = "{MODEL}"\nport = {port}\n{GRACE}[keys]\n{keys}{listed}')

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "vllm_mlx_harmony", "gateway"]
        command += ["--config", str(self._files[number]), "--log-level", "error"]
        environment = {**os.environ, "VLLM_MLX_HARMONY_STORE": self.redis.url}
        process = subprocess.Popen(command, env=environment)
        self._stack.callback(process.wait, 180)
        self._stack.callback(process.kill)
        wait_until(lambda: self._ready(number) == {"up"}, "the gateway", 180)
        return process

    def _ready(self, number: int, engine: int | None = None) -> set[str]:
        """The health of the engines of a gateway, or of one; empty if it does not answer."""
        try:
            response = httpx.get(f"http://127.0.0.1:{self.gateways[number]}/ready", timeout=180)
        except httpx.HTTPError:
            return set()
        url = None if engine is None else f"http://127.0.0.1:{self._ports[engine]}"
        engines = response.json()["engines"]
        return {entry["health"] for entry in engines if url in (None, entry["url"])}

    def _reload(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGHUP)

    def upgrade_engine(self, number: int) -> None:
        """Removes it from the files, waits until it is idle, replaces it and adds it again."""
        self._write_files(*({0, 1, 2} - {number}))
        self._reload()
        for gateway in range(2):
            wait_until(
                lambda g=gateway: not self._ready(g, number), "the engine to be drained", 180
            )
        assert self.engines[number].running == 0
        self._running[number].close()
        self.engines[number] = FakeEngine("vllm", SCRIPTS, pause=0.01)
        self._serve(number)
        self._write_files(0, 1, 2)
        self._reload()
        for gateway in range(2):
            wait_until(lambda g=gateway: self._ready(g, number) == {"up"}, "the new engine", 180)

    def upgrade_gateway(self, number: int) -> None:
        """Stops it and starts another one on its port."""
        self._processes[number].send_signal(signal.SIGTERM)
        self._processes[number].wait(180)
        self._processes[number] = self._start(number)


def stream_text(clients: list[httpx.Client], turn: int, key: str) -> str:
    """The text of a streamed answer through a load balancer as in examples/compose: after a
    connection error or 503 it tries the other gateway, once."""
    path, question = APIS[turn % 3], f"Count, {turn} times"  # every turn is a new conversation
    body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 200, "input": question}
    body["messages"] = [{"role": "user", "content": question}]
    for absent in ("messages", "max_tokens") if path == "/v1/responses" else ("input",):
        del body[absent]
    header = {"Authorization": f"Bearer {key}"}
    for client in (clients[turn % 2], clients[1 - turn % 2]):
        started = False
        try:
            with client.stream("POST", path, json=body, headers=header, timeout=180) as response:
                if response.status_code == 503:
                    continue
                started = True
                assert response.status_code == 200, response.read()
                events = list(arriving(response.iter_lines()))
        except httpx.TransportError as error:
            if started:
                raise AssertionError("an answer broke off") from error
            continue
        return "".join(map(_text, events))
    raise AssertionError("no gateway took the request")


def _text(event: dict[str, Any]) -> str:
    """The text of an event's delta, in any of the three APIs."""
    if event.get("type") in ("response.output_text.delta", "content_block_delta"):
        delta = event["delta"]
        return str(delta if isinstance(delta, str) else delta.get("text", ""))
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path_factory.mktemp("company"))


def test_limits_hold_at_both_gateways(cluster: Cluster) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in cluster.gateways]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Count"}]}

    def headers(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer key-of-{key}"}

    def status(gateway: int, key: str) -> int:
        url = urls[gateway] + APIS[0]
        return httpx.post(url, json=body, headers=headers(key), timeout=180).status_code

    def remaining_tokens(gateway: int) -> str:
        models = httpx.get(f"{urls[gateway]}/v1/models", headers=headers("tokens"), timeout=180)
        return models.headers["x-ratelimit-remaining-tokens"]

    assert [status(turn % 2, "requests") for turn in range(5)] == [200, 200, 200, 429, 429]
    assert remaining_tokens(1) == "50"
    assert status(0, "tokens") == 200
    wait_until(lambda: remaining_tokens(1) == "0", "the tokens to be counted")
    assert [status(gateway, "tokens") for gateway in (1, 0)] == [429, 429]
    for engine in cluster.engines:
        engine.held = True
    options = {"json": {**body, "stream": True}, "headers": headers("answers"), "timeout": 60}
    with httpx.stream("POST", urls[0] + APIS[0], **options) as stream:  # type: ignore[arg-type]
        lines = stream.iter_lines()  # its end would close the stream
        assert next(lines)
        assert [status(gateway, "answers") for gateway in (1, 0)] == [429, 429]
    for engine in cluster.engines:
        engine.held = False
    # Entries that are not removed expire after a minute, and each request removes those.
    running = key_of("running", "answers")
    wait_until(lambda: cluster.redis.client.zcard(running) == 0, "the answer to end", 60)
    assert status(1, "answers") == 200


def test_no_request_fails_during_upgrades(cluster: Cluster) -> None:
    with ExitStack() as stack:
        answers: Counter[str] = Counter()
        stop = threading.Event()

        def send_requests(key: str) -> None:
            urls = [f"http://127.0.0.1:{port}" for port in cluster.gateways]
            clients = [httpx.Client(base_url=url) for url in urls]
            for turn in itertools.count():
                if stop.is_set():
                    break
                answers[stream_text(clients, turn, key)] += 1

        with ThreadPoolExecutor(len(KEYS)) as threads:
            stack.callback(stop.set)
            senders = [threads.submit(send_requests, key) for key in KEYS.values()]
            try:
                for number in range(3):
                    cluster.upgrade_engine(number)
                for number in range(2):
                    cluster.upgrade_gateway(number)
                answered = sum(answers.values())
                wait_until(lambda: sum(answers.values()) > answered + 20, "more answers", 180)
            finally:
                stop.set()
            for sender in senders:
                sender.result()
    assert set(answers) == {TEXT}
    assert all(engine.prompts for engine in cluster.engines)
