"""A Chat client never sends reasoning back, and the model sees it unchanged all the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from server_process import Server

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin.scripts import Script

pytestmark = pytest.mark.served

CALL = (
    "<|channel|>analysis<|message|>An  odd thought.<|end|><|start|>assistant to=functions.weather"
    '<|channel|>commentary code<|message|>{"city": "Bern"}<|call|>'
)
REPLAYED_PROMPT = re.compile(re.escape(CALL + "<|start|>functions.weather to=assistant"))
ANSWER = "<|channel|>final<|message|>{}<|return|>"
SCRIPTS = [
    Script("<|message|>Weather?<|end|>", CALL),
    Script(REPLAYED_PROMPT, ANSWER.format("as it was"), whole_prompt=True),
    Script("<|message|>18<|end|>", ANSWER.format("written anew")),
]
TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def url(open_server: Server, standin_dir: Path) -> str:
    standin.rescript(standin_dir, SCRIPTS)
    return open_server.base_url


def answer_after_call(url: str, *, stream: bool, second_key: str = "a", edit: str = "") -> str:
    """The model's answer to the result of its call."""
    first_client, second_client = (
        OpenAI(base_url=f"{url}/v1", api_key=key) for key in ("a", second_key)
    )
    model = first_client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    choice = first_client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL]
    ).choices[0]
    (call,) = choice.message.tool_calls or ()
    function = {"name": "weather", "arguments": edit or '{"city":"Bern"}'}
    calls = [{"id": call.id, "type": "function", "function": function}]
    messages += [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.id, "content": "18"},
    ]
    request = {"model": model, "messages": messages, "tools": [TOOL]}
    if not stream:
        return second_client.chat.completions.create(**request).choices[0].message.content or ""
    chunks = second_client.chat.completions.create(**request, stream=True)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_replayed(url: str, stream: bool) -> None:
    assert answer_after_call(url, stream=stream) == "as it was"


def test_reasoning_is_not_replayed_for_other_key(url: str) -> None:
    assert answer_after_call(url, stream=False, second_key="b") == "written anew"


def test_reasoning_is_not_replayed_for_edited_call(url: str) -> None:
    assert answer_after_call(url, stream=False, edit='{"city":"Basel"}') == "written anew"
