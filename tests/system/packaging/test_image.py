"""The steps of the gateway's Dockerfile, run in a fresh environment instead of a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "examples/compose/Dockerfile").read_text()
STEPS = [
    line.partition(" ")[::2]
    for line in re.sub(r"\s*\\\n\s*", " ", DOCKERFILE).splitlines()
    if line and not line.startswith("#")
]


def steps(name: str) -> list[str]:
    """The arguments of every instruction of that name."""
    return [rest for instruction, rest in STEPS if instruction == name]


def test_dockerfile_steps_build_healthy_gateway(tmp_path: Path) -> None:
    uv = shutil.which("uv")
    assert uv is not None
    subprocess.run(
        [uv, "venv", "-q", "--seed", "--python", sys.executable, tmp_path / "env"], check=True
    )
    program = tmp_path / "env" / "bin"
    (tmp_path / "wheels").mkdir()
    useradd = program / "useradd"
    useradd.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/user\n')
    useradd.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**clean, "PATH": f"{program}:/usr/bin:/bin", "VIRTUAL_ENV": ""}

    def with_local_paths(text: str) -> str:
        return re.sub(r"/src\b", str(ROOT), text).replace("/wheels", f"{tmp_path}/wheels")

    for arguments in steps("COPY"):
        *source, _ = arguments.split(" ")
        if not source[0].startswith("--from"):
            assert (ROOT / source[0]).exists()
            if source[0] != ".":
                shutil.copy(ROOT / source[0], tmp_path / "wheels")
    for command in map(with_local_paths, steps("RUN")):
        process = subprocess.run(
            command, shell=True, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr
    (user,) = steps("USER")
    assert f"--uid {user} " in (tmp_path / "user").read_text()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = dict(assignment.split("=") for assignment in steps("ENV"))
    environment |= {**variables, "VLLM_MLX_HARMONY_GATEWAY_PORT": port}
    (entry,) = map(json.loads, steps("ENTRYPOINT"))
    (check,) = steps("HEALTHCHECK")
    check = json.loads(check.partition("CMD ")[2].replace(":8000/", f":{port}/"))

    def is_healthy() -> bool:
        return (
            subprocess.run(check, env=environment, capture_output=True, check=False).returncode == 0
        )

    flags = ("--engine", "http://127.0.0.1:9", "--model", "m", "--key", "key-of-alice")
    server = subprocess.Popen([*entry, *flags], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not is_healthy():
            assert server.poll() is None and time.monotonic() < deadline
        server.terminate()
        server.wait(30)
        assert not is_healthy()
    finally:
        server.kill()
        server.wait()
