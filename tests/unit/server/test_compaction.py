"""Compaction: the request, and the document of its answer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette")

from scripted_host import ScriptedEngine, SingleEngineHost
from stored_responses import INFO, TENANT

from vllm_mlx_harmony.core.deltas import Closed, Delta, Finished, Kind, Opened, Text, Usage
from vllm_mlx_harmony.core.errors import OutputError
from vllm_mlx_harmony.core.turn import Defaults, Summary, ToolChoice, User
from vllm_mlx_harmony.server.front_end import Caller, FrontEnd, installed_in
from vllm_mlx_harmony.server.responses.lookup import References, read
from vllm_mlx_harmony.server.responses.routes import COMPACT


@pytest.fixture
def front_end() -> FrontEnd:
    return installed_in(SingleEngineHost(ScriptedEngine({})).app)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([Opened(0, Kind.REASONING), Text("Hm."), Closed()], None),
        (
            [Opened(0, Kind.REASONING), Text("Hm."), Closed(), Opened(1, Kind.ANSWER), Text("So.")],
            "So.",
        ),
    ],
)
def test_compaction_contains_the_answer(
    front_end: FrontEnd, output: list[Delta], text: str | None
) -> None:
    request: Any = COMPACT.read(
        {"model": "m", "input": "Hi", "stream": True}, Defaults(), Caller(front_end, TENANT)
    )
    assert (request.stream, request.store) == (False, False)
    assert isinstance(request.turn.messages[-1], User)
    emitter = COMPACT.emitter(request, INFO, None, Caller(front_end, TENANT))
    for delta in [*output, Finished("stop", None, Usage(3, 2))]:
        assert emitter.feed(delta) == []
    if text is None:
        with pytest.raises(OutputError):
            emitter.result()
        return
    document = emitter.result()
    user, encrypted = document["output"]
    assert (user["role"], document["usage"]["output_tokens"]) == ("user", 2)
    again = read(
        {"model": "m", "input": [encrypted]}, Defaults(), References(Caller(front_end, TENANT))
    )
    assert again.turn.messages == (Summary(text),)


def test_compaction_ignores_answer_format_and_tool_choice(front_end: FrontEnd) -> None:
    update = {"type": "configuration_update", "text": {"format": {"type": "json_object"}}}
    hello = {"role": "user", "content": "Hi"}
    tools = [{"type": "function", "name": "f"}]
    body = {"model": "m", "input": [hello, update], "tools": tools, "tool_choice": "required"}
    turn = COMPACT.read(body, Defaults(), Caller(front_end, TENANT)).turn
    assert turn.answer_format is None
    assert (turn.tool_choice, len(turn.tools)) == (ToolChoice(names=()), 1)
    plain = {"format": {"type": "json_object"}}
    turn = COMPACT.read(
        {"model": "m", "input": "Hi", "text": plain}, Defaults(), Caller(front_end, TENANT)
    ).turn
    assert (turn.answer_format, len(turn.messages)) == (None, 3)
