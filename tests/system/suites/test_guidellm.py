"""GuideLLM, a benchmark of servers, runs to its end: with its `ignore_eos`, every answer has the
requested length.

https://github.com/vllm-project/guidellm; it is 6 GB, most of it torch, so uvx installs it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli.process import serving

pytest.importorskip("mlx.core")

REQUESTS, LENGTH = 4, 32


def test_every_answer_has_the_requested_length(tmp_path: Path) -> None:
    uvx = shutil.which("uvx")
    assert uvx, "this test needs uv: pip install uv"
    model = standin.write(tmp_path / "gpt-oss-20b-stand-in")
    report = tmp_path / "found.json"
    with serving(model, tmp_path) as server:
        command = [
            *(uvx, "guidellm@0.8.1", "run", "--disable-progress"),
            *("--backend", f"kind=openai_http,target={server.url}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={model}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={LENGTH}"),
            *("--output", f"kind=json,path={report}"),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    assert process.returncode == 0, process.stdout + process.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert [len(requests[kind]) for kind in ("errored", "incomplete")] == [0, 0]
    assert [request["output_metrics"]["text_tokens"] for request in requests["successful"]] == (
        [LENGTH] * REQUESTS
    )
