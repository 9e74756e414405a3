"""Agent loops continue after the server was killed or unloaded its model, from the disk cache.

Requests are those of Codex, Claude Code and opencode, with and without returned reasoning.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from server_process import FLAG, HARMONY
from waiting import wait_until

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

RECORDED = Path(__file__).parents[2] / "support" / "recorded"
NEW = 0.02
"""Largest part of a prompt that may be computed anew."""

TOOLS = {"Bash": "command", "exec_command": "cmd", "bash_tool": "command", "weather": "city"}
"""The tools as the model sees them, and the argument of each."""


def tool_call(tool: str) -> str:
    """A call in a spelling that no rendered history has: spaces, header order, content type."""
    return (
        "<|channel|>analysis<|message|>An  odd thought.<|end|><|start|>assistant"
        f" to=functions.{tool}<|channel|>commentary code<|message|>"
        f'{{"{TOOLS[tool]}":  "run it"}}<|call|>'
    )


FINAL = "<|channel|>final<|message|>{}<|return|>"
SCRIPTS = [
    Script("<|message|>And now?<|end|>", FINAL.format("the end")),
    *(
        Script(
            re.compile(re.escape(f"{tool_call(tool)}<|start|>functions.{tool} to=assistant")),
            FINAL.format("as it was"),
            whole_prompt=True,
        )
        for tool in TOOLS
    ),
    Script(
        re.compile(r"<\|start\|>functions\.\w+ to=assistant"),
        FINAL.format("written anew"),
        whole_prompt=True,
    ),
    *(
        Script(re.compile(rf"\btype {tool} = "), tool_call(tool), whole_prompt=True)
        for tool in TOOLS
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.write(tmp_path_factory.mktemp("disk") / "gpt-oss-standin", SCRIPTS)


def recorded_request(name: str, model: Path, marker: str) -> dict[str, Any]:
    """The body of a recorded request, with texts of the original lengths. They begin with
    ``marker``, so that two conversations share no more than they should."""
    text = (RECORDED / f"{name}.json").read_text()

    def fill(match: re.Match[str]) -> str:
        words = (f"{marker} {n} of many words. " for n in range(int(match[1]) // 12))
        return "".join(words)[: int(match[1])]

    document = json.loads(re.sub(r"\((\d+) characters of text\)", fill, text))
    return {**document.get("body", document), "model": str(model)}


@dataclass(frozen=True)
class Turn:
    """An answer: its text, the items to send back, and token counts of its prompt."""

    text: str
    echo: list[Any]
    prompt: int
    cached: int


class Codex:
    """Responses that are not stored: each request has the whole conversation."""

    recording = "responses-codex-turn1"

    def send(self, server: Server, body: dict[str, Any]) -> Turn:
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="k", timeout=60) as client:
            for event in client.responses.create(**body):
                if event.type == "response.completed":
                    response = event.response
        usage = response.usage
        assert usage is not None
        echo = [item.model_dump(exclude_none=True) for item in response.output]
        cached = usage.input_tokens_details.cached_tokens
        return Turn(response.output_text, echo, usage.input_tokens, cached)

    def next_request(self, body: dict[str, Any], turn: Turn, reasoning: bool) -> dict[str, Any]:
        echo = [item for item in turn.echo if reasoning or item["type"] != "reasoning"]
        (call,) = (item for item in echo if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        return {**body, "input": [*body["input"], *echo, result]}


class Stored(Codex):
    """Stored responses: each request has new items only."""

    def next_request(self, body: dict[str, Any], turn: Turn, reasoning: bool) -> dict[str, Any]:
        (call,) = (item for item in turn.echo if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        return {**body, "input": [result], "previous_response_id": turn.echo[0]["response"]}

    def send(self, server: Server, body: dict[str, Any]) -> Turn:
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="k", timeout=60) as client:
            request = {**body, "store": True, "stream": False}
            response = client.responses.create(**request)
        echo = [item.model_dump() | {"response": response.id} for item in response.output]
        cached = response.usage.input_tokens_details.cached_tokens
        return Turn(response.output_text, echo, response.usage.input_tokens, cached)


class ClaudeCode:
    """Messages, streamed."""

    recording = "claude-code-turn1"

    def send(self, server: Server, body: dict[str, Any]) -> Turn:
        standard = ("model", "messages", "system", "tools", "max_tokens")
        more = {name: body[name] for name in body if name not in (*standard, "stream")}
        fields = {name: body[name] for name in standard}
        with (
            anthropic.Anthropic(base_url=server.base_url, api_key="k", timeout=60) as client,
            client.messages.stream(**fields, extra_body=more) as stream,
        ):
            starts = [event for event in stream if event.type == "message_start"]
            message = stream.get_final_message()
        text = "".join(block.text for block in message.content if block.type == "text")
        cached = message.usage.cache_read_input_tokens or 0
        assert starts[0].message.usage.cache_read_input_tokens == cached
        echo = [block.model_dump(exclude_none=True) for block in message.content]
        return Turn(text, echo, cached + message.usage.input_tokens, cached)

    def next_request(self, body: dict[str, Any], turn: Turn, reasoning: bool) -> dict[str, Any]:
        echo = [block for block in turn.echo if reasoning or block["type"] != "thinking"]
        (call,) = (block for block in echo if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "42"}
        new_messages = [
            {"role": "assistant", "content": echo},
            {"role": "user", "content": [result]},
        ]
        return {**body, "messages": [*body["messages"], *new_messages]}


class Opencode:
    """Chat Completions, streamed."""

    recording = "opencode-chat-turn1"

    def send(self, server: Server, body: dict[str, Any]) -> Turn:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="k", timeout=60) as client:
            for chunk in client.chat.completions.create(**body):
                usage = chunk.usage
                for choice in chunk.choices:
                    delta = choice.delta.model_dump()
                    message["content"] += delta.get("content") or ""
                    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    message["reasoning_content"] = message.get("reasoning_content", "") + thought
                    for call in delta.get("tool_calls") or []:
                        calls = message.setdefault("tool_calls", [])
                        if call.get("id"):
                            calls.append({**call, "type": "function"})
                        else:
                            more = call["function"]["arguments"]
                            calls[call["index"]]["function"]["arguments"] += more
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        return Turn(message["content"], [message], usage.prompt_tokens, cached)

    def next_request(self, body: dict[str, Any], turn: Turn, reasoning: bool) -> dict[str, Any]:
        (message,) = turn.echo
        if not reasoning:
            message = {name: message[name] for name in message if name != "reasoning_content"}
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        return {**body, "messages": [*body["messages"], message, result]}


AGENTS = {
    f"{type(agent).__name__}-{'returned' if reasoning else 'left'}": (agent, reasoning)
    for agent in (Codex(), Stored(), ClaudeCode(), Opencode())
    for reasoning in (True, False)
}


def wait_until_written(server: Server) -> dict[str, Any]:
    """The counters once everything is written."""
    wait_until(lambda: server.cache_stats()["disk"]["waiting"] == 0, "the disk")
    counters = server.cache_stats()["disk"]
    assert counters["dropped"] == 0
    return counters


@dataclass
class AgentLoops:
    """A restarted server, a function to restart it again, and the first turns of all agents."""

    server: Server
    restart: Callable[[], Server]
    turns: dict[str, tuple[dict[str, Any], Turn]]


@pytest.fixture(scope="module")
def loops(start: Start, model: Path, tmp_path_factory: pytest.TempPathFactory) -> AgentLoops:
    """Runs every agent's first turn, then kills the server and restarts it."""
    place = tmp_path_factory.mktemp("ssd")
    env = {"VLLM_MLX_HARMONY_STORE": str(place / "store.sqlite")}
    flags = (*FLAG, "--ssd-cache-dir", str(place / "cache"), "--enable-metrics")

    def start_server() -> Server:
        return start(*flags, model=model, command=HARMONY, env=env)

    server = start_server()
    turns = {}
    for name, (agent, _) in AGENTS.items():
        body = recorded_request(agent.recording, model, name)
        turns[name] = body, agent.send(server, body)
        assert turns[name][1].cached < NEW * turns[name][1].prompt + 400
    assert wait_until_written(server)["turns"] == len(AGENTS)
    server.process.kill()
    server.process.wait(10)
    return AgentLoops(start_server(), start_server, turns)


@pytest.mark.nightly
@pytest.mark.parametrize("name", AGENTS)
def test_loops_continue_after_server_was_killed(loops: AgentLoops, name: str) -> None:
    agent, reasoning = AGENTS[name]
    body, first_turn = loops.turns[name]
    turn = agent.send(loops.server, agent.next_request(body, first_turn, reasoning))
    assert turn.text == "as it was"
    assert turn.prompt > first_turn.prompt > 1000
    assert turn.prompt - turn.cached <= NEW * turn.prompt


@pytest.mark.nightly
def test_log_stats_and_metrics_report_disk_cache(loops: AgentLoops) -> None:
    line = re.search(
        r"up to 10 GiB on disk: (.*), (\d+) conversations, from (\S+)", loops.server.log
    )
    assert line and int(line[2]) == len(AGENTS)
    counters = loops.server.cache_stats()["disk"]
    assert counters["directory"] == line[3] and counters["hits"] >= 1
    assert counters["bytes_read"] > 0 < counters["read_seconds"]
    assert counters["last_error"] == ""
    metrics = httpx.get(f"{loops.server.base_url}/metrics", timeout=30).text
    match = re.search(r"^vllm_mlx_harmony_prefix_disk_hits_total ([\d.]+)$", metrics, re.MULTILINE)
    assert match and float(match[1]) >= 1
    assert "vllm_mlx_harmony_prefix_disk_bytes" in metrics
    modes = {stat.S_IMODE(path.stat().st_mode) for path in Path(line[3]).rglob("*")}
    assert modes == {0o600, 0o700}


@pytest.mark.nightly
def test_server_survives_kill_while_writing_and_delete_empties_disk(
    loops: AgentLoops, model: Path
) -> None:
    """At most the entry that was being written is lost; deleted entries stay deleted."""
    agent = Opencode()
    body = recorded_request(agent.recording, model, "killed")
    first_turn = agent.send(loops.server, body)
    loops.server.process.kill()  # at once, even if it is writing
    loops.server.process.wait(10)
    server = loops.restart()
    assert server.cache_stats()["disk"]["damaged"] == 0
    assert agent.send(server, body).text == first_turn.text
    name = "Codex-left"
    codex_body, turn = loops.turns[name]
    request = Codex().next_request(codex_body, turn, reasoning=False)
    assert Codex().send(server, request).cached > 1000
    wait_until_written(server)
    assert httpx.delete(f"{server.base_url}/v1/cache", timeout=30).status_code == 200
    counters = server.cache_stats()["disk"]
    assert (counters["pieces"], counters["turns"], counters["nbytes"]) == (0, 0, 0)
    assert not list(Path(counters["directory"]).rglob("*.safetensors"))
    assert Codex().send(server, request).cached == 0
    server.stop()


@pytest.mark.nightly
@pytest.mark.of_vllm_mlx
def test_loops_continue_after_model_was_unloaded(start: Start, model: Path, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    flags = (*FLAG, "--auto-unload-idle-seconds", "2", "--ssd-cache-dir", str(place))
    server = start(*flags, model=model, command=HARMONY)
    agent = Opencode()
    body = recorded_request(agent.recording, model, "unloaded")
    first_turn = agent.send(server, body)
    wait_until(lambda: server.residency() == "unloaded", "the model to be unloaded")
    turn = agent.send(server, agent.next_request(body, first_turn, reasoning=False))
    assert turn.text == "as it was" and turn.prompt - turn.cached <= NEW * turn.prompt
    server.stop()


def test_unusable_directory_disables_only_the_disk(
    start: Start, model: Path, tmp_path: Path
) -> None:
    place = tmp_path / "a file"
    place.write_text("of somebody's")
    server = start(*FLAG, "--ssd-cache-dir", str(place), model=model, command=HARMONY)
    assert f"disk cache disabled: {place} cannot be used" in server.log
    agent = Opencode()
    body = recorded_request(agent.recording, model, "file")
    assert agent.send(server, body).cached == 0
    turn = agent.send(server, body)
    assert turn.cached == turn.prompt - 1
    assert place.read_text() == "of somebody's"
    server.stop()
