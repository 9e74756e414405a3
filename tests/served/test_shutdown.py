"""SIGTERM on a real server: gone at once when nobody waits for an answer, and at the second."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from server import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

SCRIPTS = [
    Script(
        "<|message|>Slowly.<|end|>",
        "<|channel|>final<|message|>" + " word" * 400 + "<|return|>",
        delay_ms=50,
    ),
]
USER = [{"role": "user", "content": "Slowly."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Slowly."},
    "/v1/messages": {"messages": USER, "max_tokens": 4000},
}


def model_of(server: Server) -> str:
    with server.client() as client:
        return str(client.get("/v1/models").json()["data"][0]["id"])


def streamed(server: Server, path: str, body: dict[str, Any]) -> str:
    with server.client(60) as client:
        return client.post(path, json=body).text


def slowly(model: str, path: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, **BODIES[path], **fields}


def test_with_nobody_to_wait_for_it_is_gone_at_once(start: Start, standin_dir: Path) -> None:
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, command=HARMONY)
    with httpx.Client(base_url=server.base_url) as idle:
        assert idle.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(5)
    assert "Traceback" not in server.log


def test_the_second_signal_kills(start: Start, standin_dir: Path) -> None:
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, command=HARMONY)
    path = "/v1/chat/completions"
    asked = slowly(model_of(server), path, stream=True)
    reader = threading.Thread(target=_reads, args=(server, path, asked), daemon=True)
    reader.start()
    time.sleep(1.0)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(2) == -signal.SIGTERM
    reader.join(5)


def _reads(server: Server, path: str, body: dict[str, Any]) -> None:
    with suppress(httpx.TransportError):
        streamed(server, path, body)
