"""Chat Completions on the real server, with the official client: rows, tool calls, streams.

`tests/unit/server/test_rows.py` sends every row through the front end in process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harmony_text import ids_of
from openai.lib.streaming.chat import ChatCompletionStreamState
from row_answers import (
    FULL,
    GENERATED,
    chat_answer,
    chat_request,
    chat_tools,
    check_chat,
    served_rows,
)
from rows import Row
from server_process import FLAG, HARMONY

from vllm_mlx_harmony import standin
from vllm_mlx_harmony.standin import Script

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion
    from server_process import Server

    Start = Callable[..., Server]

pytestmark = pytest.mark.served


SERVED = served_rows(GENERATED)

TOOL_QUESTION = "Weather in Paris?"
TOOL_CALL = (
    "<|channel|>analysis<|message|>Ask the tool.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Zürich"}<|call|>'
)
TOOL_ANSWER = "<|channel|>final<|message|>It is 18 °C in Zürich.<|return|>"
PLAYS_USER = "<|channel|>final<|message|>Shall I delete it?<|end|><|start|>user<|message|>"
USER_TURN = (
    "Yes, delete everything. " * 30 + "<|end|><|start|>assistant<|channel|>final<|message|>Ok."
)
WAVE = "<|channel|>final<|message|>" + "🙂👍🏽 " * 20 + "<|return|>"

SCRIPTS = [
    *(Script(f"<|message|>{row.id}<|end|>", row.output) for row in SERVED),
    Script(f"<|message|>{TOOL_QUESTION}<|end|>", TOOL_CALL),
    Script("<|start|>functions.weather to=assistant", TOOL_ANSWER),
    Script("<|message|>Wave.<|end|>", WAVE),
    Script("<|message|>Plays?<|end|>", f"{PLAYS_USER}{USER_TURN}<|return|>"),
    *(
        Script(f"Who is guest {n}?", f"<|channel|>final<|message|>{'I am ' * n}{n}<|return|>")
        for n in range(8)
    ),
]


@pytest.fixture(scope="module")
def server(open_server: Server, standin_dir: Path) -> Server:
    standin.rescript(standin_dir, SCRIPTS)
    return open_server


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def complete(client: OpenAI, *, stream: bool, **request: Any) -> ChatCompletion:
    """The completion; a streamed one is assembled by the client's own accumulator."""
    if not stream:
        return client.chat.completions.create(**request)
    state = ChatCompletionStreamState()
    with client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        for chunk in chunks:
            state.handle_chunk(chunk)
    return state.current_completion_snapshot


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in SERVED])
def test_chat_answers_match_row(client: OpenAI, model: str, row: Row) -> None:
    check(client, model, row)


def check(client: OpenAI, model: str, row: Row) -> None:
    request = chat_request(row, model)
    check_chat(row, *(complete(client, stream=stream, **request) for stream in (False, True)))


@pytest.mark.parametrize("stream", [False, True])
def test_tool_result_is_answered(client: OpenAI, model: str, stream: bool) -> None:
    request = {"model": model, "tools": chat_tools("weather"), "stream": stream}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        user(TOOL_QUESTION),
    ]
    choice = complete(client, messages=messages, **request).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls"
    assert call.function.arguments == '{"city": "Zürich"}'
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "18 °C"},
    ]
    final = complete(client, messages=messages, **request)
    assert final.choices[0].message.content == "It is 18 °C in Zürich."
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_model_that_plays_the_user_is_stopped(client: OpenAI, model: str, stream: bool) -> None:
    request = {"model": model, "messages": [user("Plays?")], "temperature": 0}
    answer = chat_answer(complete(client, stream=stream, **request))
    assert (answer["content"], answer["finish"]) == ("Shall I delete it?", "stop")
    assert answer["usage"]["completion_tokens"] == len(ids_of(PLAYS_USER))


def test_client_stream_helper_reads_tool_call(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=[user(TOOL_QUESTION)], tools=chat_tools("weather")
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.name == "weather"
    assert final.choices[0].message.content == "One moment."


@pytest.mark.parametrize("limit", range(4, 20, 2))
def test_emoji_cut_by_limit_is_left_out(client: OpenAI, model: str, limit: int) -> None:
    request = {"model": model, "messages": [user("Wave.")], "max_tokens": limit}
    whole, streamed = (
        chat_answer(complete(client, stream=stream, **request)) for stream in (False, True)
    )
    assert whole == streamed
    assert WAVE.partition("<|message|>")[2].startswith(whole["content"])
    assert whole["finish"] == "length"
    assert whole["usage"]["completion_tokens"] == limit


@pytest.mark.parametrize("stream", [False, True])
def test_eight_concurrent_requests_get_their_own_answers(
    client: OpenAI, model: str, stream: bool
) -> None:
    """No client gets the answer of another."""
    from concurrent.futures import ThreadPoolExecutor

    def introduce(n: int) -> str | None:
        request = {"model": model, "messages": [user(f"Who is guest {n}?")], "temperature": 0}
        return complete(client, stream=stream, **request).choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(introduce, range(8))) == ["I am " * n + str(n) for n in range(8)]


def test_usage_is_sent_only_on_request(server: Server, model: str) -> None:
    request = {"model": model, "messages": [user("plain answer")], "stream": True}
    with server.client() as http:
        for options, usages in ((None, 0), ({"include_usage": True}, 1)):
            body = {**request, "stream_options": options}
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                writes = [write for write in response.iter_raw() if write]
            events = b"".join(writes).split(b"\n\n")
            assert events[-2:] == [b"data: [DONE]", b""]
            assert b"".join(writes).count(b'"usage":{') == usages
            assert all(write.endswith(b"\n\n") for write in writes)


def test_model_is_listed(client: OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    assert client.models.retrieve(model).model_dump().keys() == (
        client.models.list().data[0].model_dump().keys()
    )


STEPS = {
    "1": {"env": {"VLLM_MLX_HARMONY_SPECULATE": "off"}},
    **{n: {"flags": ("--stream-interval", n)} for n in (["2", "7", "64"] if FULL else ["64"])},
}


@pytest.mark.nightly
@pytest.mark.parametrize("variant", STEPS.values(), ids=STEPS)
def test_answers_are_the_same_with_other_step_sizes(
    start: Start, standin_dir: Path, variant: Any
) -> None:
    """One id per step, or many. `tests/unit/host/test_vllm_mlx_engine.py` has all intervals."""
    standin.rescript(standin_dir, SCRIPTS)
    server = start(*FLAG, *variant.get("flags", ()), command=HARMONY, env=variant.get("env"))
    with server.openai() as client:
        for row in [row for row in SERVED if row.expected]:
            check(client, client.models.list().data[0].id, row)
    server.stop()
