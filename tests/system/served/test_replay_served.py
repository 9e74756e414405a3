"""A Chat client that never sends reasoning back: the model has it all the same, as it wrote it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from server import Server

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin.scripts import Script

pytestmark = pytest.mark.served

CALLED = (
    "<|channel|>analysis<|message|>An  odd thought.<|end|><|start|>assistant to=functions.weather"
    '<|channel|>commentary code<|message|>{"city": "Bern"}<|call|>'
)
AS_IT_WAS = re.compile(re.escape(CALLED + "<|start|>functions.weather to=assistant"))
ANSWER = "<|channel|>final<|message|>{}<|return|>"
SCRIPTS = [
    Script("<|message|>Weather?<|end|>", CALLED),
    Script(AS_IT_WAS, ANSWER.format("as it was"), whole_prompt=True),
    Script("<|message|>18<|end|>", ANSWER.format("written anew")),
]
TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def url(open_server: Server, standin_dir: Path) -> str:
    standin.rescript(standin_dir, SCRIPTS)
    return open_server.base_url


def looped(url: str, *, stream: bool, second_key: str = "a", edit: str = "") -> str:
    """What the model answers to the result of the call it made."""
    first, second = (OpenAI(base_url=f"{url}/v1", api_key=key) for key in ("a", second_key))
    model = first.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    message = first.chat.completions.create(model=model, messages=messages, tools=[TOOL]).choices[0]
    (call,) = message.message.tool_calls or ()
    function = {"name": "weather", "arguments": edit or '{"city":"Bern"}'}
    calls = [{"id": call.id, "type": "function", "function": function}]
    messages += [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.id, "content": "18"},
    ]
    request = {"model": model, "messages": messages, "tools": [TOOL]}
    if not stream:
        return second.chat.completions.create(**request).choices[0].message.content or ""
    chunks = second.chat.completions.create(**request, stream=True)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_replayed(url: str, stream: bool) -> None:
    assert looped(url, stream=stream) == "as it was"


def test_not_for_another_api_key(url: str) -> None:
    assert looped(url, stream=False, second_key="b") == "written anew"


def test_not_for_a_call_the_client_edited(url: str) -> None:
    assert looped(url, stream=False, edit='{"city":"Basel"}') == "written anew"
