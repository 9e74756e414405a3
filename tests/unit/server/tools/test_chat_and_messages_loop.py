"""The loop through Chat Completions and Messages, enabled by the operator for all requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")


from fakes import MODEL, Alone, ObedientEngine, ScriptedEngine, Tracker, ids
from local import browser, interpreter, weather
from official_clients import clients
from test_responses_loop import (
    CALLED,
    FIRST,
    LAST,
    OPENING,
    RESULTS,
    SCRIPTS,
    SECOND,
    THIRD,
    finally_,
)

from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.settings import Use
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

USER: list[dict[str, Any]] = [{"role": "user", "content": "Where is it warm?"}]
AGAIN = {"role": "user", "content": "Say hello."}


@pytest.fixture(autouse=True)
def _as_scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "off")


def serving(use: Use = Use.ALL, scripts: dict[str, str] | None = None, **limits: Any) -> Alone:
    host = Alone(ScriptedEngine({**SCRIPTS, **(scripts or {})}, 3, context_length=100_000))
    host.toolbox = Toolbox((weather(), interpreter(), browser()), ToolsConfig(**limits), use)
    return host


def left_of_the_loop() -> tuple[int, ...]:
    """The three calls and the answer as the next prompt has them: without reasoning (A6)."""
    called = [returned.partition(OPENING)[2] for returned in (FIRST, SECOND, THIRD)]
    loop = "".join(a + b + OPENING for a, b in zip(called, RESULTS, strict=True))
    return ids(loop + "<|channel|>final<|message|>It is warm.<|end|>")


async def chat(host: Alone, stream: bool, **request: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The message, and what the server has run."""
    client, _ = clients(host)
    request = {"model": MODEL, "messages": USER, **request}
    if not stream:
        answer = await client.chat.completions.create(**request)
        message = answer.choices[0].message
        return answer.choices[0], getattr(message, "server_tool_calls", None) or []
    ran: list[dict[str, Any]] = []
    async with client.chat.completions.stream(**request) as events:
        async for event in events:
            if event.type == "chunk" and event.chunk.choices:
                delta = event.chunk.choices[0].delta
                ran += getattr(delta, "server_tool_calls", None) or []
        answer = await events.get_final_completion()
    return answer.choices[0], ran


RAN = [
    ("weather.now", '{"city": "Rome"}', "Rome: 20 °C", None),
    ("python", "6 * 7", "42", None),
    ("browser.search", '{"query": "Rome"}', "[0] Results for Rome", None),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat(stream: bool) -> None:
    host = serving()
    choice, ran = finally_(chat(host, stream))
    assert [(c["name"], c["arguments"], c["output"], c["error"]) for c in ran] == RAN
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is warm.")
    assert not choice.message.tool_calls
    # A client gives back the answer alone: the next prompt has the whole loop all the same.
    returned = {"role": "assistant", "content": choice.message.content}
    finally_(chat(host, stream, messages=[*USER, returned, AGAIN]))
    first, *_, last = host.engine.prompts  # type: ignore[attr-defined]
    loop = left_of_the_loop()
    assert last[len(first) : len(first) + len(loop)] == loop


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_reasoning_ended_after_a_result_is_counted(stream: bool) -> None:
    ended: list[str] = []

    class Counting(Alone):
        def tracker(self, api: str, *, stream: bool) -> Tracker:
            tracker = super().tracker(api, stream=stream)
            tracker.reasoning_ended = ended.append  # type: ignore[method-assign]
            return tracker

    thoughts = "<|channel|>analysis<|message|>One, two, three, four, five, six, seven.<|end|>"
    scripts = {**SCRIPTS, "Rome: 20 °C": f"{thoughts}{OPENING}{ObedientEngine.ANSWER}"}
    host = Counting(ObedientEngine(scripts, 1, context_length=100_000))
    host.toolbox = Toolbox((weather(), interpreter(), browser()), ToolsConfig(), Use.ALL)
    budget = {"thinking_token_budget": 6}
    choice, ran = finally_(chat(host, stream, extra_body=budget))
    assert [each["name"] for each in ran] == ["weather.now"]
    assert (choice.message.content, ended) == ("Well.", ["budget"])
    assert choice.message.reasoning_ended_by == "budget"


def test_chat_with_a_call_of_the_clients() -> None:
    host = serving(scripts={"Rome: 20 °C": CALLED.format("functions.mine", "{}")})
    mine = {"type": "function", "function": {"name": "mine"}}
    choice, ran = finally_(chat(host, False, tools=[mine]))
    assert [each["name"] for each in ran] == ["weather.now"]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    returned = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "this is mine"}
    choice, _ = finally_(chat(host, False, tools=[mine], messages=[*USER, returned, result]))
    assert choice.message.content == "It is warm."
    _, second, last = host.engine.prompts  # type: ignore[attr-defined]
    assert last[: len(second)] == second  # what ran here is in it, reasoning included


@pytest.mark.parametrize(
    ("use", "request_"),
    [(Use.ON, {}), (Use.ALL, {"tool_choice": "none"})],
)
def test_chat_without(use: Use, request_: dict[str, Any]) -> None:
    host = serving(use)
    finally_(chat(host, False, messages=[AGAIN], **request_))
    (prompt,) = host.engine.prompts  # type: ignore[attr-defined]
    bare = serving(Use.ON)
    finally_(chat(bare, False, messages=[AGAIN]))
    assert bare.engine.prompts == [prompt]  # type: ignore[attr-defined]


def test_a_tool_of_the_clients_own_comes_first() -> None:
    host = serving()
    mine = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
    choice, _ = finally_(chat(host, False, messages=[AGAIN], tools=[mine]))
    assert choice.message.content == "It is warm."


async def messages(host: Alone, stream: bool, **request: Any) -> Any:
    _, client = clients(host)
    request = {"model": MODEL, "max_tokens": 900, "messages": USER, **request}
    if not stream:
        return await client.beta.messages.create(**request)
    async with client.beta.messages.stream(**request) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages(stream: bool) -> None:
    host = serving()
    message = finally_(messages(host, stream))
    assert [block.type for block in message.content] == [
        *("thinking", "mcp_tool_use", "mcp_tool_result") * 3,
        "thinking",
        "text",
    ]
    used = [block for block in message.content if block.type == "mcp_tool_use"]
    results = [block for block in message.content if block.type == "mcp_tool_result"]
    assert [(each.server_name, each.name, each.input) for each in used] == [
        ("weather", "now", {"city": "Rome"}),
        ("python", "python", {"code": "6 * 7"}),
        ("browser", "search", {"query": "Rome"}),
    ]
    assert [each.tool_use_id for each in results] == [each.id for each in used]
    assert [(each.content[0].text, each.is_error) for each in results] == [
        ("Rome: 20 °C", False),
        ("42", False),
        ("[0] Results for Rome", False),
    ]
    assert (message.stop_reason, message.content[-1].text) == ("end_turn", "It is warm.")
    # All of it comes back, and the next prompt has the loop as it was generated.
    returned = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    finally_(messages(host, stream, messages=[*USER, returned, AGAIN]))
    first, *_, last = host.engine.prompts  # type: ignore[attr-defined]
    loop = left_of_the_loop()
    assert last[len(first) : len(first) + len(loop)] == loop


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_tell_of_an_error(stream: bool) -> None:
    user = [{"role": "user", "content": "Ask something that dies."}]
    message = finally_(messages(serving(), stream, messages=user))
    _, result, answer, *_ = message.content
    assert (result.is_error, result.content[0].text) == (True, "Error: the server has died")
    assert answer.type in ("thinking", "text")


def test_fifty_at_once() -> None:
    host = serving(max_concurrent_calls=2)

    async def many() -> Any:
        return await asyncio.gather(*(chat(host, at % 2 == 0) for at in range(50)))

    found = finally_(many())
    assert {choice.message.content for choice, _ in found} == {"It is warm."}
    assert {len(ran) for _, ran in found} == {3}
    assert LAST and host.lent == 0
