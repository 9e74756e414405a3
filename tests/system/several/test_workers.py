"""A gateway of several processes on one port (``--workers``), over a real Redis."""

from __future__ import annotations

import json
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
from fake_engines import FakeEngine, served, until
from real_redis import RedisServer

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.server.settings import STORE_VARIABLE

MODEL = "gpt-oss-20b"
TEXT = "word " * 40
SCRIPTS = {"Hello": f"<|channel|>final<|message|>{TEXT}<|return|>"}
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
WORKERS = 2


class Crowd:
    """A gateway with two workers, the file of its settings, and an engine."""

    def __init__(self, stack: ExitStack, directory: Path, keys: str = "") -> None:
        self.engine = FakeEngine("vllm", SCRIPTS)
        self._url = stack.enter_context(served(self.engine.app))
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
        until(lambda: "running on" in self.log, "the port to be bound", 300)
        until(lambda: len(self.pids) == WORKERS, "the workers")
        address = next(line for line in self.log.splitlines() if "running on" in line)
        self.url = next(word for word in address.split() if word.startswith("http://"))
        for pid in self.pids:
            with self.only(pid):
                until(self.is_ready, f"worker {pid}", 180)

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
        """The workers; the parent has a child for shared resources, too."""
        command = ["pgrep", "-P", str(self.process.pid), "-f", "spawn_main"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    @contextmanager
    def only(self, pid: int) -> Iterator[None]:
        """The other workers stand still."""
        others = [each for each in self.pids if each != pid]
        for each in others:
            os.kill(each, signal.SIGSTOP)
        try:
            yield
        finally:
            for each in others:
                os.kill(each, signal.SIGCONT)

    def each(self, ask: Callable[[], Any]) -> list[Any]:
        """What every worker answers."""
        answers = []
        for pid in self.pids:
            with self.only(pid):
                answers.append(ask())
        return answers

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=180).status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, key: str = "none", path: str = CHAT, **fields: Any) -> httpx.Response:
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
        crowd = Crowd(stack, tmp_path, f'a = "key-of-a"\n{limited}')
        assert len(crowd.pids) == WORKERS

        def stored() -> Any:
            body = {"model": MODEL, "input": "Hello"}
            headers = {"Authorization": "Bearer key-of-a"}
            answer = httpx.post(
                f"{crowd.url}/v1/responses", json=body, headers=headers, timeout=180
            )
            return answer.json()["id"]

        ids = crowd.each(stored)
        for identifier in ids:
            url, headers = (
                f"{crowd.url}/v1/responses/{identifier}",
                {"Authorization": "Bearer key-of-a"},
            )
            found = crowd.each(
                lambda u=url, h=headers: httpx.get(u, headers=h, timeout=180).status_code
            )
            assert found == [200] * WORKERS
        statuses = [
            status
            for _ in range(3)
            for status in crowd.each(lambda: crowd.ask("key-of-limited").status_code)
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
            until(
                lambda n=name, v=value: crowd.each(lambda: crowd.metric(n)) == [v] * WORKERS,
                f"{name}, {value}",
            )
        # SIGHUP reaches every worker, and a file that is not valid none.
        crowd.write('b = "key-of-b"')
        crowd.process.send_signal(signal.SIGHUP)
        until(lambda: crowd.log.count("settings reloaded") == WORKERS, "the reload")
        assert (
            crowd.each(lambda: [crowd.ask(f"key-of-{name}").status_code for name in "ab"])
            == [[401, 200]] * WORKERS
        )
        crowd.write('c = "key-of-c"', "nonsense = 1")
        crowd.process.send_signal(signal.SIGHUP)
        until(lambda: "not reloaded" in crowd.log, "the error")
        # One that is killed is replaced, with the settings that the others have; counters go on.
        killed, counted = crowd.pids[0], crowd.metric("requests_total")
        os.kill(killed, signal.SIGKILL)
        until(
            lambda: killed not in crowd.pids and len(crowd.pids) == WORKERS, "another worker", 180
        )
        new = crowd.pids[-1]
        with crowd.only(new):
            until(crowd.is_ready, "the new worker", 180)
            assert [crowd.ask(f"key-of-{name}").status_code for name in "abc"] == [401, 200, 401]
            until(lambda: crowd.metric("requests_total") == counted + 1, "the counters")
            assert crowd.metric("requests_running") == 0


@pytest.mark.parametrize("to", ["parent", "all"])
def test_sigterm_lets_streams_end(to: str, tmp_path: Path) -> None:
    """Also if it is sent to every process, as systemd does, or twice by a terminal."""
    with ExitStack() as stack:
        crowd = Crowd(stack, tmp_path)
        crowd.engine.held = True
        streams = []
        for pid in crowd.pids:
            with crowd.only(pid):
                asked = httpx.stream(
                    "POST", crowd.url + CHAT, json={**BODY, "stream": True}, timeout=180
                )
                streams.append(stack.enter_context(asked).iter_lines())
                next(streams[-1])
        pids = crowd.pids if to == "all" else []
        for pid in (crowd.process.pid, *pids):
            os.kill(pid, signal.SIGTERM)
        for pid in crowd.pids:
            with crowd.only(pid):
                until(lambda: not crowd.is_ready(), "the drain to begin")
                assert crowd.ask().status_code == 503
        crowd.engine.held = False
        for lines in streams:
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert not any("error" in event for event in events), events
            choices = (choice for event in events for choice in event["choices"])
            assert "".join(each["delta"].get("content") or "" for each in choices) == TEXT
        assert crowd.process.wait(180) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{crowd.url}/health", timeout=180)


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    with ExitStack() as stack:
        crowd = Crowd(stack, tmp_path)
        crowd.process.kill()

        def refused() -> bool:
            try:
                httpx.get(f"{crowd.url}/health", timeout=180)
            except httpx.TransportError as error:
                return isinstance(error, httpx.ConnectError)
            return False

        until(refused, "the workers to end", 180)


@pytest.mark.parametrize(
    ("flags", "redis", "problem"),
    [
        ((), False, "--workers 2 requires a Redis"),
        (("--inspect",), True, "--inspect requires --workers 1"),
    ],
)
def test_unshareable_settings_of_workers_are_refused(
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
