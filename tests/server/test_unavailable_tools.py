"""Tools that nobody runs (semantics A13): what the official clients get, streamed and not."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts test directories nowhere

from fakes import MODEL, Alone, ObedientEngine
from official_clients import clients

NO_SEARCH = (
    "Not available on this server: web_search. "
    "No search took place, nothing was fetched, and nothing was run."
)
QUESTION = "Perform a web search for the query: x"
WEB_SEARCH: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
PINNED: Any = {"type": "tool", "name": "web_search"}


class Idle(ObedientEngine):
    """An engine that must not be used."""

    def __init__(self) -> None:
        super().__init__({})

    async def generate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the model ran")
        yield


async def message(stream: bool, **fields: Any) -> Any:
    _, client = clients(Alone(Idle()))
    asked: Any = {
        "model": MODEL,
        "max_tokens": 50,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [WEB_SEARCH],
        **fields,
    }
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        async for _ in events:
            pass
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{}, {"tool_choice": PINNED}], ids=["alone", "pinned"])
def test_a_search_by_messages_fails_without_the_model(fields: Any, stream: bool) -> None:
    answer = asyncio.run(message(stream, **fields))
    call, result, text = answer.content
    assert (call.type, call.name) == ("server_tool_use", "web_search")
    assert result.tool_use_id == call.id
    assert result.content.type == "web_search_tool_result_error"
    assert result.content.error_code == "unavailable"
    assert text.text == NO_SEARCH
    assert answer.stop_reason == "end_turn"
    assert answer.model_extra["unavailable_tools"] == ["web_search"]
    assert answer.usage.output_tokens > 0
