"""A real host as a process: started on a free port with a home of its own, stopped by its pid.

Knows processes and `/health`, but not what is served.
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
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
from preloaded import POSSIBLE, Forked, Process

from vllm_mlx_harmony.cli.process import free_port

REPOSITORY = Path(__file__).resolve().parents[2]

INSTALLED = Path(sysconfig.get_path("purelib"), "vllm_mlx_harmony_startup.pth").exists()
"""Whether the plugin is installed here, and so in every started server."""

SPELLINGS: dict[str, tuple[str, ...]] = {"simple": (), "batched": ("--continuous-batching",)}
"""Flags that select each of the host's engines. The plugin replaces both by its own."""

HOST = (str(Path(sys.executable).with_name("vllm-mlx")), "serve")
"""The host's own command. It loads the plugin if that is installed, by its `.pth` file."""

MODULE = (sys.executable, "-m", "vllm_mlx.cli", "serve")
"""The same, started as a module, so that the host's command line is `__main__`."""

EXPLICIT = (sys.executable, "-m", "vllm_mlx_harmony", "serve")
"""The plugin's own command, for an environment where it is on the path but not installed."""

GATEWAY = (sys.executable, "-m", "vllm_mlx_harmony", "gateway")
"""The command of the gateway, which is the light server, too."""

IS_LIGHT = find_spec("vllm_mlx") is None
"""Whether the server here is the light one, without vllm-mlx."""

HARMONY = HOST if INSTALLED else EXPLICIT
"""The command with the plugin, here."""

FLAG = ("--tool-call-parser", "harmony")
"""The flag that activates the plugin."""

KEY = "a-secret-key"
"""The API key of servers that have one."""

STARTING = 300.0
"""Seconds a server may take until it is ready; two busy cores need about 15."""


class DidNotStart(RuntimeError):
    """The process ended or was not healthy in time. The message has the log's last lines."""


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
        """OpenAI's client of this server; the caller closes it. Without an API key in the server,
        ``key`` is the name of a tenant."""
        url = f"{self.base_url}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)

    def wait_for_requests(self, running: int = 0, waiting: int = 0, seconds: float = 30.0) -> None:
        """Waits for these numbers of requests. Cancelled answers must take far longer than that."""
        deadline = time.monotonic() + seconds
        while (counts := self.requests()) != (running, waiting):
            assert time.monotonic() < deadline, f"{counts} requests run and wait after {seconds} s"
            time.sleep(0.05)

    def requests(self) -> tuple[int, int]:
        """The numbers of running and of waiting requests."""
        places = [request["place"] for model in self.models() for request in model["requests"]]
        return places.count(0), sum(place > 0 for place in places)

    def finished(self) -> int:
        """The number of finished requests, since one may start and end between two calls of
        ``requests``."""
        return sum(model["finished_requests"] for model in self.models())

    def models(self) -> list[dict[str, Any]]:
        """The loaded models, as in ``GET /harmony/status``."""
        return list(self._get("/harmony/status")["models"])

    def cache_stats(self) -> dict[str, Any]:
        """The counters of the prefix cache; ``disk`` has those of the disk."""
        stats = self._get("/v1/cache/stats")["engine_cache"]["harmony_prefix_reuse"]
        return dict(stats)

    def residency(self) -> str:
        """Whether vllm-mlx has loaded the model."""
        return str(self._get("/v1/status")["residency"]["state"])

    def _get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.get(f"{self.base_url}{path}", headers=headers, timeout=60).json()

    @contextmanager
    def open_request(self, path: str, document: object) -> Iterator[None]:
        """Sends a request. Its client reads nothing, and disconnects at the end of the context."""
        url, content = httpx.URL(self.base_url), json.dumps(document)
        head = f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall((head + content).encode())
            yield

    def stop(self, patience: float = 10.0) -> int:
        """Ends the process, with SIGTERM first. Returns its exit code; may be called twice."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start(
    model: Path | str,
    *flags: str,
    home: Path,
    command: Sequence[str] = HARMONY if IS_LIGHT else HOST,
    env: Mapping[str, str] | None = None,
    ready: bool = True,
    preloaded: bool = True,
    health: str = "/health",
) -> Server:
    """Starts ``command model --host 127.0.0.1 --port FREE flags…`` and waits until it is healthy.

    ``home`` becomes the process's home directory and contains its log: the host has a prefix cache
    in the user's cache directory, which two tests must not share. ``env`` is added to this
    process's environment. Without ``ready``, returns at once (for servers that must not start).
    ``preloaded``: with the host's libraries already imported, where possible. ``health`` is the
    path that says whether it is healthy.
    Raises ``DidNotStart``.
    """
    port = free_port()
    home.mkdir(parents=True, exist_ok=True)
    log_path = home / "server.log"
    arguments = [*command, str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
    started = time.monotonic()
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
    server = Server(process, url, Path(model), home, log_path, ready_after=0.0)
    if not ready:
        return server
    _wait_until_healthy(server, f"{url}{health}", started)
    return replace(server, ready_after=time.monotonic() - started)


def _environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with all directories of the host in ``home``."""
    source_paths = [] if INSTALLED else [str(REPOSITORY)]  # must not shadow an installed plugin
    paths = [*source_paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    isolated = {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **isolated, **extra}


def _wait_until_healthy(server: Server, url: str, started: float) -> None:
    while time.monotonic() - started < STARTING:
        if server.process.poll() is not None:
            raise DidNotStart(f"exit code {server.process.returncode}\n{_tail(server)}")
        if _is_healthy(url):
            return
        time.sleep(0.1)
    server.stop()
    raise DidNotStart(f"not healthy after {STARTING:.0f} s\n{_tail(server)}")


def _is_healthy(url: str) -> bool:
    try:
        response = httpx.get(url, timeout=5.0)
    except httpx.TransportError:
        return False
    return response.status_code == 200 and response.json().get("model_loaded") is not False


def _tail(server: Server) -> str:
    return "\n".join(server.log.splitlines()[-40:])
