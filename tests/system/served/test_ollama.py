"""Ollama's API on the real server, with the official client: rows, a tool loop, decisions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from row_answers import GENERATED, check_ollama, ollama_request, served_rows
from rows import Row
from server_process import KEY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

pytestmark = pytest.mark.served

SERVED = [row for row in served_rows(GENERATED) if not row.one_call]
QUESTION = "Weather in Paris?"
WEATHER_CALL = (
    "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.weather <|constrain|>json<|message|>{"city":"Zürich"}<|call|>'
)
SCRIPTS = [
    *(Script(f"<|message|>{row.id}<|end|>", row.output) for row in SERVED),
    Script(f"<|message|>{QUESTION}<|end|>", WEATHER_CALL),
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
def test_ollama_answers_match_row(client: ollama.Client, model: str, row: Row) -> None:
    request = ollama_request(row, model)
    check_ollama(row, [client.chat(**request)], [*client.chat(**request, stream=True)])


def weather(city: str) -> str:
    """Tells the weather.

    Args:
      city: Where.
    """
    return f"18 °C in {city}"


def test_python_function_is_called_as_tool(client: ollama.Client, model: str) -> None:
    """With a Python function as the tool."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = client.chat(model, messages, tools=[weather]).message
    assert message.thinking == "Ask the tool."
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    result = weather(**call.function.arguments)
    messages += [message, {"role": "tool", "tool_name": "weather", "content": result}]
    lines = [line.message for line in client.chat(model, messages, tools=[weather], stream=True)]
    assert "".join(line.content or "" for line in lines) == "It is 18 °C."


@pytest.mark.nightly
def test_empty_lines_are_sent_during_silence(client: ollama.Client, model: str) -> None:
    """The server sends a line after a second of silence."""
    lines = [*client.generate(model, "Slowly.", stream=True)]
    assert "".join(line.response or "" for line in lines) == "one two"
    assert any(not line.response and not line.done for line in lines)
    assert lines[-1].eval_duration is not None and lines[-1].eval_duration > 10**9


def test_decisions_have_probabilities(client: ollama.Client, model: str) -> None:
    """The stand-in is certain of the scripted token, here a label."""
    urgent = {"type": "noul", "instructions": "It is urgent."}
    decisions = client.systemone(model, "The checkout fails.", {"a": urgent, "b": urgent})
    for answer in decisions.answers.values():
        assert answer.type == "noul" and answer.noul > 0.99


def test_models_are_listed_and_shown(client: ollama.Client, model: str) -> None:
    assert [model_entry.model for model_entry in client.list().models] == [model]
    (running,) = client.ps().models
    shown = client.show(model)
    assert shown.modelinfo is not None
    assert shown.modelinfo["gptoss.context_length"] == running.context_length
    with pytest.raises(ollama.ResponseError) as raised:
        client.show("nobody")
    assert raised.value.status_code == 404
