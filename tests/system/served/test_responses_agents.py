"""A tool loop of openai-agents with the Responses API; skipped without openai-agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

agents = pytest.importorskip("agents")

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = [pytest.mark.served, pytest.mark.nightly]  # in process the gate tests it, too

CALL = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
SCRIPTS = [
    Script(
        "<|message|>Weather in Zürich?<|end|>",
        "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant<|channel|>commentary"
        f'<|message|>One moment.<|end|>{CALL}{{"city":"Zürich"}}<|call|>',
    ),
    Script(
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>18 °C in Zürich",
        "<|channel|>final<|message|>It is 18 °C.<|return|>",
    ),
    Script("<|message|>Thanks.<|end|>", "<|channel|>final<|message|>Not at all.<|return|>"),
]


@pytest.fixture(scope="module")
def server(enforcing_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return enforcing_server


def weather(city: str) -> str:
    """The weather of a city."""
    return f"18 °C in {city}"


async def run(agent: Any, text: Any, *, stream: bool, **options: Any) -> Any:
    if not stream:
        return await agents.Runner.run(agent, text, **options)
    result = agents.Runner.run_streamed(agent, text, **options)
    async for _ in result.stream_events():
        pass
    return result


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_agents_sdk_finishes_tool_loop(server: Server, stream: bool, stored: bool) -> None:
    async def run_loop() -> None:
        agents.set_tracing_disabled(True)
        async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none") as client:
            name = (await client.models.list()).data[0].id
            agent = agents.Agent(
                name="Weather",
                instructions="Tell the weather.",
                model=agents.OpenAIResponsesModel(model=name, openai_client=client),
                model_settings=agents.ModelSettings(store=stored),
                tools=[agents.function_tool(weather)],
            )
            result = await run(agent, "Weather in Zürich?", stream=stream)
            assert result.final_output == "It is 18 °C."
            if stored:
                options = {"previous_response_id": result.last_response_id}
                second = await run(agent, "Thanks.", stream=stream, **options)
            else:
                history = [*result.to_input_list(), {"role": "user", "content": "Thanks."}]
                second = await run(agent, history, stream=stream)
            assert second.final_output == "Not at all."

    asyncio.run(asyncio.wait_for(run_loop(), 60))
