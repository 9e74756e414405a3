"""demo: a conversation with a tool call, through the real server with a scripted stand-in."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_mlx_harmony.cli.client import Completion, ask
from vllm_mlx_harmony.cli.parse import parse
from vllm_mlx_harmony.cli.process import serving
from vllm_mlx_harmony.cli.render import prompt
from vllm_mlx_harmony.cli.screen import show_log, show_turn
from vllm_mlx_harmony.cli.standin import home_directory, require_host, written
from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.deltas import Kind
from vllm_mlx_harmony.standin import Script

QUESTION = "What is the weather in Paris? Should I take an umbrella?"
RESULT = json.dumps({"celsius": 18, "sky": "sunny", "rain": "0 %"})

CALLS = (
    "<|channel|>analysis<|message|>The user wants the weather in Paris. There is a tool for that."
    "<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look at the sky over Paris."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city":"Paris","unit":"celsius"}<|call|>'
)
ANSWERS = (
    "<|channel|>analysis<|message|>18 degrees, sunny, no rain: no umbrella.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 18 °C and sunny in Paris 🌞. "
    "Leave the umbrella at home.<|return|>"
)

SCRIPTS = (
    Script(f"<|start|>user<|message|>{QUESTION}", CALLS, delay_ms=10),
    Script("<|start|>functions.get_weather to=assistant", ANSWERS, delay_ms=10),
)

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony demo",
        description="Shows a tool-call conversation through the real server, with a scripted "
        "stand-in model. Downloads nothing.",
    )
    parser.add_argument(
        "--continuous-batching",
        dest="batched",
        action="store_true",
        help="pass --continuous-batching to the server",
    )
    parser.add_argument(
        "--tools",
        action="store_true",
        help="show a turn with tools that the server runs over MCP",
    )
    options = parser.parse_args(arguments)
    if options.tools:
        from vllm_mlx_harmony.cli import demo_tools

        return demo_tools.run(batched=options.batched)
    return run(batched=options.batched)


def run(*, batched: bool = False, console: Console | None = None) -> int:
    """Shows the conversation. Returns 0 if the client received the scripted output, otherwise 1."""
    require_host("the demo")
    console = console or Console(highlight=False)
    console.print(
        "[bold]vllm-mlx-harmony demo[/]: the real server, the real HTTP API, and in place of "
        "gpt-oss a [bold]scripted stand-in[/]. There are no weights: the output of the model "
        "was written by hand, token by token.\n"
    )
    with ExitStack() as stack:
        home = stack.enter_context(home_directory())
        with console.status("starting the server"):
            model = written("standin", SCRIPTS, home)
            flags = ["--continuous-batching"] if batched else []
            server = stack.enter_context(serving(model, home, flags))
        line = shlex.join(["python", *server.command[1:]]).replace(f"{Path.home()}/", "~/")
        console.print(f"$ {line}\n", style="dim")
        right = False
        try:
            right = _converse(console, server.port, str(model))
        finally:
            if not right:
                show_log(console, server.log)
    if right:
        result = "reasoning, preamble, call and answer each arrived in their own field"
        console.print(f"\n[green]✓[/] {result}; the server is stopped")
    else:
        console.print("\n[bold red]✗ the client did not receive the scripted output[/]")
    return 0 if right else 1


def _converse(console: Console, port: int, model: str) -> bool:
    """Runs both turns; returns whether each was exactly as scripted."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [TOOL],
    }
    first_prompt = prompt(body)
    first = ask(port, body)
    show_turn(console, "Turn 1: the user asks", first_prompt, ids_of(CALLS), first)
    if not _is_scripted(first, CALLS, first_prompt) or len(first.calls) != 1:
        return False
    result = {"role": "tool", "tool_call_id": first.calls[0].id, "content": RESULT}
    body["messages"] += [first.message(), result]
    second_prompt = prompt(body)
    second = ask(port, body)
    title = "Turn 2: the tool answered"
    show_turn(console, title, second_prompt, ids_of(ANSWERS), second, before=first_prompt)
    return _is_scripted(second, ANSWERS, second_prompt)


def _is_scripted(answer: Completion, script: str, prompt: tuple[int, ...]) -> bool:
    """Whether the client received exactly the messages of the script."""
    messages, finished = parse(ids_of(script))
    fields = {Kind.REASONING: "reasoning", Kind.CALL: "tool_calls"}
    expected = [
        (fields.get(message.kind, "content"), message.name, message.text) for message in messages
    ]
    received = [(part.key, part.name, part.text) for part in answer.parts]
    ended = (answer.finish_reason, answer.usage["prompt_tokens"])
    return received == expected and ended == (finished.reason, len(prompt))


def ids_of(text: str) -> tuple[int, ...]:
    """The ids of a script, whose control tokens are written out."""
    return tuple(vocab.encoding().encode(text, allowed_special="all"))
