"""Hosted MCP of OpenAI's Agents SDK, in process: its own loop ends where the server's answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "server")]

import agents
from fakes import MODEL
from local import weather
from test_responses_loop import LAST, _nothing_kept, client, finally_, serving

__all__ = ["_nothing_kept"]

ASK: dict[str, Any] = {"type": "mcp", "server_label": "weather"}


def agent(api: Any, **tool: Any) -> Any:
    agents.set_tracing_disabled(True)
    hosted = agents.HostedMCPTool(
        tool_config={**ASK, **tool.pop("config", {})},
        **tool,
    )
    model = agents.OpenAIResponsesModel(MODEL, api)
    return agents.Agent(name="a", instructions="Help.", model=model, tools=[hosted])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_hosted(stream: bool) -> None:
    host = serving(weather(), scripts={"Rome: 20 °C": LAST})

    async def asked() -> Any:
        one = agent(client(host), config={"require_approval": "never"})
        if not stream:
            return await agents.Runner.run(one, "Where is it warm?")
        result = agents.Runner.run_streamed(one, "Where is it warm?")
        async for _ in result.stream_events():
            pass
        return result

    result = finally_(asked())
    assert result.final_output == "It is warm."
    raw = [item.raw_item.type for item in result.new_items if hasattr(item.raw_item, "type")]
    assert "mcp_call" in raw


@pytest.mark.parametrize("approve", [True, False])
def test_approval_by_a_callback(approve: bool) -> None:
    server = weather()
    host = serving(server, scripts={"Rome: 20 °C": LAST})

    def answer(request: Any) -> Any:
        assert request.data.name == "now"
        return {"approve": approve} if approve else {"approve": False, "reason": "no"}

    async def asked() -> Any:
        one = agent(client(host), on_approval_request=answer)
        return await agents.Runner.run(one, "Where is it warm?")

    assert finally_(asked()).final_output == "It is warm."
    assert server.called == ([("now", {"city": "Rome"})] if approve else [])
