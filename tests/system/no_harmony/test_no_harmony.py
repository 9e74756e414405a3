"""openai-harmony is not installed: one warning that names the fix, and the host serves on its own.

Run by the leg `no-harmony`; anywhere else it is skipped, which fails that leg.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from json import dumps, loads
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("openai_harmony") is not None:
    pytest.skip("openai-harmony is installed", allow_module_level=True)

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli.process import Running, serving
from vllm_mlx_harmony.standin import Script


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The host with the flag that asks for Harmony."""
    directory = tmp_path_factory.mktemp("standin")
    model = standin.write(directory, [Script("Hello", "Hi, I am the host's own path.<|return|>")])
    with serving(model, tmp_path_factory.mktemp("home")) as running:
        yield running


def asked(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and document of an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, dumps(body) if body else None, headers)
    response = connection.getresponse()
    return response.status, loads(response.read())


def test_one_warning_names_the_fix(server: Running) -> None:
    lines = server.log.read_text("utf-8").splitlines()
    ours = [line for line in lines if line.startswith("vllm-mlx-harmony:")]
    assert len(ours) == 1
    assert "pip install openai-harmony" in ours[0]


def test_the_host_answers_on_its_own(server: Running) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    _, listed = asked(server.port, "GET", "/v1/models")
    body = {"model": listed["data"][0]["id"], "messages": messages}
    status, answer = asked(server.port, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    assert "the host's own path" in answer["choices"][0]["message"]["content"]


def test_none_of_our_routes_is_there(server: Running) -> None:
    """The host has no route for one model."""
    _, listed = asked(server.port, "GET", "/v1/models")
    assert asked(server.port, "GET", f"/v1/models/{listed['data'][0]['id']}")[0] == 404


@pytest.mark.parametrize("command", ["render", "parse"])
def test_commands_name_the_fix(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text('{"model":"m","messages":[{"role":"user","content":"<|end|>"}]}')
    ended = subprocess.run(
        [sys.executable, "-m", "vllm_mlx_harmony", command, str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "pip install openai-harmony" in ended.stderr
    assert ended.stderr.count("\n") == 1
