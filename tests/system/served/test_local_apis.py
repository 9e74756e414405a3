"""The checks of `local_apis` on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from local_apis import CHECKS, ENOUGH, FINAL, SCRIPTS, THINKING

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

pytestmark = pytest.mark.served


@pytest.fixture(scope="module")
def server(enforcing_server: Server, standin_dir: Path) -> Server:
    scripts = [Script(f"{text}<|end|>", output, delay_ms=5) for text, output in SCRIPTS.items()]
    continued = Script(THINKING, FINAL.format(ENOUGH))
    label = Script("B. true<|end|>", "<|channel|>final<|message|>B<|return|>")
    standin.rescript(standin_dir, [*scripts, continued, label])
    return enforcing_server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


@pytest.mark.parametrize("check", CHECKS)
def test_server_passes_check(http: httpx.Client, model: str, check: str) -> None:
    CHECKS[check](http, model)
