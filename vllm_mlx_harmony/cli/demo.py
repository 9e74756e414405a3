"""demo: one tool-call conversation with a scripted stand-in, through the real server.

Knows the steps and their order. What is on the screen is in `screen`, the server in `process`, the
client in `client`.
"""

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
    """Shows the conversation. Returns 0 when the client saw what the model said, 1 when it did not.

    Raises ``UsageError`` where no server can run.
    """
    _need_host()
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
    """The stand-in in the user's cache; in ``home``, where that cannot be written."""
    try:
        return standin.write(vocab.cache_dir() / name, scripts)
    except OSError:
        return standin.write(home / name, scripts)


def _need_host() -> None:
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


def _converse(view: Screen, port: int, model: str) -> bool:
    """Both turns. Whether each was, to the letter, what the script says."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [TOOL],
    }
    first_prompt = prompt(body)
    first = ask(port, body)
    view.turn("Turn 1: the user asks", Turn(first_prompt, ids_of(CALLS), first))
    if not _said(first, CALLS, first_prompt) or len(first.calls) != 1:
        return False
    result = {"role": "tool", "tool_call_id": first.calls[0].id, "content": RESULT}
    body["messages"] += [first.message(), result]
    second_prompt = prompt(body)
    second = ask(port, body)
    shown = Turn(second_prompt, ids_of(ANSWERS), second, first_prompt)
    view.turn("Turn 2: the tool answered", shown)
    return _said(second, ANSWERS, second_prompt)


def _said(answer: Completion, script: str, prompt: tuple[int, ...]) -> bool:
    """Whether the client's fields hold what the messages of the script do, and nothing else."""
    said, finished = parse(ids_of(script))
    fields = {Kind.REASONING: "reasoning", Kind.CALL: "tool_calls"}
    expected = [(fields.get(m.kind, "content"), m.name, m.text) for m in said]
    seen = [(part.key, part.name, part.text) for part in answer.parts]
    ended = (answer.finish_reason, answer.prompt_tokens) == (finished.reason, len(prompt))
    return seen == expected and ended


def ids_of(text: str) -> tuple[int, ...]:
    """Ids of a script: its control tokens are control tokens."""
    return tuple(vocab.encoding().encode(text, allowed_special="all"))
