"""Reasoning that is ended (semantics C5): what each API says of it, streamed and not."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts test directories nowhere

from fakes import MODEL, Alone, ObedientEngine, Tracker
from official_clients import clients

from vllm_mlx_harmony.server import enforcement, generation

ANALYSIS = "<|channel|>analysis<|message|>"
GRID = ("0 " * 10 + "\n") * 10


class Counting(Alone):
    """A host that counts whose reasoning was ended, and by what."""

    def __init__(self, thoughts: str) -> None:
        said = f"{ANALYSIS}{thoughts}<|end|><|start|>assistant{ObedientEngine.ANSWER}"
        super().__init__(ObedientEngine({"Hm?": said}))
        self.ended: list[str] = []

    def max_tokens(self, asked: int | None) -> int:
        return 10_000

    def tracker(self, api: str, *, stream: bool) -> Tracker:
        tracker = super().tracker(api, stream=stream)
        tracker.reasoning_ended = self.ended.append  # type: ignore[method-assign]
        return tracker


async def by_chat(host: Alone, stream: bool, budget: int | None) -> tuple[str, Any]:
    client, _ = clients(host)
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hm?"}]}
    if budget is not None:
        asked["extra_body"] = {"thinking_token_budget": budget}
    if stream:
        async with client.chat.completions.stream(**asked) as events:
            message: Any = (await events.get_final_completion()).choices[0].message
    else:
        message = (await client.chat.completions.create(**asked)).choices[0].message
    return str(message.content), (message.model_extra or {}).get("reasoning_ended_by")


async def by_responses(host: Alone, stream: bool, budget: int | None) -> tuple[str, Any]:
    client, _ = clients(host)
    asked: dict[str, Any] = {"model": MODEL, "input": "Hm?"}
    if budget is not None:
        asked["extra_body"] = {"thinking_token_budget": budget}
    if stream:
        async with client.responses.stream(**asked) as events:
            response: Any = await events.get_final_response()
    else:
        response = await client.responses.create(**asked)
    kept = await client.responses.retrieve(response.id)
    found = (response.model_extra or {}).get("reasoning_ended_by")
    assert (kept.model_extra or {}).get("reasoning_ended_by") == found
    return response.output_text, found


async def by_messages(host: Alone, stream: bool, budget: int | None) -> tuple[str, Any]:
    _, client = clients(host)
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 9_000,
        "messages": [{"role": "user", "content": "Hm?"}],
    }
    if budget is not None:
        asked["thinking"] = {"type": "enabled", "budget_tokens": budget}
    if stream:
        async with client.messages.stream(**asked) as events:
            message: Any = await events.get_final_message()
    else:
        message = await client.messages.create(**asked)
    details = message.usage.output_tokens_details
    return message.content[-1].text, (details.model_extra or {}).get("reasoning_ended_by")


ROWS: dict[str, tuple[str, int | None, str | None]] = {
    "a loop": ("Wait, what did they ask me?\n" * 400, None, "repetition"),
    "a budget": ("One, two, three, four, five, six, seven.", 4, "budget"),
    "a grid of zeros": (GRID, None, None),
    "9 equal rows": ("2025-08-05,Oslo,18.5,0.0,NW\n" * 9, None, None),
    "a dump of zeros": (("00 " * 16 + "\n") * 32, None, None),
    "a few words": ("They greet me.", None, None),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize(("thoughts", "budget", "by"), ROWS.values(), ids=ROWS)
def test_the_answer_the_log_and_the_metrics_say_so(
    ask: Callable[..., Any],
    stream: bool,
    thoughts: str,
    budget: int | None,
    by: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(enforcement.REPETITIONS_VARIABLE, "32")
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "off")
    host = Counting(thoughts)
    with caplog.at_level(logging.INFO, generation.logger.name):
        assert asyncio.run(ask(host, stream, budget)) == ("Well.", by)
    assert host.ended == ([by] if by else [])
    assert any("reasoning cut short" in each for each in caplog.messages) is bool(by)
