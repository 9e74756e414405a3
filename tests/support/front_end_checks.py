"""What every host of the front end must do: the tests of each call these checks with theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import ollama
import openai
import pytest
from event_checker import check_documents
from harmony_text import ids_of
from loops import run
from official_clients import clients, ollama_client
from openai.lib.streaming.chat import ChatCompletionStreamState
from scripted_host import KEY, MODEL, SingleEngineHost
from starlette.testclient import TestClient

from vllm_mlx_harmony.server.app import application

CALL = (
    "<|channel|>analysis<|message|>They ask for the weather.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city":"Paris"}<|call|>'
)
ANSWER = "<|channel|>analysis<|message|>Sunny.<|end|><|start|>assistant<|channel|>final<|message|>"
SCRIPTS = {
    "How is the weather?": CALL,
    "18 degrees": f"{ANSWER}It is 18 °C: très doux ☀.<|return|>",
    "Hello!": "<|channel|>final<|message|>Good day.<|return|>",
}
REPLY = "It is 18 °C: très doux ☀."
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


async def by_chat(
    host: SingleEngineHost, stream: bool, name: str = "weather"
) -> tuple[str, str, str]:
    client, _ = clients(host)
    tool = {"name": name, "description": "Tells the weather.", "parameters": CITY}
    options: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": tool}]}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]

    async def turn() -> Any:
        if not stream:
            return (
                (await client.chat.completions.create(**options, messages=messages))
                .choices[0]
                .message
            )
        state = ChatCompletionStreamState()  # the client's stream() takes strict tools only
        async for chunk in await client.chat.completions.create(
            **options, messages=messages, stream=True
        ):
            state.handle_chunk(chunk)
        return state.get_final_completion().choices[0].message

    first = await turn()
    (call,) = first.tool_calls
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"},
    ]
    second = await turn()
    return call.function.name, call.function.arguments, second.content


async def by_responses(
    host: SingleEngineHost, stream: bool, name: str = "weather"
) -> tuple[str, str, str]:
    client, _ = clients(host)
    tool = {"type": "function", "name": name, "parameters": CITY, "strict": False}

    async def turn(**options: Any) -> Any:
        options = {"model": MODEL, "tools": [tool], **options}
        if not stream:
            return await client.responses.create(**options)
        async with client.responses.stream(**options) as events:
            return await events.get_final_response()

    first = await turn(input="How is the weather?")
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    second = await turn(input=[result], previous_response_id=first.id)
    stored = await client.responses.retrieve(second.id)
    assert stored.output_text == second.output_text
    return call.name, call.arguments, second.output_text


async def by_messages(
    host: SingleEngineHost, stream: bool, name: str = "weather"
) -> tuple[str, str, str]:
    _, client = clients(host)
    tool = {"name": name, "input_schema": CITY}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "tools": [tool]}

    async def turn() -> Any:
        if not stream:
            return await client.messages.create(**options, messages=messages)
        async with client.messages.stream(**options, messages=messages) as events:
            return await events.get_final_message()

    first = await turn()
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    second = await turn()
    return call.name, json.dumps(call.input, separators=(",", ":")), second.content[-1].text


async def by_ollama(
    host: SingleEngineHost, stream: bool, name: str = "weather"
) -> tuple[str, str, str]:
    client = ollama_client(host)
    function = {"name": name, "description": "Tells the weather.", "parameters": CITY}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]

    async def turn() -> Any:
        options: Any = {"model": MODEL, "messages": messages, "tools": [{"function": function}]}
        if not stream:
            return (await client.chat(**options)).message
        lines = [line.message async for line in await client.chat(**options, stream=True)]
        calls = [call for line in lines for call in line.tool_calls or ()]
        texts = {
            field: "".join(getattr(line, field) or "" for line in lines)
            for field in ("content", "thinking")
        }
        return ollama.Message(role="assistant", tool_calls=calls, **texts)

    first = await turn()
    (call,) = first.tool_calls
    messages += [first, {"role": "tool", "tool_name": name, "content": "18 degrees"}]
    second = await turn()
    arguments = json.dumps(call.function.arguments, separators=(",", ":"))
    return call.function.name, arguments, second.content


Loop = Callable[..., Awaitable[tuple[str, str, str]]]


def check_tool_loop(host: SingleEngineHost, loop: Loop, stream: bool) -> None:
    result = run(loop(host, stream))
    assert result == ("weather", '{"city":"Paris"}', REPLY)
    assert host.leases == 0
    assert [tracker.results[0] for tracker in host.trackers] == ["success"] * 2
    # The second prompt begins with the first and the generated ids, including the reasoning, which
    # the Chat client does not send back.
    first, second = host.engine.prompts  # type: ignore[attr-defined]
    generated = (*first, *ids_of(CALL))
    assert second[: len(generated)] == generated


def check_events_over_websocket(host: SingleEngineHost) -> None:
    bearer = {"Authorization": f"Bearer {KEY}", "host": "localhost"}
    create = {"type": "response.create", "model": MODEL, "input": "Hello!"}
    with TestClient(application(host)).websocket_connect("/v1/responses", headers=bearer) as socket:
        socket.send_json(create)
        events = [socket.receive_json()]
        while events[-1]["type"] != "response.completed":
            events.append(socket.receive_json())
    response = check_documents(events)
    assert response["output"][-1]["content"][0]["text"] == "Good day."


def check_rejections(host: SingleEngineHost, path: str) -> None:
    async def create(key: str = KEY, **fields: Any) -> Any:
        openai_client, anthropic_client = clients(host, key)
        user: Any = [{"role": "user", "content": "Hello!"}]
        options: dict[str, Any] = {"model": MODEL, **fields}
        if path == "chat":
            return await openai_client.chat.completions.create(messages=user, **options)
        if path == "responses":
            return await openai_client.responses.create(input="Hello!", **options)
        return await anthropic_client.messages.create(messages=user, **{"max_tokens": 9, **options})

    errors: Any = anthropic if path == "messages" else openai
    count = "top_logprobs" if path == "responses" else "top_k"
    for error, request in [
        (errors.AuthenticationError, create("wrong")),
        (errors.NotFoundError, create(model="nobody")),
        (errors.BadRequestError, create(extra_body={count: -2})),
    ]:
        with pytest.raises(error) as refused:
            asyncio.run(request)
        assert refused.value.body is not None
    assert host.leases == 0


WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


async def create_response(client: Any, *, stream: bool, **fields: Any) -> Any:
    if not stream:
        return await client.responses.create(model=MODEL, **fields)
    async with client.responses.stream(model=MODEL, **fields) as events:
        return await events.get_final_response()


def check_tool_loop_in_conversation(host: SingleEngineHost, stream: bool) -> None:
    """The prompt continues exactly where the model stopped."""

    async def test() -> None:
        client, _ = clients(host)
        conversation = await client.conversations.create()
        options: Any = {"conversation": conversation.id, "tools": [WEATHER], "stream": stream}
        first = await create_response(client, **options, input="How is the weather?")
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
        second = await create_response(client, **options, input=[result])
        assert second.output_text == REPLY

    run(test())
    first, second = host.engine.prompts  # type: ignore[attr-defined]
    generated = (*first, *ids_of(CALL))
    assert second[: len(generated)] == generated
