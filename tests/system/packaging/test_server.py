"""The server without the plugin: small, without vllm-mlx, mlx and torch, and it serves."""

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
    # hatchling writes nothing into the tree, and the wheel only to where it is told to.
    run(uv, "build", "--wheel", "--out-dir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(uv, "venv", "-q", folder / "env")
    run(uv, "pip", "install", "-q", "--python", folder / "env" / "bin" / "python", wheel)
    return folder / "env"


def run(*command: object) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, check=False, env=clean
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def site(environment: Path) -> Path:
    (found,) = (environment / "lib").glob("python3*/site-packages")
    return found


def test_it_is_small_and_brings_no_model_library(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = site(environment)
    size = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) / 1e6
    with capsys.disabled():
        print(f"\nvllm-mlx-harmony-server, installed with all it needs: {size:.0f} MB")
    assert size < MOST_MEGABYTES
    there = {path.name for path in packages.iterdir()}
    assert there & HEAVY == set()
    assert not list(packages.glob("vllm_mlx_harmony_startup*")), "nothing runs at Python's start"


def test_model_commands_name_the_extra(environment: Path) -> None:
    program = environment / "bin" / "vllm-mlx-harmony"
    for command, code in {"serve": 2, "demo": 2, "doctor": 1}.items():
        done = subprocess.run([program, command], capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert "'vllm-mlx-harmony-server[mlx]'" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_gateway_serves_until_sigterm(environment: Path) -> None:
    """No engine is there: it lives, and is not ready."""
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


def test_with_mlx_lm_it_serves_a_model(environment: Path, tmp_path: Path) -> None:
    """The extra ``mlx``: `serve`, without vllm-mlx."""
    (wheel,) = (environment.parent / "dist").glob("*.whl")
    python = tmp_path / "env" / "bin" / "python"
    run(shutil.which("uv"), "venv", "-q", tmp_path / "env")
    run(shutil.which("uv"), "pip", "install", "-q", "--python", python, f"{wheel}[mlx]")
    installed = {path.name for path in site(tmp_path / "env").iterdir()}
    assert not installed & {"vllm_mlx", "torch", "torchvision", "gradio", "cv2", "fastapi"}
    write = "import sys, pathlib; from vllm_mlx_harmony import standin; "
    run(python, "-c", write + "standin.write(pathlib.Path(sys.argv[1]))", tmp_path / "model")
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
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            json.dumps(answer.read().decode())
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
