"""A gateway of several processes on one port (``--workers``), over a real Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_server import run_server
from fake_engines import FakeEngine
from real_redis import RedisServer
from sse import arriving
from waiting import wait_until

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.server.settings import STORE_VARIABLE

MODEL = "gpt-oss-20b"
TEXT = "word " * 40
SCRIPTS = {"Hello": f"<|channel|>final<|message|>{TEXT}<|return|>"}
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
WORKERS = 2


class MultiWorkerGateway:
    """A gateway process with two workers, its configuration file, and an engine."""

    def __init__(self, stack: ExitStack, directory: Path, keys: str = "") -> None:
        self.engine = FakeEngine("vllm", SCRIPTS)
        self._url = stack.enter_context(run_server(self.engine.app))
        self._file = directory / "gateway.toml"
        self.write(keys)
        redis = stack.enter_context(RedisServer(directory)).url
        command = [sys.executable, "-m", "vllm_mlx_harmony", "gateway", "--port", "0"]
        command += ["--config", str(self._file), "--workers", str(WORKERS)]
        environment = {**os.environ, STORE_VARIABLE: redis}
        self._log = directory / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        stack.callback(self.process.wait, 180)
        stack.callback(self.process.kill)
        wait_until(lambda: "running on" in self.log, "the port to be bound", 300)
        wait_until(lambda: len(self.pids) == WORKERS, "the workers")
        address = next(line for line in self.log.splitlines() if "running on" in line)
        self.url = next(word for word in address.split() if word.startswith("http://"))
        for pid in self.pids:
            with self.only_worker(pid):
                wait_until(self.is_ready, f"worker {pid}", 180)

    def write(self, keys: str, *more: str) -> None:
        lines = [
            f'model = "{MODEL}"',
            "shutdown_grace = 120",
            f"[keys]\n{keys}" if keys else "",
            *more,
        ]
        self._file.write_text("\n".join([*lines, f'[[engines]]\nurl = "{self._url}"\n']))

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pids(self) -> list[int]:
        """The workers, without multiprocessing's resource tracker."""
        command = ["pgrep", "-P", str(self.process.pid), "-f", "spawn_main"]
        processes = subprocess.run(command, capture_output=True, text=True, check=False)
        return [int(pid) for pid in processes.stdout.split()]

    @contextmanager
    def only_worker(self, running_pid: int) -> Iterator[None]:
        """Pauses the other workers during the context."""
        others = [pid for pid in self.pids if pid != running_pid]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    def from_each_worker(self, request: Callable[[], Any]) -> list[Any]:
        """The result of ``request`` at each worker."""
        answers = []
        for pid in self.pids:
            with self.only_worker(pid):
                answers.append(request())
        return answers

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=180).status_code == 200
        except httpx.HTTPError:
            return False

    def post(self, key: str = "none", path: str = CHAT, **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        body = {**BODY, **fields}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=180)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", timeout=180).text.splitlines()
        samples = [line for line in lines if line.startswith(f"vllm_mlx_harmony_{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in samples)


def test_workers_share_limits_responses_and_metrics(tmp_path: Path) -> None:
    limited = 'limited = { key = "key-of-limited", requests_per_day = 3 }'
    with ExitStack() as stack:
        gateway = MultiWorkerGateway(stack, tmp_path, f'a = "key-of-a"\n{limited}')
        assert len(gateway.pids) == WORKERS

        def store_response() -> Any:
            body = {"model": MODEL, "input": "Hello"}
            headers = {"Authorization": "Bearer key-of-a"}
            response = httpx.post(
                f"{gateway.url}/v1/responses", json=body, headers=headers, timeout=180
            )
            return response.json()["id"]

        ids = gateway.from_each_worker(store_response)
        for response_id in ids:
            url, headers = (
                f"{gateway.url}/v1/responses/{response_id}",
                {"Authorization": "Bearer key-of-a"},
            )
            status_codes = gateway.from_each_worker(
                lambda u=url, h=headers: httpx.get(u, headers=h, timeout=180).status_code
            )
            assert status_codes == [200] * WORKERS
        statuses = [
            status
            for _ in range(3)
            for status in gateway.from_each_worker(
                lambda: gateway.post("key-of-limited").status_code
            )
        ]
        assert Counter(statuses) == {200: 3, 429: 3} and statuses[:3] == [200] * 3
        for name, value in (
            ("requests_total", 5),
            ("requests_running", 0),
            ("routed_total", 5),
            ("engine_requests", 0),
            ("engine_up", 1),
            ("refused_total", 3),
        ):
            wait_until(
                lambda n=name, v=value: (
                    gateway.from_each_worker(lambda: gateway.metric(n)) == [v] * WORKERS
                ),
                f"{name}, {value}",
            )
        # SIGHUP reloads every worker, and an invalid file none.
        gateway.write('b = "key-of-b"')
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(lambda: gateway.log.count("settings reloaded") == WORKERS, "the reload")
        assert (
            gateway.from_each_worker(
                lambda: [gateway.post(f"key-of-{name}").status_code for name in "ab"]
            )
            == [[401, 200]] * WORKERS
        )
        gateway.write('c = "key-of-c"', "nonsense = 1")
        gateway.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "not reloaded" in gateway.log, "the error")
        # A killed worker is replaced by one with the current settings; counters are kept.
        killed, requests_before = gateway.pids[0], gateway.metric("requests_total")
        os.kill(killed, signal.SIGKILL)
        wait_until(
            lambda: killed not in gateway.pids and len(gateway.pids) == WORKERS,
            "another worker",
            180,
        )
        new_pid = gateway.pids[-1]
        with gateway.only_worker(new_pid):
            wait_until(gateway.is_ready, "the new worker", 180)
            assert [gateway.post(f"key-of-{name}").status_code for name in "abc"] == [401, 200, 401]
            wait_until(
                lambda: gateway.metric("requests_total") == requests_before + 1, "the counters"
            )
            assert gateway.metric("requests_running") == 0


@pytest.mark.parametrize("to", ["parent", "all"])
def test_sigterm_lets_streams_finish(to: str, tmp_path: Path) -> None:
    """Also when every process receives it, as from systemd."""
    with ExitStack() as stack:
        gateway = MultiWorkerGateway(stack, tmp_path)
        gateway.engine.held = True
        streams = []
        for pid in gateway.pids:
            with gateway.only_worker(pid):
                stream = httpx.stream(
                    "POST", gateway.url + CHAT, json={**BODY, "stream": True}, timeout=180
                )
                streams.append(stack.enter_context(stream).iter_lines())
                next(streams[-1])
        pids = gateway.pids if to == "all" else []
        for pid in (gateway.process.pid, *pids):
            os.kill(pid, signal.SIGTERM)
        for pid in gateway.pids:
            with gateway.only_worker(pid):
                wait_until(lambda: not gateway.is_ready(), "the drain to begin")
                assert gateway.post().status_code == 503
        gateway.engine.held = False
        for lines in streams:
            events = list(arriving(lines))
            assert not any("error" in event for event in events), events
            choices = (choice for event in events for choice in event["choices"])
            assert "".join(choice["delta"].get("content") or "" for choice in choices) == TEXT
        assert gateway.process.wait(180) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{gateway.url}/health", timeout=180)


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    with ExitStack() as stack:
        gateway = MultiWorkerGateway(stack, tmp_path)
        gateway.process.kill()

        def refuses_connections() -> bool:
            try:
                httpx.get(f"{gateway.url}/health", timeout=180)
            except httpx.TransportError as error:
                return isinstance(error, httpx.ConnectError)
            return False

        wait_until(refuses_connections, "the workers to end", 180)


@pytest.mark.parametrize(
    ("flags", "redis", "problem"),
    [
        ((), False, "--workers 2 requires a Redis"),
        (("--inspect",), True, "--inspect requires --workers 1"),
    ],
)
def test_unshareable_settings_of_workers_are_rejected(
    flags: tuple[str, ...],
    redis: bool,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as stack:
        if redis:
            server = stack.enter_context(RedisServer(tmp_path))
            monkeypatch.setenv(STORE_VARIABLE, server.url)
        command = ["gateway", "--model", "m", "--engine", "http://127.0.0.1:9", "--workers", "2"]
        assert main([*command, *flags]) == 2
        assert problem in capsys.readouterr().err
