"""Answers when a native library aborts the process, as mlx does after an error of the GPU.

A thread of the server calls C's ``abort`` as soon as a file exists, without the interpreter lock,
as Metal's completion handler does.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from waiting import wait_until

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from conftest import Start
    from server_process import Server

SLOW_ANSWER = "<|channel|>final<|message|>" + "one two three " * 300 + "<|return|>"
PROGRAM = """
import ctypes, pathlib, sys, threading, time
from vllm_mlx_harmony.__main__ import main

def abort():
    while not pathlib.Path("abort").exists():
        time.sleep(0.02)
    ctypes.CDLL(None).abort()

threading.Thread(target=abort, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""
PROBLEM = "the engine failed and the server is restarting"
REQUEST: Any = {"model": "gpt-oss-standin"}
MESSAGES: Any = [{"role": "user", "content": "Slowly"}]

StartedCallback = Callable[[], None]
"""Called when the first event has arrived."""


def chat(url: str, on_start: StartedCallback) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for _ in client.chat.completions.create(**REQUEST, messages=MESSAGES, stream=True):
            on_start()


def responses(url: str, on_start: StartedCallback) -> None:
    """The error is the last event, ``response.failed``."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for event in client.responses.create(**REQUEST, input="Slowly", stream=True):
            if event.type == "response.output_text.delta":
                on_start()
    assert event.type == "response.failed"
    assert event.response.error is not None
    raise AssertionError(event.response.error.message)


def messages(url: str, on_start: StartedCallback) -> None:
    with anthropic.Anthropic(base_url=url, auth_token="none", max_retries=0) as client:
        fields = {**REQUEST, "messages": MESSAGES, "max_tokens": 1000}
        for _ in client.messages.create(**fields, stream=True):
            on_start()


def whole_chat(url: str, on_start: StartedCallback) -> None:
    on_start()
    body = {**REQUEST, "messages": MESSAGES}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 503
    raise AssertionError(response.json()["error"]["message"])


ROWS = {"chat": chat, "responses": responses, "messages": messages, "whole": whole_chat}


@pytest.fixture(scope="module")
def error_messages(start: Start, model: Path) -> dict[str, str]:
    """The error of each client, by row. All are being served when the process is aborted."""
    standin.rescript(model, [Script("<|message|>Slowly<|end|>", SLOW_ANSWER, delay_ms=50)])
    server: Server = start(f"mlx:{model}", command=(sys.executable, "-c", PROGRAM, "gateway"))
    started = {name: threading.Event() for name in ROWS}
    with ThreadPoolExecutor(len(ROWS)) as pool:
        futures = {
            name: pool.submit(row, server.base_url, started[name].set) for name, row in ROWS.items()
        }
        assert all(event.wait(30) for event in started.values())
        wait_until(lambda: sum(server.requests()) == len(ROWS), "the unstreamed one, too")
        (server.home / "abort").touch()
        errors = {name: future.exception(30) for name, future in futures.items()}
    assert server.process.wait(30) == -signal.SIGABRT
    return {name: str(error) for name, error in errors.items()}


@pytest.mark.parametrize("name", ROWS)
def test_answer_ends_with_an_error(error_messages: dict[str, str], name: str) -> None:
    assert PROBLEM in error_messages[name]
