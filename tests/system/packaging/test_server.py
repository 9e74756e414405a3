"""The server without the plugin is small, needs no vllm-mlx, mlx or torch, and serves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[3]
MOST_MEGABYTES = 150
HEAVY = {"vllm_mlx", "mlx", "mlx_lm", "torch", "transformers", "vllm", "fastapi"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and nothing else."""
    uv = shutil.which("uv")
    assert uv is not None
    folder = tmp_path_factory.mktemp("server")
    # hatchling writes nothing into the source tree, and the wheel into --out-dir only.
    run(uv, "build", "--wheel", "--out-dir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(uv, "venv", "-q", folder / "env")
    run(uv, "pip", "install", "-q", "--python", folder / "env" / "bin" / "python", wheel)
    return folder / "env"


def run(*command: object) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    process = subprocess.run(
        words, capture_output=True, text=True, timeout=300, check=False, env=clean
    )
    assert process.returncode == 0, f"{words}\n{process.stdout}\n{process.stderr}"
    return process.stdout


def site(environment: Path) -> Path:
    (packages,) = (environment / "lib").glob("python3*/site-packages")
    return packages


def test_installation_is_small_and_has_no_model_library(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = site(environment)
    size = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) / 1e6
    with capsys.disabled():
        print(f"\nvllm-mlx-harmony-server, installed with all it needs: {size:.0f} MB")
    assert size < MOST_MEGABYTES
    installed = {path.name for path in packages.iterdir()}
    assert installed & HEAVY == set()
    assert not list(packages.glob("vllm_mlx_harmony_startup*")), "nothing runs at Python's start"


def test_model_commands_name_the_extra(environment: Path) -> None:
    program = environment / "bin" / "vllm-mlx-harmony"
    for command, code in {"serve": 2, "demo": 2, "doctor": 1}.items():
        process = subprocess.run([program, command], capture_output=True, text=True, check=False)
        assert process.returncode == code
        assert "'vllm-mlx-harmony-server[mlx]'" in process.stdout + process.stderr
        assert "Traceback" not in process.stderr


def test_gateway_serves_until_sigterm(environment: Path) -> None:
    """Without an engine, it is alive but not ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = environment / "bin" / "vllm-mlx-harmony"
    flags = ("--engine", "http://127.0.0.1:9", "--model", "m", "--port", str(port))
    server = subprocess.Popen([program, "gateway", *flags], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while (status := _status(port, "/health")) != 200:
            assert server.poll() is None, server.stderr and server.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert status == 200
        assert _status(port, "/ready") == 503
        assert _status(port, "/metrics") == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    finally:
        server.kill()
        server.communicate()


def test_server_with_mlx_extra_serves_model(environment: Path, tmp_path: Path) -> None:
    """The extra ``mlx``: `serve`, without vllm-mlx."""
    (wheel,) = (environment.parent / "dist").glob("*.whl")
    python = tmp_path / "env" / "bin" / "python"
    run(shutil.which("uv"), "venv", "-q", tmp_path / "env")
    run(shutil.which("uv"), "pip", "install", "-q", "--python", python, f"{wheel}[mlx]")
    installed = {path.name for path in site(tmp_path / "env").iterdir()}
    assert not installed & {"vllm_mlx", "torch", "torchvision", "gradio", "cv2", "fastapi"}
    code = "import sys, pathlib; from vllm_mlx_harmony import standin; "
    run(python, "-c", code + "standin.write(pathlib.Path(sys.argv[1]))", tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = python.with_name("vllm-mlx-harmony")
    command = [program, "serve", tmp_path / "model", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while _status(port, "/ready") != 200:
            assert server.poll() is None, server.stderr and server.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        server.terminate()
        server.communicate(timeout=30)


def _status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            json.dumps(response.read().decode())
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
