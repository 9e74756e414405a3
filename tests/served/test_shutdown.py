"""SIGTERM on a real server: gone at once when nobody waits for an answer, and at the second."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from server import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

SLOWLY = Script("", "<|channel|>final<|message|>" + " word" * 400 + "<|return|>", delay_ms=50)


def test_with_nobody_to_wait_for_it_is_gone_at_once(start: Start, standin_dir: Path) -> None:
    standin.rescript(standin_dir, [SLOWLY])
    server = start(*FLAG, command=HARMONY)
    with httpx.Client(base_url=server.base_url) as idle:
        assert idle.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(5)
    assert "Traceback" not in server.log


def test_the_second_signal_kills(start: Start, standin_dir: Path) -> None:
    standin.rescript(standin_dir, [SLOWLY])
    server = start(*FLAG, command=HARMONY)
    reader = threading.Thread(target=_reads, args=(server,), daemon=True)
    reader.start()
    time.sleep(1.0)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert server.process.poll() is None  # it waits for the answer
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(2) == -signal.SIGTERM
    reader.join(5)


def _reads(server: Server) -> None:
    """Asks for a long answer, and reads it until the server is gone."""
    with suppress(httpx.TransportError), server.client(60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        messages = [{"role": "user", "content": "Slowly."}]
        body = {"model": model, "messages": messages, "stream": True}
        client.post("/v1/chat/completions", json=body)
