"""The APIs over a fake engine, in process, through the official clients, without a real host."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import time
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
from front_end_checks import (
    ANSWER,
    CALL,
    CITY,
    REPLY,
    SCRIPTS,
    Loop,
    by_chat,
    by_messages,
    by_ollama,
    by_responses,
    check_events_over_websocket,
    check_rejections,
    check_tool_loop,
)
from harmony_text import ids_of
from loops import run
from official_clients import clients, ollama_client
from scripted_host import KEY, MODEL, ScriptedEngine, SingleEngineHost
from starlette.testclient import TestClient
from waiting import wait_until_async

from vllm_mlx_harmony.core import render, text_limits, vocab
from vllm_mlx_harmony.core.attachments import Attachments
from vllm_mlx_harmony.core.errors import HostError
from vllm_mlx_harmony.core.turn import Defaults
from vllm_mlx_harmony.engine_api.engine import Engine, GenerationRequest, Step, Steps
from vllm_mlx_harmony.protocols.responses import ResponsesRequest
from vllm_mlx_harmony.server import app, enforcement
from vllm_mlx_harmony.server.app import application
from vllm_mlx_harmony.server.storage.store import StoredResponse

pytestmark = pytest.mark.usefixtures("no_grammars")

USER = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(params=[1, 3, 1000])
def host(request: pytest.FixtureRequest) -> SingleEngineHost:
    """The engine generates ids one by one, a few at a time, or all at once."""
    return SingleEngineHost(ScriptedEngine(SCRIPTS, request.param))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("loop", [by_chat, by_responses, by_messages, by_ollama])
def test_tool_loop_continues_where_model_stopped(
    host: SingleEngineHost, loop: Loop, stream: bool
) -> None:
    check_tool_loop(host, loop, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("loop", [by_chat, by_responses, by_messages, by_ollama])
@pytest.mark.parametrize(
    ("name", "alias"),
    [("python", "python_tool"), ("browser_search", "browser_search"), ("bash", "bash_tool")],
)
def test_function_named_like_trained_tool_can_be_called(
    loop: Loop, stream: bool, name: str, alias: str
) -> None:
    script = CALL.replace("functions.weather", f"functions.{alias}")
    engine = ScriptedEngine({**SCRIPTS, "How is the weather?": script}, 3)
    result = run(loop(SingleEngineHost(engine), stream, name))
    assert result == (name, '{"city":"Paris"}', REPLY)
    first, second = (vocab.encoding().decode(list(prompt)) for prompt in engine.prompts)
    assert f"type {alias} = (_: {{" in first
    assert second.startswith(first + script)
    assert f"<|start|>functions.{alias} to=assistant" in second


# --- Compaction: a conversation continues from the model's own summary.

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


async def compact(host: SingleEngineHost, how: str) -> Any:
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
    received = [event async for event in stream]
    assert [event.type for event in received] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    return received[-1].response


@pytest.mark.parametrize("how", ["whole", "streamed", "background", "background, streamed"])
def test_compacted_conversation_continues(how: str) -> None:
    host = SingleEngineHost(ScriptedEngine(COMPACTION, 3))

    async def test() -> None:
        client, _ = clients(host)
        answer = await compact(host, how)
        (item,) = answer.output
        assert (item.type, answer.status, answer.store) == ("compaction", "completed", True)
        assert "hello" not in item.encrypted_content
        stored = await client.responses.retrieve(answer.id)
        assert stored.output == answer.output
        inputs = await client.responses.input_items.list(answer.id)
        assert [message.type for message in inputs.data] == ["message", "message"]
        # It continues by the item, as Codex does, or by the id of the response.
        window = [item.model_dump(exclude_none=True)]
        by_item = await client.responses.create(model=MODEL, input=window)
        assert by_item.output_text == "I remember."
        more = await client.responses.create(
            model=MODEL, input="More.", previous_response_id=answer.id
        )
        assert more.output_text == "More, then."

    run(test())
    assert host.leases == 0
    first, _, last = (vocab.encoding().decode(list(prompt)) for prompt in host.engine.prompts)  # type: ignore[attr-defined]
    assert "type weather = " in first  # the prefix cache of the conversation is used
    assert f"<|start|>user{GOES_ON}<|start|>user<|message|>More.<|end|>" in last
    assert "Good day." not in last


def test_compaction_of_stored_conversation_keeps_user_messages() -> None:
    host = SingleEngineHost(ScriptedEngine(COMPACTION, 3))

    async def test() -> None:
        client, _ = clients(host)
        first = await client.responses.create(model=MODEL, input="Hello!")
        second = await client.responses.create(
            model=MODEL, input="More.", previous_response_id=first.id
        )
        document = await client.responses.compact(model=MODEL, previous_response_id=second.id)
        *users, item = document.output
        assert [(message.type, message.content[0].text) for message in users] == [
            ("message", "Hello!"),
            ("message", "More."),
        ]
        assert item.type == "compaction"
        window = [entry.model_dump(exclude_none=True) for entry in document.output]
        answer = await client.responses.create(model=MODEL, input=window)
        assert answer.output_text == "I remember."

    run(test())
    assert host.leases == 0


def test_websocket_compacts_conversation() -> None:
    host = SingleEngineHost(ScriptedEngine(COMPACTION, 3))
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
def test_compaction_without_summary_fails(stream: bool) -> None:
    scripts = {**COMPACTION, COMPACTS: "<|channel|>analysis<|message|>Hm.<|end|>"}
    host = SingleEngineHost(ScriptedEngine(scripts, 3))

    async def test() -> None:
        client, _ = clients(host)
        if not stream:
            with pytest.raises(openai.InternalServerError, match="no summary"):
                await client.responses.create(**COMPACTED)
            return
        events = [event async for event in await client.responses.create(**COMPACTED, stream=True)]
        assert [event.type for event in events[-1:]] == ["response.failed"]

    run(test())
    assert host.leases == 0


def test_websocket_sends_valid_events(host: SingleEngineHost) -> None:
    check_events_over_websocket(host)


def test_closed_websocket_frees_its_responses(host: SingleEngineHost) -> None:
    """Its last response may hold megabytes. A garbage collection must not find it: it would block
    the event loop while it visits all items."""
    bearer = {"Authorization": f"Bearer {KEY}", "host": "localhost"}
    create = {"type": "response.create", "model": MODEL, "input": "Hello!", "store": False}

    def count_stored_responses() -> int:
        return sum(isinstance(candidate, StoredResponse) for candidate in gc.get_objects())

    gc.collect()
    before = count_stored_responses()  # other tests have their own stores
    gc.disable()
    try:
        client = TestClient(application(host), base_url="http://localhost")
        with client.websocket_connect("/v1/responses", headers=bearer) as socket:
            for _ in range(2):  # the second begins once the first is stored
                socket.send_json(create)
                while socket.receive_json()["type"] != "response.completed":
                    pass
        deadline = time.monotonic() + 5  # the thread that created the second may still hold it
        while count_stored_responses() != before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert count_stored_responses() == before
    finally:
        gc.enable()


LINE = "[image left out: this model reads text only]"


async def ask_about_picture(host: SingleEngineHost, path: str, stream: bool) -> str:
    """The answer to a picture, through the official client for ``path``."""
    openai_client, anthropic_client = clients(host)
    url = "data:image/png;base64,AAAA"
    options: dict[str, Any] = {"model": MODEL}
    if path == "ollama":
        options["messages"] = [{"role": "user", "images": ["AAAA"]}]
        client = ollama_client(host)
        if not stream:
            return str((await client.chat(**options)).message.content)
        lines = await client.chat(**options, stream=True)
        return "".join([line.message.content or "" async for line in lines])
    if path == "chat":
        image: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
        options["messages"] = [{"role": "user", "content": [image]}]
        if not stream:
            whole = await openai_client.chat.completions.create(**options)
            return str(whole.choices[0].message.content)
        async with openai_client.chat.completions.stream(**options) as chunks:
            return str((await chunks.get_final_completion()).choices[0].message.content)
    if path == "responses":
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        options["input"] = [{"role": "user", "content": [image]}]
        if not stream:
            return (await openai_client.responses.create(**options)).output_text
        async with openai_client.responses.stream(**options) as events:
            return (await events.get_final_response()).output_text
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    options["messages"] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    options["max_tokens"] = 50
    if not stream:
        message: Any = await anthropic_client.messages.create(**options)
    else:
        async with anthropic_client.messages.stream(**options) as message_stream:
            message = await message_stream.get_final_message()
    return str(message.content[-1].text)


class PredictingEngine(ScriptedEngine):
    """Counts each id as an accepted prediction, and two others as rejected."""

    predicted: tuple[int, ...] = ()

    async def generate(self, request: GenerationRequest) -> Steps:
        self.predicted, tried = request.settings.prediction, 0
        async for step in super().generate(request):
            tried += len(step.ids)
            yield step._replace(accepted=tried, rejected=2 * tried)


async def prediction_usage(
    host: SingleEngineHost, path: str, stream: bool, content: Any
) -> dict[str, Any]:
    """The usage details of an answer, which has a prediction in Chat."""
    client, _ = clients(host)
    if path == "responses":
        response = await client.responses.create(model=MODEL, input="Hello!", store=False)
        assert response.usage is not None
        return response.usage.output_tokens_details.model_dump()
    options: Any = {"model": MODEL, "messages": USER, "stream": stream}
    if content is not None:
        options["prediction"] = {"type": "content", "content": content}
    answer = await client.chat.completions.create(
        **options, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    usage = [chunk async for chunk in answer][-1].usage if stream else answer.usage
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
def test_prediction_reaches_engine_and_is_counted(
    path: str, stream: bool, content: Any, text: str
) -> None:
    engine = PredictingEngine(SCRIPTS, 3)
    details = asyncio.run(prediction_usage(SingleEngineHost(engine), path, stream, content))
    accepted = len(ids_of(SCRIPTS["Hello!"]))
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": 2 * accepted,
    }
    if path == "chat":
        assert engine.predicted == tuple(vocab.encode(text))


def test_prediction_is_not_sent_to_engines_without_drafts() -> None:
    """It is not even tokenized."""
    engine = PredictingEngine(SCRIPTS, 3)
    engine.has_prediction = False
    asyncio.run(prediction_usage(SingleEngineHost(engine), "chat", False, "Good day."))
    assert engine.predicted == ()


def test_answer_without_predictions_counts_none() -> None:
    host = SingleEngineHost(ScriptedEngine(SCRIPTS, 3))
    details = asyncio.run(prediction_usage(host, "chat", False, "Good day."))
    assert details == {"reasoning_tokens": 0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["chat", "responses", "messages", "ollama"])
def test_prompt_mentions_omitted_picture(path: str, stream: bool) -> None:
    script = "<|channel|>final<|message|>I cannot see pictures.<|return|>"
    host = SingleEngineHost(ScriptedEngine({LINE: script}, 3, False))
    assert asyncio.run(ask_about_picture(host, path, stream)) == "I cannot see pictures."


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
def test_server_can_refuse_pictures(path: str, where: str, stream: bool) -> None:
    class Refusing(SingleEngineHost):
        def defaults(self, engine: Engine | None) -> Defaults:
            return Defaults(date=None, attachments=Attachments.REFUSE)

    refused = (openai.BadRequestError, anthropic.BadRequestError, ollama.ResponseError)
    with pytest.raises(refused, match=re.escape(f"{where} is of type")):
        asyncio.run(ask_about_picture(Refusing(ScriptedEngine(SCRIPTS, 3, False)), path, stream))


@pytest.mark.parametrize("path", ["chat", "responses", "messages"])
def test_rejections_have_the_shape_of_their_api(host: SingleEngineHost, path: str) -> None:
    check_rejections(host, path)


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
def test_limit_above_servers_is_lowered(
    path: str, field: str, limit: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is cut at the server's limit (E3), and the log has a line about it."""
    caplog.set_level("INFO", "vllm_mlx_harmony")
    engine = ScriptedEngine({"Hello!": f"<|channel|>final<|message|>{LONG}<|return|>"}, 50)
    client = TestClient(
        application(SingleEngineHost(engine)), headers={"Authorization": f"Bearer {KEY}"}
    )
    prompt = {"input": "Hello!"} if path.endswith("responses") else {"messages": USER}
    answer = client.post(path, json={"model": MODEL, **prompt, field: limit, "stream": stream})
    assert answer.status_code == 200, answer.text
    cut = {"/v1/responses": '"status":"incomplete"', "/v1/messages": '"max_tokens"'}
    assert cut.get(path, '"finish_reason":"length"') in answer.text
    assert answer.text.count("word") >= 990
    lines = [record.message for record in caplog.records if "limit" in record.message]
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
def test_error_for_long_prompt_names_context_length(
    path: str, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (vocab, render):
        monkeypatch.setattr(module, "MAX_PROMPT_TOKENS", 10_000)
    texts = [" word" * 30_000] if long == "one text" else [" word" * 3_000] * 5
    messages = [{"role": "user", "content": text} for text in texts]
    host = SingleEngineHost(ScriptedEngine(SCRIPTS, 1, context_length=4096))
    client = TestClient(application(host), headers={"Authorization": f"Bearer {KEY}"})
    limit = {} if path.endswith(("responses", "count_tokens")) else {"max_tokens": 9}
    body = {"input" if path.endswith("responses") else "messages": messages, **limit}
    answer = client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert TOO_LONG[path] in message
    assert any(int(number) > 10_000 for number in re.findall("[0-9]+", message))
    assert host.leases == 0


def test_expensive_work_runs_outside_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It grows with the request: collecting names of tools, and validating unused fields."""
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
    host = SingleEngineHost(ScriptedEngine(SCRIPTS, 1))
    client = TestClient(application(host), headers={"Authorization": f"Bearer {KEY}"})
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {"model": MODEL, "messages": USER, "tools": tools}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    control = {"id": "chatcmpl-00", "action": "reasoning_end"}
    assert client.post("/v1/chat/completions/control", json=control).status_code == 200
    assert in_loop == {"expected_headers": False, "validate": False}


IMPOSSIBLE = {"type": "object", "properties": {"n": {"not": {"type": "string"}}}}
"""``not`` cannot be enforced (docs/api.md)."""

TYPED = {"type": "json_schema", "schema": IMPOSSIBLE, "name": "n", "strict": True}

FORMATS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_schema", "json_schema": TYPED}}, "response_format"),
    ("chat", {"guided_json": IMPOSSIBLE}, "guided_json"),
    ("chat", {"structured_outputs": {"json": IMPOSSIBLE}}, "structured_outputs.json"),
    ("responses", {"text": {"format": TYPED}}, "text.format"),
    ("messages", {"output_config": {"format": TYPED}}, "output_config.format"),
    ("messages", {"output_format": TYPED}, "output_format"),
]


@pytest.mark.parametrize(("api", "fields", "where"), FORMATS, ids=lambda value: str(value)[:30])
def test_error_for_impossible_format_names_field(
    api: str, fields: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(enforcement.GRAMMAR_VARIABLE)
    body = {"input": "Hello!"} if api == "responses" else {"messages": USER, "max_tokens": 9}
    client = TestClient(
        application(SingleEngineHost(ScriptedEngine(SCRIPTS, 1))),
        headers={"Authorization": f"Bearer {KEY}"},
    )
    path = "/v1/chat/completions" if api == "chat" else f"/v1/{api}"
    refused = client.post(path, json={"model": MODEL, **body, **fields})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert where == error["param"] if "param" in error else error["message"].startswith(where)
    assert "not cannot be enforced" in error["message"]


@pytest.mark.parametrize("how", ["cancelled", "the server ends"])
def test_engine_is_not_released_during_step(how: str) -> None:
    """The client gets its error at once, but the model stays loaded until the step ends."""

    async def test() -> None:
        computed, computing = asyncio.Event(), asyncio.Event()

        async def stubborn(*_: Any) -> Steps:
            try:
                yield Step(ids_of("<|channel|>"))
                computing.set()
                await asyncio.sleep(3600)
            finally:
                await computed.wait()

        engine = ScriptedEngine(SCRIPTS)
        engine.generate = stubborn  # type: ignore[method-assign]
        host = SingleEngineHost(engine)
        client, _ = clients(host)
        user: Any = [{"role": "user", "content": "Hello!"}]
        task = asyncio.ensure_future(
            client.with_options(max_retries=0).chat.completions.create(model=MODEL, messages=user)
        )
        await computing.wait()
        if how == "cancelled":
            (key,) = host.answers.running
            assert host.answers.cancel(key)
        else:
            host.answers.end_all(HostError("the server is shutting down", code="shutting_down"))
        done, _ = await asyncio.wait({task}, timeout=60)
        leases = host.leases
        computed.set()  # before any assertion, so that the step ends even if one fails
        assert done and leases == 1
        with pytest.raises(openai.APIStatusError):
            await task
        await wait_until_async(lambda: host.leases == 0, "the lease")

    run(test())


def test_unknown_ids_methods_and_keys_are_rejected() -> None:
    host = SingleEngineHost(ScriptedEngine(SCRIPTS))
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
    """As when rendering the prompt takes longer than the timeout."""
    host = SingleEngineHost(ScriptedEngine(SCRIPTS))
    client = TestClient(application(host), base_url="http://localhost")
    client.headers["Authorization"] = f"Bearer {KEY}"
    user = [{"role": "user", "content": "Hello!"}]
    body = {"model": MODEL, "messages": user, "timeout": 1e-9, "stream": stream}
    late = client.post("/v1/chat/completions", json=body)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert (host.leases, [tracker.results for tracker in host.trackers]) == (0, [["timeout"]])
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


def test_front_end_imports_no_host() -> None:
    """Without vllm-mlx, none of it could be imported; where it is installed, none should be."""
    import subprocess

    code = "import sys, vllm_mlx_harmony.server.app; print(*sys.modules, sep='\\n')"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in completed.stdout.split()}
    assert loaded & {"vllm_mlx", "mlx", "mlx_lm", "torch", "fastapi"} == set()
    assert ResponsesRequest.__module__.startswith("vllm_mlx_harmony.protocols")
