"""Tools of OpenAI's Agents SDK that run on the client, just as the model called them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("agents")


import agents
from loops import run
from scripted_host import MODEL, ScriptedEngine, SingleEngineHost
from tool_loop import client

pytestmark = [pytest.mark.usefixtures("no_grammars"), pytest.mark.nightly]

ran: list[object] = []


def shell(request: Any) -> Any:
    ran.append((request.data.action.commands, request.data.action.timeout_ms))
    outcome = agents.ShellCallOutcome(type="exit", exit_code=3)
    output = agents.ShellCommandOutput(stdout="marker-42\n", stderr="no", outcome=outcome)
    return agents.ShellResult(output=[output])


def local_shell(request: Any) -> str:
    ran.append(request.data.action.command)
    return "marker-42"


class Editor:
    def create_file(self, operation: Any) -> Any:
        ran.append((operation.type, operation.path, operation.diff))
        return agents.ApplyPatchResult(status="completed", output="marker-42")

    update_file = delete_file = create_file


class Screen(agents.AsyncComputer):
    """A computer that can only be clicked on."""

    environment = "linux"  # type: ignore[assignment]
    dimensions = (800, 600)  # type: ignore[assignment]

    async def screenshot(self) -> str:
        return "iVBORw0KGgo="

    async def click(self, x: int, y: int, button: str, **_: Any) -> None:  # type: ignore[override]
        ran.append((x, y, button))

    async def nothing(self, *_: Any, **__: Any) -> None:
        raise AssertionError

    double_click = scroll = type = wait = move = keypress = drag = nothing  # type: ignore[assignment]


CLICK = '{"type":"click","x":1,"y":2,"button":"left"}'
ROWS: dict[str, tuple[Any, str, object, str]] = {
    "shell": (
        lambda: agents.ShellTool(executor=shell),
        '{"commands":["ls","pwd"],"timeout_ms":5000}',
        (["ls", "pwd"], 5000),
        "marker-42\n[stderr]\nno\n[exit code 3]",
    ),
    "local_shell": (
        lambda: agents.LocalShellTool(executor=local_shell),
        '{"command":["ls"]}',
        ["ls"],
        "marker-42",
    ),
    "apply_patch": (
        lambda: agents.ApplyPatchTool(editor=Editor()),
        '{"operation":{"type":"update_file","path":"a","diff":"@@\\n-a\\n+b\\n"}}',
        ("update_file", "a", "@@\n-a\n+b\n"),
        "completed: marker-42",
    ),
    "computer": (
        lambda: agents.ComputerTool(computer=Screen()),
        f'{{"actions":[{CLICK}]}}',
        (1, 2, "left"),
        "[image left out: this model reads text only]",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ROWS)
def test_sdk_runs_what_model_called(name: str, stream: bool) -> None:
    make, arguments, expected, result = ROWS[name]
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    scripts = {
        "Do it.": f"{header}{arguments}<|call|>",
        f"to=assistant<|channel|>commentary<|message|>{result}<|end|>": (
            "<|channel|>final<|message|>Done.<|return|>"
        ),
    }
    host = SingleEngineHost(ScriptedEngine(scripts, 3, context_length=100_000))
    ran.clear()

    async def run_agent() -> Any:
        agents.set_tracing_disabled(True)
        model = agents.OpenAIResponsesModel(MODEL, client(host))
        agent = agents.Agent(name="a", model=model, tools=[make()])
        if not stream:
            return await agents.Runner.run(agent, "Do it.", max_turns=3)
        streamed = agents.Runner.run_streamed(agent, "Do it.", max_turns=3)
        async for _ in streamed.stream_events():
            pass
        return streamed

    assert run(run_agent()).final_output == "Done."
    assert ran == [expected]
