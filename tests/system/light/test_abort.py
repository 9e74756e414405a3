"""Answers when a native library aborts the process, as mlx does after an error of the GPU.

A thread of the server calls ``abort`` as soon as a file exists: a C function on a thread that does
not hold the interpreter lock, as Metal's completion handler.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from conftest import Server, Start

SLOWLY = "<|channel|>final<|message|>" + "one two three " * 300 + "<|return|>"
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
ASKED: Any = {"model": "gpt-oss-standin"}
MESSAGES: Any = [{"role": "user", "content": "Slowly"}]

Begin = Callable[[], None]
"""Called when the first event has arrived."""


def chat(url: str, begin: Begin) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for _ in client.chat.completions.create(**ASKED, messages=MESSAGES, stream=True):
            begin()


def responses(url: str, begin: Begin) -> None:
    """The error is the last event, ``response.failed``."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for event in client.responses.create(**ASKED, input="Slowly", stream=True):
            if event.type == "response.output_text.delta":
                begin()
    assert event.type == "response.failed"
    assert event.response.error is not None
    raise AssertionError(event.response.error.message)


def messages(url: str, begin: Begin) -> None:
    with anthropic.Anthropic(base_url=url, auth_token="none", max_retries=0) as client:
        asked = {**ASKED, "messages": MESSAGES, "max_tokens": 1000}
        for _ in client.messages.create(**asked, stream=True):
            begin()


def whole(url: str, begin: Begin) -> None:
    begin()
    body = {**ASKED, "messages": MESSAGES}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 503
    raise AssertionError(answer.json()["error"]["message"])


ROWS = {"chat": chat, "responses": responses, "messages": messages, "whole": whole}


def requests(url: str) -> int:
    """How many requests the server has."""
    models = httpx.get(f"{url}/harmony/status", timeout=60).json()["models"]
    return sum(len(model["requests"]) for model in models)


@pytest.fixture(scope="module")
def problems(start: Start, model: Path) -> dict[str, str]:
    """What each client is told, by row: all are served when the process is aborted."""
    standin.rescript(model, [Script("<|message|>Slowly<|end|>", SLOWLY, delay_ms=50)])
    server: Server = start("gateway", f"mlx:{model}", program=("-c", PROGRAM))
    waiting = {name: threading.Event() for name in ROWS}
    with ThreadPoolExecutor(len(ROWS)) as pool:
        calls = {
            name: pool.submit(row, server.url, waiting[name].set) for name, row in ROWS.items()
        }
        assert all(event.wait(30) for event in waiting.values())
        until = time.monotonic() + 30
        while requests(server.url) < len(ROWS):  # the one that is not streamed arrives, too
            assert time.monotonic() < until
            time.sleep(0.1)
        (server.log.parent / "abort").touch()
        errors = {name: call.exception(30) for name, call in calls.items()}
    assert server.process.wait(30) == -signal.SIGABRT
    return {name: str(error) for name, error in errors.items()}


@pytest.mark.parametrize("name", ROWS)
def test_answer_ends_with_an_error(problems: dict[str, str], name: str) -> None:
    assert PROBLEM in problems[name]
