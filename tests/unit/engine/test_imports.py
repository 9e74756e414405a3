"""The modules that importing the engine loads, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("mlx_lm")

CODE = """
import sys, {first}
before = {{*sys.modules}}
import {module}
print(*{{*sys.modules}} - before)
"""

WEB = {
    *("aiohttp", "anyio", "fastapi", "starlette", "uvicorn"),
    *("vllm_mlx_harmony.protocols", "vllm_mlx_harmony.server"),
}


@pytest.mark.nightly(sample=2)
@pytest.mark.parametrize(
    ("module", "first"),
    [
        ("vllm_mlx_harmony.engine_api.engine", "sys"),
        # mlx-lm imports anyio with the client of Hugging Face.
        ("vllm_mlx_harmony.engine.mlx_engine", "huggingface_hub, mlx_lm"),
    ],
)
def test_no_web_framework_is_loaded(module: str, first: str) -> None:
    command = [sys.executable, "-c", CODE.format(module=module, first=first)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {*process.stdout.split()}
    assert module in loaded
    assert not WEB & loaded
