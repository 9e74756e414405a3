"""Hosted MCP tools of OpenAI's Agents SDK, in process: the server runs them, not the SDK."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("agents")


import agents
from agents import memory
from harmony_text import text_of
from local_tool_servers import weather
from loops import run
from scripted_host import MODEL
from tool_loop import LAST, client, host_with_tools

pytestmark = [pytest.mark.usefixtures("no_grammars"), pytest.mark.nightly]

MCP_TOOL: dict[str, Any] = {"type": "mcp", "server_label": "weather"}


def make_agent(api: Any, **tool: Any) -> Any:
    agents.set_tracing_disabled(True)
    hosted = agents.HostedMCPTool(
        tool_config={**MCP_TOOL, **tool.pop("config", {})},
        **tool,
    )
    model = agents.OpenAIResponsesModel(MODEL, api)
    return agents.Agent(name="a", instructions="Help.", model=model, tools=[hosted])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_hosted_tool_runs_on_server(stream: bool) -> None:
    host = host_with_tools(weather(), scripts={"Rome: 20 °C": LAST})

    async def run_agent() -> Any:
        agent = make_agent(client(host), config={"require_approval": "never"})
        if not stream:
            return await agents.Runner.run(agent, "Where is it warm?")
        result = agents.Runner.run_streamed(agent, "Where is it warm?")
        async for _ in result.stream_events():
            pass
        return result

    result = run(run_agent())
    assert result.final_output == "It is warm."
    raw = [item.raw_item.type for item in result.new_items if hasattr(item.raw_item, "type")]
    assert "mcp_call" in raw


@pytest.mark.parametrize("approve", [True, False])
def test_callback_approves_or_rejects_call(approve: bool) -> None:
    server = weather()
    host = host_with_tools(server, scripts={"Rome: 20 °C": LAST})

    def answer(request: Any) -> Any:
        assert request.data.name == "now"
        return {"approve": approve} if approve else {"approve": False, "reason": "no"}

    async def run_agent() -> Any:
        agent = make_agent(client(host), on_approval_request=answer)
        return await agents.Runner.run(agent, "Where is it warm?")

    assert run(run_agent()).final_output == "It is warm."
    assert server.calls == ([("now", {"city": "Rome"})] if approve else [])


@pytest.mark.parametrize("approve", [True, False])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_interrupted_run_is_approved_and_resumed(stream: bool, approve: bool) -> None:
    server = weather()
    host = host_with_tools(server, scripts={"Rome: 20 °C": LAST, "In Celsius.": LAST})

    async def run_turn(agent: Any, run_input: Any) -> Any:
        if not stream:
            return await agents.Runner.run(agent, run_input)
        result = agents.Runner.run_streamed(agent, run_input)
        async for _ in result.stream_events():
            pass
        return result

    async def converse() -> None:
        agent = make_agent(client(host), config={"require_approval": "always"})
        result = await run_turn(agent, "Where is it warm?")
        (request,) = result.interruptions
        state = await agents.RunState.from_string(agent, result.to_state().to_string())
        (state.approve if approve else state.reject)(state.get_interruptions()[0])
        result = await run_turn(agent, state)
        assert (request.name, result.final_output) == ("now", "It is warm.")
        more = [*result.to_input_list(), {"role": "user", "content": "In Celsius."}]
        assert (await run_turn(agent, more)).final_output == "It is warm."

    run(converse())
    assert server.calls == ([("now", {"city": "Rome"})] if approve else [])


@pytest.mark.parametrize("mode", ["previous_response_id", "input"])
def test_session_is_compacted_after_each_turn(mode: Any) -> None:
    order = "Do not call any tool. Write only the message.<|end|>"
    summary = "<|channel|>final<|message|>They said hello.<|return|>"
    host = host_with_tools(scripts={order: summary, "And again.": LAST})

    async def converse() -> list[str]:
        api = client(host)
        session = memory.OpenAIResponsesCompactionSession(
            "x",
            agents.SQLiteSession("x"),
            client=api,
            model="gpt-oss-20b",
            compaction_mode=mode,
            should_trigger_compaction=lambda _: True,
        )
        agent = agents.Agent(name="a", model=agents.OpenAIResponsesModel(MODEL, api))
        for text in ("Say hello.", "And again."):
            result = await agents.Runner.run(agent, text, session=session)
            assert result.final_output == "It is warm."
        return [str(item["type"]) for item in await session.get_items()]

    agents.set_tracing_disabled(True)
    assert run(converse())[-1] == "compaction"
    prompts = [text_of(prompt) for prompt in host.engine.prompts]  # type: ignore[attr-defined]
    assert "<|start|>user<|message|>They said hello.<|end|>" in prompts[2]
    assert "It is warm." not in prompts[2]
