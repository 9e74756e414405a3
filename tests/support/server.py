"""A real host as a process: started on a free port with a home of its own, stopped by its pid.

Knows processes and `/health`. Refuses to know what is served.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
from preloaded import POSSIBLE, Forked, Process

from vllm_mlx_harmony.cli.process import free_port

REPOSITORY = Path(__file__).resolve().parents[2]

INSTALLED = Path(sysconfig.get_path("purelib"), "vllm_mlx_harmony_startup.pth").exists()
"""Whether the plugin is installed here, and so in every server that is started."""

SPELLINGS: dict[str, tuple[str, ...]] = {"simple": (), "batched": ("--continuous-batching",)}
"""Flags that choose each of the host's engines: with the plugin, both are served by ours."""

HOST = (str(Path(sys.executable).with_name("vllm-mlx")), "serve")
"""The host's own command. The plugin is in it when it is installed: its `.pth` is read."""

MODULE = (sys.executable, "-m", "vllm_mlx.cli", "serve")
"""The same, started as a module: the host's command line is then called `__main__`."""

EXPLICIT = (sys.executable, "-m", "vllm_mlx_harmony", "serve")
"""The plugin's own command, for an environment where it is on the path but not installed."""

IS_LIGHT = find_spec("vllm_mlx") is None
"""Whether the server is the light one here, without vllm-mlx."""

HARMONY = HOST if INSTALLED else EXPLICIT
"""The command that has the plugin in it, here."""

FLAG = ("--tool-call-parser", "harmony")
"""What switches it on."""

KEY = "a-secret-key"
"""The API key of servers that have one."""

STARTING = 300.0
"""Seconds a server may take until it is ready; two busy cores need about 15."""


class DidNotStart(RuntimeError):
    """The process ended or was not healthy in time. The message ends with the log's last lines."""


@dataclass(frozen=True)
class Server:
    """A running host. ``base_url`` has no path: ``http://127.0.0.1:PORT``."""

    process: Process
    base_url: str
    model: Path
    home: Path
    log_path: Path
    ready_after: float

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text("utf-8", "replace")

    def client(self, timeout: float = 60.0) -> httpx.Client:
        """A plain HTTP client of this server; the caller closes it."""
        return httpx.Client(base_url=self.base_url, timeout=timeout)

    def openai(self, key: str = KEY) -> openai.OpenAI:
        """OpenAI's client of this server; the caller closes it. Where no key is asked for, it says
        whose tenant this is."""
        url = f"{self.base_url}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)

    def wait_for_requests(self, running: int = 0, waiting: int = 0, seconds: float = 30.0) -> None:
        """Waits for a state. An answer that is given up must take far longer than the limit."""
        end = time.monotonic() + seconds
        while (found := self.requests()) != (running, waiting):
            assert time.monotonic() < end, f"{found} requests run and wait after {seconds} s"
            time.sleep(0.05)

    def requests(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        places = [each["place"] for model in self.models() for each in model["requests"]]
        return places.count(0), sum(place > 0 for place in places)

    def finished(self) -> int:
        """How many requests the engines have finished. One may begin and end between two looks at
        those that run."""
        return sum(model["finished_requests"] for model in self.models())

    def models(self) -> list[dict[str, Any]]:
        """The models that are loaded, as ``GET /harmony/status`` lists them."""
        headers = {"Authorization": f"Bearer {KEY}"}
        status = httpx.get(f"{self.base_url}/harmony/status", headers=headers, timeout=60)
        models: list[dict[str, Any]] = status.json()["models"]
        return models

    @contextmanager
    def sent(self, path: str, document: object) -> Iterator[None]:
        """A request whose client reads nothing and goes at the end of the context."""
        url, content = httpx.URL(self.base_url), json.dumps(document)
        head = f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall((head + content).encode())
            yield

    def stop(self, patience: float = 10.0) -> int:
        """Ends the process, gently at first. Returns its exit code; a second call does nothing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start(
    model: Path,
    *flags: str,
    home: Path,
    command: Sequence[str] = HARMONY if IS_LIGHT else HOST,
    env: Mapping[str, str] | None = None,
    ready: bool = True,
    preloaded: bool = True,
) -> Server:
    """Starts ``command model --host 127.0.0.1 --port FREE flags…`` and waits until it is healthy.

    ``home`` becomes the process's home directory, and holds its log: the host keeps a prefix cache
    in the user's cache directory, which two tests must not share. ``env`` is added to this
    process's environment. Without ``ready`` it returns at once (for servers that must not start).
    ``preloaded``: with the host's libraries imported already, where that is possible.
    Raises ``DidNotStart``.
    """
    port = free_port()
    home.mkdir(parents=True, exist_ok=True)
    log_path = home / "server.log"
    arguments = [*command, str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    began = time.monotonic()
    environment = _environment(home, env or {})
    process: Process
    if preloaded and POSSIBLE:
        process = Forked(arguments, log_path, home, environment)
    else:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=home,
                env=environment,
            )
    url = f"http://127.0.0.1:{port}"
    server = Server(process, url, model, home, log_path, ready_after=0.0)
    if not ready:
        return server
    _wait_until_healthy(server, began)
    return Server(process, url, model, home, log_path, time.monotonic() - began)


def _environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with everything the host stores moved into ``home``."""
    here = [] if INSTALLED else [str(REPOSITORY)]  # what is installed must not be shadowed
    paths = [*here, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **own, **extra}


def _wait_until_healthy(server: Server, began: float) -> None:
    while time.monotonic() - began < STARTING:
        if server.process.poll() is not None:
            raise DidNotStart(f"exit code {server.process.returncode}\n{_tail(server)}")
        if _is_healthy(server):
            return
        time.sleep(0.1)
    server.stop()
    raise DidNotStart(f"not healthy after {STARTING:.0f} s\n{_tail(server)}")


def _is_healthy(server: Server) -> bool:
    try:
        answer = httpx.get(f"{server.base_url}/health", timeout=5.0)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json().get("model_loaded") is not False


def _tail(server: Server) -> str:
    return "\n".join(server.log.splitlines()[-40:])
