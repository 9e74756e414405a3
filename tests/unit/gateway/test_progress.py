"""A gateway passes on the progress of the prompt, where its engine reports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from sse import documents

pytest.importorskip("prometheus_client")


import httpx
from app_server import run_server
from fake_engines import EXCHANGES, FakeEngine, compact
from gateway_in_process import MODEL, CountingGateway

from vllm_mlx_harmony.server.app import application

SCRIPTS = {"Hello": "<|channel|>final<|message|>Good day.<|return|>"}
REPORTS = [
    {"total": 90, "cache": 10, "processed": processed, "time_ms": processed}
    for processed in (10, 50, 90)
]


@pytest.fixture
def _reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp as it streams with ``return_progress``."""
    exchange = EXCHANGES["llamacpp"]

    def events(prompt: Sequence[int], output: Sequence[int], finish: str) -> Iterator[str]:
        for report in REPORTS:
            event = {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": 0}
            yield compact({**event, "tokens_predicted": 0, "prompt_progress": report})
        yield from exchange.events(prompt, output, finish)

    monkeypatch.setitem(EXCHANGES, "llamacpp", replace(exchange, events=events))


def post_chat(kind: str, **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of an answer, and the progress reported before it."""
    with ExitStack() as stack:
        engine = FakeEngine(kind, SCRIPTS)
        host = CountingGateway("", (engine, stack.enter_context(run_server(engine.app))))
        url = stack.enter_context(run_server(application(host)))
        messages = [{"role": "user", "content": "Hello"}]
        body = {"model": MODEL, "messages": messages, "stream": True, **fields}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180)
    chunks = documents(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]


@pytest.mark.usefixtures("_reporting")
def test_progress_of_llama_cpp_is_passed_on() -> None:
    text, reports = post_chat("llamacpp", return_progress=True)
    assert text == "Good day."
    assert reports[-1] == REPORTS[-1] and all(report in REPORTS for report in reports)
    assert post_chat("llamacpp") == (text, [])


@pytest.mark.parametrize("kind", ["vllm", "sglang", "vllm-mlx"])
def test_engine_without_progress_answers_as_before(kind: str) -> None:
    assert post_chat(kind, return_progress=True) == ("Good day.", [])
