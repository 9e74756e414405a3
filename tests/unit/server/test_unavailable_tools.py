"""Tools that cannot be run (semantics A13): what official clients get, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")


from official_clients import clients
from scripted_host import MODEL, ObedientEngine, SingleEngineHost

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
    _, client = clients(SingleEngineHost(Idle()))
    options: Any = {
        "model": MODEL,
        "max_tokens": 50,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [WEB_SEARCH],
        **fields,
    }
    if not stream:
        return await client.messages.create(**options)
    async with client.messages.stream(**options) as events:
        async for _ in events:
            pass
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{}, {"tool_choice": PINNED}], ids=["alone", "pinned"])
def test_messages_search_fails_without_running_model(fields: Any, stream: bool) -> None:
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


@pytest.mark.parametrize("mode", ["stream", "whole", "background"])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "web_search_preview"}])
def test_responses_search_fails_without_running_model(mode: str, choice: Any) -> None:
    async def create() -> tuple[Any, Any]:
        client, _ = clients(SingleEngineHost(Idle()))
        options: Any = {
            "model": MODEL,
            "input": QUESTION,
            "tools": [{"type": "web_search"}],
            "tool_choice": choice,
        }
        if mode == "stream":
            async with client.responses.stream(**options) as events:
                return await events.get_final_response(), client
        response = await client.responses.create(**options, background=mode == "background")
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            response = await client.responses.retrieve(response.id)
        return response, client

    async def check() -> None:
        answer, client = await create()
        search, final = answer.output
        assert (search.type, search.status) == ("web_search_call", "failed")
        assert (answer.output_text, final.status) == (NO_SEARCH, "completed")
        assert (answer.status, answer.model_extra["unavailable_tools"]) == (
            "completed",
            ["web_search"],
        )
        stored = await client.responses.retrieve(answer.id)
        assert stored.output_text == NO_SEARCH
        assert [item.id for item in stored.output] == [search.id, final.id]

    asyncio.run(check())


def test_model_answers_after_failed_search() -> None:
    async def check() -> None:
        engine = ObedientEngine({"From memory, then.": ObedientEngine.ANSWER})
        client, _ = clients(SingleEngineHost(engine))
        tools: Any = [{"type": "web_search"}]
        refused = await client.responses.create(model=MODEL, input=QUESTION, tools=tools)
        assert refused.output_text == NO_SEARCH
        answer = await client.responses.create(
            model=MODEL,
            input="From memory, then.",
            tools=tools,
            previous_response_id=refused.id,
        )
        assert [item.type for item in answer.output] == ["message"]
        assert answer.output_text != NO_SEARCH

    asyncio.run(check())
