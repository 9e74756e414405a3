"""Agents' loops go on when the server was killed, or has unloaded its model: nothing is lost.

As Codex, Claude Code and opencode send them; with the reasoning given back, and without.
"""

from __future__ import annotations

import json
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
from server import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

RECORDED = Path(__file__).parents[2] / "support" / "recorded"
NEW = 0.02
"""Part of a prompt that may be computed."""

TOOLS = {"Bash": "command", "exec_command": "cmd", "bash_tool": "command", "weather": "city"}
"""What the model is shown the agents' shells as, and their argument."""


def called(tool: str) -> str:
    """As no history is rendered: white space, order of the header, content type."""
    return (
        "<|channel|>analysis<|message|>An  odd thought.<|end|><|start|>assistant"
        f" to=functions.{tool}<|channel|>commentary code<|message|>"
        f'{{"{TOOLS[tool]}":  "run it"}}<|call|>'
    )


SAID = "<|channel|>final<|message|>{}<|return|>"
SCRIPTS = [
    Script("<|message|>And now?<|end|>", SAID.format("the end")),
    *(
        Script(
            re.compile(re.escape(f"{called(tool)}<|start|>functions.{tool} to=assistant")),
            SAID.format("as it was"),
            whole_prompt=True,
        )
        for tool in TOOLS
    ),
    Script(
        re.compile(r"<\|start\|>functions\.\w+ to=assistant"),
        SAID.format("written anew"),
        whole_prompt=True,
    ),
    *(Script(re.compile(rf"\btype {tool} = "), called(tool), whole_prompt=True) for tool in TOOLS),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.write(tmp_path_factory.mktemp("disk") / "gpt-oss-standin", SCRIPTS)


def recorded(name: str, model: Path, marker: str) -> dict[str, Any]:
    """The body of a recorded request, with texts of the lengths that they had; ``marker`` begins
    the first, so that no two conversations share more than they should."""
    text = (RECORDED / f"{name}.json").read_text()

    def filled(match: re.Match[str]) -> str:
        words = (f"{marker} {n} of many words. " for n in range(int(match[1]) // 12))
        return "".join(words)[: int(match[1])]

    document = json.loads(re.sub(r"\((\d+) characters of text\)", filled, text))
    return {**document.get("body", document), "model": str(model)}


@dataclass(frozen=True)
class Said:
    """An answer: its text, what the next request takes of it, and tokens of the prompt."""

    text: str
    echo: list[Any]
    prompt: int
    cached: int


class Codex:
    """Responses, not stored: all of it is sent each time."""

    recorded = "responses-codex-turn1"

    def ask(self, server: Server, body: dict[str, Any]) -> Said:
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="k", timeout=60) as client:
            for event in client.responses.create(**body):
                if event.type == "response.completed":
                    done = event.response
        usage = done.usage
        assert usage is not None
        echo = [item.model_dump(exclude_none=True) for item in done.output]
        cached = usage.input_tokens_details.cached_tokens
        return Said(done.output_text, echo, usage.input_tokens, cached)

    def following(self, body: dict[str, Any], answer: Said, reasoning: bool) -> dict[str, Any]:
        echo = [item for item in answer.echo if reasoning or item["type"] != "reasoning"]
        (call,) = (item for item in echo if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        return {**body, "input": [*body["input"], *echo, result]}


class Stored(Codex):
    """Responses that the server stores: only what is new is sent."""

    def following(self, body: dict[str, Any], answer: Said, reasoning: bool) -> dict[str, Any]:
        (call,) = (item for item in answer.echo if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        return {**body, "input": [result], "previous_response_id": answer.echo[0]["response"]}

    def ask(self, server: Server, body: dict[str, Any]) -> Said:
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="k", timeout=60) as client:
            kept = {**body, "store": True, "stream": False}
            done = client.responses.create(**kept)
        echo = [item.model_dump() | {"response": done.id} for item in done.output]
        cached = done.usage.input_tokens_details.cached_tokens
        return Said(done.output_text, echo, done.usage.input_tokens, cached)


class ClaudeCode:
    """Messages, streamed."""

    recorded = "claude-code-turn1"

    def ask(self, server: Server, body: dict[str, Any]) -> Said:
        usual = ("model", "messages", "system", "tools", "max_tokens")
        more = {name: body[name] for name in body if name not in (*usual, "stream")}
        asked = {name: body[name] for name in usual}
        with (
            anthropic.Anthropic(base_url=server.base_url, api_key="k", timeout=60) as client,
            client.messages.stream(**asked, extra_body=more) as stream,
        ):
            begun = [event for event in stream if event.type == "message_start"]
            done = stream.get_final_message()
        text = "".join(block.text for block in done.content if block.type == "text")
        cached = done.usage.cache_read_input_tokens or 0
        assert begun[0].message.usage.cache_read_input_tokens == cached
        echo = [block.model_dump(exclude_none=True) for block in done.content]
        return Said(text, echo, cached + done.usage.input_tokens, cached)

    def following(self, body: dict[str, Any], answer: Said, reasoning: bool) -> dict[str, Any]:
        echo = [block for block in answer.echo if reasoning or block["type"] != "thinking"]
        (call,) = (block for block in echo if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "42"}
        more = [{"role": "assistant", "content": echo}, {"role": "user", "content": [result]}]
        return {**body, "messages": [*body["messages"], *more]}


class Opencode:
    """Chat Completions, streamed."""

    recorded = "opencode-chat-turn1"

    def ask(self, server: Server, body: dict[str, Any]) -> Said:
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
        return Said(message["content"], [message], usage.prompt_tokens, cached)

    def following(self, body: dict[str, Any], answer: Said, reasoning: bool) -> dict[str, Any]:
        (message,) = answer.echo
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


def disk(server: Server) -> dict[str, Any]:
    stats = httpx.get(f"{server.base_url}/v1/cache/stats", timeout=30).json()
    found: dict[str, Any] = stats["engine_cache"]["harmony_prefix_reuse"]["disk"]
    return found


def written(server: Server) -> dict[str, Any]:
    """The counters, when everything is written."""
    deadline = time.monotonic() + 30
    while disk(server)["waiting"] and time.monotonic() < deadline:
        time.sleep(0.1)
    counters = disk(server)
    assert counters["waiting"] == 0 and counters["dropped"] == 0
    return counters


@dataclass
class Loops:
    """A server, its directory, and the first turns of all agents, asked of it."""

    server: Server
    again: Callable[[], Server]
    turns: dict[str, tuple[dict[str, Any], Said]]


@pytest.fixture(scope="module")
def loops(start: Start, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """Every agent's first turn; then the server is killed, and started again."""
    place = tmp_path_factory.mktemp("ssd")
    env = {"VLLM_MLX_HARMONY_STORE": str(place / "store.sqlite")}
    flags = (*FLAG, "--ssd-cache-dir", str(place / "cache"), "--enable-metrics")

    def begun() -> Server:
        return start(*flags, model=model, command=HARMONY, env=env)

    server = begun()
    turns = {}
    for name, (agent, _) in AGENTS.items():
        body = recorded(agent.recorded, model, name)
        turns[name] = body, agent.ask(server, body)
        assert turns[name][1].cached < NEW * turns[name][1].prompt + 400
    assert written(server)["turns"] == len(AGENTS)
    server.process.kill()
    server.process.wait(10)
    return Loops(begun(), begun, turns)


@pytest.mark.parametrize("name", AGENTS)
def test_loops_go_on_when_the_server_was_killed(loops: Loops, name: str) -> None:
    agent, reasoning = AGENTS[name]
    body, first = loops.turns[name]
    answer = agent.ask(loops.server, agent.following(body, first, reasoning))
    assert answer.text == "as it was"
    assert answer.prompt > first.prompt > 1000
    assert answer.prompt - answer.cached <= NEW * answer.prompt


def test_start_stats_and_metrics_show_it(loops: Loops) -> None:
    line = re.search(
        r"up to 10 GiB on disk: (.*), (\d+) conversations, from (\S+)", loops.server.log
    )
    assert line and int(line[2]) == len(AGENTS)
    counters = disk(loops.server)
    assert counters["directory"] == line[3] and counters["hits"] >= 1
    assert counters["bytes_read"] > 0 < counters["read_seconds"]
    assert counters["last_error"] == ""
    metrics = httpx.get(f"{loops.server.base_url}/metrics", timeout=30).text
    found = re.search(r"^vllm_mlx_harmony_prefix_disk_hits_total ([\d.]+)$", metrics, re.MULTILINE)
    assert found and float(found[1]) >= 1
    assert "vllm_mlx_harmony_prefix_disk_bytes" in metrics
    modes = {stat.S_IMODE(path.stat().st_mode) for path in Path(line[3]).rglob("*")}
    assert modes == {0o600, 0o700}


def test_killed_while_it_writes_and_emptied(loops: Loops, model: Path) -> None:
    """What was being written is lost, at most; what is deleted does not come back."""
    agent = Opencode()
    body = recorded(agent.recorded, model, "killed")
    first = agent.ask(loops.server, body)
    loops.server.process.kill()  # at once, whatever it does
    loops.server.process.wait(10)
    server = loops.again()
    assert disk(server)["damaged"] == 0
    assert agent.ask(server, body).text == first.text
    name = "Codex-left"
    asked, answer = loops.turns[name]
    following = Codex().following(asked, answer, reasoning=False)
    assert Codex().ask(server, following).cached > 1000
    written(server)
    assert httpx.delete(f"{server.base_url}/v1/cache", timeout=30).status_code == 200
    counters = disk(server)
    assert (counters["pieces"], counters["turns"], counters["nbytes"]) == (0, 0, 0)
    assert not list(Path(counters["directory"]).rglob("*.safetensors"))
    assert Codex().ask(server, following).cached == 0
    server.stop()


@pytest.mark.of_vllm_mlx
def test_loops_go_on_when_the_model_was_unloaded(start: Start, model: Path, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    flags = (*FLAG, "--auto-unload-idle-seconds", "2", "--ssd-cache-dir", str(place))
    server = start(*flags, model=model, command=HARMONY)
    agent = Opencode()
    body = recorded(agent.recorded, model, "unloaded")
    first = agent.ask(server, body)
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and '"unloaded"' not in status(server):
        time.sleep(0.1)
    assert '"unloaded"' in status(server)
    answer = agent.ask(server, agent.following(body, first, reasoning=False))
    assert answer.text == "as it was" and answer.prompt - answer.cached <= NEW * answer.prompt
    server.stop()


def status(server: Server) -> str:
    return httpx.get(f"{server.base_url}/v1/status", timeout=30).text.replace(" ", "")


def test_unusable_directory_disables_only_the_disk(
    start: Start, model: Path, tmp_path: Path
) -> None:
    place = tmp_path / "a file"
    place.write_text("of somebody's")
    server = start(*FLAG, "--ssd-cache-dir", str(place), model=model, command=HARMONY)
    assert f"disk cache disabled: {place} cannot be used" in server.log
    agent = Opencode()
    body = recorded(agent.recorded, model, "file")
    assert agent.ask(server, body).cached == 0
    answer = agent.ask(server, body)
    assert answer.cached == answer.prompt - 1
    assert place.read_text() == "of somebody's"
    server.stop()
