"""demo: a conversation with a tool call, through the real server with a scripted stand-in."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.cli.client import Completion, ask
from vllm_mlx_harmony.cli.errors import UsageError
from vllm_mlx_harmony.cli.parse import parse
from vllm_mlx_harmony.cli.process import serving
from vllm_mlx_harmony.cli.render import prompt
from vllm_mlx_harmony.cli.screen import Screen, Turn
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


def run(*, batched: bool = False) -> int:
    """Shows the conversation. Returns 0 if the client received the scripted output, otherwise 1.

    Raises ``UsageError`` if the server cannot run.
    """
    for module, fix in (("vllm_mlx", "vllm-mlx"), ("mlx.core", "mlx")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            linux = sys.platform == "linux" and fix == "mlx"
            wanted = "'vllm-mlx-harmony[cpu]'" if linux else fix
            raise UsageError(
                f"the demo runs the real server, but {module} cannot be imported ({error}): "
                f"pip install {wanted}"
            ) from error
    view = Screen()
    view.opening()
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="vllm-mlx-harmony-", ignore_cleanup_errors=True)
        home = Path(stack.enter_context(made))
        with view.busy("writing the stand-in"):
            model = written("standin", SCRIPTS, home)
        with view.busy("starting the server"):
            flags = ["--continuous-batching"] if batched else []
            server = stack.enter_context(serving(model, home, flags))
        view.serving(server)
        right = False
        try:
            right = _converse(view, server.port, str(model))
        finally:
            if not right:
                view.log(server)
    view.closing(right=right)
    return 0 if right else 1


def written(name: str, scripts: Sequence[Script], home: Path) -> Path:
    """Writes the stand-in to the user's cache, or to ``home`` if that is not writable."""
    try:
        return standin.write(vocab.cache_dir() / name, scripts)
    except OSError:
        return standin.write(home / name, scripts)


def _converse(view: Screen, port: int, model: str) -> bool:
    """Runs both turns; returns whether each was exactly as scripted."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [TOOL],
    }
    first_prompt = prompt(body)
    first = ask(port, body)
    view.turn("Turn 1: the user asks", Turn(first_prompt, ids_of(CALLS), first))
    if not _is_scripted(first, CALLS, first_prompt) or len(first.calls) != 1:
        return False
    result = {"role": "tool", "tool_call_id": first.calls[0].id, "content": RESULT}
    body["messages"] += [first.message(), result]
    second_prompt = prompt(body)
    second = ask(port, body)
    shown = Turn(second_prompt, ids_of(ANSWERS), second, first_prompt)
    view.turn("Turn 2: the tool answered", shown)
    return _is_scripted(second, ANSWERS, second_prompt)


def _is_scripted(answer: Completion, script: str, prompt: tuple[int, ...]) -> bool:
    """Whether the client received exactly the messages of the script."""
    messages, finished = parse(ids_of(script))
    fields = {Kind.REASONING: "reasoning", Kind.CALL: "tool_calls"}
    expected = [(fields.get(each.kind, "content"), each.name, each.text) for each in messages]
    received = [(part.key, part.name, part.text) for part in answer.parts]
    ended = (answer.finish_reason, answer.prompt_tokens) == (finished.reason, len(prompt))
    return received == expected and ended


def ids_of(text: str) -> tuple[int, ...]:
    """The ids of a script, whose control tokens are written out."""
    return tuple(vocab.encoding().encode(text, allowed_special="all"))
