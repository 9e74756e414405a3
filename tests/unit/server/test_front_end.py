"""The APIs over a fake engine, in process, through the official clients: no host at all."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("ollama")

import anthropic
import ollama
import openai
from event_checker import check_documents
from fakes import KEY, MODEL, Alone, ScriptedEngine, ids
from official_clients import clients, ollama_client
from openai.lib.streaming.chat import ChatCompletionStreamState
from starlette.testclient import TestClient

from vllm_mlx_harmony.core import render, text_limits, vocab
from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.engine_api.engine import Engine, GenerationRequest, Step, Steps
from vllm_mlx_harmony.protocols.responses import ResponsesRequest
from vllm_mlx_harmony.server import app, enforcement
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.storage.store import StoredResponse

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
SAID = "It is 18 °C: très doux ☀."
USER = [{"role": "user", "content": "Hello!"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(autouse=True)
def _no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(enforcement.GRAMMAR_VARIABLE, "off")


@pytest.fixture(params=[1, 3, 1000])
def host(request: pytest.FixtureRequest) -> Alone:
    """Ids one by one, a few and all at once."""
    return Alone(ScriptedEngine(SCRIPTS, request.param))


async def by_chat(host: Alone, stream: bool, name: str = "weather") -> tuple[str, str, str]:
    client, _ = clients(host)
    tool = {"name": name, "description": "Tells the weather.", "parameters": CITY}
    asked: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": tool}]}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]

    async def turn() -> Any:
        if not stream:
            return (
                (await client.chat.completions.create(**asked, messages=messages))
                .choices[0]
                .message
            )
        state = ChatCompletionStreamState()  # the client's stream() takes strict tools only
        async for chunk in await client.chat.completions.create(
            **asked, messages=messages, stream=True
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


async def by_responses(host: Alone, stream: bool, name: str = "weather") -> tuple[str, str, str]:
    client, _ = clients(host)
    tool = {"type": "function", "name": name, "parameters": CITY, "strict": False}

    async def turn(**asked: Any) -> Any:
        asked = {"model": MODEL, "tools": [tool], **asked}
        if not stream:
            return await client.responses.create(**asked)
        async with client.responses.stream(**asked) as events:
            return await events.get_final_response()

    first = await turn(input="How is the weather?")
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    second = await turn(input=[result], previous_response_id=first.id)
    kept = await client.responses.retrieve(second.id)
    assert kept.output_text == second.output_text
    return call.name, call.arguments, second.output_text


async def by_messages(host: Alone, stream: bool, name: str = "weather") -> tuple[str, str, str]:
    _, client = clients(host)
    tool = {"name": name, "input_schema": CITY}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "tools": [tool]}

    async def turn() -> Any:
        if not stream:
            return await client.messages.create(**asked, messages=messages)
        async with client.messages.stream(**asked, messages=messages) as events:
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


async def by_ollama(host: Alone, stream: bool, name: str = "weather") -> tuple[str, str, str]:
    client = ollama_client(host)
    function = {"name": name, "description": "Tells the weather.", "parameters": CITY}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]

    async def turn() -> Any:
        asked: Any = {"model": MODEL, "messages": messages, "tools": [{"function": function}]}
        if not stream:
            return (await client.chat(**asked)).message
        lines = [line.message async for line in await client.chat(**asked, stream=True)]
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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("loop", [by_chat, by_responses, by_messages, by_ollama])
def test_a_tool_loop(host: Alone, loop: Loop, stream: bool) -> None:
    found = asyncio.run(asyncio.wait_for(loop(host, stream), 30))
    assert found == ("weather", '{"city":"Paris"}', SAID)
    assert host.lent == 0
    assert [tracker.results[0] for tracker in host.trackers] == ["success"] * 2
    # The second prompt begins with the first and the very ids that were generated, reasoning
    # included, which the Chat client does not send back.
    first, second = host.engine.prompts  # type: ignore[attr-defined]
    spoken = (*first, *ids(CALL))
    assert second[: len(spoken)] == spoken


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("loop", [by_chat, by_responses, by_messages, by_ollama])
@pytest.mark.parametrize(
    ("name", "alias"),
    [("python", "python_tool"), ("browser_search", "browser_search"), ("bash", "bash_tool")],
)
def test_a_function_named_like_a_trained_tool(
    loop: Loop, stream: bool, name: str, alias: str
) -> None:
    script = CALL.replace("functions.weather", f"functions.{alias}")
    engine = ScriptedEngine({**SCRIPTS, "How is the weather?": script}, 3)
    found = asyncio.run(asyncio.wait_for(loop(Alone(engine), stream, name), 30))
    assert found == (name, '{"city":"Paris"}', SAID)
    first, second = (vocab.encoding().decode(list(prompt)) for prompt in engine.prompts)
    assert f"type {alias} = (_: {{" in first
    assert second.startswith(first + script)
    assert f"<|start|>functions.{alias} to=assistant" in second


# --- Compaction: the model's own summary is what a conversation goes on from.

COMPACTS = "Do not call any tool. Write only the message.<|end|>"
GOES_ON = "<|message|>They said hello.<|end|>"
COMPACTION = {
    **SCRIPTS,
    COMPACTS: f"{ANSWER}They said hello.<|return|>",
    GOES_ON: "<|channel|>final<|message|>I remember.<|return|>",
    "More.": "<|channel|>final<|message|>More, then.<|return|>",
}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}
COMPACTED: dict[str, Any] = {
    "model": MODEL,
    "tools": [WEATHER],
    "input": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Good day."},
        {"type": "compaction_trigger"},
    ],
}


async def compacted(host: Alone, how: str) -> Any:
    client, _ = clients(host)
    if how == "whole":
        return await client.responses.create(**COMPACTED)
    if how == "background":
        answer = await client.responses.create(**COMPACTED, background=True)
        while answer.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            answer = await client.responses.retrieve(answer.id)
        return answer
    if how == "streamed":
        async with client.responses.stream(**COMPACTED) as events:
            return await events.get_final_response()
    stream = await client.responses.create(**COMPACTED, stream=True, background=True)
    done = [event async for event in stream]
    assert [event.type for event in done] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    return done[-1].response


@pytest.mark.parametrize("how", ["whole", "streamed", "background", "background, streamed"])
def test_compacted_conversation_continues(how: str) -> None:
    host = Alone(ScriptedEngine(COMPACTION, 3))

    async def test() -> None:
        client, _ = clients(host)
        answer = await compacted(host, how)
        (item,) = answer.output
        assert (item.type, answer.status, answer.store) == ("compaction", "completed", True)
        assert "hello" not in item.encrypted_content
        kept = await client.responses.retrieve(answer.id)
        assert kept.output == answer.output
        asked = await client.responses.input_items.list(answer.id)
        assert [each.type for each in asked.data] == ["message", "message"]
        # By its item, as Codex goes on, and by its id.
        window = [item.model_dump(exclude_none=True)]
        by_item = await client.responses.create(model=MODEL, input=window)
        assert by_item.output_text == "I remember."
        more = await client.responses.create(
            model=MODEL, input="More.", previous_response_id=answer.id
        )
        assert more.output_text == "More, then."

    asyncio.run(asyncio.wait_for(test(), 30))
    assert host.lent == 0
    first, _, last = (vocab.encoding().decode(list(each)) for each in host.engine.prompts)  # type: ignore[attr-defined]
    assert "type weather = " in first  # what the prefix cache has of the conversation is used
    assert f"<|start|>user{GOES_ON}<|start|>user<|message|>More.<|end|>" in last
    assert "Good day." not in last


def test_compaction_of_a_stored_conversation_keeps_user_messages() -> None:
    host = Alone(ScriptedEngine(COMPACTION, 3))

    async def test() -> None:
        client, _ = clients(host)
        first = await client.responses.create(model=MODEL, input="Hello!")
        second = await client.responses.create(
            model=MODEL, input="More.", previous_response_id=first.id
        )
        document = await client.responses.compact(model=MODEL, previous_response_id=second.id)
        *users, item = document.output
        assert [(each.type, each.content[0].text) for each in users] == [
            ("message", "Hello!"),
            ("message", "More."),
        ]
        assert item.type == "compaction"
        window = [each.model_dump(exclude_none=True) for each in document.output]
        answer = await client.responses.create(model=MODEL, input=window)
        assert answer.output_text == "I remember."

    asyncio.run(asyncio.wait_for(test(), 30))
    assert host.lent == 0


def test_a_conversation_is_compacted_over_a_websocket() -> None:
    host = Alone(ScriptedEngine(COMPACTION, 3))
    bearer = {"Authorization": f"Bearer {KEY}", "host": "localhost"}
    with TestClient(application(host)).websocket_connect("/v1/responses", headers=bearer) as socket:
        socket.send_json({"type": "response.create", **COMPACTED, "store": False})
        events = [socket.receive_json()]
        while events[-1]["type"] != "response.completed":
            events.append(socket.receive_json())
        response = check_documents(events)
        assert [item["type"] for item in response["output"]] == ["compaction"]
        again = {"input": "More.", "previous_response_id": response["id"], "store": False}
        socket.send_json({"type": "response.create", "model": MODEL, **again})
        while socket.receive_json()["type"] != "response.completed":
            pass
    assert "Good day." not in vocab.encoding().decode(list(host.engine.prompts[-1]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_compaction_without_a_summary_is_an_error(stream: bool) -> None:
    scripts = {**COMPACTION, COMPACTS: "<|channel|>analysis<|message|>Hm.<|end|>"}
    host = Alone(ScriptedEngine(scripts, 3))

    async def test() -> None:
        client, _ = clients(host)
        if not stream:
            with pytest.raises(openai.InternalServerError, match="no summary"):
                await client.responses.create(**COMPACTED)
            return
        events = [event async for event in await client.responses.create(**COMPACTED, stream=True)]
        assert [event.type for event in events[-1:]] == ["response.failed"]

    asyncio.run(asyncio.wait_for(test(), 30))
    assert host.lent == 0


def test_the_same_events_over_a_websocket(host: Alone) -> None:
    bearer = {"Authorization": f"Bearer {KEY}", "host": "localhost"}
    create = {"type": "response.create", "model": MODEL, "input": "Hello!"}
    with TestClient(application(host)).websocket_connect("/v1/responses", headers=bearer) as socket:
        socket.send_json(create)
        names = []
        while not names or names[-1] != "response.completed":
            event = socket.receive_json()
            names.append(event["type"])
    assert event["response"]["output"][-1]["content"][0]["text"] == "Good day."
    assert names[:2] == ["response.created", "response.in_progress"]


def test_a_closed_websocket_holds_nothing(host: Alone) -> None:
    """Its last response may be a conversation of megabytes: no collection of garbage is to find it,
    which would hold the event loop for as long as it looks at all of its items."""
    bearer = {"Authorization": f"Bearer {KEY}", "host": "localhost"}
    create = {"type": "response.create", "model": MODEL, "input": "Hello!", "store": False}

    def stored() -> int:
        return sum(isinstance(each, StoredResponse) for each in gc.get_objects())

    gc.collect()
    before = stored()  # other tests have stores of their own
    gc.disable()
    try:
        client = TestClient(application(host), base_url="http://localhost")
        with client.websocket_connect("/v1/responses", headers=bearer) as socket:
            for _ in range(2):  # the second begins when the first is remembered
                socket.send_json(create)
                while socket.receive_json()["type"] != "response.completed":
                    pass
        until = time.monotonic() + 5  # the thread that made the second may still have it
        while stored() != before and time.monotonic() < until:
            time.sleep(0.01)
        assert stored() == before
    finally:
        gc.enable()


LINE = "[image left out: this model reads text only]"


async def look(host: Alone, path: str, stream: bool) -> str:
    """What is said of a picture, by the official client for ``path``."""
    openai_client, anthropic_client = clients(host)
    url = "data:image/png;base64,AAAA"
    asked: dict[str, Any] = {"model": MODEL}
    if path == "ollama":
        asked["messages"] = [{"role": "user", "images": ["AAAA"]}]
        client = ollama_client(host)
        if not stream:
            return str((await client.chat(**asked)).message.content)
        lines = await client.chat(**asked, stream=True)
        return "".join([line.message.content or "" async for line in lines])
    if path == "chat":
        image: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
        asked["messages"] = [{"role": "user", "content": [image]}]
        if not stream:
            whole = await openai_client.chat.completions.create(**asked)
            return str(whole.choices[0].message.content)
        async with openai_client.chat.completions.stream(**asked) as chunks:
            return str((await chunks.get_final_completion()).choices[0].message.content)
    if path == "responses":
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        asked["input"] = [{"role": "user", "content": [image]}]
        if not stream:
            return (await openai_client.responses.create(**asked)).output_text
        async with openai_client.responses.stream(**asked) as events:
            return (await events.get_final_response()).output_text
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    asked["messages"] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    asked["max_tokens"] = 50
    if not stream:
        message: Any = await anthropic_client.messages.create(**asked)
    else:
        async with anthropic_client.messages.stream(**asked) as spoken:
            message = await spoken.get_final_message()
    return str(message.content[-1].text)


class PredictingEngine(ScriptedEngine):
    """Tries every id with another one before it."""

    predicted: tuple[int, ...] = ()

    async def generate(self, request: GenerationRequest) -> Steps:
        self.predicted, tried = request.settings.prediction, 0
        async for step in super().generate(request):
            tried += len(step.ids)
            yield step._replace(accepted=tried, rejected=2 * tried)


async def predicted(host: Alone, path: str, stream: bool, content: Any) -> dict[str, Any]:
    """The details of the usage of an answer, and of its prediction in Chat."""
    client, _ = clients(host)
    if path == "responses":
        response = await client.responses.create(model=MODEL, input="Hello!", store=False)
        assert response.usage is not None
        return response.usage.output_tokens_details.model_dump()
    asked: Any = {"model": MODEL, "messages": USER, "stream": stream}
    if content is not None:
        asked["prediction"] = {"type": "content", "content": content}
    found = await client.chat.completions.create(
        **asked, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    usage = [chunk async for chunk in found][-1].usage if stream else found.usage
    return dict(usage.completion_tokens_details.model_dump(exclude_unset=True))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["chat", "responses"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ("Good day.", "Good day."),
        ([{"type": "text", "text": "Good "}, {"type": "text", "text": "day."}], "Good day."),
        ("<|return|>", "<|return|>"),
        ("a b " * 100_000, "a b " * (text_limits.CONTEXT_TOKENS // 4)),
    ],
    ids=["absent", "empty", "text", "parts", "not a control token", "cut"],
)
def test_a_prediction_reaches_the_engine_and_is_counted(
    path: str, stream: bool, content: Any, text: str
) -> None:
    engine = PredictingEngine(SCRIPTS, 3)
    details = asyncio.run(predicted(Alone(engine), path, stream, content))
    accepted = len(ids(SCRIPTS["Hello!"]))
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": 2 * accepted,
    }
    if path == "chat":
        assert engine.predicted == tuple(vocab.encode(text))


def test_prediction_is_not_sent_to_engines_without_drafts() -> None:
    """Nothing is tokenized for it."""
    engine = PredictingEngine(SCRIPTS, 3)
    engine.has_prediction = False
    asyncio.run(predicted(Alone(engine), "chat", False, "Good day."))
    assert engine.predicted == ()


def test_an_answer_without_predictions_counts_none() -> None:
    host = Alone(ScriptedEngine(SCRIPTS, 3))
    details = asyncio.run(predicted(host, "chat", False, "Good day."))
    assert details == {"reasoning_tokens": 0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["chat", "responses", "messages", "ollama"])
def test_the_model_can_say_that_it_got_no_picture(path: str, stream: bool) -> None:
    spoken = "<|channel|>final<|message|>I cannot see pictures.<|return|>"
    host = Alone(ScriptedEngine({LINE: spoken}, 3, False))
    assert asyncio.run(look(host, path, stream)) == "I cannot see pictures."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("chat", "messages[0].content[0]"),
        ("responses", "input[0].content[0]"),
        ("messages", "messages[0].content[0]"),
        ("ollama", "messages[0].images[0]"),
    ],
)
def test_a_server_may_refuse_pictures(path: str, where: str, stream: bool) -> None:
    class Refusing(Alone):
        def defaults(self, engine: Engine | None) -> Defaults:
            return Defaults(date=None, attachments=Attachments.REFUSE)

    refused = (openai.BadRequestError, anthropic.BadRequestError, ollama.ResponseError)
    with pytest.raises(refused, match=re.escape(f"{where} is of type")):
        asyncio.run(look(Refusing(ScriptedEngine(SCRIPTS, 3, False)), path, stream))


@pytest.mark.parametrize("path", ["chat", "responses", "messages"])
def test_refusals_have_the_shape_of_their_api(host: Alone, path: str) -> None:
    async def asking(key: str = KEY, **fields: Any) -> Any:
        openai_client, anthropic_client = clients(host, key)
        user: Any = [{"role": "user", "content": "Hello!"}]
        asked: dict[str, Any] = {"model": MODEL, **fields}
        if path == "chat":
            return await openai_client.chat.completions.create(messages=user, **asked)
        if path == "responses":
            return await openai_client.responses.create(input="Hello!", **asked)
        return await anthropic_client.messages.create(messages=user, **{"max_tokens": 9, **asked})

    errors: Any = anthropic if path == "messages" else openai
    count = "top_logprobs" if path == "responses" else "top_k"
    for error, asked in [
        (errors.AuthenticationError, asking("wrong")),
        (errors.NotFoundError, asking(model="nobody")),
        (errors.BadRequestError, asking(extra_body={count: -2})),
    ]:
        with pytest.raises(error) as refused:
            asyncio.run(asked)
        assert refused.value.body is not None
    assert host.lent == 0


LONG = "word " * 1100
LIMITS: list[tuple[str, str, int]] = [
    # as Kimi Code, Grok Build, Zed and LM Studio send them
    ("/v1/chat/completions", "max_tokens", 131_072),
    ("/v1/chat/completions", "max_completion_tokens", 65_535),
    ("/v1/chat/completions", "max_tokens", -1),
    ("/v1/chat/completions", "max_completion_tokens", -1),
    ("/v1/responses", "max_output_tokens", 128_000),
    ("/v1/messages", "max_tokens", 10**30),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "field", "limit"), LIMITS)
def test_a_limit_above_the_servers_is_an_upper_bound(
    path: str, field: str, limit: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is cut where the server's limit is (E3), and the log has a line about it."""
    caplog.set_level("INFO", "vllm_mlx_harmony")
    engine = ScriptedEngine({"Hello!": f"<|channel|>final<|message|>{LONG}<|return|>"}, 50)
    client = TestClient(application(Alone(engine)), headers={"Authorization": f"Bearer {KEY}"})
    asked = {"input": "Hello!"} if path.endswith("responses") else {"messages": USER}
    answer = client.post(path, json={"model": MODEL, **asked, field: limit, "stream": stream})
    assert answer.status_code == 200, answer.text
    cut = {"/v1/responses": '"status":"incomplete"', "/v1/messages": '"max_tokens"'}
    assert cut.get(path, '"finish_reason":"length"') in answer.text
    assert answer.text.count("word") >= 990
    lines = [each.message for each in caplog.records if "limit" in each.message]
    assert lines == ([] if limit < 0 else [f"{field} exceeds this server's limit, which is 1000"])


TOO_LONG = {
    "/v1/chat/completions": "maximum context length is 4096 tokens",
    "/v1/responses": "maximum context length is 4096 tokens",
    "/v1/messages": "> 4096 maximum",
    "/v1/messages/count_tokens": "> 4096 maximum",
}
"""Claude Code shortens the conversation by the difference of the two numbers."""


@pytest.mark.parametrize("path", TOO_LONG)
@pytest.mark.parametrize("long", ["one text", "many messages"])
def test_error_for_long_prompt_has_the_context_length(
    path: str, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (vocab, render):
        monkeypatch.setattr(module, "MAX_PROMPT_TOKENS", 10_000)
    texts = [" word" * 30_000] if long == "one text" else [" word" * 3_000] * 5
    spoken = [{"role": "user", "content": text} for text in texts]
    host = Alone(ScriptedEngine(SCRIPTS, 1, context_length=4096))
    client = TestClient(application(host), headers={"Authorization": f"Bearer {KEY}"})
    limit = {} if path.endswith(("responses", "count_tokens")) else {"max_tokens": 9}
    asked = {"input" if path.endswith("responses") else "messages": spoken, **limit}
    answer = client.post(path, json={"model": MODEL, **asked})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert TOO_LONG[path] in message
    assert any(int(number) > 10_000 for number in re.findall("[0-9]+", message))
    assert host.lent == 0


def test_work_that_grows_with_a_request_is_not_done_by_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The names of all tools, and the fields that nobody reads."""
    in_loop: dict[str, bool] = {}

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(*arguments: Any) -> Any:
            try:
                asyncio.get_running_loop()
                in_loop[name] = True
            except RuntimeError:
                in_loop[name] = False
            return function(*arguments)

        monkeypatch.setattr(module, name, watched)

    watch(enforcement, "expected_headers")
    watch(app, "validate")
    host = Alone(ScriptedEngine(SCRIPTS, 1))
    client = TestClient(application(host), headers={"Authorization": f"Bearer {KEY}"})
    tools = [{"type": "function", "function": {"name": "weather"}}]
    asked = {"model": MODEL, "messages": USER, "tools": tools}
    assert client.post("/v1/chat/completions", json=asked).status_code == 200
    control = {"id": "chatcmpl-00", "action": "reasoning_end"}
    assert client.post("/v1/chat/completions/control", json=control).status_code == 200
    assert in_loop == {"expected_headers": False, "validate": False}


IMPOSSIBLE = {"type": "object", "properties": {"n": {"not": {"type": "string"}}}}
"""What ``not`` says cannot be enforced (docs/api.md)."""

TYPED = {"type": "json_schema", "schema": IMPOSSIBLE, "name": "n", "strict": True}

FORMATS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_schema", "json_schema": TYPED}}, "response_format"),
    ("chat", {"guided_json": IMPOSSIBLE}, "guided_json"),
    ("chat", {"structured_outputs": {"json": IMPOSSIBLE}}, "structured_outputs.json"),
    ("responses", {"text": {"format": TYPED}}, "text.format"),
    ("messages", {"output_config": {"format": TYPED}}, "output_config.format"),
    ("messages", {"output_format": TYPED}, "output_format"),
]


@pytest.mark.parametrize(("api", "fields", "where"), FORMATS, ids=lambda each: str(each)[:30])
def test_an_impossible_format_is_refused_by_its_field(
    api: str, fields: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(enforcement.GRAMMAR_VARIABLE)
    asked = {"input": "Hello!"} if api == "responses" else {"messages": USER, "max_tokens": 9}
    client = TestClient(
        application(Alone(ScriptedEngine(SCRIPTS, 1))), headers={"Authorization": f"Bearer {KEY}"}
    )
    path = "/v1/chat/completions" if api == "chat" else f"/v1/{api}"
    refused = client.post(path, json={"model": MODEL, **asked, **fields})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert where == error["param"] if "param" in error else error["message"].startswith(where)
    assert "not cannot be enforced" in error["message"]


@pytest.mark.parametrize("how", ["cancelled", "the server ends"])
def test_an_engine_in_the_middle_of_a_step_is_not_given_back(how: str) -> None:
    """The client has its error at once, but the model must not be unloaded before the step ends."""

    async def test() -> None:
        computed, computing = asyncio.Event(), asyncio.Event()

        async def stubborn(*_: Any) -> Steps:
            try:
                yield Step(ids("<|channel|>"))
                computing.set()
                await asyncio.sleep(3600)
            finally:
                await computed.wait()

        engine = ScriptedEngine(SCRIPTS)
        engine.generate = stubborn  # type: ignore[method-assign]
        host = Alone(engine)
        client, _ = clients(host)
        user: Any = [{"role": "user", "content": "Hello!"}]
        asked = asyncio.ensure_future(
            client.with_options(max_retries=0).chat.completions.create(model=MODEL, messages=user)
        )
        await computing.wait()
        if how == "cancelled":
            (key,) = host.answers.running
            assert host.answers.cancel(key)
        else:
            host.answers.end_all(HostError("the server is shutting down", code="shutting_down"))
        done, _ = await asyncio.wait({asked}, timeout=60)
        lent = host.lent
        computed.set()  # before anything fails, because it must end first
        assert done and lent == 1
        with pytest.raises(openai.APIStatusError):
            await asked
        while host.lent:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(test(), 120))


def test_unknown_ids_methods_and_keys_are_refused() -> None:
    host = Alone(ScriptedEngine(SCRIPTS))
    client = TestClient(application(host), base_url="http://localhost")
    client.headers["Authorization"] = f"Bearer {KEY}"
    unknown = client.post("/v1/requests/chatcmpl-0/cancel")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "request_id")
    for method, path, allowed in (
        ("PUT", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/responses/resp_0", "DELETE, GET, HEAD"),
        ("GET", "/v1/requests/chatcmpl-0/cancel", "POST"),
        ("GET", "/v1/requests/chatcmpl-0", "DELETE"),
    ):
        wrong = client.request(method, path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)
        assert wrong.json()["error"]["code"] == "method_not_allowed"
    client.headers["Authorization"] = "Bearer wrong"
    for method, path in (
        ("POST", "/v1/requests/chatcmpl-0/cancel"),
        ("DELETE", "/v1/requests/chatcmpl-0"),
        ("POST", "/v1/chat/completions"),
    ):
        refused = client.request(method, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert client.head("/").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_expired_timeout_is_counted(stream: bool, recwarn: pytest.WarningsRecorder) -> None:
    """As when a prompt took longer to render than there was time: it is accounted for."""
    host = Alone(ScriptedEngine(SCRIPTS))
    client = TestClient(application(host), base_url="http://localhost")
    client.headers["Authorization"] = f"Bearer {KEY}"
    user = [{"role": "user", "content": "Hello!"}]
    asked = {"model": MODEL, "messages": user, "timeout": 1e-9, "stream": stream}
    late = client.post("/v1/chat/completions", json=asked)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert (host.lent, [tracker.results for tracker in host.trackers]) == (0, [["timeout"]])
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


def test_the_front_end_brings_no_host_along() -> None:
    """In an environment without vllm-mlx nothing of it can be imported; here nothing should be."""
    import subprocess

    code = "import sys, vllm_mlx_harmony.server.app; print(*sys.modules, sep='\\n')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert loaded & {"vllm_mlx", "mlx", "mlx_lm", "torch", "fastapi"} == set()
    assert ResponsesRequest.__module__.startswith("vllm_mlx_harmony.protocols")
