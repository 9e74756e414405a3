"""openai-harmony is not installed: one warning names the fix, and the host serves by itself.

The leg `no-harmony` runs this; elsewhere it is skipped, which fails that leg.
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
    """The host with the flag that selects Harmony."""
    directory = tmp_path_factory.mktemp("standin")
    model = standin.write(directory, [Script("Hello", "Hi, I am the host's own path.<|return|>")])
    with serving(model, tmp_path_factory.mktemp("home")) as running:
        yield running


def send(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """The status and document of the response."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, dumps(body) if body else None, headers)
    response = connection.getresponse()
    return response.status, loads(response.read())


def test_one_warning_names_the_fix(server: Running) -> None:
    lines = server.log.read_text("utf-8").splitlines()
    warnings = [line for line in lines if line.startswith("vllm-mlx-harmony:")]
    assert len(warnings) == 1
    assert "pip install openai-harmony" in warnings[0]


def test_host_answers_without_plugin(server: Running) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    _, models = send(server.port, "GET", "/v1/models")
    body = {"model": models["data"][0]["id"], "messages": messages}
    status, document = send(server.port, "POST", "/v1/chat/completions", body)
    assert status == 200, document
    assert "the host's own path" in document["choices"][0]["message"]["content"]


def test_plugin_routes_are_absent(server: Running) -> None:
    """The host has no route for one model."""
    _, models = send(server.port, "GET", "/v1/models")
    assert send(server.port, "GET", f"/v1/models/{models['data'][0]['id']}")[0] == 404


@pytest.mark.parametrize("command", ["render", "parse"])
def test_commands_name_the_fix(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text('{"model":"m","messages":[{"role":"user","content":"<|end|>"}]}')
    process = subprocess.run(
        [sys.executable, "-m", "vllm_mlx_harmony", command, str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert "pip install openai-harmony" in process.stderr
    assert process.stderr.count("\n") == 1
