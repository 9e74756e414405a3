"""Enforcement of strict tools and schemas by the real server, with the official clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import psutil
import pytest
from server_process import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served

GRAMMAR_ENV = "VLLM_MLX_HARMONY_GRAMMAR"
PROSE = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>No!"
CALL = "<|channel|>commentary to=functions.pick<|message|>{}<|call|>"
SCRIPTS = [Script("Talk.", f"{PROSE}<|return|>"), Script("Call.", CALL)]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(enforcing_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return enforcing_server


def user_messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def is_city(arguments: Any) -> bool:
    return arguments in ({"city": "Rome"}, {"city": "Oslo"})


def test_only_strict_request_starts_helper_process(start: Start, standin_dir: Path) -> None:
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, command=HARMONY, env={GRAMMAR_ENV: "auto"})
    with server.openai() as client:
        create: Any = client.chat.completions.create
        model = client.models.list().data[0].id
        for strict in (False, True):
            assert not psutil.Process(server.pid).children(recursive=True)
            function = {"name": "pick", "parameters": CITY, "strict": strict}
            tools = [{"type": "function", "function": function}]
            completion = create(
                model=model, messages=user_messages("Talk."), tools=tools, tool_choice="required"
            )
            assert is_city(
                json.loads(completion.choices[0].message.tool_calls[0].function.arguments)
            )
    assert psutil.Process(server.pid).children()
    server.stop()


def test_chat_enforces_strict_tool(client: openai.OpenAI, model: str) -> None:
    create: Any = client.chat.completions.create
    function = {"name": "pick", "parameters": CITY, "strict": True}
    tools = [{"type": "function", "function": function}]
    completion = create(
        model=model, messages=user_messages("Talk."), tools=tools, tool_choice="required"
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert is_city(json.loads(choice.message.tool_calls[0].function.arguments))
    second = create(model=model, messages=user_messages("Call."), max_tokens=40)
    assert not second.choices[0].message.tool_calls


def test_responses_enforces_schema(client: openai.OpenAI, model: str) -> None:
    create: Any = client.responses.create
    schema_format = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    response = create(model=model, input="Talk.", text={"format": schema_format})
    assert response.status == "completed"
    assert is_city(json.loads(response.output_text))


def test_messages_enforces_tool_choice(server: Server, model: str) -> None:
    tools: Any = [{"name": "pick", "input_schema": CITY}]
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0) as client:
        create: Any = client.messages.create
        message = create(
            model=model,
            max_tokens=200,
            messages=user_messages("Talk."),
            tools=tools,
            tool_choice={"type": "any"},
        )
    assert message.stop_reason == "tool_use"
    assert is_city(message.content[-1].input)


def test_unsupported_strict_schema_is_rejected(client: openai.OpenAI, model: str) -> None:
    create: Any = client.chat.completions.create
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    function = {"name": "odd", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": function}]
    with pytest.raises(openai.BadRequestError, match="'odd'"):
        create(model=model, messages=user_messages("Talk."), tools=tools)


def test_invalid_setting_stops_startup(start: Start) -> None:
    server = start(*FLAG, command=HARMONY, env={GRAMMAR_ENV: "perhaps"}, ready=False)
    assert server.process.wait(60) == 2
