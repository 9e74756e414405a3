"""The loop through Chat Completions and Messages, enabled by the operator for all requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")


from harmony_text import ids_of
from local_tool_servers import browser, interpreter, weather
from loops import run
from official_clients import clients
from scripted_host import MODEL, ObedientEngine, SingleEngineHost, Tracker
from tool_loop import (
    AGAIN,
    CALLED,
    FIRST,
    LAST,
    OPENING,
    RESULTS,
    SCRIPTS,
    SECOND,
    THIRD,
    USER,
    host_with_tools,
    messages,
)

from vllm_mlx_harmony.server.settings import ToolsMode
from vllm_mlx_harmony.server.tools.config import ToolsConfig
from vllm_mlx_harmony.server.tools.toolbox import Toolbox

pytestmark = pytest.mark.usefixtures("no_grammars")


def replayed_loop() -> tuple[int, ...]:
    """The three calls and the answer as in the next prompt: without reasoning (A6)."""
    calls = [script.partition(OPENING)[2] for script in (FIRST, SECOND, THIRD)]
    loop = "".join(a + b + OPENING for a, b in zip(calls, RESULTS, strict=True))
    return ids_of(loop + "<|channel|>final<|message|>It is warm.<|end|>")


async def chat(
    host: SingleEngineHost, stream: bool, **request: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """The choice, and the calls that the server ran."""
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
def test_chat_runs_tools(stream: bool) -> None:
    host = host_with_tools(use=ToolsMode.ALL)
    choice, ran = run(chat(host, stream))
    assert [(c["name"], c["arguments"], c["output"], c["error"]) for c in ran] == RAN
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is warm.")
    assert not choice.message.tool_calls
    # The client returns only the answer, but the next prompt has the whole loop.
    returned = {"role": "assistant", "content": choice.message.content}
    run(chat(host, stream, messages=[*USER, returned, AGAIN]))
    first, *_, last = host.engine.prompts  # type: ignore[attr-defined]
    loop = replayed_loop()
    assert last[len(first) : len(first) + len(loop)] == loop


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_reasoning_ended_after_tool_result_is_counted(stream: bool) -> None:
    reasons: list[str] = []

    class Counting(SingleEngineHost):
        def tracker(self, api: str, *, stream: bool) -> Tracker:
            tracker = super().tracker(api, stream=stream)
            tracker.reasoning_ended = reasons.append  # type: ignore[method-assign]
            return tracker

    thoughts = "<|channel|>analysis<|message|>One, two, three, four, five, six, seven.<|end|>"
    scripts = {**SCRIPTS, "Rome: 20 °C": f"{thoughts}{OPENING}{ObedientEngine.ANSWER}"}
    host = Counting(ObedientEngine(scripts, 1, context_length=100_000))
    host.toolbox = Toolbox((weather(), interpreter(), browser()), ToolsConfig(), ToolsMode.ALL)
    budget = {"thinking_token_budget": 6}
    choice, ran = run(chat(host, stream, extra_body=budget))
    assert [tool_call["name"] for tool_call in ran] == ["weather.now"]
    assert (choice.message.content, reasons) == ("Well.", ["budget"])
    assert choice.message.reasoning_ended_by == "budget"


def test_chat_returns_call_of_client_tool() -> None:
    host = host_with_tools(
        use=ToolsMode.ALL, scripts={"Rome: 20 °C": CALLED.format("functions.mine", "{}")}
    )
    mine = {"type": "function", "function": {"name": "mine"}}
    choice, ran = run(chat(host, False, tools=[mine]))
    assert [tool_call["name"] for tool_call in ran] == ["weather.now"]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    returned = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "this is mine"}
    choice, _ = run(chat(host, False, tools=[mine], messages=[*USER, returned, result]))
    assert choice.message.content == "It is warm."
    _, second, last = host.engine.prompts  # type: ignore[attr-defined]
    assert last[: len(second)] == second  # with what ran here, reasoning included


@pytest.mark.parametrize(
    ("use", "request_"),
    [(ToolsMode.ON, {}), (ToolsMode.ALL, {"tool_choice": "none"})],
)
def test_chat_prompt_has_no_disabled_tools(use: ToolsMode, request_: dict[str, Any]) -> None:
    host = host_with_tools(use=use)
    run(chat(host, False, messages=[AGAIN], **request_))
    (prompt,) = host.engine.prompts  # type: ignore[attr-defined]
    bare = host_with_tools(use=ToolsMode.ON)
    run(chat(bare, False, messages=[AGAIN]))
    assert bare.engine.prompts == [prompt]  # type: ignore[attr-defined]


def test_client_tool_takes_precedence() -> None:
    host = host_with_tools(use=ToolsMode.ALL)
    mine = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
    choice, _ = run(chat(host, False, messages=[AGAIN], tools=[mine]))
    assert choice.message.content == "It is warm."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_run_tools(stream: bool) -> None:
    host = host_with_tools(use=ToolsMode.ALL)
    message = run(messages(host, stream))
    assert [block.type for block in message.content] == [
        *("thinking", "mcp_tool_use", "mcp_tool_result") * 3,
        "thinking",
        "text",
    ]
    used = [block for block in message.content if block.type == "mcp_tool_use"]
    results = [block for block in message.content if block.type == "mcp_tool_result"]
    assert [(block.server_name, block.name, block.input) for block in used] == [
        ("weather", "now", {"city": "Rome"}),
        ("python", "python", {"code": "6 * 7"}),
        ("browser", "search", {"query": "Rome"}),
    ]
    assert [result.tool_use_id for result in results] == [block.id for block in used]
    assert [(result.content[0].text, result.is_error) for result in results] == [
        ("Rome: 20 °C", False),
        ("42", False),
        ("[0] Results for Rome", False),
    ]
    assert (message.stop_reason, message.content[-1].text) == ("end_turn", "It is warm.")
    # The client returns all of it, and the next prompt has the loop as it was generated.
    returned = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
    run(messages(host, stream, messages=[*USER, returned, AGAIN]))
    first, *_, last = host.engine.prompts  # type: ignore[attr-defined]
    loop = replayed_loop()
    assert last[len(first) : len(first) + len(loop)] == loop


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_report_failed_tool(stream: bool) -> None:
    user = [{"role": "user", "content": "Ask something that dies."}]
    message = run(messages(host_with_tools(use=ToolsMode.ALL), stream, messages=user))
    _, result, answer, *_ = message.content
    assert (result.is_error, result.content[0].text) == (True, "Error: the server has died")
    assert answer.type in ("thinking", "text")


def test_fifty_requests_run_concurrently() -> None:
    host = host_with_tools(use=ToolsMode.ALL, max_concurrent_calls=2)

    async def many() -> Any:
        return await asyncio.gather(*(chat(host, at % 2 == 0) for at in range(50)))

    answers = run(many())
    assert {choice.message.content for choice, _ in answers} == {"It is warm."}
    assert {len(ran) for _, ran in answers} == {3}
    assert LAST and host.leases == 0
