"""What importing the engine loads, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("mlx_lm")

CODE = "import sys, vllm_mlx_harmony.engine.engine; print(*sys.modules)"

WEB = ("aiohttp", "fastapi", "starlette", "uvicorn", "vllm_mlx_harmony.protocols")
"""Not anyio: mlx-lm imports it with the client of Hugging Face."""


def test_the_engine_loads_no_web_framework() -> None:
    command = [sys.executable, "-c", CODE]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "mlx_lm" in loaded
    assert not {*WEB} & {*loaded}
