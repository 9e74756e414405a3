"""Messages: turns that are paused and resumed, and MCP servers that a request names."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("anthropic")


import anthropic
from harmony_text import ids_of, text_of
from loops import run
from scripted_host import SingleEngineHost
from tool_loop import (
    AGAIN,
    CALLED,
    FIRST,
    LAST,
    OPENING,
    RESULTS,
    SECOND,
    USER,
    host_with_tools,
    messages,
)

from vllm_mlx_harmony.server import enforcement
from vllm_mlx_harmony.server.settings import ToolsMode

pytestmark = pytest.mark.usefixtures("no_grammars")


def assistant_message(message: Any) -> dict[str, Any]:
    """An assistant message as a client returns it."""
    content = [block.model_dump(exclude_none=True) for block in message.content]
    return {"role": "assistant", "content": content}


def kinds(message: Any) -> list[str]:
    return [block.type for block in message.content]


def prompts(host: SingleEngineHost) -> list[tuple[int, ...]]:
    token_ids: list[tuple[int, ...]] = host.engine.prompts  # type: ignore[attr-defined]
    return token_ids


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dropped", [(), ("thinking",)], ids=["all", "without thinking"])
def test_paused_turn_is_resumed(stream: bool, dropped: tuple[str, ...]) -> None:
    host = host_with_tools(use=ToolsMode.ALL, max_tool_calls=1)
    first = run(messages(host, stream))
    assert first.stop_reason == "pause_turn"
    call = ["thinking", "mcp_tool_use"]
    assert kinds(first) == [*call, "mcp_tool_result", *call]
    history = [*USER, assistant_message(first)]
    content = history[-1]["content"]
    history[-1]["content"] = [block for block in content if block["type"] not in dropped]
    second = run(messages(host, stream, messages=history))
    assert kinds(second) == ["mcp_tool_result", *call]
    assert second.content[0].tool_use_id == first.content[-1].id
    assert second.content[0].content[0].text == "42"
    assert second.stop_reason == "pause_turn"
    # The prompt has the generated ids, the pending call and its result, and nothing twice.
    first_prompt, second_prompt, third_prompt = prompts(host)
    assert list(second_prompt) == [*first_prompt, *ids_of(FIRST + RESULTS[0] + OPENING)]
    assert list(third_prompt) == [*second_prompt, *ids_of(SECOND + RESULTS[1] + OPENING)]
    # Returned in one message or in two, the turn continues to the answer.
    third = run(messages(host, stream, messages=[*history, assistant_message(second)]))
    assert (third.stop_reason, third.content[-1].text) == ("end_turn", "It is warm.")
    assert host.leases == 0


def test_abandoned_turn_runs_nothing() -> None:
    """Its pending call gets a result that says so, and is not run."""
    host = host_with_tools(use=ToolsMode.ALL, max_tool_calls=1)
    first = run(messages(host, False))
    again = run(messages(host, False, messages=[*USER, assistant_message(first), AGAIN]))
    assert kinds(again) == ["thinking", "text"]
    not_run = "<|start|>python to=assistant<|channel|>analysis<|message|>[this call did not finish"
    assert not_run in text_of(prompts(host)[-1])
    # Nor is it run if the request wants no tools: the model answers without.
    none = {"type": "none"}
    host.engine.scripts["did not finish"] = LAST  # type: ignore[attr-defined]
    answer = run(
        messages(host, False, messages=[*USER, assistant_message(first)], tool_choice=none)
    )
    assert kinds(answer) == ["thinking", "text"]


def test_turn_ending_with_result_is_continued() -> None:
    host = host_with_tools(use=ToolsMode.ALL, max_tool_calls=1)
    first = run(messages(host, False))
    history = [
        *USER,
        {**assistant_message(first), "content": assistant_message(first)["content"][:3]},
    ]
    second = run(messages(host, False, messages=history))
    assert kinds(second)[:3] == ["thinking", "mcp_tool_use", "mcp_tool_result"]
    assert second.content[1].name == "python"


def test_history_of_other_server_is_rendered() -> None:
    """Nothing of it was generated here: its calls and results are rendered."""
    first = run(messages(host_with_tools(use=ToolsMode.ALL), False))
    host = host_with_tools(use=ToolsMode.ALL)
    run(messages(host, False, messages=[*USER, assistant_message(first), AGAIN]))
    (prompt,) = prompts(host)
    analysis = "<|start|>assistant<|channel|>analysis to=python code<|message|>6 * 7<|call|>"
    assert analysis + RESULTS[1] in text_of(prompt)
    assert RESULTS[0] in text_of(prompt) and "to=weather.now" in text_of(prompt)


WEATHER = {"type": "url", "name": "weather", "url": "https://unused.example/mcp"}
TOOLSET = {"type": "mcp_toolset", "mcp_server_name": "weather"}
NAMED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a server": ({"mcp_servers": [WEATHER]}, {"now", "fails", "dies", "sleep"}),
    "some of its tools": (
        {"mcp_servers": [{**WEATHER, "tool_configuration": {"allowed_tools": ["now", "no"]}}]},
        {"now"},
    ),
    "none of them": (
        {"mcp_servers": [{**WEATHER, "tool_configuration": {"enabled": False}}]},
        set(),
    ),
    "a toolset": (
        {"mcp_servers": [WEATHER], "tools": [TOOLSET]},
        {"now", "fails", "dies", "sleep"},
    ),
    "a toolset alone": ({"tools": [TOOLSET]}, {"now", "fails", "dies", "sleep"}),
    "all but one": (
        {"tools": [{**TOOLSET, "configs": {"dies": {"enabled": False}, "now": {}}}]},
        {"now", "fails", "sleep"},
    ),
    "one alone": (
        {
            "mcp_servers": [WEATHER],
            "tools": [
                {
                    **TOOLSET,
                    "default_config": {"enabled": False},
                    "configs": {"now": {"enabled": True, "defer_loading": True}},
                }
            ],
        },
        {"now"},
    ),
    "without tools": ({"mcp_servers": [WEATHER], "tool_choice": {"type": "none"}}, set()),
}


@pytest.mark.parametrize(("request_", "tools"), NAMED.values(), ids=NAMED)
def test_request_selects_servers_and_tools(request_: dict[str, Any], tools: set[str]) -> None:
    host = host_with_tools(use=ToolsMode.ON)
    run(messages(host, False, messages=[AGAIN], **request_))
    text = text_of(prompts(host)[0])
    shown = {name for name in ("now", "fails", "dies", "sleep") if f"type {name} = (" in text}
    assert shown == tools
    assert "python" not in text


def test_call_of_named_server_is_run() -> None:
    host = host_with_tools(use=ToolsMode.ON, scripts={"Rome: 20 °C": LAST})
    message = run(messages(host, True, mcp_servers=[WEATHER]))
    assert kinds(message) == ["thinking", "mcp_tool_use", "mcp_tool_result", "thinking", "text"]
    assert message.content[1].server_name == "weather"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mcp_servers": [{**WEATHER, "name": "other"}]}, "mcp_servers[0].url"),
    ({"mcp_servers": [{"type": "url", "name": "other"}]}, "mcp_servers[0].name"),
    ({"tools": [{**TOOLSET, "mcp_server_name": "other"}]}, "tools[0].mcp_server_name"),
    ({"tools": [{"type": "mcp_toolset"}]}, "tools[0].mcp_server_name"),
    ({"mcp_servers": [{"type": "url", "url": "https://x"}]}, "mcp_servers[0].name"),
    (
        {"mcp_servers": [WEATHER], "tool_choice": {"type": "tool", "name": "later"}},
        "tool_choice.name",
    ),
]


@pytest.mark.parametrize(("request_", "where"), REFUSED)
def test_unknown_server_is_rejected(request_: dict[str, Any], where: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        run(messages(host_with_tools(use=ToolsMode.ON), False, messages=[AGAIN], **request_))
    assert where in str(caught.value)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}])
def test_server_call_can_be_required(
    choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "auto")
    host = host_with_tools(
        use=ToolsMode.ON,
        scripts={
            "Rome: 20 °C": LAST,
            "Say hello.": CALLED.format("weather.now", '{"city": "Rome"}'),
        },
    )
    request = {"messages": [AGAIN], "mcp_servers": [WEATHER], "tool_choice": choice}
    message = run(messages(host, False, **request))
    assert kinds(message) == ["mcp_tool_use", "mcp_tool_result", "thinking", "text"]
