"""Ollama's API through the real server and the official client: rows of all kinds, and a loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from row_answers import GENERATED, check_ollama, ollama_request, served_rows
from rows import Row
from server import KEY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server import Server

pytestmark = pytest.mark.served

SERVED = [row for row in served_rows(GENERATED) if not row.one_call]
ASKED = "Weather in Paris?"
CALLS = (
    "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.weather <|constrain|>json<|message|>{"city":"Zürich"}<|call|>'
)
SCRIPTS = [
    *(Script(f"<|message|>{row.id}<|end|>", row.output) for row in SERVED),
    Script(f"<|message|>{ASKED}<|end|>", CALLS),
    Script(
        "<|start|>functions.weather to=assistant",
        "<|channel|>final<|message|>It is 18 °C.<|return|>",
    ),
    Script(
        "<|message|>Slowly.<|end|>",
        "<|channel|>final<|message|>one two<|return|>",
        delay_ms=1500,
    ),
    Script("B. true<|end|>", "<|channel|>final<|message|>B<|return|>"),
]


@pytest.fixture(scope="module")
def server(keyed_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return keyed_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with ollama.Client(server.base_url, headers=headers, timeout=60) as client:
        yield client


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED])
def test_row(client: ollama.Client, model: str, row: Row) -> None:
    request = ollama_request(row, model)
    check_ollama(row, [client.chat(**request)], [*client.chat(**request, stream=True)])


def weather(city: str) -> str:
    """Tells the weather.

    Args:
      city: Where.
    """
    return f"18 °C in {city}"


def test_a_loop(client: ollama.Client, model: str) -> None:
    """With a Python function as the tool."""
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    first = client.chat(model, messages, tools=[weather]).message
    assert first.thinking == "Ask the tool."
    assert first.tool_calls is not None
    (call,) = first.tool_calls
    result = weather(**call.function.arguments)
    messages += [first, {"role": "tool", "tool_name": "weather", "content": result}]
    lines = [line.message for line in client.chat(model, messages, tools=[weather], stream=True)]
    assert "".join(line.content or "" for line in lines) == "It is 18 °C."


def test_a_silence_has_lines(client: ollama.Client, model: str) -> None:
    """The server says after a second of silence that it is alive."""
    lines = [*client.generate(model, "Slowly.", stream=True)]
    assert "".join(line.response or "" for line in lines) == "one two"
    assert any(not line.response and not line.done for line in lines)
    assert lines[-1].eval_duration is not None and lines[-1].eval_duration > 10**9


def test_decisions(client: ollama.Client, model: str) -> None:
    """The stand-in is certain of the token that it has a script for, here a label."""
    urgent = {"type": "noul", "instructions": "It is urgent."}
    found = client.systemone(model, "The checkout fails.", {"a": urgent, "b": urgent})
    for answer in found.answers.values():
        assert answer.type == "noul" and answer.noul > 0.99


def test_the_models(client: ollama.Client, model: str) -> None:
    assert [each.model for each in client.list().models] == [model]
    (running,) = client.ps().models
    shown = client.show(model)
    assert shown.modelinfo is not None
    assert shown.modelinfo["gptoss.context_length"] == running.context_length
    with pytest.raises(ollama.ResponseError) as refused:
        client.show("nobody")
    assert refused.value.status_code == 404
