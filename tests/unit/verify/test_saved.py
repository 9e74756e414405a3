"""Cases saved by the inspector, run as checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faulty_server import Fault, Reply, run_faulty_server
from scripted_host import KEY

from vllm_mlx_harmony.__main__ import main
from vllm_mlx_harmony.verify import wire
from vllm_mlx_harmony.verify.apis import APIS, Api


def save_case(directory: Path, api: Api, **fields: Any) -> str:
    file = directory / f"{api.name}.json"
    body = {**api.body("the model of another server", wire.TIME), **fields}
    file.write_text(json.dumps({"case": 1, "path": api.path, "body": body}), "utf-8")
    return str(file)


@pytest.mark.parametrize("stream", [True, False])
def test_saved_cases_pass_and_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, stream: bool
) -> None:
    files = [save_case(tmp_path, api, stream=stream) for api in APIS]
    command = [part for file in files for part in ("--case", file)]
    with run_faulty_server() as url:
        assert main(["verify", url, "--key", KEY, *command]) == 0
    shown = capsys.readouterr().out
    assert "3 passed" in shown and "case" in shown
    other = Fault(
        lambda method, path, body: "tools" in body,
        reply=lambda response: Reply(
            response.status, response.text.replace("get_time", "get_date")
        ),
    )
    with run_faulty_server(other) as url:
        assert main(["verify", url, "--key", KEY, *command]) == 1
    shown = capsys.readouterr().out
    assert "3 failed" in shown and shown.count("a call to 'get_date', which is not offered") == 3


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"case": 1, "path": "/", "body": {}}', '{"case": 1, "path": 1, "body": 1}'],
)
def test_other_files_are_rejected(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(text, "utf-8")
    assert main(["verify", "http://127.0.0.1:9", "--case", str(file)]) == 2
    assert "is not a case of the inspector" in capsys.readouterr().err
